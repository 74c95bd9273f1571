"""A call under a ``Mask``: each task in one launch of the native kernel, or part by part by one
that knows only plain and causal rectangles.

What a mask keeps of a task's rectangles is a short list of parts: plain rectangles, squares whose
lower or upper triangle is kept, and ragged ones, which are given an additive mask, made for them
alone. An upper triangle is a causal call with the orders of queries and keys turned round.
Batch entries of different geometry are computed one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any, cast

import torch

from quorum_attention.decomposition import PARTIAL, Pairs, Ranges, Rectangle, Rows, Verdict
from quorum_attention.decomposition.bands import Band, BandPart
from quorum_attention.decomposition.rectangles import cut
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.block_evaluator import evaluated_bytes
from quorum_attention.kernels.masked.block_nodes import BLOCK, joined_along_rows
from quorum_attention.kernels.masked.block_table import blocks_key, listed_blocks, whole_region
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.packed_calls import PackedKernel
from quorum_attention.kernels.masked.pair_bias import BiasedKernel
from quorum_attention.kernels.masked.pair_functions import MaskMod, ScoreMod
from quorum_attention.kernels.masked.resolve import ResolvedMask, resolve
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.native.kernel import NativeKernel
from quorum_attention.kernels.operator_inputs import four_dims
from quorum_attention.kernels.protocol import (
    BiasShape,
    Call,
    CallShape,
    Extent,
    Gradients,
    Indices,
    Kernel,
    Saved,
    Statistics,
    TaskTensors,
    Three,
    refusal,
)
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import DenseKernel, TiledKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.score_tiles import PLAIN, QueryBlock, ScoreTransform
from quorum_attention.kernels.select import select_kernel
from quorum_attention.mask import Mask

_BY_ENTRY = ("grad_out", "out", "lse", "grad_query", "grad_key", "grad_value")
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


class UserModKernel(Kernel):
    """A kernel of users' functions.

    Attributes:
        mask_mods, score_mod: they.
    """

    own_attention = True
    sparse = True
    mask_mods: tuple[MaskMod, ...]
    score_mod: ScoreMod | None = None

    def called_back(self) -> tuple[Callable[..., Any], ...]:
        """See ``Kernel``."""
        return (*(() if self.score_mod is None else (self.score_mod,)), *self.mask_mods)

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> list[torch.Tensor]:
        """What they return for the first pair of ``at`` and for the last."""
        mods: list[Callable[..., Any]] = list(self.mask_mods)
        if self.score_mod is not None:
            mods.append(partial(self.score_mod, torch.zeros((), device=at.queries.device)))
        each = (at.entries, at.heads, at.queries, at.keys)
        pairs = [[numbers[end] for numbers in each] for end in (0, -1)]
        return [mod(*pair) for mod in mods for pair in pairs]


def _cap(
    cap: float, scores: torch.Tensor, block: object, keys: object, derivative: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A ``ScoreFunction``: scores become ``cap * tanh(score / cap)``, in place."""
    scores.div_(cap).tanh_()
    found = (scores * scores).neg_().add_(1.0) if derivative else None
    return scores.mul_(cap), found


def capped(softcap: float | None) -> ScoreTransform:
    """The change of scores by a soft cap; None is none."""
    if softcap is None:
        return PLAIN
    return ScoreTransform(function=partial(_cap, softcap), matrices=1)


_Parts = tuple[tuple[Rectangle, ...], ...]
"""The parts of a task, local positions: those of plain and causal calls, upper triangles, and
ragged ones."""


