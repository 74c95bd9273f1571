"""A call under a ``Mask``, on a kernel that knows only plain and causal rectangles.

What a mask keeps of a task's rectangles is a short list of parts (``geometry.py``): plain ones and
triangles. A lower triangle is a causal call; an upper one is a causal call with the orders of
queries and keys turned round. Only ragged parts are given a mask, made for them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quorum_attention.decomposition import (
    MIXED,
    Decomposition,
    Pairs,
    Ranges,
    Rectangle,
    Task,
    Verdict,
)
from quorum_attention.decomposition.bands import Kind
from quorum_attention.decomposition.batches import Batch
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.kit.reads import tensors
from quorum_attention.kernels.masked.geometry import TESTED, Geometry, Place
from quorum_attention.kernels.masked.native import NativeUnderMask
from quorum_attention.kernels.masked.tiles import Tiles
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, add_all_, merge_
from quorum_attention.kernels.native.kernel import NativeKernel
from quorum_attention.kernels.positions import positions
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    InnerKernel,
    MaskShape,
    Operator,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.rectangles import four_dims
from quorum_attention.kernels.traits import Traits, operator, traits_of
from quorum_attention.kernels.views import Pick, jth_of_group, key_rows, query_rows

# Tasks whose parts are remembered.
_MOST_TASKS = 512
# The most rows to which an operator rounds up those of a batch entry.
_ROUND = 128
# Parts are joined to one call up to so many queries, and keys.
_JOINED = 8192
_RAGGED = MaskShape(boolean=True, batch=True, heads=True, rows=True)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the operator, in local positions.

    Attributes:
        batch: the rectangle, or several of one size.
        kind: "lower" and "upper" triangles, "plain", or "ragged": with a mask of its own.
        query_shift, key_shift: added to local positions, they give those of the whole call.
    """

    batch: Batch
    kind: Kind
    query_shift: int = 0
    key_shift: int = 0


