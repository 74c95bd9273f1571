"""A call under a ``Mask``: each task in one launch of the native kernel, or part by part
(``parts.py``). Batch entries of different geometry are computed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby

import torch

from quorum_attention.decomposition import (
    PARTIAL,
    Pairs,
    Ranges,
    Rectangle,
    Verdict,
)
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.fa4 import Fa4Kernel
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.parts import ByParts, ModsKernel, capped
from quorum_attention.kernels.masked.resolve import ResolvedMask, Sizes, resolve
from quorum_attention.kernels.native.kernel import NativeKernel
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Kernel,
    Saved,
    Statistics,
    TaskTensors,
    Three,
)
from quorum_attention.kernels.rectangles import RectangleKernel, four_dims
from quorum_attention.kernels.reference import (
    Block,
    Scores,
    Tiles,
    backward_by_task,
    forward_by_task,
)
from quorum_attention.kernels.registry import get_kernel, select_kernel
from quorum_attention.mask import Mask

_BY_ENTRY = ("grad_out", "out", "lse", "grad_query", "grad_key", "grad_value")


class MaskedKernel(ModsKernel):
    """Attention under a mask.

    Args:
        mask: for the sizes of the calls it is for; torch.vmap may add entries, which are those of
            the batch over and over.
        base: what computes the parts: an operator, whose scores are capped already.
    """

    def __init__(self, mask: ResolvedMask, base: Kernel) -> None:
        # Not the mask, which holds its kernels.
        self.batch, self.base, self.mask_mods = mask.sizes.batch, base, mask.functions
        self.geometries = mask.geometries
        self._distinct = tuple(dict.fromkeys(mask.geometries))
        self._uniform = len(self._distinct) == 1
        self._scores, self.name = capped(mask.softcap), base.name
        self._parts = {g: ByParts(g, base, self._scores) for g in self._distinct}
        # One launch of these runs a whole task, or some do where there are rules.
        self._native: dict[Geometry, Kernel] = {}
        if isinstance(base, NativeKernel):
            self._native = {g: base.under(g) for g in self._distinct}
        self._share = mask.kept_pairs / max(1, mask.sizes.n_queries * mask.sizes.n_keys)
        self._verdict = partial(_verdict, self._distinct)
        self.whole_tasks = bool(self._native)
        # A task is several calls, though they take no turns on streams.
        self.several_streams = not self._native
        self.rates, self.pace = base.rates, base.pace
        self.launch_seconds = base.launch_seconds
        self.scaled_backward, self.wide_products = base.scaled_backward, base.wide_products
        self.dropout, self.empty_rows = base.dropout, base.empty_rows

    def _kernel(self, geometry: Geometry, *, drops: bool) -> Kernel:
        """What computes batch entries of a geometry: tables of blocks know no dropout."""
        by_parts = not self._native or (drops and geometry.rules)
        return self._parts[geometry] if by_parts else self._native[geometry]

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self.base.refusal(replace(call, is_causal=True))

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Kernel``."""
        every = Band(None, 0 if is_causal else None).count(0, n_queries, 0, n_keys)
        share = self._share * n_queries * n_keys / max(1, every)
        return Pairs(n_queries, n_keys, is_causal, self._verdict, min(1.0, share))

    def scores_of_pairs(self) -> Scores:
        """See ``Kernel``: the soft cap, and what the geometries keep."""
        return replace(self._scores, kept=self._kept)

    def _kept(self, block: Block, keys: slice) -> torch.Tensor:
        rows = Rectangle(block.rows.start, block.rows.stop, keys.start, keys.stop)
        pairs = block.task.indices(rows, block.entries, block.heads)
        numbers = pairs.entries % self.batch
        parts = [
            (at.stop - at.start, geometry.keeps(replace(pairs, entries=numbers[at])))
            for at, geometry in self._by_geometry(block.task.entries[block.entries])
        ]
        if len(parts) == 1:
            return parts[0][1]
        n_heads = max(kept.shape[1] for _, kept in parts)
        return torch.cat([kept.expand(n, n_heads, -1, -1) for n, kept in parts])

    def takes_whole(
        self, query_heads: int, key_heads: int, tokens: int, masked: bool, every: bool
    ) -> bool:
        """Numbers of heads and entries are needed where the mask may depend on them."""
        return every or (self._uniform and not self.mask_mods)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        kernels = (self._kernel(g, drops=call.dropout) for g in self._distinct)
        return self._times(extent) * max(k.forward_workspace_bytes(call, extent) for k in kernels)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        kernels = (self._kernel(g, drops=call.dropout) for g in self._distinct)
        return self._times(extent) * max(k.backward_workspace_bytes(call, extent) for k in kernels)

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
            yield at, kernel, _entries_of(task, at)

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` is rounded once, to ``call.stored``."""
        whole = self._whole(call)
        if whole is None:
            return forward_by_task(self.forward, replace(call, causal=False))
        kernel, call = whole
        return kernel.whole_forward(call)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients are rounded once, to ``call.stored``."""
        whole = self._whole(call)
        if whole is None:
            return backward_by_task(self.backward, replace(call, causal=False), saved)
        kernel, call = whole
        return kernel.whole_backward(call, saved)

    def _whole(self, call: Call) -> tuple[Kernel, Call] | None:
        """The one call of the native kernel, or of an operator that takes bands, that a whole call
        is; None: it is run as a task."""
        geometry, base = self._distinct[0], self.base
        if not self._uniform or geometry.rules:
            return None
        if self._native:
            return self._native[geometry], call
        bands = isinstance(base, RectangleKernel) and base.bands and geometry.blocks is None
        more = call.bias is not None or call.dropout is not None
        if not bands or more or 0 in (*call.query.shape[:3], *call.key.shape[2:3]):
            return None
        return base, replace(call, causal=geometry.band)

    def _by_geometry(self, entries: tuple[int, ...]) -> Iterator[tuple[slice, Geometry]]:
        """Runs of batch entries with the same geometry."""
        found = [self.geometries[entry % len(self.geometries)] for entry in entries]
        if not found:
            yield slice(0, 0), self.geometries[0]
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


def _entries_of(task: TaskTensors, entries: slice) -> TaskTensors:
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
    sizes: Sizes,
    wanted: str | Kernel,
    call: CallShape,
    device: torch.device,
    *,
    tried: bool = True,
) -> tuple[bool, str | Kernel]:
    """How a call under ``mask`` is computed, its bias and its sinks left aside.

    Args:
        wanted: the kernel that the caller asked for.
        call: what kernels are asked about.
        tried: whether kernels have to pass their test on the device.

    Returns:
        Whether the call is causal, and its kernel: ``wanted`` where nothing else is masked.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
        NotImplementedError: the kernel asked for cannot run it.
    """
    found = resolve(mask, sizes, call.is_causal)
    if found.keeps_all and mask.softcap is None:
        return found.is_causal, wanted
    base = None
    if wanted == "auto" and found.few_bands:
        # The preferred kernel of a call that keeps so many pairs, if it takes bands.
        pairs = found.kept_pairs * sizes.batch * sizes.heads
        flops = 2.0 * (call.head_dim + call.value_dim) * pairs
        with suppress(NotImplementedError):
            kernel = select_kernel("auto", call, device, tried=tried, flops=flops)
            if isinstance(kernel, RectangleKernel) and kernel.bands:
                base = _capped(kernel.name, mask.softcap)
    base = base or _base(wanted, call, device, mask.softcap, tried=tried)
    if id(base) not in found.kernels:
        found.kernels[id(base)] = MaskedKernel(found, base)
    return found.is_causal, found.kernels[id(base)]


def _base(
    wanted: str | Kernel,
    call: CallShape,
    device: torch.device,
    softcap: float | None,
    *,
    tried: bool,
) -> Kernel:
    """The kernel for the parts of a mask.

    Raises:
        NotImplementedError: the kernel asked for cannot run them.
    """
    if wanted == "auto" and device.type == "cuda":
        # It runs a task in one launch, whatever its mask.
        with suppress(NotImplementedError):
            return _capped(select_kernel("native", call, device, tried=tried).name, softcap)
    reference = wanted in ("dense", "tiles") or wanted is get_kernel("dense")
    if reference or (wanted == "auto" and softcap is not None):
        return _capped("tiles", softcap)
    kernel = select_kernel(wanted, call, device, tried=tried)
    if not kernel.operator or kernel.probed_as is not None:
        if wanted == "auto":
            return _capped("tiles", softcap)
        raise NotImplementedError(
            f"kernel {kernel.name!r} cannot run a call under a Mask: only kernels of plain "
            "attention that can be called by rectangles do (native without options of its own, "
            "cudnn, flash, efficient, cpu and dense)"
        )
    if softcap is None:
        return kernel
    if kernel.name not in ("fa4", "native"):
        raise NotImplementedError(
            f"kernel {kernel.name!r} has no soft cap; fa4, native, dense and auto have"
        )
    return _capped(kernel.name, softcap)


@lru_cache(maxsize=16)
def _capped(name: str, softcap: float | None) -> Kernel:
    """A kernel with a soft cap: one object for each. ``tiles`` runs anything."""
    if name == "tiles":
        return Tiles(capped(softcap))
    if softcap is None:
        return get_kernel(name)
    return Fa4Kernel(softcap) if name == "fa4" else NativeKernel(softcap=softcap)
