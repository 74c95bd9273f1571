"""Dilated attention (LongNet) as an inner kernel, exact relative to the same call in one piece.

A setting (segment w, dilation r) keeps a pair of head h when both tokens lie in the same segment
of w tokens and both positions are congruent to h modulo r. Results of several settings are weighted
by their softmax denominators. So a pair that m settings keep counts m times in numerator and
denominator, which is what merging the settings one after the other gives. Within a setting, the
kept tokens of a segment are a strided view, on which an ordinary kernel runs without a mask.
Positions are global: a task's tokens belong to segments by their positions in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from quorum_attention.counts import shown, switch, whole_number
from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Pairs, Ranges, Rows, Verdict
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Kernel,
    Saved,
    Statistics,
    TaskTensors,
)

Index = tuple[slice, slice, slice]
"""Batch entries, heads and rows of a task's tensor."""


class DilatedSetting(NamedTuple):
    """One (segment, dilation) pair, in tokens."""

    segment: int
    dilation: int


class LongNetKernel(Kernel):
    """Dilated attention, causal or not, forward and backward.

    Args:
        settings: (segment, dilation) pairs; a segment is a positive multiple of its dilation.
        inner: the kernel that runs the strided rectangles: a ``RectangleKernel``, or another with
            ``operator``; None for the first that can.
        full_precision: whether 16-bit tokens are converted to fp32 for the inner kernel. Then no
            partial result is rounded to 16 bits: slower, and more exact.

    Raises:
        ValueError: no settings, or one that makes no sense.
        TypeError: an inner kernel of another kind, or a number that is not whole.

    Examples:
        >>> kernel = qa.LongNetKernel([(64, 1), (128, 2)])
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel=kernel, depth=1)
    """

    name = "longnet"
    own_attention = True
    sparse = True

    def __init__(
        self,
        settings: Sequence[tuple[int, int]],
        inner: Kernel | None = None,
        *,
        full_precision: bool = False,
    ) -> None:
        self.settings = _checked(settings)
        self._inner = inner
        if inner is not None and not getattr(inner, "operator", False):
            raise TypeError(f"inner must be a RectangleKernel or None, not {type(inner).__name__}")
        self.full_precision = switch(full_precision, "full_precision")

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call that lie within a segment of any setting."""
        n = max(n_queries, n_keys, 1)
        share = sum(min(s.segment, n) / (n * s.dilation**2) for s in self.settings)
        return Pairs(n_queries, n_keys, is_causal, self._verdict, share)

    def _verdict(self, block: Ranges) -> Verdict:
        (q0, q1), (k0, k1) = block
        found = EMPTY
        for width, dilation in self.settings:
            if q0 // width <= (k1 - 1) // width and k0 // width <= (q1 - 1) // width:
                one_segment = min(q0, k0) // width == (max(q1, k1) - 1) // width
                if dilation == 1 and one_segment:
                    return FULL
                found = PARTIAL
        return found

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.mask is not None:
            return "it takes no attention mask"
        if call.query_heads != call.key_heads:
            return "it takes as many key heads as query heads: a head's offset is its own"
        return None if self._operator(call) is not None else "no kernel can run its rectangles"

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        inner = self._operator(call)
        own = 0 if inner is None else inner.forward_workspace_bytes(self._widened(call), extent)
        return own + self._copied_bytes(call, extent, 1)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        inner = self._operator(call)
        # A copy of lse without -inf.
        own = 9 * extent.batch * extent.query_heads * extent.n_tokens
        if inner is not None:
            own += inner.backward_workspace_bytes(self._widened(call), extent)
        return own + self._copied_bytes(call, extent, 2)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        inner = self._operator_of(task)
        for rows, columns, causal in self._calls(task):
            out, lse = inner.whole_forward(self._call(task, rows, columns, causal))
            with task.timed("merge"):
                merge_(state.out[rows], state.lse[rows], out, lse)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        inner = self._operator_of(task)
        finite = grads.lse.masked_fill(grads.lse == -torch.inf, 0.0)
        for rows, columns, causal in self._calls(task):
            grad_out, out = (self._wide(t[rows]) for t in (grads.grad_out, grads.out))
            saved = Saved(grad_out, out, finite[rows].contiguous())
            call = self._call(task, rows, columns, causal)
            dq, dk, dv = inner.whole_backward(call, saved)
            with task.timed("merge"):
                add_(grads.grad_query[rows], dq)
                add_(grads.grad_key[columns], dk)
                add_(grads.grad_value[columns], dv)

    def _call(self, task: TaskTensors, rows: Index, columns: Index, causal: bool) -> Call:
        call = Call(task.query, task.key, task.value, causal, task.scale)
        return call.mapped(lambda t: self._wide(t[rows]), lambda t: self._wide(t[columns]))

    def _calls(self, task: TaskTensors) -> Iterator[tuple[Index, Index, bool]]:
        """The task as plain or causal calls: (index of queries, index of keys, causal)."""
        heads = task.query.shape[1]
        if 0 in task.query.shape[:2]:
            return
        for r in task.rectangles:
            for rows, columns, causal in task.task.contiguous(r):
                for width, dilation in self.settings:
                    for own, others in _in_segments(width, rows, columns):
                        # Every dilation-th head has the same offset.
                        for first in range(min(dilation, heads)):
                            offset = (task.first_head + first) % dilation
                            chosen = _congruent(own, offset, dilation)
                            keys = _congruent(others, offset, dilation)
                            if chosen is not None and keys is not None:
                                lanes = (slice(None), slice(first, heads, dilation))
                                yield (*lanes, chosen), (*lanes, keys), causal

    def _operator_of(self, task: TaskTensors) -> Kernel:
        query, value = task.query, task.value
        call = CallShape(
            query.device.type, query.dtype, query.shape[1], query.shape[1], query.shape[3],
            value.shape[3], task.is_causal, True,
        )  # fmt: skip
        inner = self._operator(call)
        assert inner is not None, "refused before"
        return inner

    def _operator(self, call: CallShape) -> Kernel | None:
        """The kernel that runs the rectangles of such calls; None if none can."""
        from quorum_attention.kernels.registry import kernels

        call = self._widened(call)
        candidates = kernels().values() if self._inner is None else [self._inner]
        return next((k for k in candidates if k.operator and k.refusal(call) is None), None)

    def _widens(self, dtype: torch.dtype) -> bool:
        return self.full_precision and dtype.itemsize < 4

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if self._widens(tensor.dtype) else tensor

    def _widened(self, call: CallShape) -> CallShape:
        if not self._widens(call.dtype):
            return call
        return replace(call, dtype=torch.float32, exact_scale=False)

    def _copied_bytes(self, call: CallShape, extent: Extent, rows: int) -> int:
        """Bytes of a rectangle's tokens in fp32: ``rows`` copies of queries, one of keys."""
        if not self._widens(call.dtype):
            return 0
        queries = rows * extent.max_queries * extent.query_heads
        keys = extent.max_keys * extent.key_heads
        return 4 * extent.batch * (queries + keys) * (call.head_dim + call.value_dim)


