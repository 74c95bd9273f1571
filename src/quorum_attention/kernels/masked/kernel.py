"""A call under a ``Mask`` by blocks: each task in one launch of the native kernel, or
part by part.

Batch entries of different geometry are computed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch

from quorum_attention.decomposition import PARTIAL, Pairs, Ranges, Rectangle, Verdict
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.partwise import PartwiseKernel
from quorum_attention.kernels.masked.resolve import ResolvedMask
from quorum_attention.kernels.masked.user_functions import BasedKernel, capped
from quorum_attention.kernels.native.kernel import NativeKernel
from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three, four_dims
from quorum_attention.kernels.protocol import Kernel, Launches, workspace_bytes
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.score_tiles import QueryBlock
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors


class MaskedKernel(BasedKernel):
    """Attention under a mask.

    Args:
        mask: for the sizes of the calls it is for.
        base: what computes the parts: an operator, whose scores are capped already.
    """

    def __init__(self, mask: ResolvedMask, base: Kernel) -> None:
        # Not the mask, which holds its kernels.
        super().__init__(base, capped(mask.softcap))
        self.geometries = mask.geometries
        self.mask_mods = mask.functions
        self._distinct = tuple(dict.fromkeys(mask.geometries))
        self._is_uniform = len(self._distinct) == 1
        n_pairs = mask.shape.n_queries * mask.shape.n_keys
        self._share = mask.kept_pairs / max(1, n_pairs)
        self._verdict = partial(_verdict, self._distinct)
        self._partwise: dict[Geometry, Kernel] = {}
        # One launch of these runs a whole task, or some do where there are rules.
        self._native: dict[Geometry, Kernel] = {}
        for geometry in self._distinct:
            self._partwise[geometry] = PartwiseKernel(geometry, base, self._scores)
            if isinstance(base, NativeKernel):
                self._native[geometry] = base.under(geometry)
        # Several calls take no turns on streams, but two of them in flight may be
        # faster.
        self.launches = Launches.ONE if self._native else Launches.CALLS_ON_STREAMS

    def _kernel(self, geometry: Geometry, *, drops: bool) -> Kernel:
        """The kernel of batch entries of a geometry.

        Tables of blocks know no dropout, nor do those of windows that blocks have of
        their own.
        """
        takes_no_dropout = bool(geometry.rules) or geometry.has_block_windows
        if not self._native or (drops and takes_no_dropout):
            return self._partwise[geometry]
        return self._native[geometry]

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Kernel``."""
        band = Band(high=0) if is_causal else Band()
        n_pairs = band.count(0, n_queries, 0, n_keys)
        share = self._share * n_queries * n_keys / max(1, n_pairs)
        return Pairs(
            n_queries,
            n_keys,
            is_causal,
            self._verdict,
            min(1.0, share),
        )

    def kept_pairs_of_tile(self, block: QueryBlock, keys: slice) -> torch.Tensor:
        """See ``BasedKernel``."""
        pairs = block.indices(keys)
        entries = block.task.entries[block.entries]
        parts: list[torch.Tensor] = []
        for run, geometry in self._runs_of_geometries(entries):
            is_kept = geometry.keeps(replace(pairs, entries=pairs.entries[run]))
            n_entries = run.stop - run.start
            parts.append(is_kept.expand(n_entries, -1, -1, -1))
        if len(parts) == 1:
            return parts[0]
        n_heads = max(part.shape[1] for part in parts)
        parts = [part.expand(-1, n_heads, -1, -1) for part in parts]
        return torch.cat(parts)

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """Numbers of heads and entries are needed where the mask may depend on them."""
        return all_heads or (self._is_uniform and not self.mask_mods)

    def pass_workspace_bytes(
        self, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """See ``BasedKernel``."""
        largest = 0
        for geometry in self._distinct:
            kernel = self._kernel(geometry, drops=shape.dropout)
            n_bytes = workspace_bytes(kernel, shape, extent, backward=backward)
            largest = max(largest, n_bytes)
        has_rules = any(geometry.rules for geometry in self._distinct)
        if extent.direct and self._native and not self._is_uniform and not has_rules:
            # Results are computed in fp32 first, and the native kernel's bound has one
            # of each.
            return 2 * largest
        return largest

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for run, kernel, part in self._tasks(task):
            state_of_run = Statistics(state.out[run], state.lse[run])
            kernel.forward(part, state_of_run)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        for run, kernel, part in self._tasks(task):
            kernel.backward(part, _gradients_of(grads, run))

    def _tasks(self, task: TaskTensors) -> Iterator[tuple[slice, Kernel, TaskTensors]]:
        """The task for each run of entries of one geometry."""
        drops = task.dropout is not None
        for run, geometry in self._runs_of_geometries(task.entries):
            kernel = self._kernel(geometry, drops=drops)
            yield run, kernel, entries_of(task, run)

    def whole_forward(self, call: Call) -> OutLse:
        """See ``Kernel``; ``out`` is rounded once, to ``call.stored``."""
        kernel = self._kernel_of_whole_call(call)
        if kernel is None:
            return super().whole_forward(replace(call, causal=False))
        return kernel.whole_forward(self._under_band(call, kernel))

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients are rounded once, to ``call.stored``."""
        kernel = self._kernel_of_whole_call(call)
        if kernel is None:
            return super().whole_backward(replace(call, causal=False), saved)
        return kernel.whole_backward(self._under_band(call, kernel), saved)

    def _kernel_of_whole_call(self, call: Call) -> Kernel | None:
        """The kernel that runs a call as one of its own: the native kernel, or an
        operator that takes bands. None: the call is run as a task."""
        geometry = self._distinct[0]
        if not self._is_uniform or geometry.rules:
            return None
        kernel = self._kernel(geometry, drops=call.dropout is not None)
        if kernel is not self._partwise[geometry]:
            return kernel
        if not isinstance(self.base, RectangleKernel) or not self.base.bands:
            return None
        if call.bias is not None or call.dropout is not None or not geometry.is_band:
            return None
        return self.base

    def _under_band(self, call: Call, kernel: Kernel) -> Call:
        """The call with its band, unless its kernel knows the geometry."""
        if kernel is not self.base:
            return call
        return replace(call, causal=self._distinct[0].band)

    def _runs_of_geometries(self, entries: range) -> Iterator[tuple[slice, Geometry]]:
        """Runs of batch entries with the same geometry."""
        n_geometries = len(self.geometries)
        by_entry = [self.geometries[entry % n_geometries] for entry in entries]
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


def _rows_of(tensor: torch.Tensor, entries: slice) -> torch.Tensor:
    """The rows (b or 1, ...) of some batch entries."""
    n_entries = entries.stop - entries.start
    has_them_alone = tensor.shape[0] in (1, n_entries)
    return tensor if has_them_alone else tensor[entries]


def entries_of(task: TaskTensors, entries: slice) -> TaskTensors:
    """A task with some of its batch entries."""

    def bias(rectangle: Rectangle) -> torch.Tensor | None:
        tensor = task.bias(rectangle)
        return tensor if tensor is None else _rows_of(four_dims(tensor), entries)

    return replace(
        task,
        query=_rows_of(task.query, entries),
        key=_rows_of(task.key, entries),
        value=_rows_of(task.value, entries),
        bias=bias,
        entries=task.entries[entries],
        dropout=task.dropout and task.dropout.at(0, entries.start),
    )


def _gradients_of(grads: Gradients, entries: slice) -> Gradients:
    """The gradients of some batch entries, and what they are computed from; views."""
    scaling = grads.scaling
    if scaling.unscale is not None:
        scaling = replace(scaling, unscale=_rows_of(scaling.unscale, entries))
    if scaling.overflow is not None:
        scaling = replace(scaling, overflow=_rows_of(scaling.overflow, entries))
    return Gradients(
        grads.grad_out[entries],
        grads.out[entries],
        grads.lse[entries],
        grads.grad_query[entries],
        grads.grad_key[entries],
        grads.grad_value[entries],
        scaling,
    )