class MaskedKernel:
    """Attention under a mask's geometry; made by ``masked_kernel``.

    Args:
        geometries: one for each batch entry, or one for all of them.
        n_queries, n_keys: of the calls it is for.
        base: what computes the parts: an operator, or ``dense``, for which ``Tiles`` stands in.
        functions: the user's functions in the geometries.
        softcap: of scores; ``base`` has it if it is an operator other than ``Tiles``.
    """

    def __init__(
        self,
        geometries: tuple[Geometry, ...],
        n_queries: int,
        n_keys: int,
        base: InnerKernel,
        functions: Sequence[Callable[..., object]],
        softcap: float | None,
    ) -> None:
        self.geometries, self.base = geometries, base
        self.n_queries, self.n_keys = n_queries, n_keys
        self._functions = tuple(functions)
        called = operator(base)
        self._tiles = Tiles(softcap)
        self._by_operator = called is not None
        self._operator: Operator | Tiles = self._tiles if called is None else called
        self.name = base.name if called is not None else self._tiles.name
        self._distinct = tuple(dict.fromkeys(geometries))
        # By geometry, where one launch runs a whole task of it.
        self._native: dict[Geometry, NativeUnderMask] = {}
        if isinstance(base, NativeKernel) and not any(g.rules for g in self._distinct):
            self._native = {g: NativeUnderMask(g, base) for g in self._distinct}
        self._ragged = any(g.rules or not g.band.keeps_all for g in self._distinct)
        own = traits_of(base)
        kept = sum(g.count(n_queries, n_keys) for g in geometries) / len(geometries)
        self._share = kept / max(1, n_queries * n_keys)
        self._verdict = _Verdict(self._distinct)
        self._calls_of: Cache[tuple[_Call, ...]] = Cache(_MOST_TASKS, lambda calls: 1)
        self.traits = Traits(
            own_attention=True,
            whole_tasks=bool(self._native),
            # A task is several calls, though they take no turns on streams.
            several_streams=not self._native,
            rates=own.rates if called is not None else (0.3, 0.3),
            launch_seconds=own.launch_seconds,
            scaled_backward=own.scaled_backward if called is not None else frozenset(),
            captures=True,
            sparse=True,
            pairwise=True,
            dropout=own.dropout and called is not None,
            whole_calls=True,
        )

    @property
    def _uniform(self) -> bool:
        return len(self._distinct) == 1

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self.base.refusal(replace(call, is_causal=True)) if self._by_operator else None

    def captured(self) -> Sequence[torch.Tensor]:
        """See ``Captures``."""
        return tensors(*self._functions)

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Sparse``."""
        every = n_queries * n_keys
        if is_causal:
            corner = min(n_queries, n_keys)
            every = corner * (corner + 1) // 2 + (n_queries - corner) * n_keys
        share = self._share * n_queries * n_keys / max(1, every)
        return Pairs(n_queries, n_keys, is_causal, self._verdict, min(1.0, share))

    def change_(self, scores: torch.Tensor) -> torch.Tensor | None:
        """See ``Pairwise``: the soft cap."""
        return self._tiles.cap_(scores)

    def masked_pairs(
        self,
        entries: tuple[int, ...],
        heads: slice,
        queries: slice,
        keys: slice,
        device: torch.device,
    ) -> torch.Tensor:
        """See ``Pairwise``."""
        found = []
        for at, geometry in self._by_geometry(entries):
            place = Place(
                torch.tensor(entries[at], device=device),
                torch.arange(heads.start, heads.stop, device=device),
                torch.arange(queries.start, queries.stop, device=device),
                torch.arange(keys.start, keys.stop, device=device),
                Ranges.of(queries.start, queries.stop, keys.start, keys.stop),
            )
            kept = four_dims(geometry.keeps(place))
            found.append(kept.expand(len(entries[at]), *kept.shape[1:]))
        if len(found) == 1:
            return ~found[0]
        n_heads = max(kept.shape[1] for kept in found)
        return ~torch.cat([kept.expand(-1, n_heads, -1, -1) for kept in found])

    def takes_whole(
        self, query_heads: int, key_heads: int, tokens: int, masked: bool, every: bool
    ) -> bool:
        """Numbers of heads and entries are needed where the mask may depend on them."""
        return every or (self._uniform and not self._functions)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        if self._native:
            return self._launch_bytes(call) + self.base.forward_workspace_bytes(call, extent) * (
                2 if extent.direct and not self._uniform else 1
            )
        inside = self._largest_call(extent)
        most = self._turned_bytes(call, inside, backward=False) + self._tile_bytes(call, extent)
        if self._by_operator:
            most += self.base.forward_workspace_bytes(replace(call, is_causal=True), inside)
        else:
            most += self._tiles.forward_bytes(call, inside)
        if self._ragged:
            most = max(most, self._ragged_bytes(call, inside, backward=False))
        if extent.direct:
            rows = extent.batch * extent.query_heads * extent.n_tokens
            most += rows * (call.value_dim + 1) * _wide(call) + rows * call.value_dim * 4
        return most + MERGE_WORKSPACE_BYTES

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        if self._native:
            return self._launch_bytes(call) + self.base.backward_workspace_bytes(call, extent) * (
                2 if extent.direct and not self._uniform else 1
            )
        inside = self._largest_call(extent)
        most = self._turned_bytes(call, inside, backward=True) + self._tile_bytes(call, extent)
        if self._by_operator:
            most += self.base.backward_workspace_bytes(replace(call, is_causal=True), inside)
        else:
            most += self._tiles.backward_bytes(call, inside)
        if self._ragged:
            most = max(most, self._ragged_bytes(call, inside, backward=True))
        rows = extent.batch * extent.query_heads * extent.n_tokens
        most += 2 * rows * _wide(call)  # the lse without empty rows
        if extent.direct:
            keys = extent.batch * extent.key_heads * extent.n_tokens
            numbers = rows * call.head_dim + keys * (call.head_dim + call.value_dim)
            most += numbers * (_wide(call) + 4)
        return most + MERGE_WORKSPACE_BYTES

    def _launch_bytes(self, call: CallShape) -> int:
        """What the tables of a launch have more than those of the kernel without a mask."""
        return max(native.table_bytes(dropout=call.dropout) for native in self._native.values())

    def _largest_call(self, extent: Extent) -> Extent:
        """The extent of one call of the operator: of a part, or of several joined."""
        queries, keys = _limits(self._distinct, (extent.max_queries, extent.max_keys))
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
        ask = self._tiles.backward_bytes if backward else self._tiles.forward_bytes
        return tests + ask(masked, least)

    def _takes_masks(self, call: CallShape) -> bool:
        return self._by_operator and self.base.refusal(replace(call, mask=_RAGGED)) is None

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for entries, geometry in self._by_geometry(task.entries):
            one, given = (
                _entries_of(task, entries),
                (state.out[entries], state.lse[entries]),
            )
            if self._native:
                self._native[geometry].forward(one, Statistics(*given))
                continue
            if task.dropout is not None:
                self.base.forward(self._tile_by_tile(one, geometry), Statistics(*given))
                continue
            for call in self._calls(one, geometry):
                self._forward_call(one, call, geometry, *given)

    def _forward_call(
        self, task: TaskTensors, call: _Call, geometry: Geometry, out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:  # fmt: skip
        at, turned = call.batch, call.kind == "upper"
        used, bias = self._with_mask(task, call, geometry)
        for pick in _head_views(used, task, bias is not None):
            part, part_lse = used.whole_forward(
                _rows(pick(task.query), at, turned),
                _keys(task.key, at, turned),
                _keys(task.value, at, turned),
                call.kind in ("lower", "upper"),
                task.scale,
                None if bias is None else _of_heads(pick, bias, task.query.shape[1]),
            )
            if turned:
                part, part_lse = part.flip(2), part_lse.flip(2)
            with task.timed("merge"):
                merge_(query_rows(pick(out), at), query_rows(pick(lse), at), part, part_lse)
            del part, part_lse

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        lse = grads.lse
        if not self._native:
            shift = grads.scaling.shift * math.log(2.0)
            lse = (lse - shift).masked_fill_(lse == -torch.inf, 0.0)
        for entries, geometry in self._by_geometry(task.entries):
            one = _entries_of(task, entries)
            scaling = grads.scaling
            mine = replace(
                grads,
                **{
                    name: getattr(grads, name)[entries]
                    for name in (
                        "grad_out",
                        "out",
                        "grad_query",
                        "grad_key",
                        "grad_value",
                    )
                },
                lse=lse[entries],
                scaling=replace(
                    scaling,
                    unscale=_rows_of_entries(scaling.unscale, entries),
                    overflow=_rows_of_entries(scaling.overflow, entries),
                ),
            )
            if self._native:
                self._native[geometry].backward(one, mine)
                continue
            if task.dropout is not None:
                self.base.backward(self._tile_by_tile(one, geometry), mine)
                continue
            for call in self._calls(one, geometry):
                self._backward_call(one, call, geometry, mine)

    def _backward_call(
        self, task: TaskTensors, call: _Call, geometry: Geometry, grads: Gradients
    ) -> None:
        at, turned = call.batch, call.kind == "upper"
        scaling = grads.scaling
        used, bias = self._with_mask(task, call, geometry)
        for pick in _head_views(used, task, bias is not None):
            found = used.whole_backward(
                _rows(pick(grads.grad_out), at, turned),
                _rows(pick(task.query), at, turned),
                _keys(task.key, at, turned),
                _keys(task.value, at, turned),
                _rows(pick(grads.out), at, turned),
                _rows(pick(grads.lse), at, turned),
                call.kind in ("lower", "upper"),
                task.scale,
                None if bias is None else _of_heads(pick, bias, task.query.shape[1]),
            )
            if turned:
                found = (found[0].flip(2), found[1].flip(2), found[2].flip(2))
            targets = (
                query_rows(pick(grads.grad_query), at),
                key_rows(grads.grad_key, at),
                key_rows(grads.grad_value, at),
            )
            with task.timed("merge"):
                add_all_(
                    targets,
                    found,
                    2.0**-scaling.shift,
                    scaling.unscale,
                    scaling.overflow,
                )
            del found

    def whole_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``WholeCalls``; ``out`` is rounded once, to ``out_dtype``."""
        if self._native:
            parts = [
                native.whole_forward(
                    query[at], key[at], value[at], causal, scale, _rows_of_entries(bias, at),
                    out_dtype, dropout and dropout.at(0, at.start),
                )
                for at, native in self._native_calls(query)
            ]  # fmt: skip
            out, lse = (_together(pieces) for pieces in zip(*parts, strict=True))
            return out, lse
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        out = torch.zeros((*query.shape[:3], value.shape[-1]), dtype=work, device=query.device)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=work, device=query.device)
        task = self._everything(query, key, value, causal, scale, bias, dropout)
        self.forward(task, Statistics(out, lse))
        return out.to(out_dtype or query.dtype), lse

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
        dropout: Dropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See ``WholeCalls``; gradients are rounded once, to ``grad_dtype``."""
        if self._native:
            parts = [
                native.whole_backward(
                    grad_out[at], query[at], key[at], value[at], out[at], lse[at], causal, scale,
                    _rows_of_entries(bias, at), grad_dtype, dropout and dropout.at(0, at.start),
                )
                for at, native in self._native_calls(query)
            ]  # fmt: skip
            dq, dk, dv = (_together(pieces) for pieces in zip(*parts, strict=True))
            return dq, dk, dv
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        dq, dk, dv = (
            torch.zeros(t.shape, dtype=work, device=t.device) for t in (query, key, value)
        )
        task = self._everything(query, key, value, causal, scale, bias, dropout)
        self.backward(task, Gradients(grad_out, out, lse, dq, dk, dv))
        found = [total.to(grad_dtype or query.dtype) for total in (dq, dk, dv)]
        return found[0], found[1], found[2]

    def _native_calls(self, query: torch.Tensor) -> Iterator[tuple[slice, NativeUnderMask]]:
        for entries, geometry in self._by_geometry(tuple(range(query.shape[0]))):
            yield entries, self._native[geometry]

    def _everything(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float,
        bias: torch.Tensor | None,
        dropout: Dropout | None,
    ) -> TaskTensors:
        n_queries, n_keys = query.shape[2], key.shape[2]
        return TaskTensors(
            task=Decomposition(max(n_queries, n_keys)).task(()),
            rectangles=(Rectangle(0, n_queries, 0, n_keys),),
            query=query, key=key, value=value, scale=scale, is_causal=causal,
            bias=partial(_part_of, bias),
            max_queries=n_queries, max_keys=n_keys,
            entries=tuple(range(query.shape[0])),
            dropout=dropout,
        )  # fmt: skip

    def _by_geometry(self, entries: tuple[int, ...]) -> Iterator[tuple[slice, Geometry]]:
        """Runs of batch entries with the same geometry."""
        found = [self.geometries[entry % len(self.geometries)] for entry in entries]
        start = 0
        for stop in range(1, len(found) + 1):
            if stop == len(found) or found[stop] is not found[start]:
                yield slice(start, stop), found[start]
                start = stop

    def _calls(self, task: TaskTensors, geometry: Geometry) -> tuple[_Call, ...]:
        """The operator calls of a task; remembered, because each head group has the same."""
        if 0 in task.query.shape[:2]:
            return ()
        rectangles = tuple(r for r in task.rectangles if r.n_queries > 0 and r.n_keys > 0)
        masked = bool(rectangles) and task.has_mask(rectangles[0])
        single = masked or task.query.shape[0] != 1
        limits = _limits((geometry,), (task.max_queries, task.max_keys))
        key = (task.task, rectangles, geometry, task.is_causal, single, limits)
        return self._calls_of.get(
            key,
            lambda: tuple(_calls(task.task, rectangles, geometry, limits, single=single)),
        )

    def _with_mask(
        self, task: TaskTensors, call: _Call, geometry: Geometry
    ) -> tuple[Operator | Tiles, torch.Tensor | None]:
        """What runs a call, and the mask it is given: the call's own, and that of ragged parts."""
        r = call.batch.first
        bias = None if call.batch.count > 1 else task.bias(r)
        if bias is not None:
            bias = four_dims(bias)
            if call.kind == "upper":
                bias = bias.flip(2, 3)
        used: Operator | Tiles = self._operator
        if call.kind == "ragged":
            tested = self._tested(task, call, geometry)
            bias = tested if bias is None else bias + tested
        if bias is not None and self._by_operator and not self._masked_calls(task):
            used = self._tiles
        return used, bias

    def _tile_by_tile(self, task: TaskTensors, geometry: Geometry) -> TaskTensors:
        """A task with dropout, as its kernel computes it tile by tile: the rectangles around its
        parts, and a mask for each tile that is asked for."""
        calls = self._calls(task, geometry)
        every = [replace(r, causal=False) for call in calls for r in call.batch.rectangles()]

        def bias(r: Rectangle) -> torch.Tensor:
            device = task.query.device
            queries = positions(task.task, r.query_start, r.query_stop, device)
            keys = positions(task.task, r.key_start, r.key_stop, device)
            block = Ranges.of(
                int(queries[0]), int(queries[-1]) + 1, int(keys[0]), int(keys[-1]) + 1
            )
            tested = self._additive(task, geometry, queries, keys, block)
            given = task.bias(r)
            return tested if given is None else four_dims(given) + tested

        return replace(task, rectangles=tuple(every), bias=bias)

    def _masked_calls(self, task: TaskTensors) -> bool:
        query, key = task.query, task.key
        return self._takes_masks(
            CallShape(
                query.device.type, query.dtype, query.shape[1], key.shape[1], query.shape[-1],
                task.value.shape[-1], needs_grad=True,
            )
        )  # fmt: skip

    def _tested(self, task: TaskTensors, call: _Call, geometry: Geometry) -> torch.Tensor:
        """The mask of a ragged part, additive, (b|1, h|1, queries, keys)."""
        r, device = call.batch.first, task.query.device
        q0, k0 = r.query_start + call.query_shift, r.key_start + call.key_shift
        queries = torch.arange(q0, q0 + r.n_queries, device=device)
        keys = torch.arange(k0, k0 + r.n_keys, device=device)
        block = Ranges.of(q0, q0 + r.n_queries, k0, k0 + r.n_keys)
        return self._additive(task, geometry, queries, keys, block)

    def _additive(
        self,
        task: TaskTensors,
        geometry: Geometry,
        queries: torch.Tensor,
        keys: torch.Tensor,
        block: Ranges,
    ) -> torch.Tensor:
        """What band and rules mask of a tile, additive, (b|1, h|1, queries, keys)."""
        device, first = task.query.device, task.first_head
        entries = torch.tensor(task.entries, device=device)
        heads = torch.arange(first, first + task.query.shape[1], device=device)
        at = Place(entries, heads, queries, keys, block)
        kept = geometry.kept(at)
        kept = four_dims(kept)
        # Where a dimension is expanded, one of its entries is enough.
        for dim in (0, 1):
            if kept.shape[dim] > 1 and kept.stride(dim) == 0:
                kept = kept.narrow(dim, 0, 1)
        zero = torch.zeros((), dtype=task.query.dtype, device=device)
        return torch.where(kept, zero, torch.full_like(zero, -torch.inf))