class PartwiseKernel(Kernel):
    """See above; for batch entries of one geometry.

    Args:
        base: what computes the parts: an operator, or ``TiledKernel``.
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
        most = self._bytes(shape, extent, backward=False)
        if extent.direct:
            rows = extent.batch * extent.query_heads * extent.n_tokens
            most += (
                rows * (shape.value_dim + 1) * shape.state_dtype.itemsize
                + rows * shape.value_dim * 4
            )
        return most

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        most = self._bytes(shape, extent, backward=True)
        rows = extent.batch * extent.query_heads * extent.n_tokens
        if isinstance(self._operator, RectangleKernel):
            most += rows * 2 * shape.state_dtype.itemsize  # the lse without rows that have no key
        by_tiles = self._kernel_for(replace(shape, bias=_ragged_mask(shape))) is self._tiles
        if by_tiles and shape.dtype in self._operator.scaled_backward:
            most += rows * 4 * shape.value_dim  # an upstream gradient that is not scaled
        if extent.direct:
            keys = extent.batch * extent.key_heads * extent.n_tokens
            numbers = rows * shape.head_dim + keys * (shape.head_dim + shape.value_dim)
            most += numbers * (shape.state_dtype.itemsize + 4)
        return most

    def _bytes(self, shape: CallShape, extent: Extent, *, backward: bool) -> int:
        """Of the calls of plain and causal parts, and of ragged ones with their masks."""

        def ask(shape: CallShape, queries: int, keys: int) -> int:
            kernel = self._kernel_for(shape)
            inside = replace(extent, max_queries=queries, max_keys=keys, direct=False)
            if backward:
                return kernel.backward_workspace_bytes(shape, inside)
            return kernel.forward_workspace_bytes(shape, inside)

        lanes, key_lanes = extent.batch * extent.query_heads, extent.batch * extent.key_heads
        queries, keys = self._limits((extent.max_queries, extent.max_keys), shape)
        most = ask(replace(shape, is_causal=True), queries, keys)
        if isinstance(self._operator, RectangleKernel):
            # Copies of a triangle's rows in the other order.
            copies = lanes * queries * (2 if backward else 1) + key_lanes * keys
            most += 2 * copies * (shape.head_dim + shape.value_dim) * shape.dtype.itemsize
            most += 8 * lanes * queries + MERGE_WORKSPACE_BYTES
        if self._has_ragged:
            rules = self._geometry.rules
            queries = min(BLOCK if rules else _LEAF, queries)
            keys = min(_WIDEST if rules else _LEAF, keys)
            masked = replace(shape, bias=_ragged_mask(shape), is_causal=False)
            pair_bytes = lanes * (2 + 2 * masked.bias_dtype.itemsize) + (64 if rules else 16)
            tests = pair_bytes * queries * keys
            most = max(most, tests + ask(masked, queries, keys))
        if self._geometry.functions:
            most = max(most, evaluated_bytes(lanes, _EVALUATED_BYTES))
        return most

    def _limits(self, limits: tuple[int, int], shape: CallShape) -> tuple[int, int]:
        """The most queries and keys of one call: of the largest part, or of parts joined."""
        queries, keys = limits
        if not self._geometry.rules:
            queries, keys = self._geometry.largest_part(*limits, bands=self._takes_bands(shape))
        return max(queries, min(limits[0], _JOINED)), max(keys, min(limits[1], _JOINED))

    def _takes_bands(self, shape: CallShape) -> bool:
        # What drops, and what takes a mask, knows no bands.
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
        every = tuple(task.rectangles)
        if not every:
            return
        mask = None
        if task.has_mask(every[0]):
            mask = replace(_ANY_MASK, wide=task.has_wide_mask(every[0]))
        call = task.shape(mask)
        kernel, parts = self._kernel_for(call), self._parts_of(task, every, call)
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
        """What the geometry keeps of rectangles; it has the call's own causal rule."""
        geometry, bands = self._geometry, self._takes_bands(shape)
        if geometry.rules:
            key = blocks_key(geometry, task, live)
            return self._known.get(key, lambda: _by_blocks(task, live, geometry))
        # What computes a whole task takes no triangles off its diagonal.
        triangles = task.dropout is None and isinstance(self._operator, RectangleKernel)
        kinds = {"lower": triangles, "upper": triangles and shape.bias is None}
        key = (task.task, live, *kinds.values(), bands)
        return self._known.get(key, lambda: _by_bands(task, live, geometry, kinds, bands))


