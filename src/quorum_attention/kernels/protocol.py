"""What an inner kernel is: it computes one task's statistics, or one task's gradients.

A kernel sees one task in *local* positions (the task's tokens, gathered in ascending order), and
no plan, no device queue and no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from quorum_attention.decomposition import Pairs, Rectangle, Task
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.lanes import Lanes
from quorum_attention.kernels.scaling import Scaling

Bias = Callable[[Rectangle], torch.Tensor | None]
Timed = Callable[[str], AbstractContextManager[None]]


def untimed(stage: str) -> AbstractContextManager[None]:
    """Times nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class MaskShape:
    """The kind of an attention mask, and which dimensions it spans.

    A dimension that the mask broadcasts over is False.
    """

    boolean: bool
    batch: bool
    heads: bool
    rows: bool
    columns: bool = True


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a kernel needs to know of a call to say whether it can run it.

    Attributes:
        positive_scale: whether the factor of the scores is above 0.
        dropout: whether probabilities are dropped; asked only of kernels whose traits say
            ``dropout``.
        exact_scale: whether nothing is lost by multiplying with the factor of the scores; False for
            fp32 inputs unless it is a power of two, and for fp16 if it is small.
    """

    device_type: str
    dtype: torch.dtype
    query_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool = False
    needs_grad: bool = False
    mask: MaskShape | None = None
    positive_scale: bool = True
    dropout: bool = False
    exact_scale: bool = True


@dataclass(frozen=True, slots=True)
class Extent:
    """The largest task a kernel will be handed (counts, not bytes).

    Attributes:
        n_tokens: bound of the task's tokens.
        max_queries, max_keys: bounds of every rectangle.
        direct: the kernel runs on the call's own inputs and allocates the results itself.
    """

    batch: int
    query_heads: int
    key_heads: int
    n_tokens: int
    max_queries: int
    max_keys: int
    direct: bool = False


@dataclass(slots=True)
class TaskTensors:
    """One task's inputs, gathered.

    Attributes:
        task: which tokens these are.
        rectangles: its kept pairs, in local positions.
        query, key, value: (b, hq, nq, d), (b, hk, nk, d), (b, hk, nk, dv), where nq and nk count
            the task's tokens that are queries and keys.
        scale: factor of the scores.
        is_causal: whether the call is causal.
        bias: ``bias(rectangle)`` is the additive mask of a rectangle in the inputs' dtype,
            broadcastable to (b, hq, lq, lk), or None.
        max_queries, max_keys: bounds from the ``Extent`` by which the workspace was sized.
            Rectangles that go to an operator in one call stay within them together; 0: each
            rectangle is a call of its own.
        timed: ``timed("merge")`` is a context around merging, for reports.
        lanes: streams over which operator calls are spread, or None. The workspace bound then
            holds for each of them.
        first_head: number of the first query head in the whole call.
        entries: numbers of the batch entries in the whole call (batch dimensions flattened).
        dropout: which probabilities are dropped, or None; of these heads and batch entries.
    """

    task: Task
    rectangles: Sequence[Rectangle]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    is_causal: bool
    bias: Bias
    max_queries: int = 0
    max_keys: int = 0
    timed: Timed = untimed
    lanes: Lanes | None = None
    first_head: int = 0
    entries: tuple[int, ...] = (0,)
    dropout: Dropout | None = None

    def has_mask(self, r: Rectangle) -> bool:
        """Whether there is a mask; it asks for that of the first pair of ``r``, which is cheap."""
        q, k = r.query_start, r.key_start
        return self.bias(Rectangle(q, q + 1, k, k + 1)) is not None


@dataclass(slots=True)
class Statistics:
    """Running softmax statistics of a task's rows, updated in place.

    Attributes:
        out: (b, hq, nq, dv) normalised output so far, fp32, or fp64 for fp64 inputs; 0 in rows
            without keys so far.
        lse: (b, hq, nq) its natural-log log-sum-exp, same dtype; -inf in rows without keys so far.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(slots=True)
