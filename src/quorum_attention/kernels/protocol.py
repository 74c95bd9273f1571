"""What an inner kernel is: it computes one task's statistics, or one task's gradients.

A kernel sees one task in *local* positions (the task's tokens, gathered in ascending order), and
no plan, no device queue and no budget.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from quorum_attention.decomposition import Decomposition, Pairs, Rectangle, Task
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.limits import NO_LIMIT
from quorum_attention.kernels.masked.captured_tensors import tensors
from quorum_attention.kernels.merge import empty_
from quorum_attention.kernels.result_layout import empty_like_input
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.tensors import Pick, positions

if TYPE_CHECKING:
    from quorum_attention.execution.device.streams import KernelStreams

Bias = Callable[[Rectangle], torch.Tensor | None]
Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class BiasShape:
    """Which dimensions an attention mask spans, and in which dtype it is added.

    Attributes:
        batch, heads, rows, columns: whether it spans the dimension; it broadcasts over the others.
        wide: whether it is added in the state's dtype, because the inputs' dtype would round it.
    """

    batch: bool
    heads: bool
    rows: bool
    columns: bool = True
    wide: bool = False


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of inputs and results."""
Lengths = tuple[int, int, bool]
"""Queries, keys, and whether the call is causal."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The sizes and the kind of a call; hashable, without tensors.

    Attributes:
        device_type: the type of the device that computes.
        dtype: the dtype of query, key and value.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim, value_dim: columns of query and key; columns of value.
        is_causal: whether keys after the query are masked.
        needs_grad: whether a kernel is asked for gradients too; set where kernels are asked.
        bias: the shape of an additive or boolean mask.
        positive_scale: whether the scale is above 0.
        dropout: whether probabilities are dropped; asked only of kernels with ``dropout``.
        exact_scale: whether nothing is lost by multiplying with the scale; False for fp32 inputs
            unless it is a power of two, and for fp16 if it is small.
        batch_shape: the shape before the head dimension, () for 3-D inputs.
        n_queries, n_keys: 0 where a kernel is asked about calls of any length.
        sinks: whether rows begin with a sink.
        columns: how many of the last columns of the value were added to carry the gradient of the
            log-sum-exp (call/lse_columns.py).
    """

    device_type: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool = False
    needs_grad: bool = False
    bias: BiasShape | None = None
    positive_scale: bool = True
    dropout: bool = False
    exact_scale: bool = True
    batch_shape: tuple[int, ...] = ()
    n_queries: int = 0
    n_keys: int = 0
    sinks: bool = False
    columns: int = 0

    @property
    def batch(self) -> int:
        """Batch entries, all batch dimensions together."""
        return math.prod(self.batch_shape)

    @property
    def lengths(self) -> Lengths:
        """Return what the pairs of a call depend on, beside its kernel."""
        return self.n_queries, self.n_keys, self.is_causal

    @property
    def n_tokens(self) -> int:
        """Positions that are decomposed: the larger of queries and keys."""
        return max(self.n_queries, self.n_keys)

    @property
    def queries_per_key_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of statistics and gradients: fp32, or fp64 for fp64 inputs."""
        return state_dtype(self.dtype)

    @property
    def bias_dtype(self) -> torch.dtype:
        """The dtype in which kernels are given an additive mask."""
        is_wide = self.bias is not None and self.bias.wide
        return self.state_dtype if is_wide else self.dtype

    @property
    def pairs(self) -> int:
        """Query-key pairs of one head that are computed (a mask does not count)."""
        return self.pairs_above(self.n_queries)

    def pairs_above(self, row: int) -> int:
        """Return the pairs of the queries before ``row``."""
        band = Band(high=0 if self.is_causal else None)
        return band.count(0, row, 0, self.n_keys)


def scale_is_exact(scale: float, dtype: torch.dtype) -> bool:
    """Return the ``exact_scale`` of a call."""
    if dtype == torch.float16:
        # Its products with gradients of scores may else be no normal numbers.
        return scale == 0 or abs(scale) >= 2.0**-9
    if dtype != torch.float32:
        return True
    mantissa, _ = math.frexp(scale)
    return abs(mantissa) in (0.0, 0.5)  # a power of two, or 0


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states: of output, lse and gradients of inputs of ``dtype`` while they
    accumulate, and of the lse that a call returns."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_rounded(mask: torch.dtype, inputs: torch.dtype) -> bool:
    """Whether a mask of one dtype would lose digits or range in the inputs' dtype, and keeps more
    of them in the state's. A boolean mask loses nothing."""
    return state_dtype(inputs) != inputs and torch.promote_types(mask, inputs) != inputs


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

    def with_sides_within(self, low: int = 0, high: int = NO_LIMIT) -> Extent:
        """Return the extent with rectangles of ``low`` to ``high`` queries and keys."""
        queries = min(max(low, self.max_queries), high)
        keys = min(max(low, self.max_keys), high)
        return replace(self, max_queries=queries, max_keys=keys)


