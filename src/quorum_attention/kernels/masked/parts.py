"""A task under a ``Mask``, by calls of a kernel that knows only plain and causal rectangles.

What a mask keeps of a task's rectangles is a short list of parts. Only ragged ones
are given a mask, made for them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quorum_attention.decomposition import FULL, Ranges, Rectangle, Task
from quorum_attention.decomposition.bands import Band, Kind
from quorum_attention.decomposition.rectangles import Batch
from quorum_attention.kernels import reference
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.geometry import TESTED, Geometry
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, add_all_, merge_
from quorum_attention.kernels.native.kernel import NativeKernel
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Indices,
    Kernel,
    MaskShape,
    Saved,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.rectangles import RectangleKernel, four_dims
from quorum_attention.kernels.reference import Tiles
from quorum_attention.kernels.tensors import Pick, jth_of_group, key_rows, positions, query_rows

# What a mask keeps of a task's rectangles, as calls of an operator that has no masks.
#
# They are plain rectangles and triangles (``geometry.py``). A lower triangle is a causal call; an
# upper one is a causal call with the orders of queries and keys turned round. Rectangles of one
# size at equal distances are one call.

# The most rows to which an operator rounds up those of a batch entry.
_ROUND = 128
# Parts are joined to one call up to so many queries, and keys.
_JOINED = 8192


@dataclass(frozen=True, slots=True)
class PartCall:
    """One call of the operator, in local positions.

    Attributes:
        batch: the rectangle, or several of one size.
        kind: "lower" and "upper" triangles, "plain", "band", or "ragged": with a mask of its own.
        band: which pairs of a "band" are kept, counted from its first query and its first key.
    """

    batch: Batch
    kind: Kind
    band: Band | None = None

    @property
    def causal(self) -> bool | Band:
        """Whether it is causal; or its band (``RectangleKernel.rectangle_forward``)."""
        return self.kind in ("lower", "upper") if self.band is None else self.band


def calls_of(
    task: Task,
    rectangles: Sequence[Rectangle],
    geometry: Geometry,
    limits: tuple[int, int],
    *,
    single: bool,
    bands: bool = False,
) -> Iterator[PartCall]:
    """The operator calls of a task under a geometry.

    Args:
        limits: most queries and keys of a call together.
        single: no rectangles may be joined to one call.
        bands: the operator takes a band.
    """
    alike: dict[Kind, list[Rectangle]] = {"plain": [], "lower": [], "upper": []}
    for r in rectangles:
        for queries, keys, _ in task.contiguous(r):
            shifts = queries.start - queries.local, keys.start - keys.local
            block = Ranges.of(queries.start, queries.stop, keys.start, keys.stop)
            # The geometry has the call's own causal rule, so that of a rectangle adds nothing.
            for part in geometry.parts(block, bands=bands):
                made = Rectangle(
                    part.query_start - shifts[0], part.query_stop - shifts[0],
                    part.key_start - shifts[1], part.key_stop - shifts[1],
                    part.kind in ("lower", "upper"),
                )  # fmt: skip
                if part.kind == "band":
                    moved = geometry.band.moved(part.query_start - part.key_start)
                    yield PartCall(Batch(made), "band", moved)
                elif part.kind == "ragged":
                    yield PartCall(Batch(made), "ragged")
                else:
                    alike[part.kind].append(made)
    for kind, found in alike.items():
        if single:
            yield from (PartCall(Batch(r), kind) for r in found)
            continue
        for batch in _batches(found):
            for part_of_batch in _bounded(batch, limits):
                yield PartCall(part_of_batch, kind)


def limits_of(
    geometries: Sequence[Geometry], limits: tuple[int, int], *, bands: bool
) -> tuple[int, int]:
    """The most queries and keys of one call: of the largest part, or of parts joined."""
    largest = [geometry.most(*limits, bands=bands) for geometry in geometries]
    queries, keys = (max(n) for n in zip(*largest, strict=True))
    return max(queries, min(limits[0], _JOINED)), max(keys, min(limits[1], _JOINED))


def _batches(rectangles: list[Rectangle]) -> Iterator[Batch]:
    """Neighbours in the list of one size, at equal distances, as one call. In linear time, unlike
    ``rectangles.batches``: there may be tens of thousands."""
    batch: Batch | None = None
    for r in rectangles:
        joined = None if batch is None else _with(batch, r)
        if batch is not None and joined is None:
            yield batch
        batch = joined or Batch(r)
    if batch is not None:
        yield batch


def _with(batch: Batch, r: Rectangle) -> Batch | None:
    first = batch.first
    if (r.n_queries, r.n_keys) != (first.n_queries, first.n_keys):
        return None
    down, along = r.query_start - first.query_start, r.key_start - first.key_start
    if batch.count == 1:
        # No two may share a row, or a key.
        apart = down >= first.n_queries and along >= first.n_keys
        return Batch(first, 2, down, along) if apart else None
    count = batch.count
    if (down, along) != (count * batch.query_step, count * batch.key_step):
        return None
    return replace(batch, count=count + 1)


def _bounded(batch: Batch, limits: tuple[int, int]) -> Iterator[Batch]:
    """``batch`` in parts that together stay within the limits by which workspaces are sized."""
    first = batch.first
    # Operators round rows up to whole tiles of each batch entry.
    rows, columns = (-(-n // _ROUND) * _ROUND for n in (first.n_queries, first.n_keys))
    most = max(1, min(limits[0] // rows, limits[1] // columns))
    every = batch.rectangles()
    for start in range(0, batch.count, most):
        yield replace(batch, first=every[start], count=min(most, batch.count - start))


# Tasks whose parts are remembered.
_MOST_TASKS = 512
_RAGGED = MaskShape(boolean=True, batch=True, heads=True, rows=True)


class ByParts:
    """See above; for tasks whose batch entries have one geometry.

    Args:
        geometries: all that tasks may have.
        base: what computes the parts: an operator, or ``dense``, for which ``Tiles`` stands in.
        softcap: of scores; ``base`` has it if it is an operator.
    """

    def __init__(self, geometries: Sequence[Geometry], base: Kernel, softcap: float | None) -> None:
        self.base, self.tiles = base, Tiles(softcap)
        self.by_operator = base.operator
        self.bands: RectangleKernel | None = None
        if isinstance(base, RectangleKernel) and base.bands:
            self.bands = base
        self._operator: Kernel | Tiles = base if base.operator else self.tiles
        self._geometries = tuple(geometries)
        self._ragged = any(g.rules or not g.band.keeps_all for g in self._geometries)
        self._calls_of: Cache[tuple[PartCall, ...]] = Cache(_MOST_TASKS, lambda calls: 1)

    def forward_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        inside = self._largest_call(extent)
        most = self._turned_bytes(call, inside, backward=False) + self._tile_bytes(call, extent)
        if self.by_operator:
            most += self.base.forward_workspace_bytes(replace(call, is_causal=True), inside)
        else:
            most += self.tiles.forward_bytes(call, inside)
        if self._ragged:
            most = max(most, self._ragged_bytes(call, inside, backward=False))
        if extent.direct:
            rows = extent.batch * extent.query_heads * extent.n_tokens
            most += rows * (call.value_dim + 1) * _wide(call) + rows * call.value_dim * 4
        return most + MERGE_WORKSPACE_BYTES

    def backward_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        inside = self._largest_call(extent)
        most = self._turned_bytes(call, inside, backward=True) + self._tile_bytes(call, extent)
        if self.by_operator:
            most += self.base.backward_workspace_bytes(replace(call, is_causal=True), inside)
        else:
            most += self.tiles.backward_bytes(call, inside)
        if self._ragged:
            most = max(most, self._ragged_bytes(call, inside, backward=True))
        rows = extent.batch * extent.query_heads * extent.n_tokens
        most += 2 * rows * _wide(call)  # the lse without empty rows
        if extent.direct:
            keys = extent.batch * extent.key_heads * extent.n_tokens
            numbers = rows * call.head_dim + keys * (call.head_dim + call.value_dim)
            most += numbers * (_wide(call) + 4)
        return most + MERGE_WORKSPACE_BYTES

    def _largest_call(self, extent: Extent) -> Extent:
        """The extent of one call of the operator: of a part, or of several joined."""
        queries, keys = limits_of(
            self._geometries, (extent.max_queries, extent.max_keys), bands=bool(self.bands)
        )
        return replace(extent, max_queries=queries, max_keys=keys, direct=False)

    def _tile_bytes(self, call: CallShape, extent: Extent) -> int:
        """The mask of a tile of a call with dropout, and what tests its pairs."""
        if not call.dropout:
            return 0
        lanes = extent.batch * extent.query_heads
        item = call.dtype.itemsize
        return (lanes * (2 + 2 * item) + 64) * min(1024, extent.max_queries) * TESTED

    def _turned_bytes(self, call: CallShape, extent: Extent, *, backward: bool) -> int:
        """Copies of a triangle's rows in the other order."""
        width = call.head_dim + call.value_dim
        rows = extent.batch * extent.query_heads * extent.max_queries
        keys = extent.batch * extent.key_heads * extent.max_keys
        copies = rows * width * (2 if backward else 1) + keys * width
        return 2 * copies * call.dtype.itemsize + rows * 8

    def _ragged_bytes(self, call: CallShape, extent: Extent, *, backward: bool) -> int:
        """A ragged part: its tests, its mask, and the call."""
        queries, keys = (
            min(TESTED, extent.max_queries),
            min(2 * TESTED, extent.max_keys),
        )
        least = replace(extent, max_queries=queries, max_keys=keys)
        masked = replace(call, mask=_RAGGED, is_causal=False)
        lanes = extent.batch * extent.query_heads
        tests = (lanes * (2 + 2 * call.dtype.itemsize) + 64) * queries * keys
        if self._takes_masks(call):
            ask = self.base.backward_workspace_bytes if backward else (
                self.base.forward_workspace_bytes
            )  # fmt: skip
            return tests + ask(masked, least)
        ask = self.tiles.backward_bytes if backward else self.tiles.forward_bytes
        return tests + ask(masked, least)

    def _takes_masks(self, call: CallShape) -> bool:
        return self.by_operator and self.base.refusal(replace(call, mask=_RAGGED)) is None

    def forward(
        self, task: TaskTensors, geometry: Geometry, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Merge the task's kept pairs into ``out`` and ``lse``, in place."""
        if task.dropout is not None:
            state = Statistics(out, lse)
            if isinstance(self.base, NativeKernel):
                self.base.forward(self._tile_by_tile(task, geometry), state)
            else:
                reference.forward(self._cut(task, geometry), state, self._scores(task, geometry))
            return
        for call in self._calls(task, geometry):
            self._forward_call(task, call, geometry, out, lse)

    def _forward_call(
        self, task: TaskTensors, call: PartCall, geometry: Geometry, out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:  # fmt: skip
        at, turned = call.batch, call.kind == "upper"
        used, bias = self._with_mask(task, call, geometry)
        for pick in _head_views(used, task, bias is not None):
            part, part_lse = used.whole_forward(_operator_call(task, call, pick, bias))
            if turned:
                part, part_lse = part.flip(2), part_lse.flip(2)
            with task.timed("merge"):
                merge_(query_rows(pick(out), at), query_rows(pick(lse), at), part, part_lse)
            del part, part_lse

    def backward(self, task: TaskTensors, geometry: Geometry, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place; rows without a key have lse 0."""
        if task.dropout is not None:
            if isinstance(self.base, NativeKernel):
                self.base.backward(self._tile_by_tile(task, geometry), grads)
            else:
                reference.backward(self._cut(task, geometry), grads, self._scores(task, geometry))
            return
        for call in self._calls(task, geometry):
            self._backward_call(task, call, geometry, grads)

    def _backward_call(
        self, task: TaskTensors, call: PartCall, geometry: Geometry, grads: Gradients
    ) -> None:
        at, turned = call.batch, call.kind == "upper"
        scaling = grads.scaling
        used, bias = self._with_mask(task, call, geometry)
        for pick in _head_views(used, task, bias is not None):
            given = (grads.grad_out, grads.out, grads.lse)
            saved = Saved(*(_rows(pick(tensor), at, turned) for tensor in given))
            found = used.whole_backward(_operator_call(task, call, pick, bias), saved)
            if turned:
                found = (found[0].flip(2), found[1].flip(2), found[2].flip(2))
            targets = (
                query_rows(pick(grads.grad_query), at),
                key_rows(grads.grad_key, at),
                key_rows(grads.grad_value, at),
            )
            with task.timed("merge"):
                alpha = 2.0**-scaling.shift
                add_all_(targets, found, alpha, scaling.unscale, scaling.overflow)
            del found

    def _calls(self, task: TaskTensors, geometry: Geometry) -> tuple[PartCall, ...]:
        """The operator calls of a task; remembered, because each head group has the same."""
        if 0 in task.query.shape[:2]:
            return ()
        rectangles = tuple(r for r in task.rectangles if r.n_queries > 0 and r.n_keys > 0)
        masked = bool(rectangles) and task.has_mask(rectangles[0])
        # What drops, and what takes a mask, knows no bands.
        bands = bool(self.bands) and not masked and task.dropout is None
        single = masked or task.query.shape[0] != 1 or task.dropout is not None
        limits = limits_of((geometry,), (task.max_queries, task.max_keys), bands=bands)
        key = (task.task, rectangles, geometry, task.is_causal, single, limits, bands)

        def make() -> tuple[PartCall, ...]:
            calls = calls_of(task.task, rectangles, geometry, limits, single=single, bands=bands)
            return tuple(calls)

        return self._calls_of.get(key, make)

    def _with_mask(
        self, task: TaskTensors, call: PartCall, geometry: Geometry
    ) -> tuple[Kernel | Tiles, torch.Tensor | None]:
        """What runs a call, and the mask it is given: the call's own, and that of ragged parts."""
        r = call.batch.first
        bias = None if call.batch.count > 1 else task.bias(r)
        if bias is not None:
            bias = four_dims(bias)
            if call.kind == "upper":
                bias = bias.flip(2, 3)
        used: Kernel | Tiles = self._operator
        if call.kind == "ragged":
            tested = self._tested(task, call, geometry)
            bias = tested if bias is None else bias + tested
        if bias is not None and self.by_operator and not self._masked_calls(task):
            used = self.tiles
        return used, bias

    def _cut(self, task: TaskTensors, geometry: Geometry) -> TaskTensors:
        """A task with dropout: the rectangles around its parts."""
        calls = self._calls(task, geometry)
        every = [replace(r, causal=False) for call in calls for r in call.batch.rectangles()]
        return replace(task, rectangles=tuple(every))

    def _scores(self, task: TaskTensors, geometry: Geometry) -> reference.Scores:
        """What the reference does to scores of a task with dropout."""

        def kept(block: reference.Block, keys: slice) -> torch.Tensor | None:
            r = Rectangle(block.rows.start, block.rows.stop, keys.start, keys.stop)
            found = {geometry.verdict(Ranges.of(q.start, q.stop, k.start, k.stop))
                     for q, k, _ in task.task.contiguous(r)}  # fmt: skip
            if found == {FULL}:
                return None
            some = slice(task.first_head + block.heads.start, task.first_head + block.heads.stop)
            at = _indices(task, r, task.entries[block.entries], some)
            return geometry.kept(at)

        return replace(self.tiles.scores, kept=kept, tiles=reference.IN_CACHE)

    def _tile_by_tile(self, task: TaskTensors, geometry: Geometry) -> TaskTensors:
        """A task with dropout as the native kernel computes it: with a mask for each part."""

        def bias(r: Rectangle) -> torch.Tensor:
            heads = slice(task.first_head, task.first_head + task.query.shape[1])
            tested = self._additive(task, geometry, _indices(task, r, task.entries, heads))
            given = task.bias(r)
            return tested if given is None else four_dims(given) + tested

        return replace(self._cut(task, geometry), bias=bias)

    def _masked_calls(self, task: TaskTensors) -> bool:
        query, key = task.query, task.key
        return self._takes_masks(
            CallShape(
                query.device.type, query.dtype, query.shape[1], key.shape[1], query.shape[-1],
                task.value.shape[-1], needs_grad=True,
            )
        )  # fmt: skip

    def _tested(self, task: TaskTensors, call: PartCall, geometry: Geometry) -> torch.Tensor:
        """The mask of a ragged part, additive, (b|1, h|1, queries, keys)."""
        heads = slice(task.first_head, task.first_head + task.query.shape[1])
        return self._additive(task, geometry, _indices(task, call.batch.first, task.entries, heads))

    def _additive(self, task: TaskTensors, geometry: Geometry, at: Indices) -> torch.Tensor:
        """What band and rules mask of a tile, additive, (b|1, h|1, queries, keys)."""
        kept = four_dims(geometry.kept(at))
        # Where a dimension is expanded, one of its entries is enough.
        for dim in (0, 1):
            if kept.shape[dim] > 1 and kept.stride(dim) == 0:
                kept = kept.narrow(dim, 0, 1)
        zero = torch.zeros((), dtype=task.query.dtype, device=task.query.device)
        return torch.where(kept, zero, torch.full_like(zero, -torch.inf))


def _indices(task: TaskTensors, r: Rectangle, entries: tuple[int, ...], heads: slice) -> Indices:
    """The pairs of a rectangle, for some batch entries and heads, by their numbers."""
    device = task.query.device
    return Indices(
        torch.tensor(entries, device=device),
        torch.arange(heads.start, heads.stop, device=device),
        positions(task.task, r.query_start, r.query_stop, device),
        positions(task.task, r.key_start, r.key_stop, device),
    )


def _rows(tensor: torch.Tensor, at: Batch, turned: bool) -> torch.Tensor:
    rows = query_rows(tensor, at)
    return rows.flip(2) if turned else rows


def _keys(tensor: torch.Tensor, at: Batch, turned: bool) -> torch.Tensor:
    rows = key_rows(tensor, at)
    return rows.flip(2) if turned else rows


def _head_views(used: Kernel | Tiles, task: TaskTensors, masked: bool) -> Iterator[Pick]:
    """The query heads of one call each: all of them, if the operator takes grouped heads."""
    heads, key_heads = task.query.shape[1], task.key.shape[1]
    tokens = max(task.query.shape[2], task.key.shape[2])
    if (
        heads == key_heads
        or isinstance(used, Tiles)
        or used.takes_whole(heads, key_heads, tokens, masked, True)
    ):
        yield lambda tensor: tensor
        return
    for j in range(heads // key_heads):
        yield partial(jth_of_group, key_heads, j)


def _operator_call(
    task: TaskTensors, call: PartCall, pick: Pick, bias: torch.Tensor | None
) -> Call:
    """What the operator is called with for some query heads."""
    at, turned = call.batch, call.kind == "upper"
    return Call(
        _rows(pick(task.query), at, turned),
        _keys(task.key, at, turned),
        _keys(task.value, at, turned),
        call.causal,
        task.scale,
        None if bias is None else _of_heads(pick, bias, task.query.shape[1]),
    )


def _of_heads(pick: Pick, bias: torch.Tensor, heads: int) -> torch.Tensor:
    return pick(bias) if bias.shape[1] == heads and heads > 1 else bias


def _wide(call: CallShape) -> int:
    return 8 if call.dtype == torch.float64 else 4
