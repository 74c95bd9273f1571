"""Dilated attention (LongNet) as an inner kernel, exact relative to the same call in
one piece.

A setting (segment w, dilation r) keeps a pair of head h when both tokens lie in the
same segment of w tokens and both positions are congruent to h modulo r. Results of
several settings are weighted by their softmax denominators. So a pair that m settings
keep counts m times in numerator and denominator, which is what merging the settings one
after the other gives. Within a setting, the kept tokens of a segment are a strided
view, on which an ordinary kernel runs without a mask. Positions are global: a task's
tokens belong to segments by their positions in the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch

from quorum_attention.argument_checks import shown, switch, whole_number
from quorum_attention.decomposition import (
    EMPTY,
    FULL,
    PARTIAL,
    Pairs,
    Ranges,
    Rows,
    Verdict,
)
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.operator_call import Call
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.task_calls import CallsKernel, TaskCall
from quorum_attention.kernels.task_tensors import TaskTensors
from quorum_attention.keywords import helps_with_names


class DilatedSetting(NamedTuple):
    """One (segment, dilation) pair, in tokens."""

    segment: int
    dilation: int


class LongNetKernel(CallsKernel):
    """Dilated attention, causal or not, forward and backward.

    Args:
        settings: (segment, dilation) pairs; a segment is a positive multiple of its
            dilation.
        full_precision: whether torch's operators compute 16-bit inputs in fp32. Then no
            partial result is rounded to 16 bits, which is slower and more exact.

    Raises:
        ValueError: ``settings`` is empty, or one of them is wrong.
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
        n_tokens = max(n_queries, n_keys, 1)
        share = sum(
            min(segment, n_tokens) / (n_tokens * dilation**2)
            for segment, dilation in self.settings
        )
        return Pairs(n_queries, n_keys, is_causal, self._verdict, share)

    def _verdict(self, block: Ranges) -> Verdict:
        (first_query, query_stop), (first_key, key_stop) = block
        first_token = min(first_query, first_key)
        last_token = max(query_stop, key_stop) - 1
        verdict = EMPTY
        for segment, dilation in self.settings:
            begins_before_keys_end = first_query // segment <= (key_stop - 1) // segment
            ends_after_keys_begin = first_key // segment <= (query_stop - 1) // segment
            if not (begins_before_keys_end and ends_after_keys_begin):
                continue
            in_one_segment = first_token // segment == last_token // segment
            if dilation == 1 and in_one_segment:
                return FULL
            verdict = PARTIAL
        return verdict

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it
        can."""
        if shape.bias is not None:
            return "it takes no attention mask"
        if shape.heads != shape.kv_heads:
            return (
                "it takes as many key heads as query heads: a head's offset is its own"
            )
        return (
            None
            if self._operator(shape) is not None
            else "no kernel can run its rectangles"
        )

    def _operator(self, shape: CallShape) -> Kernel | None:
        """The kernel that runs the rectangles of such calls; None if none can."""
        from quorum_attention.kernels.registry import kernels

        if self.full_precision and shape.dtype.itemsize < 4:
            return TiledKernel()
        for kernel in kernels().values():
            if kernel.operator and kernel.refusal(shape) is None:
                return kernel
        return None

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        inner = self._operator(shape) or TiledKernel()
        return inner.forward_workspace_bytes(shape, self._inside(extent))

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        inner = self._operator(shape) or TiledKernel()
        lse_without_inf = 9 * extent.token_rows
        return lse_without_inf + inner.backward_workspace_bytes(
            shape, self._inside(extent)
        )

    def _inside(self, extent: Extent) -> Extent:
        """The extent of the calls of the inner kernel."""
        return replace(extent, direct=extent.direct or self.full_precision)

    def task_calls(
        self, task: TaskTensors, *, backward: bool
    ) -> Iterator[tuple[TaskCall]]:
        """Yield the task as plain or causal calls of a kernel, each alone in its
        turn."""
        inner = self._operator(task.shape(is_causal=task.is_causal))
        assert inner is not None, "refused before"
        stored = torch.float32 if isinstance(inner, TiledKernel) else None
        for queries, keys, is_causal in _contiguous_parts(task):
            for query_rows, key_rows, heads in self._kept_rows(task, queries, keys):
                pick_queries = itemgetter((slice(None), heads, query_rows))
                pick_keys = itemgetter((slice(None), heads, key_rows))
                call = Call(
                    pick_queries(task.query),
                    pick_keys(task.key),
                    pick_keys(task.value),
                    is_causal,
                    task.scale,
                    stored=stored,
                )
                task_call = TaskCall(
                    rows=pick_queries,
                    keys=pick_keys,
                    forward=partial(inner.whole_forward, call),
                    backward=partial(inner.whole_backward, call),
                )
                yield (task_call,)

    def _kept_rows(
        self, task: TaskTensors, queries: Rows, keys: Rows
    ) -> Iterator[tuple[slice, slice, slice]]:
        """Yield the (query rows, key rows, heads) that are kept together, in local
        positions.

        Heads that are ``dilation`` apart keep the same rows.
        """
        n_heads = task.query.shape[1]
        for segment, dilation in self.settings:
            for head in range(min(dilation, n_heads)):
                remainder = (task.first_head + head) % dilation
                heads = slice(head, n_heads, dilation)
                for bounds in _shared_segments(queries, keys, segment):
                    query_rows = _congruent_rows(queries, bounds, remainder, dilation)
                    key_rows = _congruent_rows(keys, bounds, remainder, dilation)
                    if query_rows is not None and key_rows is not None:
                        yield query_rows, key_rows, heads


def _contiguous_parts(task: TaskTensors) -> Iterator[tuple[Rows, Rows, bool]]:
    """Yield the task's rectangles in parts whose queries and keys are consecutive
    tokens."""
    for rectangle in task.rectangles:
        yield from task.task.contiguous(rectangle)


def _shared_segments(
    queries: Rows, keys: Rows, segment: int
) -> Iterator[tuple[int, int]]:
    """Yield first and last token (exclusive) of the segments that both may have tokens
    of."""
    first_token = max(queries.start, keys.start)
    stop_token = min(queries.stop, keys.stop)
    first_start = first_token // segment * segment
    for start in range(first_start, stop_token, segment):
        yield start, start + segment


def _checked(settings: Sequence[tuple[int, int]]) -> tuple[DilatedSetting, ...]:
    """The settings of a kernel.

    Raises:
        TypeError, ValueError: they make no sense.
    """
    try:
        pairs = tuple(DilatedSetting(*setting) for setting in settings)
    except TypeError:
        raise TypeError(
            f"settings must be (segment, dilation) pairs, got {shown(settings)}"
        ) from None
    if not pairs:
        raise ValueError("settings must name at least one (segment, dilation)")
    for segment, dilation in pairs:
        if whole_number(segment, "segment", 1) % whole_number(dilation, "dilation", 1):
            raise ValueError(
                "a segment must be a positive multiple of its dilation, got "
                f"{segment} and {dilation}"
            )
    return pairs


def _congruent_rows(
    rows: Rows, bounds: tuple[int, int], remainder: int, dilation: int
) -> slice | None:
    """Local positions of the rows within bounds that are ``remainder`` modulo
    ``dilation``."""
    inside = rows.within(*bounds)
    if inside is None:
        return None
    first = inside.start + (remainder - inside.start) % dilation
    if first >= inside.stop:
        return None
    shift = inside.start - inside.local
    return slice(first - shift, inside.stop - shift, dilation)
