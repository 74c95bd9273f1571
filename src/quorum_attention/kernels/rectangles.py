"""Kernels by calls of plain attention operators: one call for one or a few rectangles.

The kept pairs of a task are a short list of rectangles, each plain or causal and with
no mask inside (paper, section 4), so an operator that returns ``(out, lse)`` and whose
backward takes an lse from outside can be used as it is.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition import Rectangle
from quorum_attention.decomposition.rectangles import Batch, batches, cut
from quorum_attention.kernels.call_shape import CallShape, state_dtype
from quorum_attention.kernels.dead_rows import dead_rows
from quorum_attention.kernels.grouped_heads import grouped_backward, grouped_forward
from quorum_attention.kernels.limits import (
    UNLIMITED,
    CallLimits,
    CallSizes,
    call_parts,
)
from quorum_attention.kernels.operator_call import (
    Call,
    OutLse,
    Saved,
    Three,
    bias_of_heads,
    four_dims,
    map_three,
)
from quorum_attention.kernels.operator_inputs import (
    as_operator_readable,
    with_positive_scale,
)
from quorum_attention.kernels.operator_parts import (
    backward_by_parts,
    call_sizes,
    forward_by_parts,
)
from quorum_attention.kernels.protocol import Launches
from quorum_attention.kernels.task_calls import CallsKernel, TaskCall
from quorum_attention.kernels.task_tensors import TaskTensors
from quorum_attention.kernels.tensors import key_rows, query_rows


class RectangleKernel(CallsKernel):
    """Base class: implement the two ``rectangle_`` methods, ``refusal`` and the two
    bounds.

    If its operator is not ``grouped``, the query heads of a group are run one after the
    other on views.

    Attributes:
        bands: the operator takes windows (``rectangle_forward``).
        masked_limit: most queries or keys of one call with a bias; None for no limit.
        forward_limits, backward_limits: what one call of the operator may have at most.
            Larger calls are cut into parts by batch entries and heads; where one head
            is too large, by rows.
        lowest_score: the operator treats this score, and lower ones, as masked, but not
            in float64.
        row_unit: for every batch entry the operator's temporaries are rounded up to
            multiples of this many rows.
        splits_fp32_scale: in its backward the operator rounds a score times the scale
            otherwise than in its forward, so in fp32 too the scale it gets is a power
            of two (``operator_inputs.with_positive_scale``).
        regroups: whole calls have fewer key heads than query heads although the
            operator does not take them (``grouped_heads``).
        most_group_rows: up to so many query rows of a group are the rows of one head in
            the backward of a whole call with 16-bit inputs (``grouped_heads``).
        reversed_order: causal rectangles are upper triangles: they are run with the
            orders of queries and of keys reversed.
    """

    launches = Launches.CALLS_ON_STREAMS
    scaled_backward = frozenset({torch.float16})
    any_upstream = True
    operator = True
    bands: bool = False
    masked_limit: int | None = None
    forward_limits: CallLimits = UNLIMITED
    backward_limits: CallLimits = UNLIMITED
    lowest_score: float = -math.inf
    row_unit: int = 1
    splits_fp32_scale: bool = False
    regroups: bool = False
    most_group_rows: int = 0
    reversed_order: bool = False

    # --- What a subclass implements ---------------------------------------------------

    @abstractmethod
    def rectangle_forward(self, call: Call) -> OutLse:
        """Compute attention over one rectangle: dense rows, a scale above 0.

        A causal rectangle is a square. A kernel with ``bands`` also takes a ``Band``,
        counted from the first query and the first key; rows without a key then have out
        0 and lse -inf.

        Returns:
            out (b, h, lq, dv), normalised, in any floating dtype, and its natural-log
            lse (b, h, lq). Rows that the bias leaves no key may hold anything.
        """

    @abstractmethod
    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """Return the gradients of query, key and value of one rectangle, given the
        *global* out and lse of its rows; lse is finite everywhere."""

    def preferred_sizes(
        self, task: TaskTensors, r: Rectangle, backward: bool
    ) -> tuple[int, int]:
        """Return the most (queries, keys) of one plain call, for speed alone; by
        default all.

        Args:
            r: the rectangle of the task to run.
            backward: whether it runs in a backward.
        """
        return r.n_queries, r.n_keys

    def backward_parts(self, batch_and_heads: int) -> int:
        """Return the number of equal runs of query rows into which a backward cuts a
        plain rectangle.

        The runs go to the operator as further batch entries. That helps an operator
        that is parallel over batch and heads only.
        """
        return 1

    # --- Uncut calls ------------------------------------------------------------------

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """Whether a monolithic call can be handed to the operator as it is."""
        if shape.heads != shape.kv_heads and not (self.grouped or self.regroups):
            return False
        limit = self.masked_limit
        if shape.bias is not None and limit is not None and tokens > limit:
            return False
        limits = self.call_limits(backward=shape.needs_grad)
        sizes = _sizes_of(shape, tokens)
        if self.regroups:
            # The rows of a group may become those of a single head.
            sizes = sizes._replace(group=1, queries=sizes.queries * sizes.group)
        _, key_heads = limits.largest(sizes)
        return key_heads > 0

    def call_limits(self, *, backward: bool) -> CallLimits:
        """Return the limits of one call of the operator in a pass."""
        return self.backward_limits if backward else self.forward_limits

    def whole_forward(self, call: Call) -> OutLse:
        """Return (out, lse) of an uncut call; rows without keys have out 0 and lse
        -inf.

        A call beyond the operator's limits is cut into parts.
        """
        has_groups = call.query.shape[1] != call.key.shape[1]
        if has_groups and not self.takes_groups(call, backward=False):
            return grouped_forward(self.whole_forward, call)
        if self.forward_limits is UNLIMITED:
            return self._single_forward(call)
        return forward_by_parts(self._single_forward, call, self.forward_limits)

    def _single_forward(self, call: Call) -> OutLse:
        scaled_call, _ = with_positive_scale(call, self.splits_fp32_scale)
        out, lse = self.rectangle_forward(scaled_call)
        self.clear_dead_rows_(out, lse, call)
        return out, lse

    def clear_dead_rows_(
        self, out: torch.Tensor, lse: torch.Tensor, call: Call
    ) -> None:
        """Set rows without keys to out 0 and lse -inf, in place. Operators differ in
        what they return for such rows (0 with lse 0, NaN)."""
        if call.bias is None:
            return
        is_float64 = call.query.dtype == torch.float64
        dead = dead_rows(
            four_dims(call.bias),
            call.query.shape[2],
            call.is_causal,
            -math.inf if is_float64 else self.lowest_score,
        )
        # Most masks leave no such row. On a GPU, asking would make the host wait.
        if dead.is_cuda or bool(dead.any()):
            out.masked_fill_(dead.unsqueeze(-1), 0.0)
            lse.masked_fill_(dead, -torch.inf)

    def is_cut(self, shape: CallShape) -> bool:
        """Return whether a backward of a whole call is cut into parts."""
        return len(call_parts(self.backward_limits, _sizes_of(shape))) > 1

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """Return the gradients of an uncut call; lse is 0 in rows without keys.

        A call beyond the operator's limits is cut into parts.
        """
        has_groups = call.query.shape[1] != call.key.shape[1]
        if has_groups and not self.takes_groups(call, backward=True):
            most_rows = self.most_group_rows
            return grouped_backward(self.whole_backward, call, saved, most_rows)
        if self.backward_limits is UNLIMITED:
            return self._single_backward(call, saved)
        return backward_by_parts(
            self._single_backward, call, saved, self.backward_limits
        )

    def takes_groups(self, call: Call, *, backward: bool) -> bool:
        """Whether the operator is given the grouped heads of a whole call as they
        are."""
        return not self.regroups

    def _single_backward(self, call: Call, saved: Saved) -> Three:
        scaled_call, query_factor = with_positive_scale(call, self.splits_fp32_scale)
        grad_query, grad_key, grad_value = self.rectangle_backward(scaled_call, saved)
        if query_factor != 1:
            grad_query.mul_(query_factor)
        return grad_query, grad_key, grad_value

    # --- Tasks ------------------------------------------------------------------------

    def task_calls(
        self, task: TaskTensors, *, backward: bool
    ) -> Iterator[Iterator[TaskCall]]:
        """See ``CallsKernel``."""
        for batch in self._operator_calls(task, backward=backward):
            yield self._calls_of_batch(task, batch, backward)

    def _calls_of_batch(
        self, task: TaskTensors, batch: Batch, backward: bool
    ) -> Iterator[TaskCall]:
        """Yield the calls of one batch of rectangles."""
        if not backward:
            yield from self._calls_by_heads(task, batch, backward)
            return
        for run in self._backward_runs(task, batch):
            yield from self._calls_by_heads(task, run, backward)

    def _operator_calls(self, task: TaskTensors, *, backward: bool) -> Iterator[Batch]:
        """Yield the operator calls of a task, by its rectangles."""
        rectangles = self._within_row_limits(task, backward)
        if rectangles and task.has_mask(rectangles[0]):
            limit = self.masked_limit
            if limit is not None:
                rectangles = tuple(cut(rectangles, limit, limit))
            yield from map(Batch, rectangles)
            return
        pieces: list[Rectangle] = []
        for r in rectangles:
            if r.causal:
                pieces.append(r)
                continue
            n_queries, n_keys = self.preferred_sizes(task, r, backward)
            pieces.extend(cut([r], n_queries, n_keys))
        for batch in batches(tuple(pieces)):
            yield from self._within_workspace(batch, task)

    def _within_row_limits(
        self, task: TaskTensors, backward: bool
    ) -> Sequence[Rectangle]:
        """Return the task's rectangles, cut where a single head has too many rows for a
        call."""
        limits = self.call_limits(backward=backward)
        width = max(task.query.shape[-1], task.value.shape[-1])
        queries, keys = limits.rows(width)
        for rectangle in task.rectangles:
            if rectangle.n_queries > queries or rectangle.n_keys > keys:
                return tuple(cut(task.rectangles, queries, keys))
        return task.rectangles

    def _within_workspace(self, batch: Batch, task: TaskTensors) -> Iterator[Batch]:
        """Yield ``batch`` in parts, each with as many rectangles as the workspace bound
        allows."""
        limit = 1
        if task.query.shape[0] == 1:
            rows = round_up(batch.first.n_queries, self.row_unit)
            columns = round_up(batch.first.n_keys, self.row_unit)
            fit_by_rows = task.max_queries // rows
            fit_by_columns = task.max_keys // columns
            limit = max(1, min(fit_by_rows, fit_by_columns))
        for start in range(0, batch.count, limit):
            count = min(limit, batch.count - start)
            yield replace(batch, first=batch.rectangle(start), count=count)

    def _backward_runs(self, task: TaskTensors, batch: Batch) -> Iterator[Batch]:
        """Yield ``batch`` as a backward runs it: in equal runs of rows, by
        ``backward_parts``."""
        r = batch.first
        heads_of = task.query if self.grouped else task.key
        n_runs = self.backward_parts(heads_of.shape[1])
        n_rows = r.n_queries // n_runs
        if n_runs == 1 or n_rows == 0 or not self._can_be_cut_into_runs(task, batch):
            yield batch
            return
        if r.causal:
            yield from _diagonal_runs(r, n_runs)
            for below in _left_of_diagonal(r, n_runs):
                yield from self._backward_runs(task, Batch(below))
            return
        first = replace(r, query_stop=r.query_start + n_rows)
        yield Batch(first, count=n_runs, query_step=n_rows)
        stop = r.query_start + n_runs * n_rows
        if stop < r.query_stop:
            yield Batch(replace(r, query_start=stop))

    def _can_be_cut_into_runs(self, task: TaskTensors, batch: Batch) -> bool:
        """Whether runs of rows can be further batch entries. Batch entries leave no
        room for others; a mask would have to be cut as well."""
        is_single = task.query.shape[0] * batch.count <= 1
        return is_single and not self.reversed_order and not task.has_mask(batch.first)

    def _calls_by_heads(
        self, task: TaskTensors, batch: Batch, backward: bool
    ) -> Iterator[TaskCall]:
        """Yield a call for the query heads that one call takes."""
        bias = task.bias(batch.first)
        key = self._reordered(key_rows(task.key, batch))
        value = self._reordered(key_rows(task.value, batch))
        # Runs of rows with the same keys each return a part of these keys' gradients.
        batch_of_keys = batch if batch.key_step else Batch(batch.first)
        keys = partial(key_rows, batch=batch_of_keys)
        for heads in self._call_heads(task, batch, backward):
            rows = partial(query_rows, batch=batch, heads=heads)
            call = Call(
                self._reordered(rows(task.query)),
                key,
                value,
                batch.first.causal,
                task.scale,
                bias_of_heads(bias, slice(None), heads),
            )
            yield TaskCall(
                rows,
                keys,
                partial(self._forward, call),
                partial(self._backward, call),
            )
            del call

    def _call_heads(
        self, task: TaskTensors, batch: Batch, backward: bool
    ) -> list[slice]:
        """Return the query heads of each call; fewer than all of a key head's, where
        those are too many for one call."""
        if not self.grouped:
            return self._heads(task.query, task.key)
        query = query_rows(task.query, batch)
        value = key_rows(task.value, batch)
        limits = self.call_limits(backward=backward)
        n_calls = limits.group_parts(call_sizes(query, value))
        return [slice(first, None, n_calls) for first in range(n_calls)]

    def _forward(self, call: Call) -> OutLse:
        out, lse = self.whole_forward(call)
        return self._reordered(out), self._reordered(lse)

    def _backward(self, call: Call, saved: Saved) -> Three:
        dtype = call.query.dtype
        out_dtype = saved.out.dtype if self.reads_wide_out else dtype
        out = as_operator_readable(saved.out, out_dtype)
        grad_out = as_operator_readable(saved.grad_out, dtype)
        saved = Saved(grad_out, out, saved.lse).mapped(self._reordered)
        # In the other order results are copied. Vendors' kernels do not return them
        # wider; others do, and 16 bits might not hold them (``fp32_products``).
        if not self.reversed_order or self.fp32_products:
            call = replace(call, stored=state_dtype(dtype))
        return map_three(self._reordered, self.whole_backward(call, saved))

    def _reordered(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.flip(2) if self.reversed_order else rows


def _diagonal_runs(r: Rectangle, n_runs: int) -> Iterator[Batch]:
    """Yield equal squares along the diagonal of a causal rectangle, and the rest of
    it."""
    side = r.n_queries // n_runs
    first = replace(
        r,
        query_stop=r.query_start + side,
        key_stop=r.key_start + side,
    )
    squares = Batch(first, n_runs, query_step=side, key_step=side)
    yield squares
    after = squares.rectangle(n_runs)
    if after.query_start < r.query_stop:
        yield Batch(replace(after, query_stop=r.query_stop, key_stop=r.key_stop))


def _left_of_diagonal(r: Rectangle, n_runs: int) -> Iterator[Rectangle]:
    """Yield the plain rectangles that squares along the diagonal leave to their
    left."""
    side = r.n_queries // n_runs
    for run in range(1, n_runs + 1):
        covered = run * side
        stop = covered + side if run < n_runs else r.n_queries
        if covered < stop:
            yield Rectangle(
                r.query_start + covered,
                r.query_start + stop,
                r.key_start,
                r.key_start + covered,
            )


def _sizes_of(shape: CallShape, tokens: int = 0) -> CallSizes:
    """Return the sizes of a whole call; ``tokens`` stands for lengths that the shape
    lacks."""
    return CallSizes(
        entries=shape.batch,
        key_heads=shape.kv_heads,
        group=shape.queries_per_key_head,
        queries=shape.n_queries or tokens,
        keys=shape.n_keys or tokens,
        width=shape.width,
    )
