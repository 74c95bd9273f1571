"""Which pairs one batch entry keeps under a ``Mask``: a band, blocks, and rules of single pairs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges, Verdict
from quorum_attention.decomposition.bands import Band, BandPart
from quorum_attention.decomposition.pairs import kept_by_both, kept_by_either
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.captured_tensors import versions
from quorum_attention.kernels.masked.pair_functions import (
    MaskMod,
    depends_on_batch_head,
    over_pairs,
)
from quorum_attention.kernels.masked.rules import (
    FunctionRule,
    Rule,
    all_of,
    any_of,
    mask_mod_of_band,
)
from quorum_attention.kernels.task_tensors import Indices

Blocks = NDArray[np.int64]
"""(n, 4): query_start, query_stop, key_start, key_stop, by ascending queries; no two overlap."""
Bounds = NDArray[np.int64]
"""(n, 2): the least and the largest ``key - query`` of the pairs that are kept in each block."""

UNBOUNDED = 1 << 62
"""As a bound: beyond all positions. (Sums with positions are 64-bit integers.)"""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The kept pairs of a batch entry; as a ``mask_mod`` one that knows of a block of positions
    whether it is empty or full.

    Attributes:
        band: pairs have to lie in it.
        blocks: pairs have to lie in one of them; None is no such rule.
        rules: all of them have to keep a pair.
        same: what ``blocks`` and ``bounds`` say, as rules of single pairs.
        bounds: the band of each block, in which its pairs have to lie too; None is no such rule.
            Blocks of the same queries have the same bounds.
    """

    band: Band = field(default_factory=Band)
    blocks: Blocks | None = None
    rules: tuple[Rule, ...] = ()
    same: tuple[Rule, ...] = ()
    bounds: Bounds | None = None
    _differ: Cache[tuple[bool, bool]] = field(default_factory=lambda: Cache(16), repr=False)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is masked."""
        return self.band.keeps_all and self.blocks is None and not self.rules

    @property
    def functions(self) -> tuple[MaskMod, ...]:
        """The users' functions in its rules."""
        return tuple(function for rule in self.rules for function in rule.functions)

    @property
    def seen(self) -> Hashable:
        """A key that changes when a tensor that its functions read changes, as far as can be
        seen."""
        return versions(*self.functions)

    def depends(self, device: torch.device) -> tuple[bool, bool]:
        """Whether its functions differ between batch entries, and between heads."""
        if not self.functions:
            return False, False
        evaluate = partial(depends_on_batch_head, self.mask_mod(device), device)
        return self._differ.get((device, self.seen), evaluate)

    @property
    def placed_bytes(self) -> int:
        """Device bytes of what its rules read, once they are evaluated there."""
        return sum(rule.placed_bytes for rule in (*self.rules, *self.same))

    @property
    def block_bands(self) -> tuple[Band, ...]:
        """The bands that pairs lie in: that of each block, or that of all of them."""
        if self.bounds is None:
            return (self.band,)
        return tuple(self.band & _band_of(*bounds) for bounds in np.unique(self.bounds, axis=0))

    @property
    def has_block_windows(self) -> bool:
        """Whether a block has a lower bound of its own."""
        return self.bounds is not None and bool((self.bounds[:, 0] > -UNBOUNDED).any())

    def __and__(self, other: Geometry) -> Geometry:
        """Pairs that both keep."""
        if self.blocks is None:
            blocks, bounds = other.blocks, other.bounds
        elif other.blocks is None:
            blocks, bounds = self.blocks, self.bounds
        else:
            blocks, bounds = _intersect_blocks(self, other)
        return Geometry(
            band=self.band & other.band,
            blocks=blocks,
            rules=(*self.rules, *other.rules),
            same=(*self.same, *other.same),
            bounds=bounds,
        )

    def __or__(self, other: Geometry) -> Geometry:
        """Pairs that either keeps."""
        return Geometry(rules=(AnyOf((self, other)),))

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        """Which pairs are kept: FlexAttention's ``mask_mod``."""
        return self.mask_mod(query.device)(batch, head, query, key)

    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions; PARTIAL for users' functions."""
        verdict = self.band.verdict(block)
        if self.blocks is not None and verdict is not EMPTY:
            verdict = kept_by_both(verdict, self._verdict_of_blocks(block))
        for rule in self.rules:
            if verdict is EMPTY:
                return EMPTY
            verdict = kept_by_both(verdict, rule.verdict(block))
        return verdict

    def _verdict_of_blocks(self, block: Ranges) -> Verdict:
        """The verdict of the blocks of the geometry, and of their bounds, on ``block``."""
        numbers = self._meeting(block)
        if not len(numbers):
            return EMPTY
        parts = self._clipped(numbers, block)
        is_inside = len(parts) == 1 and parts[0].tolist() == [*block.queries, *block.keys]
        if self.bounds is None:
            return FULL if is_inside else PARTIAL
        low, high = self.bounds[numbers].T
        distances = _distances(parts)
        may_be_kept = (distances.least <= high) & (distances.largest >= low)
        if not may_be_kept.any():
            return EMPTY
        are_kept = (distances.least >= low) & (distances.largest <= high)
        return FULL if is_inside and bool(are_kept[0]) else PARTIAL

    def _meeting(self, block: Ranges) -> NDArray[np.intp]:
        """The numbers of the blocks of the geometry that meet ``block``."""
        assert self.blocks is not None
        query_starts, query_stops, key_starts, key_stops = self.blocks.T
        first_query, query_stop = block.queries
        first_key, key_stop = block.keys
        # Blocks are sorted by their queries.
        first = int(np.searchsorted(query_stops, first_query, side="right"))
        last = int(np.searchsorted(query_starts, query_stop, side="left"))
        some = slice(first, last)
        meets = (key_starts[some] < key_stop) & (key_stops[some] > first_key)
        return first + np.flatnonzero(meets)

    def _clipped(self, numbers: NDArray[np.intp], block: Ranges) -> Blocks:
        """The parts of blocks of the geometry that lie in ``block``."""
        assert self.blocks is not None
        starts = (block.queries[0], block.keys[0])
        stops = (block.queries[1], block.keys[1])
        clipped = self.blocks[numbers]
        clipped[:, ::2] = np.maximum(clipped[:, ::2], starts)
        clipped[:, 1::2] = np.minimum(clipped[:, 1::2], stops)
        return clipped

    def within(self, block: Ranges) -> Iterator[tuple[Ranges, Band]]:
        """The parts of ``block`` that lie in the blocks of the geometry, and the band of each."""
        if self.blocks is None:
            yield block, self.band
            return
        numbers = self._meeting(block)
        parts = self._clipped(numbers, block).tolist()
        if self.bounds is None:
            for ends in parts:
                yield Ranges.from_bounds(*ends), self.band
            return
        for ends, bounds in zip(parts, self.bounds[numbers].tolist(), strict=True):
            yield Ranges.from_bounds(*ends), self.band & _band_of(*bounds)

    def largest_part(self, n_queries: int, n_keys: int, *, bands: bool = False) -> tuple[int, int]:
        """The most queries and keys of a part of a block of so many; ``bands`` as of ``parts``."""
        if self.blocks is not None and len(self.blocks):
            query_starts, query_stops, key_starts, key_stops = self.blocks.T
            n_queries = min(n_queries, int((query_stops - query_starts).max()))
            n_keys = min(n_keys, int((key_stops - key_starts).max()))
        widths = [band.width for band in self.block_bands if band.width is not None]
        is_bounded = bool(widths) and len(widths) == len(self.block_bands)
        if bands or not is_bounded:
            return n_queries, n_keys
        widest = max(widths)
        return min(n_queries, widest), min(n_keys, widest)

    def parts(self, block: Ranges, *, bands: bool = False) -> Iterator[tuple[BandPart, Band]]:
        """Parts that hold each kept pair of a block once, and the band of each; of a geometry
        without rules.

        Args:
            bands: parts may be bands.
        """
        for ranges, band in self.within(block):
            ends = (*ranges.queries, *ranges.keys)
            if bands:
                smallest_part = band.within(*ends)
                parts = [] if smallest_part is None else [smallest_part]
            else:
                parts = list(band.parts(*ends))
            for part in parts:
                yield part, band

    def keeps(self, at: Indices) -> torch.Tensor:
        """Which pairs of a tile are kept: bool, (b or 1, h or 1, q, k); of several tiles, without
        functions, (tiles, 1, 1, q, k)."""
        mask_mod = self.mask_mod(at.keys.device)
        if not self.functions:  # our own rules broadcast, which takes less time than torch.vmap
            rows = at.queries[..., None, None, :, None]  # (tiles, 1, 1, q, 1)
            columns = at.keys[..., None, None, None, :]  # (tiles, 1, 1, 1, k)
            is_kept = mask_mod(at.entries[:1], at.heads[:1], rows, columns)
            return is_kept.expand(torch.broadcast_shapes(rows.shape, columns.shape))
        is_kept = over_pairs(mask_mod)(at.entries, at.heads, at.queries, at.keys)  # (b, h, q, k)
        # Where a dimension is expanded, one of its entries is enough.
        for dim in (0, 1):
            if is_kept.shape[dim] > 1 and is_kept.stride(dim) == 0:
                is_kept = is_kept.narrow(dim, 0, 1)
        return is_kept

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        mask_mods = [] if self.band.keeps_all else [mask_mod_of_band(self.band)]
        mask_mods += [rule.mask_mod(device) for rule in (*self.rules, *self.same)]
        return all_of(mask_mods)

    def count(self, n_queries: int, n_keys: int) -> int:
        """How many pairs it keeps; those that the rules leave out are counted as well."""
        call = Ranges.from_bounds(0, n_queries, 0, n_keys)
        return sum(band.count(*part.queries, *part.keys) for part, band in self.within(call))


