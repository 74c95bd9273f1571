"""A call under a ``Mask``: each task in one launch of the native kernel, by a table of blocks where
rules have to be tried (``by_blocks.py``), or part by part (``parts.py``).

Batch entries of different geometry are computed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from quorum_attention.decomposition import (
    PARTIAL,
    Pairs,
    Ranges,
    Rectangle,
    Verdict,
)
from quorum_attention.kernels.kit.functions import results_at, tensors
from quorum_attention.kernels.masked.by_blocks import NativeByBlocks
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.masked.parts import ByParts
from quorum_attention.kernels.masked.resolve import ResolvedMask
from quorum_attention.kernels.native.kernel import NativeKernel
from quorum_attention.kernels.protocol import (
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
)
from quorum_attention.kernels.rectangles import four_dims
from quorum_attention.kernels.reference import whole_task, work_dtype
from quorum_attention.kernels.tensors import Pick

_BY_ENTRY = ("grad_out", "out", "lse", "grad_query", "grad_key", "grad_value")


class MaskedKernel(Kernel):
    """Attention under a mask.

    Args:
        mask: for the sizes of the calls it is for; torch.vmap may add entries, which are those of
            the batch over and over.
        base: what computes the parts: an operator, or ``dense``, for which ``Tiles`` stands in. Its
            scores are capped already if it is an operator other than ``Tiles``.
    """

    own_attention = True
    sparse = True
    pairwise = True
    whole_calls = True

    def __init__(self, mask: ResolvedMask, base: Kernel) -> None:
        # Not the mask, which holds its kernels.
        self.batch, self.base, self._functions = mask.sizes.batch, base, mask.functions
        self.geometries = mask.geometries
        self._distinct = tuple(dict.fromkeys(mask.geometries))
        self._parts = ByParts(self._distinct, base, mask.softcap)
        by_operator = self._parts.by_operator
        self.name = base.name if by_operator else self._parts.tiles.name
        # By geometry: one launch of these runs a whole task, or some do where there are rules.
        self._native: dict[Geometry, NativeKernel] = {}
        if isinstance(base, NativeKernel):
            self._native = {
                g: NativeByBlocks(g, base, self._functions) if g.rules else base.under(g)
                for g in self._distinct
            }
        self._ruled = any(g.rules for g in self._distinct)
        self._share = mask.kept_pairs / max(1, mask.sizes.n_queries * mask.sizes.n_keys)
        self._verdict = partial(_verdict, self._distinct)
        self.whole_tasks = bool(self._native)
        # A task is several calls, though they take no turns on streams.
        self.several_streams = not self._native
        self.rates, self.pace = (base.rates, base.pace) if by_operator else ((0.3, 0.3), None)
        self.launch_seconds = base.launch_seconds
        self.scaled_backward = base.scaled_backward if by_operator else frozenset()
        self.wide_products = base.wide_products or not by_operator
        self.dropout, self.empty_rows = base.dropout, base.empty_rows

    @property
    def _uniform(self) -> bool:
        return len(self._distinct) == 1

    def _by_parts(self, *, drops: bool) -> bool:
        """Whether a task is computed part by part: tables of blocks know no dropout."""
        return not self._native or (drops and self._ruled)

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self.base.refusal(replace(call, is_causal=True)) if self._parts.by_operator else None

    def captured(self) -> Sequence[torch.Tensor]:
        """See ``Kernel``."""
        return tensors(self._functions)

    def called_back(self) -> Sequence[Callable[..., Any]]:
        """See ``Kernel``."""
        return self._functions

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> Sequence[torch.Tensor]:
        """See ``Kernel``."""
        return results_at(self._functions, at)

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Kernel``."""
        every = n_queries * n_keys
        if is_causal:
            corner = min(n_queries, n_keys)
            every = corner * (corner + 1) // 2 + (n_queries - corner) * n_keys
        share = self._share * n_queries * n_keys / max(1, every)
        return Pairs(n_queries, n_keys, is_causal, self._verdict, min(1.0, share))

    def change_(self, scores: torch.Tensor) -> torch.Tensor | None:
        """See ``Kernel``: the soft cap."""
        return self._parts.tiles.cap_(scores)

    def masked_pairs(
        self,
        entries: tuple[int, ...],
        heads: slice,
        queries: torch.Tensor,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Kernel``."""
        entries, found, device = self._own(entries), [], queries.device
        for at, geometry in self._by_geometry(entries):
            place = Indices(
                torch.tensor(entries[at], device=device),
                torch.arange(heads.start, heads.stop, device=device),
                queries,
                keys,
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
        if self._by_parts(drops=call.dropout):
            return self._parts.forward_bytes(call, extent)
        each = (native.forward_workspace_bytes(call, extent) for native in self._native.values())
        return self._times(extent) * max(each)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        if self._by_parts(drops=call.dropout):
            return self._parts.backward_bytes(call, extent)
        each = (native.backward_workspace_bytes(call, extent) for native in self._native.values())
        return self._times(extent) * max(each)

    def _times(self, extent: Extent) -> int:
        """2 where results of several geometries are put together at the end."""
        return 2 if extent.direct and not self._uniform and not self._ruled else 1

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        task = self._told(task)
        for entries, geometry in self._by_geometry(task.entries):
            one = _entries_of(task, entries)
            mine = Statistics(state.out[entries], state.lse[entries])
            if self._by_parts(drops=task.dropout is not None):
                self._parts.forward(one, geometry, mine)
            else:
                self._native[geometry].forward(one, mine)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        task = self._told(task)
        for entries, geometry in self._by_geometry(task.entries):
            one = _entries_of(task, entries)
            scaling = grads.scaling
            mine = replace(
                grads,
                **{name: getattr(grads, name)[entries] for name in _BY_ENTRY},
                scaling=replace(
                    scaling,
                    unscale=_rows_of_entries(scaling.unscale, entries),
                    overflow=_rows_of_entries(scaling.overflow, entries),
                ),
            )
            if self._by_parts(drops=task.dropout is not None):
                self._parts.backward(one, geometry, mine)
            else:
                self._native[geometry].backward(one, mine)

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` is rounded once, to ``call.stored``."""
        query = call.query
        if self._native and not self._ruled:
            found = [
                self._native[geometry].whole_forward(_call_of_entries(call, at))
                for at, geometry in self._by_geometry(tuple(range(query.shape[0])))
            ]
            out, lse = (_together(pieces) for pieces in zip(*found, strict=True))
            return out, lse
        whole, banded = self._parts.bands, self._banded(call)
        if whole is not None and banded is not None:
            return whole.whole_forward(banded)
        work = work_dtype(query)
        shape = (*query.shape[:3], call.value.shape[-1])
        out = torch.zeros(shape, dtype=work, device=query.device)
        lse = torch.full(shape[:3], -torch.inf, dtype=work, device=query.device)
        self.forward(whole_task(replace(call, causal=False)), Statistics(out, lse))
        return out.to(call.stored or query.dtype), lse

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients are rounded once, to ``call.stored``."""
        if self._native and not self._ruled:
            parts = [
                self._native[geometry].whole_backward(
                    _call_of_entries(call, at), saved.mapped(_taken(at, call.query))
                )
                for at, geometry in self._by_geometry(tuple(range(call.query.shape[0])))
            ]
            dq, dk, dv = (_together(pieces) for pieces in zip(*parts, strict=True))
            return dq, dk, dv
        whole, banded = self._parts.bands, self._banded(call)
        if whole is not None and banded is not None:
            return whole.whole_backward(banded, saved)
        work, dtype = work_dtype(call.query), call.stored or call.query.dtype
        dq, dk, dv = (torch.zeros(t.shape, dtype=work, device=t.device) for t in call.inputs)
        task = whole_task(replace(call, causal=False))
        self.backward(task, Gradients(saved.grad_out, saved.out, saved.lse, dq, dk, dv))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _banded(self, call: Call) -> Call | None:
        """A whole call as one with a band; None where it is more than that."""
        if not self._uniform or call.bias is not None or call.dropout is not None:
            return None
        (one,) = self._distinct
        empty = 0 in (*call.query.shape[:3], call.key.shape[2])
        if one.rules or one.blocks is not None or empty:
            return None
        return replace(call, causal=one.band)

    def _own(self, entries: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of entries among those of the batch."""
        if max(entries, default=0) < self.batch:
            return entries
        return tuple(entry % self.batch for entry in entries)

    def _told(self, task: TaskTensors) -> TaskTensors:
        """A task with numbers of entries that functions know."""
        own = self._own(task.entries)
        return task if own is task.entries else replace(task, entries=own)

    def _by_geometry(self, entries: tuple[int, ...]) -> Iterator[tuple[slice, Geometry]]:
        """Runs of batch entries with the same geometry."""
        if self._uniform:
            yield slice(0, len(entries)), self._distinct[0]
            return
        found = [self.geometries[entry % len(self.geometries)] for entry in entries]
        start = 0
        for stop in range(1, len(found) + 1):
            if stop == len(found) or found[stop] is not found[start]:
                yield slice(start, stop), found[start]
                start = stop


def _verdict(geometries: tuple[Geometry, ...], block: Ranges) -> Verdict:
    """The verdict on a block in all batch entries together."""
    found = geometries[0].verdict(block)
    for geometry in geometries[1:]:
        if found is PARTIAL or geometry.verdict(block) is not found:
            return PARTIAL
    return found


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


def _call_of_entries(call: Call, entries: slice) -> Call:
    """A whole call with some of its batch entries."""
    some = _taken(entries, call.query)
    return call.mapped(
        some,
        some,
        bias=_rows_of_entries(call.bias, entries),
        dropout=call.dropout and call.dropout.at(0, entries.start),
    )


def _taken(entries: slice, query: torch.Tensor) -> Pick:
    """What takes some batch entries of a tensor: an identity where these are all."""
    every = entries == slice(0, query.shape[0])
    return (lambda tensor: tensor) if every else itemgetter(entries)


def _rows_of_entries(tensor: torch.Tensor | None, entries: slice) -> torch.Tensor | None:
    """The entries of (b or 1, ...)."""
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[entries]


def _together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


__all__ = ["MaskedKernel"]