@dataclass(slots=True)
class TaskTensors:
    """One task's inputs, gathered.

    Attributes:
        task: which tokens these are.
        rectangles: its kept pairs, in local positions; none is empty, and there are none where
            there is no head or no batch entry.
        query, key, value: (b, hq, nq, d), (b, hk, nk, d), (b, hk, nk, dv), where nq and nk count
            the task's tokens that are queries and keys.
        scale: factor of the scores.
        is_causal: whether the call is causal.
        bias: ``bias(rectangle)`` is the additive mask of a rectangle, broadcastable to
            (b, hq, lq, lk), or None. It is of ``CallShape.bias_dtype``.
        max_queries, max_keys: bounds from the ``Extent`` by which the workspace was sized.
            Rectangles that go to an operator in one call stay within them together; 0: each
            rectangle is a call of its own.
        timed: ``timed("merge")`` is a context around merging, for reports.
        streams: those over which operator calls are spread, or None. The workspace bound then
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
    timed: Timed = lambda stage: nullcontext()
    streams: KernelStreams | None = None
    first_head: int = 0
    entries: tuple[int, ...] = (0,)
    dropout: Dropout | None = None

    def has_mask(self, r: Rectangle) -> bool:
        """Whether there is a mask; it asks for that of the first pair of ``r``, which is cheap."""
        return self._bias_of_first_pair(r) is not None

    def has_wide_mask(self, r: Rectangle) -> bool:
        """Whether there is a mask of another dtype than the inputs', as cheaply."""
        bias = self._bias_of_first_pair(r)
        return bias is not None and bias.dtype != self.query.dtype

    def _bias_of_first_pair(self, r: Rectangle) -> torch.Tensor | None:
        q, k = r.query_start, r.key_start
        return self.bias(Rectangle(q, q + 1, k, k + 1))

    def shape(self, bias: BiasShape | None = None, *, is_causal: bool = False) -> CallShape:
        """Return the shape of calls of its rectangles, as kernels are asked about it."""
        return CallShape(
            device_type=self.query.device.type,
            dtype=self.query.dtype,
            heads=self.query.shape[1],
            kv_heads=self.key.shape[1],
            head_dim=self.query.shape[-1],
            value_dim=self.value.shape[-1],
            is_causal=is_causal,
            needs_grad=True,
            bias=bias,
            dropout=self.dropout is not None,
        )

    def indices(
        self,
        r: Rectangle,
        entries: slice = slice(None),
        heads: slice | None = None,
        device: torch.device | None = None,
    ) -> Indices:
        """Return the pairs of a rectangle, by their numbers in the whole call.

        Args:
            entries, heads: some of the task's batch entries and query heads; default all.
            device: the device of the numbers; None is the query's.
        """
        if device is None:
            device = self.query.device
        if heads is None:
            heads = slice(0, self.query.shape[1])
        first_head = self.first_head + heads.start
        stop_head = self.first_head + heads.stop
        return Indices(
            _on_device(self.entries[entries], device),
            torch.arange(first_head, stop_head, device=device),
            positions(self.task, r.query_start, r.query_stop, device),
            positions(self.task, r.key_start, r.key_stop, device),
        )


