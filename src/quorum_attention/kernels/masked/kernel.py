"""A call under a ``Mask`` by blocks: each task in one launch of the native kernel, or part by part.

Batch entries of different geometry are computed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import cast

import torch

from quorum_attention.decomposition import PARTIAL, Pairs, Ranges, Verdict
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.partwise import PartwiseKernel
from quorum_attention.kernels.masked.resolve import ResolvedMask
from quorum_attention.kernels.masked.user_functions import UserModKernel, capped
from quorum_attention.kernels.native.kernel import NativeKernel
from quorum_attention.kernels.operator_call import Call, Saved, Three
from quorum_attention.kernels.operator_inputs import four_dims
from quorum_attention.kernels.protocol import Kernel, Launches
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.score_tiles import QueryBlock, ScoreTransform
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

_BY_ENTRY = ("grad_out", "out", "lse", "grad_query", "grad_key", "grad_value")


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
        # Several calls take no turns on streams, but two of them in flight may be faster.
        self.launches = Launches.ONE if self._native else Launches.CALLS_ON_STREAMS
        self.compute_like(base)

    def _kernel(self, geometry: Geometry, *, drops: bool) -> Kernel:
        """The kernel of batch entries of a geometry.

        Tables of blocks know no dropout, nor do those of windows that blocks have of their own.
        """
        native = self._native.get(geometry)
        if native is None or (drops and (geometry.rules or geometry.has_block_windows)):
            return self._parts[geometry]
        return native

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self.base.refusal(replace(shape, is_causal=True))

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Kernel``."""
        n_pairs = Band(None, 0 if is_causal else None).count(0, n_queries, 0, n_keys)
        share = self._share * n_queries * n_keys / max(1, n_pairs)
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
        n_heads = max(is_kept.shape[1] for _, is_kept in parts)
        return torch.cat([is_kept.expand(n, n_heads, -1, -1) for n, is_kept in parts])

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
            fields = {name: getattr(grads, name)[at] for name in _BY_ENTRY}
            fields["scaling"] = replace(scaling, unscale=unscale, overflow=overflow)
            kernel.backward(part, replace(grads, **fields))

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
        """The kernel that runs a whole call, and its call.

        That is the native kernel or an operator that takes bands, if it is one call of theirs; else
        this kernel, as a task.
        """
        geometry, base = self._distinct[0], self.base
        if self._uniform and not geometry.rules:
            kernel = self._kernel(geometry, drops=call.dropout is not None)
            if kernel is self._native.get(geometry):
                return kernel, call
            bands = isinstance(base, RectangleKernel) and base.bands and geometry.blocks is None
            is_plain = call.bias is None and call.dropout is None
            if bands and is_plain and 0 not in (*call.query.shape[:3], *call.key.shape[2:3]):
                return base, replace(call, causal=geometry.band)
        return cast(Kernel, super()), replace(call, causal=False)

    def _by_geometry(self, entries: tuple[int, ...]) -> Iterator[tuple[slice, Geometry]]:
        """Runs of batch entries with the same geometry."""
        by_entry = [self.geometries[entry % len(self.geometries)] for entry in entries]
        start = 0
        for geometry, run in groupby(by_entry):
            stop = start + len(list(run))
            yield slice(start, stop), geometry
            start = stop


def _verdict(geometries: tuple[Geometry, ...], block: Ranges) -> Verdict:
    """The verdict on a block in all batch entries together."""
    verdict = geometries[0].verdict(block)
    for geometry in geometries[1:]:
        if verdict is PARTIAL or geometry.verdict(block) is not verdict:
            return PARTIAL
    return verdict


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
