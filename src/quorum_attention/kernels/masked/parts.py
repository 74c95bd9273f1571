"""A task under a ``Mask``, by calls of a kernel that knows only plain and causal rectangles.

What a mask keeps of a task's rectangles is a short list of parts: plain rectangles, squares whose
lower or upper triangle is kept, and ragged ones, which are given an additive mask, made for them
alone. An upper triangle is a causal call with the orders of queries and keys turned round.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from quorum_attention.decomposition import Ranges, Rectangle, Rows
from quorum_attention.decomposition.bands import Part
from quorum_attention.decomposition.rectangles import Batch
from quorum_attention.kernels import reference
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.geometry import TESTED, Geometry
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, add_, merge_
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
    Three,
)
from quorum_attention.kernels.rectangles import RectangleKernel, four_dims, shifted_lse
from quorum_attention.kernels.tensors import Pick, key_rows, positions, query_rows

# Parts are joined to one call up to so many queries, and keys.
_JOINED = 8192
# Triangles up to this side are ragged, where they are no calls of their own.
_LEAF = 256
# Tasks whose parts are remembered.
_MOST_TASKS = 512
_RAGGED = MaskShape(boolean=True, batch=True, heads=True, rows=True)


class Tiles(reference.ReferenceDropout):
    """The reference with a soft cap, for rectangles: any device, any floating dtype.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)``, before the mask is added; None
            is none.
    """

    name = "tiles"
    grouped = True
    rates = (0.3, 0.3)
    wide_products = True
    scaled_backward = frozenset()

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap
        if softcap is not None:
            self.scores = reference.Scores(change=self._change, matrices=1)

    def refusal(self, call: CallShape) -> str | None:
        """None: it runs every call."""
        return None

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` in fp32 (fp64 for fp64 inputs)."""
        wide = replace(call, stored=reference.work_dtype(call.query))
        return reference.whole_forward(wide, self.scores)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients in fp32 (fp64 for fp64 inputs)."""
        wide = replace(call, stored=reference.work_dtype(call.query))
        return reference.whole_backward(wide, saved, self.scores)

    rectangle_forward, rectangle_backward = whole_forward, whole_backward

    def cap_(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Cap scaled scores in place; returns the derivative of the cap, None without one."""
        return None if self.softcap is None else self._change(scores, None, slice(None), True)[1]

    def _change(
        self,
        scores: torch.Tensor,
        block: reference.Block | None,
        keys: slice,
        derivative: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.softcap is not None
        scores.div_(self.softcap).tanh_()
        found = (scores * scores).neg_().add_(1.0) if derivative else None
        return scores.mul_(self.softcap), found

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        return reference.forward_bytes(call, replace(extent, direct=True), self.scores)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        return reference.backward_bytes(call, replace(extent, direct=True), self.scores)


class _Parts(NamedTuple):
    """The parts of a task, local positions: those of plain and causal calls, upper triangles, and
    ragged ones."""

    clear: tuple[Rectangle, ...]
    upper: tuple[Rectangle, ...]
    ragged: tuple[Rectangle, ...]


class ByParts(Kernel):
    """See above; for batch entries of one geometry.

    Args:
        base: what computes the parts: an operator.
        tiles: have the soft cap that ``base`` has; they take masks that it does not.
    """

    name = "parts"

    def __init__(self, geometry: Geometry, base: Kernel, tiles: Tiles) -> None:
        self._tiles, self._operator = tiles, copy.copy(base)
        # Calls that take grouped heads as they are run all heads of a part at a time.
        self._operator.grouped = base.grouped or base.takes_whole(2, 1, 1, False, True)
        self._bands = base if isinstance(base, RectangleKernel) and base.bands else None
        self._geometry = geometry
        self._ragged = bool(geometry.rules) or not geometry.band.keeps_all
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
        most += 2 * rows * _wide(call)  # the lse without rows that have no key
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

        limits = self._limits((extent.max_queries, extent.max_keys), call)
        most = ask(replace(call, is_causal=True), *limits)
        # Copies of a triangle's rows in the other order.
        rows = extent.batch * extent.query_heads * limits[0]
        keys = extent.batch * extent.key_heads * limits[1]
        copies = rows * (2 if backward else 1) + keys
        most += 2 * copies * (call.head_dim + call.value_dim) * call.dtype.itemsize + rows * 8
        if self._ragged:
            queries, keys = min(TESTED, limits[0]), min(2 * TESTED, limits[1])
            lanes = extent.batch * extent.query_heads
            tests = (lanes * (2 + 2 * call.dtype.itemsize) + 64) * queries * keys
            masked = replace(call, mask=_RAGGED, is_causal=False)
            most = max(most, tests + ask(masked, queries, keys))
        return most + MERGE_WORKSPACE_BYTES

    def _limits(self, limits: tuple[int, int], call: CallShape) -> tuple[int, int]:
        """The most queries and keys of one call: of the largest part, or of parts joined."""
        queries, keys = self._geometry.most(*limits, bands=self._takes_bands(call))
        return max(queries, min(limits[0], _JOINED)), max(keys, min(limits[1], _JOINED))

    def _takes_bands(self, call: CallShape) -> bool:
        # What drops, and what takes a mask, knows no bands.
        return self._bands is not None and call.mask is None and not call.dropout

    def _kernel_for(self, call: CallShape) -> Kernel:
        """The operator, or ``Tiles`` for masks that it does not take."""
        takes = call.mask is None or self._operator.refusal(replace(call, mask=_RAGGED)) is None
        return self._operator if takes else self._tiles

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for kernel, part, is_upper in self._tasks(task):
            if is_upper:
                _forward_upper(cast(RectangleKernel, kernel), part, state)
            else:
                kernel.forward(part, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        for kernel, part, is_upper in self._tasks(task):
            if is_upper:
                _backward_upper(cast(RectangleKernel, kernel), part, grads)
            else:
                kernel.backward(part, grads)

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``."""
        banded = self._banded(call)
        if self._bands is not None and banded is not None:
            return self._bands.whole_forward(banded)
        return reference.forward_by_task(self.forward, replace(call, causal=False))

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``."""
        banded = self._banded(call)
        if self._bands is not None and banded is not None:
            return self._bands.whole_backward(banded, saved)
        return reference.backward_by_task(self.backward, replace(call, causal=False), saved)

    def _banded(self, call: Call) -> Call | None:
        """A whole call as one with a band; None where it is more than that."""
        more = self._geometry.rules or self._geometry.blocks is not None
        more = more or call.bias is not None or call.dropout is not None
        empty = 0 in (*call.query.shape[:3], call.key.shape[2])
        return None if more or empty else replace(call, causal=self._geometry.band)

    def _tasks(self, task: TaskTensors) -> Iterator[tuple[Kernel, TaskTensors, bool]]:
        """The task as one without this mask, one of upper triangles (True), and one whose
        rectangles have masks of their own."""
        live = tuple(r for r in task.rectangles if r.n_queries > 0 and r.n_keys > 0)
        if not live or 0 in task.query.shape[:2]:
            return
        call = _shape_of(task, masked=task.has_mask(live[0]))
        # What computes a whole task takes no triangles off its diagonal.
        triangles = task.dropout is None and isinstance(self._operator, RectangleKernel)
        kinds = {"lower": triangles, "upper": triangles and call.mask is None}
        bands = self._takes_bands(call)
        geometry, key = self._geometry, (task.task, live, *kinds.values(), bands)
        parts = self._known.get(key, lambda: _parts_of(task, live, geometry, kinds, bands))
        limits = task.max_queries, task.max_keys
        if task.max_queries:
            limits = self._limits(limits, call)
        inside = replace(task, max_queries=limits[0], max_keys=limits[1], lanes=None)
        if parts.clear:
            yield self._kernel_for(call), replace(inside, rectangles=parts.clear), False
        if parts.upper:
            yield self._kernel_for(call), replace(inside, rectangles=parts.upper), True
        if parts.ragged:
            kernel = self._kernel_for(replace(call, mask=_RAGGED))
            masks = _PartMasks(task, geometry)
            yield kernel, replace(inside, rectangles=parts.ragged, bias=masks), False


def _parts_of(
    task: TaskTensors,
    rectangles: tuple[Rectangle, ...],
    geometry: Geometry,
    triangles: dict[str, bool],
    bands: bool,
) -> _Parts:
    """What a geometry keeps of rectangles; ``triangles`` (of which kind), ``bands``: what calls may
    be of."""
    found: dict[str, list[Rectangle]] = {"clear": [], "upper": [], "ragged": []}
    for r in rectangles:
        for queries, keys, _ in task.task.contiguous(r):
            # The geometry has the call's own causal rule, so that of a rectangle adds nothing.
            block = Ranges.of(*queries[:2], *keys[:2])
            for whole in geometry.parts(block, bands=bands):
                for part in [whole] if triangles.get(whole.kind, True) else _cut(whole):
                    causal: object = part.kind in ("lower", "upper")
                    if part.kind == "band":
                        causal = geometry.band.moved(part.query_start - part.key_start)
                    made = _local(part, queries, keys, causal)
                    found.get(part.kind, found["clear"]).append(made)
    return _Parts(*map(tuple, found.values()))


def _local(part: Part, queries: Rows, keys: Rows, causal: object) -> Rectangle:
    """A part in local positions; for an operator with bands, ``causal`` may be one."""
    by_query, by_key = queries.local - queries.start, keys.local - keys.start
    return Rectangle(
        part.query_start + by_query, part.query_stop + by_query,
        part.key_start + by_key, part.key_stop + by_key, cast(bool, causal),
    )  # fmt: skip


def _cut(triangle: Part) -> Iterator[Part]:
    """A triangle as plain parts, and ragged ones along its edge."""
    q0, q1, k0, k1 = (
        triangle.query_start, triangle.query_stop, triangle.key_start, triangle.key_stop
    )  # fmt: skip
    if q1 - q0 <= _LEAF:
        yield Part(q0, q1, k0, k1, "ragged")
        return
    half = -(-(q1 - q0) // (2 * _LEAF)) * _LEAF
    q, k = q0 + half, k0 + half
    yield from _cut(Part(q0, q, k0, k, triangle.kind))
    yield from _cut(Part(q, q1, k, k1, triangle.kind))
    yield Part(q0, q, k, k1) if triangle.kind == "upper" else Part(q, q1, k0, k)


def _turned_calls(
    kernel: RectangleKernel, task: TaskTensors, backward: bool
) -> Iterator[tuple[Batch, Pick, Call]]:
    """The calls of a task of upper triangles, with both orders turned round: where the rows and the
    keys of each are, and what selects its heads."""
    for batch in kernel.calls(task, backward=backward):
        for pick, call in kernel.of_heads(task, batch):
            yield batch, pick, call.mapped(_turned, _turned)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(2)


def _forward_upper(kernel: RectangleKernel, task: TaskTensors, state: Statistics) -> None:
    for batch, pick, call in _turned_calls(kernel, task, False):
        out, lse = map(_turned, kernel.whole_forward(call))
        with task.timed("merge"):
            merge_(query_rows(pick(state.out), batch), query_rows(pick(state.lse), batch), out, lse)
        del call, out, lse  # freed before the next call is made


def _backward_upper(kernel: RectangleKernel, task: TaskTensors, grads: Gradients) -> None:
    scaling = grads.scaling
    given = Saved(grads.grad_out, grads.out, shifted_lse(grads.lse, scaling.shift))
    for batch, pick, call in _turned_calls(kernel, task, True):
        saved = given.mapped(lambda tensor, at=batch, of=pick: _turned(query_rows(of(tensor), at)))  # type: ignore[misc]
        found = tuple(map(_turned, kernel.whole_backward(call, saved)))
        targets = (
            query_rows(pick(grads.grad_query), batch), key_rows(grads.grad_key, batch),
            key_rows(grads.grad_value, batch),
        )  # fmt: skip
        with task.timed("merge"):
            undo = 2.0**-scaling.shift, scaling.unscale, scaling.overflow
            for target, part in zip(targets, found, strict=True):
                add_(target, part, *undo)
        del call, saved, found


class _PartMasks:
    """The additive mask of a ragged part of a task, as ``TaskTensors.bias``: what band and rules
    mask there, and the task's own. Where there are no rules, parts of one size may share it."""

    def __init__(self, task: TaskTensors, geometry: Geometry) -> None:
        self._task, self._geometry = task, geometry
        self._known: tuple[object, torch.Tensor] | None = None

    def __call__(self, r: Rectangle) -> torch.Tensor:
        task = self._task
        query, key = (
            task.task.segments(start, start + 1)[0].start for start in (r.query_start, r.key_start)
        )
        place = key - query, r.n_queries, r.n_keys
        if self._known is None or self._known[0] != place or self._geometry.rules:
            self._known = None  # freed before the next one is made
            self._known = place, self._tested(r)
        given, tested = task.bias(r), self._known[1]
        if self._geometry.rules:
            self._known = None
        return tested if given is None else four_dims(given) + tested

    def _tested(self, r: Rectangle) -> torch.Tensor:
        """What band and rules mask of a part, additive, (b|1, h|1, queries, keys)."""
        query = self._task.query
        kept = four_dims(self._geometry.kept(indices(self._task, r)))
        # Where a dimension is expanded, one of its entries is enough.
        for dim in (0, 1):
            if kept.shape[dim] > 1 and kept.stride(dim) == 0:
                kept = kept.narrow(dim, 0, 1)
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        return torch.where(kept, zero, torch.full_like(zero, -torch.inf))


def indices(task: TaskTensors, r: Rectangle) -> Indices:
    """The pairs of a rectangle, for all batch entries and heads of a task, by their numbers."""
    device, heads = task.query.device, task.query.shape[1]
    return Indices(
        torch.tensor(task.entries, device=device),
        torch.arange(task.first_head, task.first_head + heads, device=device),
        positions(task.task, r.query_start, r.query_stop, device),
        positions(task.task, r.key_start, r.key_stop, device),
    )


def _shape_of(task: TaskTensors, *, masked: bool) -> CallShape:
    query, key, value = task.query, task.key, task.value
    return CallShape(
        query.device.type, query.dtype, query.shape[1], key.shape[1], query.shape[-1],
        value.shape[-1], needs_grad=True, mask=_RAGGED if masked else None,
        dropout=task.dropout is not None,
    )  # fmt: skip


def _wide(call: CallShape) -> int:
    return 8 if call.dtype == torch.float64 else 4