def _on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return ``numbers``, int64, on a device. Consecutive ones are made there: a copy from the host
    would wait for the device, and cannot be captured in a CUDA graph."""
    if not numbers:
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    first = numbers[0]
    stop = first + len(numbers)
    if numbers == tuple(range(first, stop)):
        return torch.arange(first, stop, device=device)
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@dataclass(slots=True)
class Statistics:
    """Running softmax statistics of a task's rows, updated in place.

    Attributes:
        out: (b, hq, nq, dv) normalised output so far, fp32, or fp64 for fp64 inputs; 0 in rows
            without keys so far.
        lse: (b, hq, nq) the natural-log log-sum-exp of the scores so far, same dtype; -inf in rows
            without keys so far.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(slots=True)
class Gradients:
    """The inputs of a backward (grad_out, out, lse), and the three gradients it adds to in place.

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


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an attention operator.

    Attributes:
        query, key, value: (b, h, n, d), (b, hk, m, d), (b, hk, m, dv).
        causal: whether keys after the query are masked. A kernel with ``bands`` also takes a
            ``Band`` here.
        scale: factor of the scores.
        bias: additive mask broadcastable to (b, h, n, m), of ``CallShape.bias_dtype``; or None.
        stored: the dtype that results will be stored in, if it is another than the inputs'; a
            kernel may return them in it.
        dropout: which probabilities are dropped, or None; only for kernels with ``dropout``.
        first_entry: the number of the first batch entry in the whole call.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool | Band = False
    scale: float = 1.0
    bias: torch.Tensor | None = None
    stored: torch.dtype | None = None
    dropout: Dropout | None = None
    first_entry: int = 0

    @property
    def inputs(self) -> Three:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def is_causal(self) -> bool:
        """Whether ``causal`` is the plain rule, of a kernel without bands."""
        return self.causal is True

    def mapped(self, on_rows: Pick, on_keys: Pick, **changes: Any) -> Call:
        """Return the call with other queries, and other keys and values."""
        return replace(
            self,
            query=on_rows(self.query),
            key=on_keys(self.key),
            value=on_keys(self.value),
            **changes,
        )


def whole_task(call: Call) -> TaskTensors:
    """Return a whole call as one task."""
    batch, heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    is_empty = 0 in (batch, heads, n_queries, n_keys)
    all_pairs = Rectangle(0, n_queries, 0, n_keys, call.is_causal)
    return TaskTensors(
        uncut(max(n_queries, n_keys)),
        () if is_empty else (all_pairs,),
        *call.inputs,
        scale=call.scale,
        is_causal=call.is_causal,
        bias=partial(part_of, call.bias),
        max_queries=n_queries,
        max_keys=n_keys,
        entries=tuple(range(call.first_entry, call.first_entry + batch)),
        dropout=call.dropout,
    )


@lru_cache(maxsize=64)
def uncut(n_tokens: int) -> Task:
    """Return a sequence as one task."""
    return Decomposition(n_tokens).task(())


def part_of(bias: torch.Tensor | None, r: Rectangle) -> torch.Tensor | None:
    """Return the bias of a rectangle, from that of a whole call."""
    if bias is None:
        return None
    missing_dims = 4 - bias.dim()
    bias = bias[(None,) * missing_dims]
    if bias.shape[2] > 1:
        bias = bias[:, :, r.query_start : r.query_stop]
    if bias.shape[3] > 1:
        bias = bias[..., r.key_start : r.key_stop]
    return bias


@dataclass(frozen=True, slots=True)
class Saved:
    """The inputs of a backward besides query, key and value, of whole rows.

    Attributes:
        grad_out: (b, h, n, dv), upstream.
        out: (b, h, n, dv).
        lse: (b, h, n).
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def mapped(self, on_rows: Pick) -> Saved:
        """Return other rows of all three."""
        return Saved(on_rows(self.grad_out), on_rows(self.out), on_rows(self.lse))


@dataclass(frozen=True, slots=True)
class Indices:
    """Pairs of a call, by int64 tensors on one device.

    Attributes:
        entries: (b,) numbers of batch entries.
        heads: (h,) numbers of query heads.
        queries: (q,) positions of queries.
        keys: (k,) positions of keys.
    """

    entries: torch.Tensor
    heads: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor


class Kernel(ABC):
    """Computes a task. Write a subclass; register it, or pass it as ``kernel=``.

    A subclass defines ``name``, ``refusal``, two bounds of memory, ``forward`` and ``backward``.
    The rest describes optional features, which are off by default.

    Attributes:
        name: short and unique; users write it as ``kernel=``.
        own_attention: it is not plain attention of query, key, scale and mask. So it is not
            compared with the reference first, and gets no rows beyond the sequence's tokens.
        position_free: that other attention does not depend on positions, heads or batch entries, so
            parts of a call can be computed as separate calls.
        whole_tasks: a task is one launch, whatever its rectangles. So several calls in flight, or
            all tasks of a head group together, are not faster.
        several_streams: a task is several calls, spread over ``TaskTensors.streams`` if there are
            any. Two calls in flight, or all tasks of a head group together, may be faster.
        launch_seconds: host seconds to launch a forward, and a backward, of a kernel of whole
            tasks.
        rates: speeds of its forward and its backward, as shares of the device's best kernel's.
        scaled_backward: dtypes for which a scaled backward is more exact; the kernel undoes the
            scaling (kernels/scaling.py). With other dtypes, or dropout, nothing is scaled.
        fp32_products: its backward takes fp16 upstream gradients of up to 2**15 without overflow,
            because its products are in fp32 or scaled by the kernel. A gradient of a wider dtype
            then keeps more of its small numbers (execution/upstream.py).
        dropout: it applies ``TaskTensors.dropout`` (kernels/dropout.py). Other kernels get no calls
            with dropout.
        wide_masks: it takes additive masks in fp32 beside 16-bit inputs. Other kernels get no calls
            with such masks.
        plain_variant: the kernel to compare with the reference instead of this one, if this one has
            options that change the scores; None: this one.
        priced_as: a kernel with the same costs in uncut calls, which lives longer than this one;
            None: this one. What is found out about short calls is remembered by that kernel.
        any_upstream: upstream gradient and output of its ``backward`` may have any dtype and
            strides; if needed they are copied, for one operator call at a time.
        thread_per_head: on a CPU each thread computes whole heads of batch entries in the backward
            of an uncut call, and an equal part of all rows in its forward.
        accepts_inf_lse: its backward takes an lse of -inf, which rows without keys have.
        operator: ``whole_forward`` and ``whole_backward`` run a single rectangle.
        grouped: its operator takes fewer key/value heads than query heads.
        sparse: it has its own mask, and ``kept_pairs`` says which pairs that keeps.
    """

    name: str
    own_attention: bool = False
    position_free: bool = False
    whole_tasks: bool = False
    several_streams: bool = False
    launch_seconds: tuple[float, float] = (60e-6, 200e-6)  # the native kernel's
    rates: tuple[float, float] = (1.0, 1.0)
    scaled_backward: frozenset[torch.dtype] = frozenset()
    fp32_products: bool = False
    dropout: bool = False
    wide_masks: bool = False
    plain_variant: Kernel | None = None
    priced_as: Kernel | None = None
    any_upstream: bool = False
    thread_per_head: bool = False
    accepts_inf_lse: bool = False
    operator: bool = False
    grouped: bool = False
    sparse: bool = False

    @abstractmethod
    def refusal(self, shape: CallShape) -> str | None:
        """Return why this kernel cannot run such a call, in words for the user, or None."""

    @abstractmethod
    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the device bytes ``forward`` allocates at any one time."""

    @abstractmethod
    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the device bytes ``backward`` allocates at any one time."""

    @abstractmethod
    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""

    @abstractmethod
    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""

    def compute_like(self, base: Kernel) -> None:
        """Take over how ``base`` computes, for a kernel whose calls ``base`` runs."""
        self.launch_seconds = base.launch_seconds
        self.rates = base.rates
        self.scaled_backward = base.scaled_backward
        self.fp32_products = base.fp32_products
        self.dropout = base.dropout
        self.wide_masks = base.wide_masks
        self.accepts_inf_lse = base.accepts_inf_lse

    def with_softcap(self, softcap: float) -> Kernel | None:
        """Return this kernel, with its other options, for scores bounded by a soft cap.

        Scores become ``softcap * tanh(score / softcap)``. None: the kernel has no soft cap.
        """
        return None

    # --- Monolithic calls --------------------------------------------------------------------

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """Whether it takes such a call by ``whole_forward`` and ``whole_backward``.

        Args:
            tokens: the larger of the numbers of queries and keys.
            all_heads: whether it is handed all heads and batch entries, in order; otherwise it is
                handed some of them, and not told which.
        """
        return False

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output (b, h, n, dv), rounded once, and lse (b, h, n).

        Rows without keys have output 0 and lse -inf. By default that is ``forward`` of a whole call
        as one task.
        """
        query = call.query
        rows = query.shape[:3]
        dtype = state_dtype(query.dtype)
        out = empty_like_input(query, (*rows, call.value.shape[-1]), dtype)
        lse = torch.empty(rows, dtype=dtype, device=query.device)
        empty_(out, lse)
        self.forward(whole_task(call), Statistics(out, lse))
        return out.to(call.stored or query.dtype), lse

    def bias_gradient(self, call: Call, saved: Saved) -> torch.Tensor | None:
        """Return the gradient of the bias of a whole call, before it is summed: (b, h, n, m).

        Only of one that the kernel's own operator computes, within the digits of the bias's dtype.
        None: it is computed tile by tile (execution/mask_gradient.py).
        """
        return None

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """Return the gradients of query, key and value, rounded once; lse is 0 in rows without
        keys.

        By default that is ``backward`` of a whole call as one task.
        """
        sum_dtype = state_dtype(call.query.dtype)
        result_dtype = call.stored or call.query.dtype
        grad_query, grad_key, grad_value = (
            empty_like_input(tensor, tensor.shape, sum_dtype).zero_() for tensor in call.inputs
        )
        grads = Gradients(saved.grad_out, saved.out, saved.lse, grad_query, grad_key, grad_value)
        self.backward(whole_task(call), grads)
        return (
            grad_query.to(result_dtype),
            grad_key.to(result_dtype),
            grad_value.to(result_dtype),
        )

    # --- What it reads, calls and keeps ------------------------------------------------------

    def captured(self) -> Sequence[torch.Tensor]:
        """Return the tensors besides the inputs that results depend on (slopes, a function's
        closure).

        Autograd saves them with the inputs. So writing to one of them before the backward is an
        error, as for any saved tensor.
        """
        return tensors(self.called_back())

    def called_back(self) -> Sequence[Callable[..., Any]]:
        """Return the users' functions that it calls in the forward and again in the backward."""
        return ()

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> Sequence[torch.Tensor]:
        """Return the functions' results for a few rows (b, h, q, d), (b, hk, k, d), (b, hk, k,
        dv)."""
        return ()

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """Return the pairs of a call. Tokens without a kept pair are not copied.

        Their ``verdict`` may call a block EMPTY only if no pair of it is kept, in any head of any
        batch entry. Its answers are cached by function as long as the kernel lives: return the same
        function in every call, a method of the kernel or one that does not close over the kernel.
        """
        return Pairs(n_queries, n_keys, is_causal)

    def scores_of_pairs(self) -> Any:
        """Return how the kernel changes and masks each score (``score_tiles.ScoreTransform``).

        None: it computes more than that, and the gradient of a mask beside it is not computed as
        beside plain softmax.
        """
        return None


