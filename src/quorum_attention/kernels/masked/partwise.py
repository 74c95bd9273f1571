"""A task under a mask part by part, by a kernel that knows only plain and causal rectangles.

The pairs that a mask keeps of a task's rectangles are a short list of parts: plain rectangles,
squares whose lower or upper triangle is kept, and ragged ones, which are given an additive mask,
made for them alone. An upper triangle is a causal call with the orders of queries and keys turned
round.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from quorum_attention.decomposition import Ranges, Rectangle, Rows
from quorum_attention.decomposition.bands import BandPart
from quorum_attention.decomposition.rectangles import cut
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.masked.block_evaluator import evaluated_bytes
from quorum_attention.kernels.masked.block_nodes import BLOCK, joined_along_rows
from quorum_attention.kernels.masked.block_table import blocks_key, listed_blocks, whole_region
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.operator_inputs import four_dims
from quorum_attention.kernels.protocol import Kernel, refusal
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.score_tiles import ScoreTransform
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

# Parts are joined to one call up to so many queries, and keys.
_JOINED = 8192
# Triangles up to this side are ragged, where they are no calls of their own.
_LEAF = 256
# Keys of a ragged part with partial blocks side by side.
_WIDEST = 4096
# Tasks whose parts are remembered.
_MOST_TASKS = 512
# Device bytes for evaluating users' functions block by block, unless there are many heads.
_EVALUATED_BYTES = 8 << 20
_ANY_MASK = BiasShape(batch=True, heads=True, rows=True)


_Parts = tuple[tuple[Rectangle, ...], ...]
"""The parts of a task, local positions: those of plain and causal calls, upper triangles, and
ragged ones."""


class PartwiseKernel(Kernel):
    """Attention under a mask, part by part, for batch entries of one geometry.

    Args:
        base: the kernel that computes the parts: an operator, or ``TiledKernel``.
        scores: the change of scores that ``base`` makes.
    """

    name = "parts"

    def __init__(self, geometry: Geometry, base: Kernel, scores: ScoreTransform) -> None:
        self._geometry, self._operator = geometry, copy.copy(base)
        # Calls that take grouped heads as they are run all heads of a part at a time.
        shared = CallShape("cpu", torch.float32, heads=2, kv_heads=1, head_dim=1, value_dim=1)
        self._operator.grouped = base.grouped or base.takes_whole(shared, 1, all_heads=True)
        self._upper = copy.copy(self._operator)
        if isinstance(self._upper, RectangleKernel):
            self._upper.reversed_order = True
        self._bands = base if isinstance(base, RectangleKernel) and base.bands else None
        self._tiles = TiledKernel(scores)
        bands = geometry.block_bands
        self._has_ragged = bool(geometry.rules) or not all(band.keeps_all for band in bands)
        self._known: Cache[_Parts] = Cache(_MOST_TASKS)

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self._operator.refusal(shape)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        n_bytes = self._bytes(shape, extent, backward=False)
        if extent.direct:
            rows = extent.batch * extent.query_heads * extent.n_tokens
            n_bytes += (
                rows * (shape.value_dim + 1) * shape.state_dtype.itemsize
                + rows * shape.value_dim * 4
            )
        return n_bytes

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        n_bytes = self._bytes(shape, extent, backward=True)
        rows = extent.batch * extent.query_heads * extent.n_tokens
        if isinstance(self._operator, RectangleKernel):
            n_bytes += (
                rows * 2 * shape.state_dtype.itemsize
            )  # the lse without rows that have no key
        by_tiles = self._kernel_for(replace(shape, bias=_ragged_mask(shape))) is self._tiles
        if by_tiles and shape.dtype in self._operator.scaled_backward:
            n_bytes += rows * 4 * shape.value_dim  # an upstream gradient that is not scaled
        if extent.direct:
            keys = extent.batch * extent.key_heads * extent.n_tokens
            numbers = rows * shape.head_dim + keys * (shape.head_dim + shape.value_dim)
            n_bytes += numbers * (shape.state_dtype.itemsize + 4)
        return n_bytes

    def _bytes(self, shape: CallShape, extent: Extent, *, backward: bool) -> int:
        """The bytes of calls of plain and causal parts, and of ragged ones with their masks."""

        def ask(shape: CallShape, queries: int, keys: int) -> int:
            kernel = self._kernel_for(shape)
            inside = replace(extent, max_queries=queries, max_keys=keys, direct=False)
            if backward:
                return kernel.backward_workspace_bytes(shape, inside)
            return kernel.forward_workspace_bytes(shape, inside)

        lanes, key_lanes = extent.batch * extent.query_heads, extent.batch * extent.key_heads
        queries, keys = self._limits((extent.max_queries, extent.max_keys), shape)
        n_bytes = ask(replace(shape, is_causal=True), queries, keys)
        if isinstance(self._operator, RectangleKernel):
            # Copies of a triangle's rows in the other order.
            copies = lanes * queries * (2 if backward else 1) + key_lanes * keys
            n_bytes += 2 * copies * (shape.head_dim + shape.value_dim) * shape.dtype.itemsize
            n_bytes += 8 * lanes * queries + MERGE_WORKSPACE_BYTES
        if self._has_ragged:
            rules = self._geometry.rules
            queries = min(BLOCK if rules else _LEAF, queries)
            keys = min(_WIDEST if rules else _LEAF, keys)
            masked = replace(shape, bias=_ragged_mask(shape), is_causal=False)
            pair_bytes = lanes * (2 + 2 * masked.bias_dtype.itemsize) + (64 if rules else 16)
            tests = pair_bytes * queries * keys
            n_bytes = max(n_bytes, tests + ask(masked, queries, keys))
        if self._geometry.functions:
            n_bytes = max(n_bytes, evaluated_bytes(lanes, _EVALUATED_BYTES))
        return n_bytes

    def _limits(self, limits: tuple[int, int], shape: CallShape) -> tuple[int, int]:
        """The most queries and keys of one call: of the largest part, or of parts joined."""
        n_queries, n_keys = limits
        joined_queries = min(n_queries, _JOINED)
        joined_keys = min(n_keys, _JOINED)
        if not self._geometry.rules:
            takes_bands = self._takes_bands(shape)
            n_queries, n_keys = self._geometry.largest_part(*limits, bands=takes_bands)
        return max(n_queries, joined_queries), max(n_keys, joined_keys)

    def _takes_bands(self, shape: CallShape) -> bool:
        # Operators with bands neither drop nor take a mask beside them.
        return self._bands is not None and shape.bias is None and not shape.dropout

    def _kernel_for(self, shape: CallShape) -> Kernel:
        """The operator, or ``TiledKernel`` for a call's mask that it does not take."""
        if shape.bias is None:
            return self._operator
        masked = replace(shape, bias=_ragged_mask(shape))
        return self._operator if refusal(self._operator, masked) is None else self._tiles

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for kernel, part in self._tasks(task):
            kernel.forward(part, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        for kernel, part in self._tasks(task):
            kernel.backward(part, _unscaled(grads) if isinstance(kernel, TiledKernel) else grads)

    def _tasks(self, task: TaskTensors) -> Iterator[tuple[Kernel, TaskTensors]]:
        """The parts of the task: for the operator, upper triangles, and ragged ones."""
        rectangles = tuple(task.rectangles)
        if not rectangles:
            return
        mask = None
        if task.has_mask(rectangles[0]):
            mask = replace(_ANY_MASK, wide=task.has_wide_mask(rectangles[0]))
        call = task.shape(mask)
        kernel = self._kernel_for(call)
        parts = self._parts_of(task, rectangles, call)
        limits = task.max_queries, task.max_keys
        if task.max_queries:
            limits = self._limits(limits, call)
        inside = replace(task, max_queries=limits[0], max_keys=limits[1], streams=None)
        clear, upper, ragged = parts
        if clear:
            yield kernel, replace(inside, rectangles=clear)
        if upper:
            yield self._upper, replace(inside, rectangles=upper)
        if ragged:
            masks = partial(_part_mask, self._geometry, task, {})
            kernel = self._kernel_for(replace(call, bias=_ragged_mask(call)))
            yield kernel, replace(inside, rectangles=ragged, bias=masks)

    def _parts_of(self, task: TaskTensors, live: tuple[Rectangle, ...], shape: CallShape) -> _Parts:
        """The parts of rectangles that the geometry keeps; it has the call's own causal rule."""
        geometry, bands = self._geometry, self._takes_bands(shape)
        if geometry.rules:
            key = blocks_key(geometry, task, live)
            return self._known.get(key, lambda: _by_blocks(task, live, geometry))
        # Kernels that compute a whole task take no triangles off its diagonal.
        triangles = task.dropout is None and isinstance(self._operator, RectangleKernel)
        kinds = {"lower": triangles, "upper": triangles and shape.bias is None}
        key = (task.task, live, *kinds.values(), bands)
        return self._known.get(key, lambda: _by_bands(task, live, geometry, kinds, bands))


def _part_mask(
    geometry: Geometry, task: TaskTensors, known: dict[object, torch.Tensor], r: Rectangle
) -> torch.Tensor:
    """The additive mask of a part, with the task's own mask, (b|1, h|1, q, k).

    Args:
        known: the last one, where it is the same for other parts at such a distance and size.
    """
    rules, place = geometry, None
    if not geometry.rules:
        # A part lies in a block of the geometry: its band is all that is left.
        query, key = (
            task.task.segments(at, at + 1)[0].start for at in (r.query_start, r.key_start)
        )
        part = Ranges.from_bounds(query, query + r.n_queries, key, key + r.n_keys)
        ((_, band),) = geometry.within(part)
        rules, place = Geometry(band), (band.moved(query - key), r.n_queries, r.n_keys)
    tested = known.pop(place, None)
    if tested is None:
        known.clear()  # freed before the next one is made
        tested = _tested(rules, task, r)
    if place is not None:
        known[place] = tested
    bias = task.bias(r)
    return tested if bias is None else four_dims(bias) + tested


def _tested(rules: Geometry, task: TaskTensors, r: Rectangle) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        is_kept = rules.keeps(task.indices(r))
    zero = torch.zeros((), dtype=task.query.dtype, device=task.query.device)
    return torch.where(is_kept, zero, torch.full_like(zero, -torch.inf))


def _by_blocks(task: TaskTensors, rectangles: tuple[Rectangle, ...], geometry: Geometry) -> _Parts:
    """The parts of a geometry with rules: full blocks, and partial ones side by side as ragged."""
    clear = list[Rectangle]()
    ragged = list[Rectangle]()
    region = whole_region(task)
    for r in rectangles:
        full, partial, _ = listed_blocks(geometry, task, region, (r,), _EVALUATED_BYTES)
        clear += [Rectangle(*bounds) for bounds in full[:, 1:].tolist()]
        for bounds in joined_along_rows(partial)[:, 1:].tolist():
            block_row = Rectangle(*bounds)
            ragged += cut([block_row], block_row.n_queries, _WIDEST)
    return tuple(clear), (), tuple(ragged)


def _by_bands(
    task: TaskTensors,
    rectangles: tuple[Rectangle, ...],
    geometry: Geometry,
    triangles: dict[str, bool],
    bands: bool,
) -> _Parts:
    """The parts of a geometry without rules.

    Args:
        triangles: whether calls may be of lower and of upper triangles.
        bands: whether calls may be of bands.
    """
    parts: dict[str, list[Rectangle]] = {"clear": [], "upper": [], "ragged": []}
    for r in rectangles:
        for queries, keys, _ in task.task.contiguous(r):
            block = Ranges.from_bounds(*queries[:2], *keys[:2])
            for kept_part, band in geometry.parts(block, bands=bands):
                is_taken = triangles.get(kept_part.kind, True)
                for part in [kept_part] if is_taken else _cut(kept_part):
                    causal: object = part.kind in ("lower", "upper")
                    if part.kind == "band":
                        causal = band.moved(part.query_start - part.key_start)
                    of_kind = parts.get(part.kind, parts["clear"])
                    of_kind.append(_local(part, queries, keys, causal))
    return tuple(map(tuple, parts.values()))


def _local(part: BandPart, queries: Rows, keys: Rows, causal: object) -> Rectangle:
    """A part in local positions; for an operator with bands, ``causal`` may be one."""
    query_shift = queries.local - queries.start
    key_shift = keys.local - keys.start
    return Rectangle(
        part.query_start + query_shift,
        part.query_stop + query_shift,
        part.key_start + key_shift,
        part.key_stop + key_shift,
        cast(bool, causal),
    )


def _cut(triangle: BandPart) -> Iterator[BandPart]:
    """A triangle as plain parts, and ragged squares along its edge."""
    side = triangle.n_queries
    for start in range(0, side, _LEAF):
        stop = min(start + _LEAF, side)
        rows = triangle.query_start + start, triangle.query_start + stop
        yield BandPart(*rows, triangle.key_start + start, triangle.key_start + stop, "ragged")
        first, last = 0, start
        if triangle.kind == "upper":
            first, last = stop, side
        if first < last:
            yield BandPart(*rows, triangle.key_start + first, triangle.key_start + last)


def _ragged_mask(shape: CallShape) -> BiasShape:
    """The mask of a ragged part: it has all dimensions, and is as wide as the call's own."""
    return replace(_ANY_MASK, wide=shape.bias is not None and shape.bias.wide)


def _unscaled(grads: Gradients) -> Gradients:
    """Gradients whose upstream one is not divided: the reference computes in fp32."""
    factor = grads.scaling.unscale
    if factor is None:
        return grads
    factor = factor.repeat_interleave(grads.grad_out.shape[1] // factor.shape[1], 1)
    return replace(grads, grad_out=grads.grad_out * factor[..., None, None], scaling=Scaling())