class _Verdict:
    """The verdict on a block in all batch entries together."""

    def __init__(self, geometries: tuple[Geometry, ...]) -> None:
        self._geometries = geometries

    def __call__(self, block: Ranges) -> Verdict:
        found = self._geometries[0].verdict(block)
        for geometry in self._geometries[1:]:
            if found is MIXED or geometry.verdict(block) is not found:
                return MIXED
        return found


def _calls(
    task: Task,
    rectangles: Sequence[Rectangle],
    geometry: Geometry,
    limits: tuple[int, int],
    *,
    single: bool,
) -> Iterator[_Call]:
    """The operator calls of a task under a geometry.

    Args:
        limits: most queries and keys of a call together.
        single: no rectangles may be joined to one call.
    """
    alike: dict[Kind, list[Rectangle]] = {"plain": [], "lower": [], "upper": []}
    for r in rectangles:
        for queries, keys, _ in task.contiguous(r):
            shifts = queries.start - queries.local, keys.start - keys.local
            block = Ranges.of(queries.start, queries.stop, keys.start, keys.stop)
            # The geometry has the call's own causal rule, so that of a rectangle adds nothing.
            for part in geometry.parts(block):
                made = Rectangle(
                    part.query_start - shifts[0], part.query_stop - shifts[0],
                    part.key_start - shifts[1], part.key_stop - shifts[1],
                    part.kind in ("lower", "upper"),
                )  # fmt: skip
                if part.kind == "ragged":
                    yield _Call(Batch(made), "ragged", *shifts)
                else:
                    alike[part.kind].append(made)
    for kind, found in alike.items():
        if single:
            yield from (_Call(Batch(r), kind) for r in found)
            continue
        for batch in _batches(found):
            for part_of_batch in _bounded(batch, limits):
                yield _Call(part_of_batch, kind)