InnerKernel = Kernel
"""The public name."""


def refusal(kernel: Kernel, shape: CallShape) -> str | None:
    """Return why a kernel cannot run such a call, or None.

    Dropout and wide masks are asked about here, so that a kernel that does not know of them never
    leaves out the one, nor misreads the other.
    """
    reason = kernel.refusal(shape)
    if reason is not None:
        return reason
    if shape.dropout and not kernel.dropout:
        return "it has no dropout by the position of a pair"
    if shape.bias is not None and shape.bias.wide and not kernel.wide_masks:
        return (
            f"it adds attn_mask in the inputs' dtype {shape.dtype}, which would round it: take "
            f"kernel='auto', or give attn_mask.to({shape.dtype}) if that is meant"
        )
    return None


def check_mask_gradient(kernel: Kernel) -> None:
    """Check that the gradient of a mask beside ``kernel`` is that of plain softmax.

    Raises:
        NotImplementedError: it computes another function of the scores.
    """
    is_plain = not kernel.own_attention and kernel.plain_variant is None
    if not is_plain and not kernel.scores_of_pairs():
        raise NotImplementedError(
            f"kernel {kernel.name!r} has no gradient of attn_mask: it computes more than the "
            f"softmax of scores and mask; pass attn_mask.detach(), or take another kernel"
        )