def _part_mask(
    geometry: Geometry, task: TaskTensors, known: dict[object, torch.Tensor], r: Rectangle
) -> torch.Tensor:
    """What a geometry masks of a part, with the task's own mask: additive, (b|1, h|1, q, k).

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
    given = task.bias(r)
    return tested if given is None else four_dims(given) + tested


def _tested(rules: Geometry, task: TaskTensors, r: Rectangle) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        kept = rules.keeps(task.indices(r))
    zero = torch.zeros((), dtype=task.query.dtype, device=task.query.device)
    return torch.where(kept, zero, torch.full_like(zero, -torch.inf))


def _by_blocks(task: TaskTensors, rectangles: tuple[Rectangle, ...], geometry: Geometry) -> _Parts:
    """What a geometry with rules keeps: full blocks, and partial ones side by side as ragged."""
    clear, ragged = list[Rectangle](), list[Rectangle]()
    for r in rectangles:
        full, partial, _ = listed_blocks(geometry, task, whole_region(task), (r,), _EVALUATED_BYTES)
        for found, nodes in ((clear, full), (ragged, joined_along_rows(partial))):
            for bounds in nodes[:, 1:].tolist():
                _, bottom, _, right = bounds
                found += cut([Rectangle(*bounds)], bottom, _WIDEST if found is ragged else right)
    return tuple(clear), (), tuple(ragged)


def _by_bands(
    task: TaskTensors,
    rectangles: tuple[Rectangle, ...],
    geometry: Geometry,
    triangles: dict[str, bool],
    bands: bool,
) -> _Parts:
    """What a geometry without rules keeps; ``triangles`` (of which kind), ``bands``: what calls may
    be of."""
    found: dict[str, list[Rectangle]] = {"clear": [], "upper": [], "ragged": []}
    for r in rectangles:
        for queries, keys, _ in task.task.contiguous(r):
            block = Ranges.from_bounds(*queries[:2], *keys[:2])
            for whole, band in geometry.parts(block, bands=bands):
                for part in [whole] if triangles.get(whole.kind, True) else _cut(whole):
                    causal: object = part.kind in ("lower", "upper")
                    if part.kind == "band":
                        causal = band.moved(part.query_start - part.key_start)
                    made = _local(part, queries, keys, causal)
                    found.get(part.kind, found["clear"]).append(made)
    return tuple(map(tuple, found.values()))


def _local(part: BandPart, queries: Rows, keys: Rows, causal: object) -> Rectangle:
    """A part in local positions; for an operator with bands, ``causal`` may be one."""
    by_query, by_key = queries.local - queries.start, keys.local - keys.start
    return Rectangle(
        part.query_start + by_query, part.query_stop + by_query,
        part.key_start + by_key, part.key_stop + by_key, cast(bool, causal),
    )  # fmt: skip


def _cut(triangle: BandPart) -> Iterator[BandPart]:
    """A triangle as plain parts, and ragged squares along its edge."""
    q, k, side = triangle.query_start, triangle.key_start, triangle.n_queries
    for a in range(0, side, _LEAF):
        b = min(a + _LEAF, side)
        yield BandPart(q + a, q + b, k + a, k + b, "ragged")
        first, last = (b, side) if triangle.kind == "upper" else (0, a)
        if first < last:
            yield BandPart(q + a, q + b, k + first, k + last)


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


class MaskedKernel(UserModKernel):
    """Attention under a mask.

    Args:
        mask: for the sizes of the calls it is for; torch.vmap may add entries, which are those of
            the batch over and over.
        base: what computes the parts: an operator, whose scores are capped already.
    """

    def __init__(self, mask: ResolvedMask, base: Kernel) -> None:
        # Not the mask, which holds its kernels.
        self.batch, self.base, self.mask_mods = mask.shape.batch, base, mask.functions
        self.geometries = mask.geometries
        self._distinct = tuple(dict.fromkeys(mask.geometries))
        self._uniform = len(self._distinct) == 1
        self._scores, self.name = capped(mask.softcap), base.name
        self._parts = {g: PartwiseKernel(g, base, self._scores) for g in self._distinct}
        # One launch of these runs a whole task, or some do where there are rules.
        self._native: dict[Geometry, Kernel] = {}
        if isinstance(base, NativeKernel):
            self._native = {g: base.under(g) for g in self._distinct}
        self._share = mask.kept_pairs / max(1, mask.shape.n_queries * mask.shape.n_keys)
        self._verdict = partial(_verdict, self._distinct)
        self.whole_tasks = bool(self._native)
        # A task is several calls, though they take no turns on streams.
        self.several_streams = not self._native
        self.rates = base.rates
        self.launch_seconds = base.launch_seconds
        self.scaled_backward, self.fp32_products = base.scaled_backward, base.fp32_products
        self.dropout, self.accepts_inf_lse = base.dropout, base.accepts_inf_lse
        self.wide_masks = base.wide_masks

    def _kernel(self, geometry: Geometry, *, drops: bool) -> Kernel:
        """What computes batch entries of a geometry: tables of blocks know no dropout, nor do
        those of windows that blocks have of their own."""
        native = self._native.get(geometry)
        if native is None or (drops and (geometry.rules or geometry.has_block_windows)):
            return self._parts[geometry]
        return native

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self.base.refusal(replace(shape, is_causal=True))

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Kernel``."""
        every = Band(None, 0 if is_causal else None).count(0, n_queries, 0, n_keys)
        share = self._share * n_queries * n_keys / max(1, every)
        return Pairs(n_queries, n_keys, is_causal, self._verdict, min(1.0, share))

    def scores_of_pairs(self) -> ScoreTransform:
        """See ``Kernel``: the soft cap, and what the geometries keep."""
        return replace(self._scores, keeps=self._kept)

    def _kept(self, block: QueryBlock, keys: slice) -> torch.Tensor:
        pairs = block.indices(keys)
        numbers = pairs.entries % self.batch
        parts = [
            (at.stop - at.start, geometry.keeps(replace(pairs, entries=numbers[at])))
            for at, geometry in self._by_geometry(block.task.entries[block.entries])
        ]
        if len(parts) == 1:
            return parts[0][1]
        n_heads = max(kept.shape[1] for _, kept in parts)
        return torch.cat([kept.expand(n, n_heads, -1, -1) for n, kept in parts])

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """Numbers of heads and entries are needed where the mask may depend on them."""
        return all_heads or (self._uniform and not self.mask_mods)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        kernels = (self._kernel(g, drops=shape.dropout) for g in self._distinct)
        return self._times(extent) * max(k.forward_workspace_bytes(shape, extent) for k in kernels)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        kernels = (self._kernel(g, drops=shape.dropout) for g in self._distinct)
        return self._times(extent) * max(k.backward_workspace_bytes(shape, extent) for k in kernels)

    def _times(self, extent: Extent) -> int:
        """2 where results are computed in fp32 first, and the native kernel's bound has one."""
        mixed = not self._uniform and not any(g.rules for g in self._distinct)
        return 2 if extent.direct and self._native and mixed else 1

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for at, kernel, part in self._tasks(task):
            kernel.forward(part, Statistics(state.out[at], state.lse[at]))

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        scaling = grads.scaling
        factors = scaling.unscale, scaling.overflow
        for at, kernel, part in self._tasks(task):
            unscale, overflow = (None if t is None else _some(t, at) for t in factors)
            mine = {name: getattr(grads, name)[at] for name in _BY_ENTRY}
            mine["scaling"] = replace(scaling, unscale=unscale, overflow=overflow)
            kernel.backward(part, replace(grads, **mine))

    def _tasks(self, task: TaskTensors) -> Iterator[tuple[slice, Kernel, TaskTensors]]:
        """The task for each run of entries, with numbers of entries that functions know."""
        entries = tuple(entry % self.batch for entry in task.entries)
        task = replace(task, entries=entries)
        for at, geometry in self._by_geometry(entries):
            kernel = self._kernel(geometry, drops=task.dropout is not None)
            yield at, kernel, entries_of(task, at)

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` is rounded once, to ``call.stored``."""
        kernel, call = self._whole(call)
        return kernel.whole_forward(call)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients are rounded once, to ``call.stored``."""
        kernel, call = self._whole(call)
        return kernel.whole_backward(call, saved)

    def _whole(self, call: Call) -> tuple[Kernel, Call]:
        """What runs a whole call, and that call: the native kernel or an operator that takes bands,
        if it is one call of theirs; else this kernel, as a task."""
        geometry, base = self._distinct[0], self.base
        if self._uniform and not geometry.rules:
            kernel = self._kernel(geometry, drops=call.dropout is not None)
            if kernel is self._native.get(geometry):
                return kernel, call
            bands = isinstance(base, RectangleKernel) and base.bands and geometry.blocks is None
            more = call.bias is not None or call.dropout is not None
            if bands and not more and 0 not in (*call.query.shape[:3], *call.key.shape[2:3]):
                return base, replace(call, causal=geometry.band)
        return cast(Kernel, super()), replace(call, causal=False)

    def _by_geometry(self, entries: tuple[int, ...]) -> Iterator[tuple[slice, Geometry]]:
        """Runs of batch entries with the same geometry."""
        found = [self.geometries[entry % len(self.geometries)] for entry in entries]
        start = 0
        for geometry, run in groupby(found):
            stop = start + len(list(run))
            yield slice(start, stop), geometry
            start = stop


def _verdict(geometries: tuple[Geometry, ...], block: Ranges) -> Verdict:
    """The verdict on a block in all batch entries together."""
    found = geometries[0].verdict(block)
    for geometry in geometries[1:]:
        if found is PARTIAL or geometry.verdict(block) is not found:
            return PARTIAL
    return found


def _some(tensor: torch.Tensor, entries: slice) -> torch.Tensor:
    """Some of the batch entries of (b or 1, ...)."""
    return tensor if tensor.shape[0] in (1, entries.stop - entries.start) else tensor[entries]


def _if_any(tensor: torch.Tensor | None, entries: slice) -> torch.Tensor | None:
    return tensor if tensor is None else _some(four_dims(tensor), entries)


def entries_of(task: TaskTensors, entries: slice) -> TaskTensors:
    """A task with some of its batch entries."""
    return replace(
        task,
        query=_some(task.query, entries),
        key=_some(task.key, entries),
        value=_some(task.value, entries),
        bias=lambda r: _if_any(task.bias(r), entries),
        entries=task.entries[entries],
        dropout=task.dropout and task.dropout.at(0, entries.start),
    )


def kernel_for_mask(
    mask: Mask,
    wanted: str | Kernel,
    shape: CallShape,
    device: torch.device,
    *,
    needs_grad: bool,
    tried: bool = True,
) -> tuple[CallShape, str | Kernel]:
    """How a call under ``mask`` is computed, its bias and its sinks left aside.

    Args:
        wanted: the kernel that the caller asked for.
        needs_grad: whether it has to have gradients.
        tried: whether kernels have to pass their test on the device.

    Returns:
        The call, causal or not, and its kernel: ``wanted`` where nothing else is masked.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
        NotImplementedError: the kernel asked for cannot run it.
    """
    resolved = resolve(mask, shape)
    if resolved.keeps_all and mask.softcap is None:
        return replace(shape, is_causal=resolved.is_causal), wanted
    choose_base = partial(
        _base,
        wanted=wanted,
        shape=replace(shape, needs_grad=needs_grad),
        device=device,
        tried=tried,
    )
    if resolved.pair_bias is not None:
        biased = _kernel_with_bias(resolved, wanted, choose_base)
        if biased is not None:
            return replace(shape, is_causal=False), biased
        resolved = resolved.without_bias()
    base = choose_base(resolved)
    if id(base) not in resolved.kernels:
        resolved.kernels[id(base)] = _kernel_of(resolved, base)
    return replace(shape, is_causal=resolved.is_causal), resolved.kernels[id(base)]


def _kernel_with_bias(
    mask: ResolvedMask, wanted: str | Kernel, choose_base: partial[Kernel]
) -> Kernel | None:
    """The kernel of a mask that becomes a bias; None where no vendor's kernel takes that.

    Args:
        choose_base: ``_base`` of the call, of a mask.
    """
    pair_bias, shape = mask.pair_bias, choose_base.keywords["shape"]
    if pair_bias is None or shape.dropout:
        return None
    biased = replace(shape, bias=pair_bias.shape(shape.bias), is_causal=pair_bias.is_causal)
    select = partial(select_kernel, **{**choose_base.keywords, "shape": biased})
    try:
        kernel = select()
    except NotImplementedError:
        return None
    base = _with_softcap(kernel, mask.softcap) if _runs_parts(kernel) else None
    if not isinstance(base, RectangleKernel):
        return None
    if not base.takes_whole(biased, biased.n_tokens, all_heads=True):
        return None
    if shape.dtype in base.scaled_backward:
        # Tasks are scaled if whole calls are.
        choose_base = partial(choose_base, wanted=base)
    key = id(base), wanted if isinstance(wanted, str) else id(wanted)
    if key not in mask.kernels:
        by_blocks = cache(partial(_kernel_by_blocks, mask.by_blocks, choose_base))
        made = BiasedKernel(
            pair_bias,
            shape=mask.shape,
            base=base,
            by_blocks=by_blocks,
            scores=capped(mask.softcap),
        )
        made.remember_prices()
        mask.kernels[key] = made
    return mask.kernels[key]


def _kernel_of(mask: ResolvedMask, base: Kernel) -> Kernel:
    """The kernel of a mask whose parts ``base`` computes."""
    if mask.packing is None or mask.rules is None:
        return MaskedKernel(mask, base)
    # Not the mask itself, which holds its kernels.
    by_blocks = cache(partial(_kernel_by_blocks, mask.by_blocks, lambda _: base))
    shape = mask.shape
    packed = PackedKernel(
        mask.packing,
        rules=mask.rules,
        shape=shape,
        base=base,
        by_blocks=by_blocks,
        scores=capped(mask.softcap),
        share=mask.packing.pairs / (shape.batch * shape.n_queries * shape.n_keys),
    )
    bias_shapes = {bucket.bias_shape for bucket in mask.packing.buckets}
    takes_all = all(base.refusal(replace(shape, bias=bias)) is None for bias in bias_shapes)
    return packed if takes_all else by_blocks()


def _kernel_by_blocks(
    resolve_blocks: Callable[[], ResolvedMask], choose_base: Callable[[ResolvedMask], Kernel]
) -> Kernel:
    mask = resolve_blocks()
    return MaskedKernel(mask, choose_base(mask))


def _base(
    mask: ResolvedMask, *, wanted: str | Kernel, shape: CallShape, device: torch.device, tried: bool
) -> Kernel:
    """Choose the kernel for the parts of a mask, with the mask's soft cap.

    Raises:
        NotImplementedError: the kernel asked for cannot run them.
    """
    select = partial(select_kernel, shape=shape, device=device, tried=tried)
    if wanted == "auto":
        return _preferred_base(mask, shape, device, select)
    if wanted == "tiles" or isinstance(get_kernel(wanted), DenseKernel):
        return _tiles(mask.softcap)
    kernel = select(wanted)
    if not _runs_parts(kernel):
        raise NotImplementedError(
            f"kernel {kernel.name!r} cannot run a call under a Mask: only kernels of plain "
            "attention that can be called by rectangles do (native without options of its own, "
            "cudnn, flash, efficient, cpu and dense)"
        )
    capped = _with_softcap(kernel, mask.softcap)
    if capped is None:
        raise NotImplementedError(
            f"kernel {kernel.name!r} has no soft cap; fa4, native, dense and auto have"
        )
    return capped


def _preferred_base(
    mask: ResolvedMask, shape: CallShape, device: torch.device, select: Callable[..., Kernel]
) -> Kernel:
    """Choose the kernel for a call that asked for none: the first that can run the parts."""
    if mask.few_bands:
        # The preferred kernel of a call that keeps so many pairs, if it takes bands.
        pairs = mask.kept_pairs * shape.batch * shape.heads
        with suppress(NotImplementedError):
            kernel = select("auto", flops=2.0 * (shape.head_dim + shape.value_dim) * pairs)
            capped = _with_softcap(kernel, mask.softcap)
            if isinstance(capped, RectangleKernel) and capped.bands:
                return capped
    # On a GPU the native kernel runs a task in one launch, whatever its mask.
    for name in ("native", "auto") if device.type == "cuda" else ("auto",):
        with suppress(NotImplementedError):
            kernel = select(name)
            capped = _with_softcap(kernel, mask.softcap) if _runs_parts(kernel) else None
            if capped is not None:
                return capped
    return _tiles(mask.softcap)


def _runs_parts(kernel: Kernel) -> bool:
    """Tell whether a kernel computes plain attention and can be called by rectangles."""
    return kernel.operator and kernel.plain_variant is None


@lru_cache(maxsize=16)
def _with_softcap(kernel: Kernel, softcap: float | None) -> Kernel | None:
    """Return a kernel under a soft cap: one object for each; None if the kernel has none."""
    return kernel if softcap is None else kernel.with_softcap(softcap)


@lru_cache(maxsize=16)
def _tiles(softcap: float | None) -> Kernel:
    """Return the kernel that runs any call tile by tile: one object for each soft cap."""
    return TiledKernel(capped(softcap))
