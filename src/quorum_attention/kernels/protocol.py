"""What an inner kernel is: it computes one task's statistics, or one task's gradients.

A kernel sees one task in *local* coordinates (the task's tokens, gathered into contiguous
slots in ascending order) and never a plan, a device queue or a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from quorum_attention.decomposition import Pairs, Rectangle, Task
from quorum_attention.kernels.lanes import Lanes
from quorum_attention.kernels.scaling import Scaling

Bias = Callable[[Rectangle], torch.Tensor | None]
Timed = Callable[[str], AbstractContextManager[None]]


def untimed(stage: str) -> AbstractContextManager[None]:
    """Nobody wants to know."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class MaskShape:
    """What a kernel needs to know of an attention mask: its kind, and which dimensions it spans.

    A dimension the mask broadcasts over is False.
    """

    boolean: bool
    batch: bool
    heads: bool
    rows: bool
    columns: bool = True


@dataclass(frozen=True, slots=True)
class CallShape:
    """The shape of an attention call, as far as a kernel's yes or no depends on it.

    Attributes:
        positive_scale: whether the factor of the scores is above 0 (its usual value is).
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


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of the largest piece of work a kernel will be handed (counts, not bytes).

    ``max_queries`` and ``max_keys`` bound every rectangle; ``n_tokens`` bounds the task. With
    ``direct`` the kernel runs on the inputs as they lie, and makes the results itself.
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

    Shapes: query (b, hq, nq, d), key (b, hk, nk, d), value (b, hk, nk, dv), where nq and nk count
    the task's tokens below the number of queries and of keys. ``rectangles`` are in local
    coordinates. ``bias(rectangle)`` is the additive mask of a rectangle in the compute dtype,
    broadcastable to (b, hq, lq, lk), or None. ``max_queries`` and ``max_keys`` are those of the
    ``Extent`` that the workspace was reckoned with: rectangles handed to an operator together stay
    within them (0: each rectangle alone). ``lanes``, where given, are streams to spread operator
    calls over; the workspace bound then holds for each of them. ``timed("merge")`` brackets what is
    merging, for reports. ``first_head`` is the first query head's number in the whole call, and
    ``entries`` the batch entries' (batch dimensions flattened).
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


@dataclass(slots=True)
class Statistics:
    """Running softmax statistics of a task's rows, updated in place.

    out (b, hq, nq, dv) is the normalised output so far, lse (b, hq, nq) its natural-log
    log-sum-exp; fp32, or fp64 for fp64 inputs. Rows without keys so far: out 0, lse -inf.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(slots=True)
class Gradients:
    """What a backward reads (grad_out, out, lse) and accumulates into (the three gradients).

    grad_out, out (b, hq, nq, dv) in the input dtype; lse (b, hq, nq) the *global* log-sum-exp in
    fp32 (fp64 for fp64 inputs), with -inf for rows that have no key at all. grad_query
    (b, hq, nq, d), grad_key (b, hk, nk, d), grad_value (b, hk, nk, dv) in fp32 (or fp64), added to
    in place.

    ``scaling``: what grad_out has been divided by, and what the kernel scales probabilities by, to
    keep 16-bit ones out of the subnormal range; the kernel undoes both (kernels/scaling.py).
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

    A kernel may declare more of itself in ``traits`` (``kernels.Traits``), and offer what the
    protocols below have; its traits then say so.
    """

    @property
    def name(self) -> str:
        """Short, unique, what users write as ``kernel=``."""
        ...

    def __hash__(self) -> int:
        """Plans are remembered by kernel."""
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
    """What a kernel that reads tensors of its own may offer besides (slopes, ids of documents, what
    a function closes over): autograd saves them with the inputs, so that one that is written to
    before the backward is an error, as with any saved tensor."""

    def captured(self) -> Sequence[torch.Tensor]:
        """Tensors beside the inputs that results depend on."""
        ...


class Sparse(InnerKernel, Protocol):
    """What a kernel with a mask of its own may offer besides: which pairs it leaves out, so that
    tokens without a pair are not copied (``decomposition/trimming.py``)."""

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of such a call.

        ``verdict`` must be safe: MASKED only of a block no pair of which counts, in any head of
        any batch entry. Answers are remembered as long as the kernel lives, by the function: let it
        be the same one in every call, a method of the kernel or one that does not close over it.
        """
        ...


class WholeCalls(InnerKernel, Protocol):
    """What a kernel may offer besides: monolithic calls, on the inputs as they lie."""

    def takes_whole(
        self, query_heads: int, key_heads: int, tokens: int, masked: bool, every: bool
    ) -> bool:
        """Whether it can be handed such a call.

        Args:
            tokens: the larger of queries and keys.
            masked: whether the call has a mask.
            every: it is handed all heads and batch entries, in order; otherwise some of them, and
                not told which.
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
        value (b, hk, m, dv); rows without keys: 0 and -inf."""
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
        """Gradients of query, key and value; lse is 0 in rows without keys."""
        ...


class TaskCalls(InnerKernel, Protocol):
    """What a kernel of whole tasks may offer besides: a task as one call on inputs as they lie.

    The task it is given is the whole sequence, with the rectangles of one task of a decomposition,
    in positions of the sequence: its tensors are the call's own, of any strides with rows
    contiguous, and of a head group. Rows between the rectangles cost nothing to speak of.
    """

    def takes_tasks(self, dtype: torch.dtype) -> bool:
        """Whether it can be handed tasks of such inputs; others go through slots."""
        ...

    def task_span(self, task: TaskTensors) -> tuple[slice, slice] | None:
        """Queries and keys that its results are of: none of its pairs lies outside. None where it
        keeps no pair."""
        ...

    def task_forward(self, task: TaskTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (b, h, queries, dv) and lse (b, h, queries) over the task's keys alone, of the
        queries of ``task_span``; rows without keys there: 0 and -inf."""
        ...

    def task_backward(
        self, task: TaskTensors, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The task's parts of the gradients, of the queries and keys of ``task_span``.

        grad_out, out, lse: of all queries and the whole rows, lse -inf in rows without any key.
        """
        ...


class Operator(WholeCalls, Protocol):
    """What a kernel that runs an operator of plain attention may offer besides: single rectangles,
    and nothing done to what comes back."""

    @property
    def grouped(self) -> bool:
        """Whether it takes fewer key/value heads than query heads as they are."""
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
    """What a kernel may offer besides that a planner may weigh against the preferred one."""

    def keeps_pace(self, call: CallShape) -> bool:
        """Whether the rates in its traits have been measured for such calls."""
        ...