def _checked(settings: Sequence[tuple[int, int]]) -> tuple[DilatedSetting, ...]:
    pairs = isinstance(settings, Sequence) and not isinstance(settings, str)
    if not pairs or not all(isinstance(s, (tuple, list)) and len(s) == 2 for s in settings):
        raise TypeError(f"settings must be (segment, dilation) pairs, got {shown(settings)}")
    if not settings:
        raise ValueError("settings must name at least one (segment, dilation)")
    for segment, dilation in settings:
        whole_number(segment, "segment", -(2**63))
        whole_number(dilation, "dilation", -(2**63))
        if segment < 1 or dilation < 1 or segment % dilation:
            raise ValueError(
                "a segment must be a positive multiple of its dilation, got "
                f"{segment} and {dilation}"
            )
    return tuple(DilatedSetting(*setting) for setting in settings)


def _in_segments(width: int, rows: Rows, columns: Rows) -> Iterator[tuple[Rows, Rows]]:
    """(rows, columns) within each segment that has both."""
    first = max(rows.start, columns.start) // width
    last = (min(rows.stop, columns.stop) - 1) // width
    for number in range(first, last + 1):
        bounds = number * width, (number + 1) * width
        own, other = rows.within(*bounds), columns.within(*bounds)
        if own is not None and other is not None:
            yield own, other


def _congruent(rows: Rows, offset: int, step: int) -> slice | None:
    """Local positions of the rows whose global positions are ``offset`` modulo ``step``."""
    first = rows.start + (offset - rows.start) % step
    shift = rows.start - rows.local
    return slice(first - shift, rows.stop - shift, step) if first < rows.stop else None
