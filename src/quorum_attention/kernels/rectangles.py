"""Kernels by calls, above all plain attention operators: one call for one or a few rectangles.

The kept pairs of a task are a short list of rectangles, each plain or causal and with no mask
inside (paper, section 4), so an operator that returns ``(out, lse)`` and whose backward takes an
lse from outside can be used as it is.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition import Rectangle
from quorum_attention.decomposition.rectangles import Batch, batches, cut
from quorum_attention.kernels.limits import (
    UNLIMITED,
    CallLimits,
    CallPart,
    CallSizes,
    call_parts,
    part_sizes,
)
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, add_, merge_
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Kernel,
    Saved,
    Statistics,
    TaskTensors,
    Three,
    state_dtype,
)
from quorum_attention.kernels.tensors import (
    Pick,
    dead_rows,
    dead_rows_bytes,
    empty_in_order_of,
    key_rows,
    query_rows,
)


class TaskCall(NamedTuple):
    """A call of a task: what selects its query rows of (b, hq, nq, ...) and its key rows of
    (b, hk, nk, ...), as views; ``forward() -> (out, lse)``; ``backward(saved)`` -> gradients, given
    the whole rows' results, lse 0 in rows without keys."""

    rows: Pick
    keys: Pick
    forward: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[Saved], Three]