def _limits(geometries: Sequence[Geometry], limits: tuple[int, int]) -> tuple[int, int]:
    """The most queries and keys of one call: of the largest part, or of parts joined."""
    largest = [geometry.most(*limits) for geometry in geometries]
    queries, keys = (max(n) for n in zip(*largest, strict=True))
    return max(queries, min(limits[0], _JOINED)), max(keys, min(limits[1], _JOINED))


def _batches(rectangles: list[Rectangle]) -> Iterator[Batch]:
    """Neighbours in the list of one size, at equal distances, as one call. In linear time, unlike
    ``decomposition.batches``: there may be tens of thousands."""
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


def _rows(tensor: torch.Tensor, at: Batch, turned: bool) -> torch.Tensor:
    rows = query_rows(tensor, at)
    return rows.flip(2) if turned else rows


def _keys(tensor: torch.Tensor, at: Batch, turned: bool) -> torch.Tensor:
    rows = key_rows(tensor, at)
    return rows.flip(2) if turned else rows


def _entries_of(task: TaskTensors, entries: slice) -> TaskTensors:
    """A task with some of its batch entries."""
    if entries == slice(0, task.query.shape[0]):
        return task

    def bias(r: Rectangle) -> torch.Tensor | None:
        found = task.bias(r)
        return found if found is None else _rows_of_entries(four_dims(found), entries)

    return replace(
        task,
        query=task.query[entries],
        key=task.key[entries],
        value=task.value[entries],
        bias=bias,
        entries=task.entries[entries],
        dropout=task.dropout and task.dropout.at(0, entries.start),
    )


def _rows_of_entries(tensor: torch.Tensor | None, entries: slice) -> torch.Tensor | None:
    """The entries of (b or 1, ...)."""
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[entries]


def _head_views(used: Operator | Tiles, task: TaskTensors, masked: bool) -> Iterator[Pick]:
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


def _of_heads(pick: Pick, bias: torch.Tensor, heads: int) -> torch.Tensor:
    return pick(bias) if bias.shape[1] == heads and heads > 1 else bias


def _part_of(bias: torch.Tensor | None, r: Rectangle) -> torch.Tensor | None:
    """The part of a whole call's mask that belongs to ``r``."""
    if bias is None:
        return None
    bias = four_dims(bias)
    if bias.shape[2] > 1:
        bias = bias[:, :, r.query_start : r.query_stop]
    return bias[..., r.key_start : r.key_stop] if bias.shape[3] > 1 else bias


def _together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _wide(call: CallShape) -> int:
    return 8 if call.dtype == torch.float64 else 4
