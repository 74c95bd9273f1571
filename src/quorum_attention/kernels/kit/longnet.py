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
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch

from quorum_attention.counts import shown, switch, whole_number
from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Pairs, Ranges, Rows, Verdict
from quorum_attention.kernels.protocol import Call, CallShape, Extent, Kernel, TaskTensors
from quorum_attention.kernels.rectangles import CallsKernel, TaskCall
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.keywords import helps_with_names


class DilatedSetting(NamedTuple):
    """One (segment, dilation) pair, in tokens."""

    segment: int
    dilation: int


class LongNetKernel(CallsKernel):
    """Dilated attention, causal or not, forward and backward.

    Args:
        settings: (segment, dilation) pairs; a segment is a positive multiple of its dilation.
        full_precision: whether 16-bit tokens are computed in fp32, by torch's operators. Then no
            partial result is rounded to 16 bits: slower, and more exact.

    Raises:
        ValueError: no settings, or one that makes no sense.
        TypeError: a number that is not whole.

    Examples:
        >>> kernel = qa.LongNetKernel([(64, 1), (128, 2)])
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel=kernel, depth=1)
    """

    name = "longnet"
    own_attention = True
    sparse = True

    @helps_with_names
    def __init__(
        self, settings: Sequence[tuple[int, int]], *, full_precision: bool = False
    ) -> None:
        self.settings = _checked(settings)
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

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if shape.bias is not None:
            return "it takes no attention mask"
        if shape.heads != shape.kv_heads:
            return "it takes as many key heads as query heads: a head's offset is its own"
        return None if self._operator(shape) is not None else "no kernel can run its rectangles"

    def _operator(self, shape: CallShape) -> Kernel | None:
        """The kernel that runs the rectangles of such calls; None if none can."""
        from quorum_attention.kernels.registry import kernels

        if self.full_precision and shape.dtype.itemsize < 4:
            return TiledKernel()
        every = kernels().values()
        return next((k for k in every if k.operator and k.refusal(shape) is None), None)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        inner = self._operator(shape) or TiledKernel()
        return inner.forward_workspace_bytes(shape, self._inside(extent))

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        inner = self._operator(shape) or TiledKernel()
        # A copy of lse without -inf.
        own = 9 * extent.batch * extent.query_heads * extent.n_tokens
        return own + inner.backward_workspace_bytes(shape, self._inside(extent))

    def _inside(self, extent: Extent) -> Extent:
        return replace(extent, direct=extent.direct or self.full_precision)

    def task_calls(self, task: TaskTensors, *, backward: bool) -> Iterator[tuple[TaskCall]]:
        """The task as plain or causal calls of a kernel."""
        heads, inner = task.query.shape[1], self._operator(task.shape(is_causal=task.is_causal))
        assert inner is not None, "refused before"
        stored = torch.float32 if isinstance(inner, TiledKernel) else None
        # Every dilation-th head has the same offset.
        for rows, columns, causal, width, dilation, first in (
            (*part, *setting, first)
            for r in task.rectangles
            for part in task.task.contiguous(r)
            for setting in self.settings
            for first in range(min(setting.dilation, heads))
        ):
            offset, some = (task.first_head + first) % dilation, slice(first, heads, dilation)
            begins, ends = max(rows.start, columns.start), min(rows.stop, columns.stop)
            for segment in range(begins // width, (ends - 1) // width + 1):
                bounds = segment * width, (segment + 1) * width
                both = [_congruent(side, bounds, offset, dilation) for side in (rows, columns)]
                if None not in both:
                    at, keys = (itemgetter((slice(None), some, chosen)) for chosen in both)
                    inputs = at(task.query), keys(task.key), keys(task.value)
                    call = Call(*inputs, causal, task.scale, stored=stored)
                    forward, backwards = inner.whole_forward, inner.whole_backward
                    yield (TaskCall(at, keys, partial(forward, call), partial(backwards, call)),)


def _checked(settings: Sequence[tuple[int, int]]) -> tuple[DilatedSetting, ...]:
    try:
        found = tuple(DilatedSetting(*setting) for setting in settings)
    except TypeError:
        says = f"settings must be (segment, dilation) pairs, got {shown(settings)}"
        raise TypeError(says) from None
    if not found:
        raise ValueError("settings must name at least one (segment, dilation)")
    for segment, dilation in found:
        if whole_number(segment, "segment", 1) % whole_number(dilation, "dilation", 1):
            raise ValueError(
                "a segment must be a positive multiple of its dilation, got "
                f"{segment} and {dilation}"
            )
    return found


def _congruent(rows: Rows, bounds: tuple[int, int], offset: int, step: int) -> slice | None:
    """Local positions of the rows within bounds that are ``offset`` modulo ``step``."""
    some = rows.within(*bounds)
    if some is None:
        return None
    first = some.start + (offset - some.start) % step
    shift = some.start - some.local
    return slice(first - shift, some.stop - shift, step) if first < some.stop else None