class CallsKernel(Kernel):
    """A kernel that computes a task by calls whose results are merged one after the other."""

    @abstractmethod
    def task_calls(self, task: TaskTensors, *, backward: bool) -> Iterator[Iterable[TaskCall]]:
        """The calls of a task; those of each turn share a stream, if there are several."""

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""

        def merged(call: TaskCall, number: int) -> None:
            out, lse = call.forward()
            with _merging(task, number):
                merge_(call.rows(state.out), call.rows(state.lse), out, lse)

        self._run(task, merged, backward=False)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        scaling = grads.scaling
        undo = (2.0**-scaling.shift, scaling.unscale, scaling.overflow)
        lse = shifted_lse(grads.lse, scaling.shift)

        def added(call: TaskCall, number: int) -> None:
            rows, keys, _, run = call
            found = run(Saved(rows(grads.grad_out), rows(grads.out), rows(lse)))
            targets = rows(grads.grad_query), keys(grads.grad_key), keys(grads.grad_value)
            with _merging(task, number):
                for target, parts in zip(targets, found, strict=True):
                    for part in parts.chunk(parts.shape[0] // target.shape[0]):
                        add_(target, part, *undo)

        self._run(task, added, backward=True)

    def _heads(self, query: torch.Tensor, key: torch.Tensor) -> list[slice]:
        """The query heads of each call: all, or one of every key head."""
        shared = 1 if self.grouped else query.shape[1] // key.shape[1]
        return [slice(j, None, shared) for j in range(shared)]

    def _run(
        self, task: TaskTensors, run: Callable[[TaskCall, int], None], *, backward: bool
    ) -> None:
        streams = task.streams
        with nullcontext() if streams is None else streams.task():
            for number, turn in enumerate(self.task_calls(task, backward=backward)):
                with nullcontext() if streams is None else streams.call(number):
                    for call in turn:
                        run(call, number)
                        del call  # its mask is freed before the next one is made


@contextmanager
def _merging(task: TaskTensors, number: int) -> Iterator[None]:
    """Around merging the results of a call in a task's ``number``-th turn."""
    with nullcontext() if task.streams is None else task.streams.merge(number), task.timed("merge"):
        yield


class RectangleKernel(CallsKernel):
    """Base class: implement the two ``rectangle_`` methods, ``refusal`` and the two bounds.

    If its operator is not ``grouped``, the query heads of a group are run one after the other on
    views.

    Attributes:
        bands: the operator takes windows (``rectangle_forward``).
        masked_limit: most queries or keys of one call with a mask; None for no limit.
        forward_limits, backward_limits: what one call of the operator may have at most. Larger
            calls are cut into parts by batch entries and heads; where one head is too large, by
            rows.
        lowest_score: the operator treats this score, and lower ones, as masked.
        row_unit: for every batch entry the operator's temporaries are rounded up to multiples of
            this many rows.
        rounds_scale: in its backward the operator rounds a score times the factor otherwise than in
            its forward, so in fp32 too the factor it gets is a power of two (``signed``).
        turned: causal rectangles are upper triangles: they are run with the orders of queries and
            of keys turned round.
    """

    several_streams = True
    scaled_backward = frozenset({torch.float16})
    any_upstream = True
    operator = True
    bands: bool = False
    masked_limit: int | None = None
    forward_limits: CallLimits = UNLIMITED
    backward_limits: CallLimits = UNLIMITED
    lowest_score: float = -math.inf
    row_unit: int = 1
    rounds_scale: bool = False
    turned: bool = False

    @abstractmethod
    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over one rectangle: dense rows, a scale above 0 (see ``signed``).

        A causal rectangle is a square. A kernel with ``bands`` also takes a ``Band``, counted from
        the first query and the first key; rows without a key then have out 0 and lse -inf.

        Returns:
            out (b, h, lq, dv), normalised, in any floating dtype, and its natural-log lse
            (b, h, lq). Rows that the bias leaves no key may hold anything.
        """

    @abstractmethod
    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """Gradients of query, key and value of one rectangle, given the *global* out and lse of its
        rows; lse is finite everywhere."""

    def takes_whole(self, shape: CallShape, tokens: int, every: bool) -> bool:
        """Whether a monolithic call can be handed to the operator as it is."""
        limit = None if shape.bias is None else self.masked_limit
        if not (self.grouped or shape.heads == shape.kv_heads):
            return False
        if limit is not None and tokens > limit:
            return False
        sizes = CallSizes(
            entries=max(1, shape.batch),
            key_heads=max(1, shape.kv_heads),
            group=max(1, shape.queries_per_key_head),
            queries=shape.n_queries or tokens,
            keys=shape.n_keys or tokens,
            width=max(shape.head_dim, shape.value_dim),
        )
        return self.call_limits(backward=shape.needs_grad).largest(sizes)[1] > 0

    def call_limits(self, *, backward: bool) -> CallLimits:
        """The limits of one call of the operator in a pass."""
        return self.backward_limits if backward else self.forward_limits

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """``rectangle_forward`` with rows that have no key mended: out 0, lse -inf. A call beyond
        the operator's limits is cut into parts."""
        parts = _parts_within(self.forward_limits, call)
        if len(parts) < 2:
            return self._single_forward(call)
        query = call.query
        rows = query.shape[:3]
        dtype = call.stored or query.dtype
        out = empty_in_order_of(query, (*rows, call.value.shape[-1]), dtype)
        lse = torch.empty(rows, dtype=state_dtype(query.dtype), device=query.device)
        for part in parts:
            part_out, part_lse = self._single_forward(_part_of_call(call, part))
            out[part.query_rows].copy_(part_out)
            lse[part.query_rows].copy_(part_lse)
            del part_out, part_lse  # before the next part's are made
        return out, lse

    def _single_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.rectangle_forward(signed(call, self.rounds_scale)[0])
        self.clear_dead_rows_(out, lse, call)
        return out, lse

    def clear_dead_rows_(self, out: torch.Tensor, lse: torch.Tensor, call: Call) -> None:
        """Rows without keys: operators differ in what they return for them (0 with lse 0, NaN)."""
        if call.bias is None:
            return
        dead = dead_rows(
            four_dims(call.bias), call.query.shape[2], call.is_causal, self.lowest_score
        )
        # Most masks leave no such row. On a GPU, asking would make the host wait.
        if dead.is_cuda or bool(dead.any()):
            out.masked_fill_(dead.unsqueeze(-1), 0.0)
            lse.masked_fill_(dead, -torch.inf)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """``rectangle_backward`` of a whole call; lse is 0 in rows without keys. A call beyond the
        operator's limits is cut into parts."""
        parts = _parts_within(self.backward_limits, call)
        if len(parts) < 2:
            return self._single_backward(call, saved)
        grad_query, grad_key, grad_value = (
            empty_in_order_of(tensor, tensor.shape, call.stored or tensor.dtype)
            for tensor in call.inputs
        )
        for part in parts:
            part_saved = saved.mapped(itemgetter(part.query_rows))
            part_grads = self._single_backward(_part_of_call(call, part), part_saved)
            grad_query[part.query_rows].copy_(part_grads[0])
            grad_key[part.key_rows].copy_(part_grads[1])
            grad_value[part.key_rows].copy_(part_grads[2])
            del part_grads  # before the next part's are made
        return grad_query, grad_key, grad_value

    def _single_backward(self, call: Call, saved: Saved) -> Three:
        upright, share = signed(call, self.rounds_scale)
        grad_query, grad_key, grad_value = self.rectangle_backward(upright, saved)
        return grad_query if share == 1 else grad_query.mul_(share), grad_key, grad_value

    def preferred_sizes(self, task: TaskTensors, r: Rectangle, backward: bool) -> tuple[int, int]:
        """The most (queries, keys) of one plain call, for speed alone; by default all of ``r``.

        Args:
            r: the rectangle of the task to run.
            backward: whether it runs in a backward.
        """
        return r.n_queries, r.n_keys

    def backward_parts(self, batch_and_heads: int) -> int:
        """The number of equal runs of query rows into which a backward cuts a plain rectangle.

        The runs go to the operator as further batch entries. That helps an operator that is
        parallel over batch and heads only.
        """
        return 1

    def task_calls(self, task: TaskTensors, *, backward: bool) -> Iterator[Iterator[TaskCall]]:
        """See ``CallsKernel``."""
        for batch in self._calls(task, backward=backward):
            parts = self._in_parts(task, batch) if backward else iter((batch,))
            yield (call for part in parts for call in self._of_heads(task, part, backward))

    def _of_heads(self, task: TaskTensors, batch: Batch, backward: bool) -> Iterator[TaskCall]:
        """A call for the query heads that one call takes."""
        given = task.bias(batch.first)
        bias = None if given is None else four_dims(given)
        key, value = (self._turned(key_rows(t, batch)) for t in (task.key, task.value))
        # Runs of rows with the same keys each return a part of these keys' gradients.
        keys = partial(key_rows, batch=batch if batch.key_step else Batch(batch.first))
        for heads in self._call_heads(task, batch, backward):
            mask = bias if bias is None or bias.shape[1] == 1 else bias[:, heads]
            rows = partial(query_rows, batch=batch, heads=heads)
            query = self._turned(rows(task.query))
            call = Call(query, key, value, batch.first.causal, task.scale, mask)
            yield TaskCall(rows, keys, partial(self._forward, call), partial(self._backward, call))
            del call

    def _call_heads(self, task: TaskTensors, batch: Batch, backward: bool) -> list[slice]:
        """The query heads of each call; fewer than all of a key head's, where those are too many
        for one call."""
        if not self.grouped:
            return self._heads(task.query, task.key)
        first = batch.first
        sizes = CallSizes(
            entries=task.query.shape[0] * batch.count,
            key_heads=task.key.shape[1],
            group=task.query.shape[1] // task.key.shape[1],
            queries=first.n_queries,
            keys=first.n_keys,
            width=max(task.query.shape[-1], task.value.shape[-1]),
        )
        count = self.call_limits(backward=backward).group_parts(sizes)
        return [slice(start, None, count) for start in range(count)]

    def _forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.whole_forward(call)
        return self._turned(out), self._turned(lse)

    def _backward(self, call: Call, saved: Saved) -> Three:
        dtype = call.query.dtype
        out, grad_out = (
            as_operator_readable(saved.out, dtype),
            as_operator_readable(saved.grad_out, dtype),
        )
        saved = Saved(grad_out, out, saved.lse).mapped(self._turned)
        if not self.turned:  # results are copied
            call = replace(call, stored=state_dtype(call.query.dtype))
        query, key, value = map(self._turned, self.whole_backward(call, saved))
        return query, key, value

    def _turned(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.flip(2) if self.turned else rows

    def _calls(self, task: TaskTensors, *, backward: bool) -> Iterator[Batch]:
        """The operator calls of a task, by its rectangles."""
        rectangles = self._within_row_limits(task, backward)
        if rectangles and task.has_mask(rectangles[0]):
            limit = self.masked_limit
            cuts = rectangles if limit is None else cut(rectangles, limit, limit)
            yield from (Batch(r) for r in cuts)
            return
        pieces: list[Rectangle] = []
        for r in rectangles:
            pieces += [r] if r.causal else cut([r], *self.preferred_sizes(task, r, backward))
        for batch in batches(tuple(pieces)):
            yield from self._bounded(batch, task)

    def _within_row_limits(self, task: TaskTensors, backward: bool) -> Sequence[Rectangle]:
        """The task's rectangles, cut where a single head has too many rows for a call."""
        width = max(task.query.shape[-1], task.value.shape[-1])
        queries, keys = self.call_limits(backward=backward).rows(width)
        for rectangle in task.rectangles:
            if rectangle.n_queries > queries or rectangle.n_keys > keys:
                return tuple(cut(task.rectangles, queries, keys))
        return task.rectangles

    def _bounded(self, batch: Batch, task: TaskTensors) -> Iterator[Batch]:
        """``batch`` in parts, each with as many rectangles as the workspace bound allows."""
        most, first = 1, batch.first
        if task.max_queries and task.query.shape[0] == 1:
            rows = round_up(first.n_queries, self.row_unit)
            columns = round_up(first.n_keys, self.row_unit)
            most = max(1, min(task.max_queries // rows, task.max_keys // columns))
        for start in range(0, batch.count, most):
            first, count = batch.rectangle(start), min(most, batch.count - start)
            yield replace(batch, first=first, count=count)

    def _in_parts(self, task: TaskTensors, batch: Batch) -> Iterator[Batch]:
        """``batch`` as a backward runs it: in equal runs of rows, by ``backward_parts``."""
        r = batch.first
        n_parts = self.backward_parts(task.query.shape[1] if self.grouped else task.key.shape[1])
        side = r.n_queries // n_parts
        # Batch entries leave no room for others; a mask would have to be cut as well.
        several = task.query.shape[0] * batch.count > 1
        if n_parts == 1 or side == 0 or several or self.turned or task.has_mask(r):
            yield batch
            return
        q, k = r.query_start, r.key_start
        edges = [q + side * part for part in range(n_parts + 1)]
        even, stop = edges[-1], r.query_stop
        if even < stop:
            edges.append(stop)
        if not r.causal:
            yield Batch(Rectangle(q, q + side, k, r.key_stop), n_parts, side)
            if even < stop:
                yield Batch(Rectangle(even, stop, k, r.key_stop))
            return
        # Squares along the diagonal, the rest of it, and what each leaves to its left.
        yield Batch(Rectangle(q, q + side, k, k + side, causal=True), n_parts, side, side)
        if even < stop:
            yield Batch(Rectangle(even, stop, k + even - q, r.key_stop, causal=True))
        for first, last in pairwise(edges[1:]):
            yield from self._in_parts(task, Batch(Rectangle(first, last, k, k + first - q)))


def _parts_within(limits: CallLimits, call: Call) -> tuple[CallPart, ...]:
    """The parts of a call that an operator can take; none where it has no limits."""
    if limits is UNLIMITED:
        return ()
    entries, heads, queries, head_dim = call.query.shape
    _, key_heads, keys, value_dim = call.value.shape
    width = max(head_dim, value_dim)
    sizes = CallSizes(entries, key_heads, heads // key_heads, queries, keys, width)
    return call_parts(limits, sizes)


def _part_of_call(call: Call, part: CallPart) -> Call:
    bias = call.bias
    if bias is not None:
        bias = four_dims(bias)
        entries, heads = part.query_rows
        bias = bias if bias.shape[0] == 1 else bias[entries]
        bias = bias if bias.shape[1] == 1 else bias[:, heads]
    return call.mapped(itemgetter(part.query_rows), itemgetter(part.key_rows), bias=bias)


def as_operator_readable(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``rows`` (b, h, n, d) of an upstream gradient or an output as operators can read them: of
    ``dtype``, in dense rows, not expanded. Copied, token after token, only if they are not so."""
    dense = rows.stride(-1) == 1 or rows.shape[-1] <= 1
    if rows.dtype == dtype and dense and 0 not in rows.stride():
        return rows
    batch, heads, n, width = rows.shape
    copy = torch.empty((batch, n, heads, width), dtype=dtype, device=rows.device)
    return copy.transpose(1, 2).copy_(rows)


def signed(call: Call, rounds_scale: bool = False) -> tuple[Call, float]:
    """The call with a factor above 0 that gives the same scores.

    Operators mask a row with -inf and take its maximum before they multiply by the factor. With a
    factor of 0 or below they return NaN or wrong weights. So the queries are multiplied by the sign
    of the factor (-1 or 0), which is exact. In float64, and in fp32 for torch's CPU operator, they
    are multiplied by all of the factor but a power of two: that operator rounds a score times the
    factor otherwise in its backward than in its forward, which costs a digit or two of
    exp(score - lse) where scores are large (docs/gradients.md).

    Args:
        rounds_scale: as the kernel's.

    Returns:
        (call, share): the gradient of its queries is to be multiplied by ``share``; if that is 1,
        it is ``call`` itself.
    """
    dtype = call.query.dtype
    exact = dtype == torch.float64 or (rounds_scale and dtype == torch.float32)
    share, factor = _split(call.scale, exact)
    if share == 1.0 and factor == call.scale:
        return call, share
    # 0 times NaN or infinity is NaN, as in the scores.
    query = call.query if share == 1.0 else call.query * share
    return replace(call, query=query, scale=factor), share


@lru_cache(maxsize=256)
def _split(scale: float, exact: bool) -> tuple[float, float]:
    """``scale`` as a product of what queries are multiplied by and a factor above 0; ``exact``: a
    power of two."""
    share = -1.0 if scale < 0 else 0.0 if scale == 0 else 1.0
    factor = abs(scale) or 1.0
    mantissa, exponent = math.frexp(factor)
    if exact and mantissa != 0.5:
        share, factor = share * mantissa, math.ldexp(1.0, exponent)
    return share, factor


def operator_refusal(
    shape: CallShape, device: str, dtypes: Sequence[torch.dtype], widest: int | None = None
) -> str | None:
    """Why an operator for a kind of device and some dtypes cannot run a call; None if it can.

    Args:
        widest: the largest head and value dimension, which then are multiples of 8.
    """
    if shape.device_type != device:
        where = "the CPU" if device == "cpu" else "NVIDIA GPUs"
        return f"it runs on {where}, not on {shape.device_type}"
    if shape.dtype not in dtypes:
        *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it takes {', '.join(names)} and {last}, not {shape.dtype}"
    for what, width in (("head", shape.head_dim), ("value", shape.value_dim)):
        if width == 0:
            return f"it takes no {what} dimension of 0"
        if widest is not None and (width % 8 or width > widest):
            return f"it takes {what} dimensions that are multiples of 8 up to {widest}, not {width}"
    return None


def four_dims(bias: torch.Tensor) -> torch.Tensor:
    """The mask with four dimensions (b, h, lq, lk); missing ones have size 1."""
    return bias[(None,) * (4 - bias.dim())]


def shifted_lse(lse: torch.Tensor, shift: int) -> torch.Tensor:
    """``lse - shift ln 2``, with 0 for rows without keys: exp(-inf - 0) = 0, where -inf is NaN."""
    shifted = lse - shift * math.log(2.0)
    return shifted.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=0.0)


# --- Sizes of an operator call, from which kernels compute their bounds in bytes -----------------

SLACK_BYTES = 64 * 1024
"""Bound of what the allocator adds by rounding, for the few tensors alive at once."""

UNSPLIT_BYTES = 1 << 20
"""torch's CUDA caching allocator does not split a large block if less than this would be left: a
tensor may then take this much more."""


@cache
def multiprocessors() -> int:
    """Multiprocessors of the largest GPU here; without a GPU, 160, as many as the largest has."""
    if not torch.cuda.is_available():
        return 160
    counts = [
        torch.cuda.get_device_properties(index).multi_processor_count
        for index in range(torch.cuda.device_count())
    ]
    return max(counts, default=160)


def mask_bytes(shape: CallShape, extent: Extent, multiple: int = 1) -> int:
    """Bytes of the mask of one rectangle; ``multiple``: what its rows are padded to, in bytes."""
    mask, item = shape.bias, shape.bias_dtype.itemsize
    if mask is None:
        return 0
    size = (extent.batch if mask.batch else 1) * (extent.query_heads if mask.heads else 1)
    size *= extent.max_queries if mask.rows else 1
    return size * round_up((extent.max_keys if mask.columns else 1) * item, multiple)


class RectangleSizes:
    """Sizes of the largest operator call a kernel makes, and bounds of the bytes it takes.

    Args:
        grouped: whether the operator takes fewer key heads than query heads.
        splits_scale: whether queries are copied to multiply them by a part of the scale, whatever
            that is (``signed``).
        limits: what one call may have at most; larger ones are cut into parts.

    Attributes:
        extent: the sizes of one call.
        is_cut: whether the task, or the whole call, is cut into parts within the limits.
        heads, shared: query heads of one call, and those of a key head.
        lanes: batch entries times query heads of one call.
        rows, key_rows: query rows and key rows of one call.
        shared_key_rows: key rows of one call if every query head had its own.
        item, work: bytes of an element of the inputs, and of the statistics.
        aligned_bias_bytes: of a copy of the mask from ``aligned_bias``, every row at its full
            length.
    """

    def __init__(
        self,
        shape: CallShape,
        extent: Extent,
        grouped: bool = True,
        splits_scale: bool = False,
        limits: CallLimits = UNLIMITED,
    ) -> None:
        self.call, self.task = shape, extent
        group = extent.query_heads // max(1, extent.key_heads) if grouped else 1
        self.extent = _largest_call(limits, shape, extent, group)
        self.heads = self.extent.query_heads if grouped else self.extent.key_heads
        self.shared = self.heads // max(1, self.extent.key_heads)
        self.lanes = self.extent.batch * self.heads
        self.rows = self.lanes * self.extent.max_queries
        self.key_rows = self.extent.batch * self.extent.key_heads * self.extent.max_keys
        self.shared_key_rows = self.lanes * self.extent.max_keys
        self.is_cut = self.extent != extent
        # The results of a call that is cut are all there while its last part runs.
        self._joined_rows = 0
        self._joined_key_rows = 0
        if self.is_cut:
            self._joined_rows = extent.batch * extent.query_heads * self.extent.max_queries
            self._joined_key_rows = extent.batch * extent.key_heads * self.extent.max_keys
        self.item = shape.dtype.itemsize
        self.work = shape.state_dtype.itemsize
        self.aligned_bias_bytes = 0
        if shape.bias is not None:
            whole = replace(shape, bias=replace(shape.bias, columns=True))
            self.aligned_bias_bytes = mask_bytes(whole, extent, 16)
        # The mask, and the queries of one call times a part of its scale.
        split = splits_scale or not shape.positive_scale or self.work == 8
        signed = self.rows * shape.head_dim * self.item if split else 0
        self._held = mask_bytes(shape, extent) + signed + SLACK_BYTES

    def forward_bytes(
        self, out_width: int, inside: int, merging: int = MERGE_WORKSPACE_BYTES
    ) -> int:
        """Bound of a forward whose operator holds ``inside`` bytes until it returns (out, lse),
        which are merged with ``merging`` bytes."""
        call, extent, dead = self.call, self.extent, 0
        if call.bias is not None:
            batch = extent.batch if call.bias.batch else 1
            sides = extent.max_queries, extent.max_keys
            dead = dead_rows_bytes(batch, self.heads, *sides, call.is_causal)
        results = self.rows * (out_width * self.item + self.work)
        results += self._joined_rows * (call.value_dim * self.item + self.work)
        # Temporaries after the operator has returned: rows without keys, merge.
        return self._held + results + max(inside, max(dead, merging) + dead)

    def backward_bytes(
        self, inside: int, gradients: int | None = None, adding: int = MERGE_WORKSPACE_BYTES
    ) -> int:
        """Bound of a backward that returns ``gradients`` bytes (by default as wide as the inputs)
        and holds ``inside`` until it does, and whose gradients are added with ``adding`` bytes."""
        if gradients is None:
            gradients = self._gradient_bytes(self.rows, self.key_rows)
        gradients += self._gradient_bytes(self._joined_rows, self._joined_key_rows)
        task_rows = self.task.batch * self.task.query_heads * self.task.n_tokens
        # The shifted lse, the flags of its empty rows, and two copies for a call.
        lse = task_rows * (self.work + 1) + 2 * self.rows * self.work
        return self._held + lse + gradients + max(inside, adding)

    def _gradient_bytes(self, rows: int, key_rows: int) -> int:
        """Bytes of the gradients of so many query rows and key rows, as wide as the inputs."""
        of_keys = key_rows * (self.call.head_dim + self.call.value_dim)
        return (rows * self.call.head_dim + of_keys) * self.item


def _largest_call(limits: CallLimits, shape: CallShape, extent: Extent, group: int) -> Extent:
    """The sizes of the largest call that ``limits`` leave of ``extent``; ``group``: query heads
    that share a key/value head in a call."""
    if limits is UNLIMITED or 0 in (extent.batch, extent.key_heads):
        return extent
    width = max(shape.head_dim, shape.value_dim)
    row_limits = limits.rows(width)
    queries = min(extent.max_queries, row_limits[0])
    keys = min(extent.max_keys, row_limits[1])
    sizes = CallSizes(extent.batch, extent.key_heads, group, queries, keys, width)
    entries, key_heads = part_sizes(limits, sizes)
    return replace(
        extent,
        batch=entries,
        query_heads=key_heads * (extent.query_heads // extent.key_heads),
        key_heads=key_heads,
        max_queries=queries,
        max_keys=keys,
    )