class Gradients:
    """What a backward reads (grad_out, out, lse), and the three gradients it adds to in place.

    Attributes:
        grad_out, out: (b, hq, nq, dv) in the input dtype.
        lse: (b, hq, nq) the *global* log-sum-exp in fp32 (fp64 for fp64 inputs), -inf in rows that
            have no key at all.
        grad_query, grad_key, grad_value: (b, hq, nq, d), (b, hk, nk, d), (b, hk, nk, dv) in fp32
            (or fp64).
        scaling: what grad_out has been divided by, and the shift of the probabilities, which keep
            16-bit ones out of the subnormal range; the kernel undoes both (kernels/scaling.py).
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_query: torch.Tensor
    grad_key: torch.Tensor
    grad_value: torch.Tensor
    scaling: Scaling = field(default_factory=Scaling)


@runtime_checkable
class InnerKernel(Protocol):
    """What computes a task. Register one with ``quorum_attention.register_kernel``.

    A kernel may declare more about itself in ``traits`` (``kernels.Traits``), and have the methods
    of the protocols below; its traits then say which.
    """

    @property
    def name(self) -> str:
        """Short and unique; users write it as ``kernel=``."""
        ...

    def __hash__(self) -> int:
        """Plans are cached by kernel."""
        ...

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        ...

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        ...

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        ...

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        ...

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        ...


class Captures(InnerKernel, Protocol):
    """A kernel that reads tensors besides its inputs (slopes, document ids, a function's closure).

    Autograd saves them with the inputs. So writing to one of them before the backward is an error,
    as for any saved tensor.
    """

    def captured(self) -> Sequence[torch.Tensor]:
        """The tensors besides the inputs that results depend on."""
        ...


@dataclass(frozen=True, slots=True)
class Indices:
    """Pairs of a call, int64 on one device: numbers of batch entries (b,) and of query heads (h,),
    positions of queries (q,) and of keys (k,)."""

    entries: torch.Tensor
    heads: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor


class CallsBack(InnerKernel, Protocol):
    """A kernel that calls users' functions, in the forward and again in the backward."""

    def called_back(self) -> Sequence[Callable[..., Any]]:
        """The functions."""
        ...

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> Sequence[torch.Tensor]:
        """What the functions return for a few rows (b, h, q, d), (b, hk, k, d), (b, hk, k, dv)."""
        ...

    def check_functions(self, sizes: tuple[int, int, int, int], device: torch.device) -> None:
        """Ask functions again whose answers are remembered, on some pairs of a call with so many
        batch entries, heads, queries and keys.

        Raises:
            RuntimeError: one answers otherwise than when its answers were remembered.
        """
        ...


class RowStatistics(InnerKernel, Protocol):
    """A kernel that computes another attention, and can compute a few of its rows alone."""

    def rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        at: Indices,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (b, h, q, dv) and log-sum-exp (b, h, q) of some query rows over some keys, none of
        which is masked for being later; arguments as of ``results_of_functions``."""
        ...


class ByEntry(InnerKernel, Protocol):
    """A kernel that is told which batch entry it computes, and may compute another attention in
    each."""

    def tells_entries_apart(self, device: torch.device) -> bool:
        """Whether results depend on the number of the batch entry, as far as can be told."""
        ...


class Sparse(InnerKernel, Protocol):
    """A kernel with a mask of its own that says which pairs it keeps.

    Tokens without a kept pair are then not copied (``decomposition/trimming.py``).
    """

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call.

        Their ``verdict`` may call a block EMPTY only if no pair of it is kept, in any head of any
        batch entry. Its answers are cached by function as long as the kernel lives: return the same
        function in every call, a method of the kernel or one that does not close over the kernel.
        """
        ...


class Pairwise(InnerKernel, Protocol):
    """A kernel of the softmax of scores that it changes, which says how: pair by pair.

    The gradient of a mask beside it is then computed as beside plain softmax.
    """

    def change_(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Change scaled scores in place, before the mask is added; returns the derivative of the
        change, or None where it is 1."""
        ...

    def masked_pairs(
        self,
        entries: tuple[int, ...],
        heads: slice,
        queries: torch.Tensor,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """Which pairs of a tile it masks, by numbers of entries and heads and positions (q,), (k,)
        in the whole call: bool, broadcastable to (entries, heads, queries, keys)."""
        ...


class WholeCalls(InnerKernel, Protocol):
    """A kernel that takes monolithic calls, on the inputs as they are."""

    def takes_whole(
        self, query_heads: int, key_heads: int, tokens: int, masked: bool, every: bool
    ) -> bool:
        """Whether it takes such a call.

        Args:
            query_heads, key_heads: heads of the call.
            tokens: the larger of the numbers of queries and keys.
            masked: whether the call has a mask.
            every: whether it is handed all heads and batch entries, in order; otherwise it is
                handed some of them, and not told which.
        """
        ...

    def whole_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (b, h, n, dv) and lse (b, h, n) of query (b, h, n, d), key (b, hk, m, d) and
        value (b, hk, m, dv); rows without keys: 0 and -inf.

        A kernel whose traits say ``dropout`` also takes ``dropout``, a ``Dropout`` or None.
        """
        ...

    def whole_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        grad_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value; lse is 0 in rows without keys.

        A kernel whose traits say ``dropout`` also takes ``dropout``, a ``Dropout`` or None.
        """
        ...


class Recorded(InnerKernel, Protocol):
    """A kernel whose whole calls torch's autograd can record: its operator has a gradient there."""

    def takes_recorded(self, call: CallShape) -> bool:
        """Whether such a call is one of the operator, and its gradient there is
        ``whole_backward`` if the call needs any."""
        ...

    def recorded_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Output (b, h, n, dv) with a gradient of torch's where torch records any; arguments as of
        ``whole_forward``.

        None where a row has no key, or a score that is not finite: that takes more than the
        operator.
        """
        ...


class TaskCalls(InnerKernel, Protocol):
    """A kernel of whole tasks that runs a task as one call on the call's own inputs.

    Its ``TaskTensors`` hold the whole sequence, with the rectangles of one task of a decomposition
    in positions of the sequence. The tensors are the call's own (one head group of them), with any
    strides but contiguous rows. Rows between the rectangles must cost next to nothing.
    """

    def takes_tasks(self, dtype: torch.dtype) -> bool:
        """Whether it takes tasks of inputs of ``dtype`` this way; others go through slots."""
        ...

    def task_span(self, task: TaskTensors) -> tuple[slice, slice] | None:
        """The ranges of queries and keys that its results cover; they hold all of its pairs.

        None if the task keeps no pair.
        """
        ...

    def task_forward(self, task: TaskTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (b, h, queries, dv) and lse (b, h, queries) over the task's keys alone, for the
        queries of ``task_span``; 0 and -inf in rows without keys."""
        ...

    def task_backward(
        self, task: TaskTensors, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The task's parts of the three gradients, for the queries and keys of ``task_span``.

        ``grad_out``, ``out`` and ``lse`` have all queries and are of whole rows; lse is -inf in
        rows without any key.
        """
        ...


class Operator(WholeCalls, Protocol):
    """A kernel that can call its attention operator for a single rectangle, results as they are."""

    @property
    def grouped(self) -> bool:
        """Whether the operator takes fewer key/value heads than query heads."""
        ...

    def rectangle_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``RectangleKernel.rectangle_forward``."""
        ...

    def rectangle_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As ``RectangleKernel.rectangle_backward``."""
        ...


class Measured(InnerKernel, Protocol):
    """A kernel with measured rates, which a planner may choose instead of the preferred one."""

    def keeps_pace(self, call: CallShape) -> bool:
        """Whether the rates in its traits have been measured for such calls."""
        ...
