"""A task under a ``Mask``, by calls of a kernel that knows only plain and causal rectangles.

What a mask keeps of a task's rectangles is a short list of parts: plain rectangles, squares whose
lower or upper triangle is kept, and ragged ones, which are given an additive mask, made for them
alone. An upper triangle is a causal call with the orders of queries and keys turned round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from quorum_attention.decomposition import Ranges, Rectangle, Rows
from quorum_attention.decomposition.bands import Part
from quorum_attention.decomposition.rectangles import cut
from quorum_attention.kernels import reference
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.block_table import (
    BLOCK,
    blocks_key,
    evaluated_bytes,
    joined_along_rows,
    listed_blocks,
    whole_region,
)
from quorum_attention.kernels.masked.functions import MaskMod, ScoreMod, tensors
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Indices,
    Kernel,
    MaskShape,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.rectangles import RectangleKernel, four_dims
from quorum_attention.kernels.reference import Tiles
from quorum_attention.kernels.scaling import Scaling

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
_ANY_MASK = MaskShape(boolean=True, batch=True, heads=True, rows=True)


class ModsKernel(Kernel):
    """A kernel of users' functions.

    Attributes:
        mask_mods, score_mod: they.
    """

    own_attention = True
    sparse = True
    mask_mods: tuple[MaskMod, ...]
    score_mod: ScoreMod | None = None

    def captured(self) -> list[torch.Tensor]:
        """See ``Kernel``."""
        return tensors(self.called_back())

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
    """A ``reference.Change``: scores become ``cap * tanh(score / cap)``, in place."""
    scores.div_(cap).tanh_()
    found = (scores * scores).neg_().add_(1.0) if derivative else None
    return scores.mul_(cap), found


def capped(softcap: float | None) -> reference.Scores:
    """The change of scores by a soft cap; None is none."""
    if softcap is None:
        return reference.PLAIN
    return reference.Scores(change=partial(_cap, softcap), matrices=1)


_Parts = tuple[tuple[Rectangle, ...], ...]
"""The parts of a task, local positions: those of plain and causal calls, upper triangles, and
ragged ones."""


class ByParts(Kernel):
    """See above; for batch entries of one geometry.

    Args:
        base: what computes the parts: an operator, or ``Tiles``.
        scores: the change of scores that ``base`` makes.
    """

    name = "parts"

    def __init__(self, geometry: Geometry, base: Kernel, scores: reference.Scores) -> None:
        self._geometry, self._operator = geometry, copy.copy(base)
        # Calls that take grouped heads as they are run all heads of a part at a time.
        self._operator.grouped = base.grouped or base.takes_whole(2, 1, 1, False, True)
        self._upper = copy.copy(self._operator)
        if isinstance(self._upper, RectangleKernel):
            self._upper.turned = True
        self._bands = base if isinstance(base, RectangleKernel) and base.bands else None
        self._tiles = Tiles(scores)
        self._has_ragged = bool(geometry.rules) or not geometry.band.keeps_all
        self._known: Cache[_Parts] = Cache(_MOST_TASKS, lambda parts: 1)

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self._operator.refusal(call)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        most = self._bytes(call, extent, backward=False)
        if extent.direct:
            rows = extent.batch * extent.query_heads * extent.n_tokens
            most += rows * (call.value_dim + 1) * _wide(call) + rows * call.value_dim * 4
        return most

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        most = self._bytes(call, extent, backward=True)
        rows = extent.batch * extent.query_heads * extent.n_tokens
        if isinstance(self._operator, RectangleKernel):
            most += rows * 2 * _wide(call)  # the lse without rows that have no key
        by_tiles = self._kernel_for(replace(call, mask=_ANY_MASK)) is self._tiles
        if by_tiles and call.dtype in self._operator.scaled_backward:
            most += rows * 4 * call.value_dim  # an upstream gradient that is not scaled
        if extent.direct:
            keys = extent.batch * extent.key_heads * extent.n_tokens
            numbers = rows * call.head_dim + keys * (call.head_dim + call.value_dim)
            most += numbers * (_wide(call) + 4)
        return most

    def _bytes(self, call: CallShape, extent: Extent, *, backward: bool) -> int:
        """Of the calls of plain and causal parts, and of ragged ones with their masks."""

        def ask(call: CallShape, queries: int, keys: int) -> int:
            kernel = self._kernel_for(call)
            inside = replace(extent, max_queries=queries, max_keys=keys, direct=False)
            if backward:
                return kernel.backward_workspace_bytes(call, inside)
            return kernel.forward_workspace_bytes(call, inside)

        lanes, key_lanes = extent.batch * extent.query_heads, extent.batch * extent.key_heads
        queries, keys = self._limits((extent.max_queries, extent.max_keys), call)
        most = ask(replace(call, is_causal=True), queries, keys)
        if isinstance(self._operator, RectangleKernel):
            # Copies of a triangle's rows in the other order.
            copies = lanes * queries * (2 if backward else 1) + key_lanes * keys
            most += 2 * copies * (call.head_dim + call.value_dim) * call.dtype.itemsize
            most += 8 * lanes * queries + MERGE_WORKSPACE_BYTES
        if self._has_ragged:
            rules = self._geometry.rules
            queries = min(BLOCK if rules else _LEAF, queries)
            keys = min(_WIDEST if rules else _LEAF, keys)
            tests = (lanes * (2 + 2 * call.dtype.itemsize) + (64 if rules else 16)) * queries * keys
            masked = replace(call, mask=_ANY_MASK, is_causal=False)
            most = max(most, tests + ask(masked, queries, keys))
        if self._geometry.functions:
            most = max(most, evaluated_bytes(lanes, _EVALUATED_BYTES))
        return most

    def _limits(self, limits: tuple[int, int], call: CallShape) -> tuple[int, int]:
        """The most queries and keys of one call: of the largest part, or of parts joined."""
        queries, keys = limits
        if not self._geometry.rules:
            queries, keys = self._geometry.most(*limits, bands=self._takes_bands(call))
        return max(queries, min(limits[0], _JOINED)), max(keys, min(limits[1], _JOINED))

    def _takes_bands(self, call: CallShape) -> bool:
        # What drops, and what takes a mask, knows no bands.
        return self._bands is not None and call.mask is None and not call.dropout

    def _kernel_for(self, call: CallShape) -> Kernel:
        """The operator, or ``Tiles`` for a call's mask that it does not take."""
        takes = call.mask is None or self._operator.refusal(replace(call, mask=_ANY_MASK)) is None
        return self._operator if takes else self._tiles

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for kernel, part in self._tasks(task):
            kernel.forward(part, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        for kernel, part in self._tasks(task):
            kernel.backward(part, _unscaled(grads) if isinstance(kernel, Tiles) else grads)

    def _tasks(self, task: TaskTensors) -> Iterator[tuple[Kernel, TaskTensors]]:
        """The parts of the task: for the operator, upper triangles, and ragged ones."""
        live = tuple(r for r in task.rectangles if r.n_queries > 0 and r.n_keys > 0)
        if not live or 0 in task.query.shape[:2]:
            return
        call = task.shape(_ANY_MASK if task.has_mask(live[0]) else None)
        kernel, parts = self._kernel_for(call), self._parts_of(task, live, call)
        limits = task.max_queries, task.max_keys
        if task.max_queries:
            limits = self._limits(limits, call)
        inside = replace(task, max_queries=limits[0], max_keys=limits[1], lanes=None)
        clear, upper, ragged = parts
        if clear:
            yield kernel, replace(inside, rectangles=clear)
        if upper:
            yield self._upper, replace(inside, rectangles=upper)
        if ragged:
            masks = partial(_part_mask, self._geometry, task, {})
            kernel = self._kernel_for(replace(call, mask=_ANY_MASK))
            yield kernel, replace(inside, rectangles=ragged, bias=masks)

    def _parts_of(self, task: TaskTensors, live: tuple[Rectangle, ...], call: CallShape) -> _Parts:
        """What the geometry keeps of rectangles; it has the call's own causal rule."""
        geometry, bands = self._geometry, self._takes_bands(call)
        if geometry.rules:
            key = blocks_key(geometry, task, live)
            return self._known.get(key, lambda: _by_blocks(task, live, geometry))
        # What computes a whole task takes no triangles off its diagonal.
        triangles = task.dropout is None and isinstance(self._operator, RectangleKernel)
        kinds = {"lower": triangles, "upper": triangles and call.mask is None}
        key = (task.task, live, *kinds.values(), bands)
        return self._known.get(key, lambda: _by_bands(task, live, geometry, kinds, bands))


def _part_mask(
    geometry: Geometry, task: TaskTensors, known: dict[object, torch.Tensor], r: Rectangle
) -> torch.Tensor:
    """What a geometry masks of a part, with the task's own mask: additive, (b|1, h|1, q, k).

    Args:
        known: the last one, where it is the same for other parts at such a distance and size.
    """
    query, key = (task.task.segments(at, at + 1)[0].start for at in (r.query_start, r.key_start))
    place = None if geometry.rules else (key - query, r.n_queries, r.n_keys)
    tested = known.pop(place, None)
    if tested is None:
        known.clear()  # freed before the next one is made
        tested = _tested(geometry, task, r)
    if place is not None:
        known[place] = tested
    given = task.bias(r)
    return tested if given is None else four_dims(given) + tested


def _tested(geometry: Geometry, task: TaskTensors, r: Rectangle) -> torch.Tensor:
    # Without rules a part lies in a block of the geometry: the band is all that is left.
    rules = geometry if geometry.rules else Geometry(geometry.band)
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
            block = Ranges.of(*queries[:2], *keys[:2])
            for whole in geometry.parts(block, bands=bands):
                for part in [whole] if triangles.get(whole.kind, True) else _cut(whole):
                    causal: object = part.kind in ("lower", "upper")
                    if part.kind == "band":
                        causal = geometry.band.moved(part.query_start - part.key_start)
                    made = _local(part, queries, keys, causal)
                    found.get(part.kind, found["clear"]).append(made)
    return tuple(map(tuple, found.values()))


def _local(part: Part, queries: Rows, keys: Rows, causal: object) -> Rectangle:
    """A part in local positions; for an operator with bands, ``causal`` may be one."""
    by_query, by_key = queries.local - queries.start, keys.local - keys.start
    return Rectangle(
        part.query_start + by_query, part.query_stop + by_query,
        part.key_start + by_key, part.key_stop + by_key, cast(bool, causal),
    )  # fmt: skip


def _cut(triangle: Part) -> Iterator[Part]:
    """A triangle as plain parts, and ragged squares along its edge."""
    q, k, side = triangle.query_start, triangle.key_start, triangle.n_queries
    for a in range(0, side, _LEAF):
        b = min(a + _LEAF, side)
        yield Part(q + a, q + b, k + a, k + b, "ragged")
        first, last = (b, side) if triangle.kind == "upper" else (0, a)
        if first < last:
            yield Part(q + a, q + b, k + first, k + last)


def _unscaled(grads: Gradients) -> Gradients:
    """Gradients whose upstream one is not divided: the reference computes in fp32."""
    factor = grads.scaling.unscale
    if factor is None:
        return grads
    factor = factor.repeat_interleave(grads.grad_out.shape[1] // factor.shape[1], 1)
    return replace(grads, grad_out=grads.grad_out * factor[..., None, None], scaling=Scaling())


def _wide(call: CallShape) -> int:
    return 8 if call.dtype == torch.float64 else 4