class _Distances(NamedTuple):
    """The least and the largest ``key - query`` of the pairs of each part, (parts,)."""

    least: NDArray[np.int64]
    largest: NDArray[np.int64]


def _distances(parts: Blocks) -> _Distances:
    query_starts, query_stops, key_starts, key_stops = parts.T
    return _Distances(key_starts - (query_stops - 1), key_stops - 1 - query_starts)


def _band_of(low: int, high: int) -> Band:
    """A block's bounds as a band."""
    return Band(None if low <= -UNBOUNDED else int(low), None if high >= UNBOUNDED else int(high))


def bounds_of(band: Band) -> tuple[int, int]:
    """A band as a block's bounds."""
    low = -UNBOUNDED if band.low is None else band.low
    return low, UNBOUNDED if band.high is None else band.high


class AnyOf(Rule):
    """The rule that at least one of several geometries keeps a pair."""

    def __init__(self, geometries: tuple[Geometry, ...]) -> None:
        self.geometries = geometries
        self.functions = sum((geometry.functions for geometry in geometries), ())
        self.placed_bytes = sum(geometry.placed_bytes for geometry in geometries)

    def verdict(self, block: Ranges) -> Verdict:
        """See ``Rule``."""
        verdict: Verdict = EMPTY
        for geometry in self.geometries:
            verdict = kept_by_either(verdict, geometry.verdict(block))
            if verdict is FULL:
                return FULL
        return verdict

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        return any_of([geometry.mask_mod(device) for geometry in self.geometries])


def geometry_of(mask_mod: MaskMod | None) -> Geometry:
    """The geometry of what a ``mask_mod`` keeps; None keeps everything."""
    if mask_mod is None:
        return Geometry()
    if isinstance(mask_mod, Geometry):
        return mask_mod
    return Geometry(rules=(FunctionRule(mask_mod),))


def _intersect_blocks(first: Geometry, second: Geometry) -> tuple[Blocks, Bounds | None]:
    """The common parts of the blocks of two geometries, and the bounds that both have there."""
    all_pairs = Ranges.from_bounds(0, UNBOUNDED, 0, UNBOUNDED)
    rows = []
    for block, band in first.within(all_pairs):
        for part, narrower_band in second.within(block):
            bounds = bounds_of(band & narrower_band)
            rows.append((*part.queries, *part.keys, *bounds))
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 6)
    is_bounded = first.bounds is not None or second.bounds is not None
    return table[:, :4], table[:, 4:] if is_bounded else None
