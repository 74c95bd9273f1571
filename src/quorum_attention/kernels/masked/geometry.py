"""Which pairs one batch entry keeps under a ``Mask``: a band, blocks, and rules of single pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges, Verdict
from quorum_attention.decomposition.bands import Band, BandPart
from quorum_attention.decomposition.pairs import both, either
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.functions import (
    MaskMod,
    depends_on_batch_head,
    over_pairs,
    versions,
)
from quorum_attention.kernels.protocol import Indices
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.units import counted

Blocks = NDArray[np.int64]
"""(n, 4): query_start, query_stop, key_start, key_stop, by ascending queries; no two overlap."""
Bounds = NDArray[np.int64]
"""(n, 2): the least and the largest ``key - query`` of the pairs that are kept in each block."""

UNBOUNDED = 1 << 62
"""As a bound: beyond all positions. (Sums with positions are 64-bit integers.)"""


class Rule(ABC):
    """A rule that has to be evaluated on pairs where its verdict is PARTIAL.

    Attributes:
        functions: the users' functions in it, which say nothing of blocks.
        placed_bytes: device bytes of what it reads, once it is evaluated there.
    """

    functions: tuple[MaskMod, ...] = ()
    placed_bytes: int = 0

    @abstractmethod
    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions; PARTIAL for users' functions."""

    @abstractmethod
    def mask_mod(self, device: torch.device) -> MaskMod:
        """The rule as FlexAttention's ``mask_mod`` over tensors on ``device``; can be traced."""


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
        """Another where a tensor that its functions read has changed, as far as can be seen."""
        return versions(*self.functions)

    def depends(self, device: torch.device) -> tuple[bool, bool]:
        """Whether its functions differ between batch entries, and between heads."""
        if not self.functions:
            return False, False
        find = partial(depends_on_batch_head, self.mask_mod(device), device)
        return self._differ.get((device, self.seen), find)

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
        rules, same = (*self.rules, *other.rules), (*self.same, *other.same)
        band, bounded = self.band & other.band, self if other.blocks is None else other
        if self.blocks is None or other.blocks is None:
            return Geometry(band, bounded.blocks, rules, same, bounded.bounds)
        blocks, bounds = _intersect_blocks(self, other)
        return Geometry(band, blocks, rules, same, bounds)

    def __or__(self, other: Geometry) -> Geometry:
        """Pairs that either keeps."""
        return Geometry(rules=(AnyOf((self, other)),))

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        """Which pairs are kept: FlexAttention's ``mask_mod``."""
        return self.mask_mod(query.device)(batch, head, query, key)

    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions; PARTIAL for users' functions."""
        found = self.band.verdict(block)
        if self.blocks is not None and found is not EMPTY:
            found = both(found, self._among(block))
        for rule in self.rules:
            if found is EMPTY:
                return EMPTY
            found = both(found, rule.verdict(block))
        return found

    def _among(self, block: Ranges) -> Verdict:
        near = self._near(block)
        if not len(near):
            return EMPTY
        # The ends of what is within the block: (parts, 4).
        parts = self._clipped(near, block)
        inside = len(parts) == 1 and parts[0].tolist() == [*block.queries, *block.keys]
        if self.bounds is None:
            return FULL if inside else PARTIAL
        bounds = self.bounds[near]
        least, largest = parts[:, 2] - (parts[:, 1] - 1), parts[:, 3] - 1 - parts[:, 0]
        if not ((least <= bounds[:, 1]) & (largest >= bounds[:, 0])).any():
            return EMPTY
        inside = inside and bool(bounds[0, 0] <= least[0] and largest[0] <= bounds[0, 1])
        return FULL if inside else PARTIAL

    def _near(self, block: Ranges) -> NDArray[np.intp]:
        """The numbers of the blocks of the geometry that meet ``block``."""
        assert self.blocks is not None
        (q0, q1), (k0, k1) = block
        first = int(np.searchsorted(self.blocks[:, 1], q0, side="right"))
        last = int(np.searchsorted(self.blocks[:, 0], q1, side="left"))
        near = self.blocks[first:last]
        return first + np.flatnonzero((near[:, 2] < k1) & (near[:, 3] > k0))

    def _clipped(self, numbers: NDArray[np.intp], block: Ranges) -> Blocks:
        """What blocks of the geometry have in common with ``block``."""
        assert self.blocks is not None
        (q0, q1), (k0, k1) = block
        found = self.blocks[numbers]
        found[:, ::2] = np.maximum(found[:, ::2], (q0, k0))
        found[:, 1::2] = np.minimum(found[:, 1::2], (q1, k1))
        return found

    def within(self, block: Ranges) -> Iterator[tuple[Ranges, Band]]:
        """The parts of ``block`` that lie in the blocks of the geometry, and the band of each."""
        if self.blocks is None:
            yield block, self.band
            return
        near = self._near(block)
        parts = self._clipped(near, block).tolist()
        bounds = None if self.bounds is None else self.bounds[near].tolist()
        for number, ends in enumerate(parts):
            band = self.band if bounds is None else self.band & _band_of(*bounds[number])
            yield Ranges.of(*ends), band

    def largest_part(self, n_queries: int, n_keys: int, *, bands: bool = False) -> tuple[int, int]:
        """The most queries and keys of a part of a block of so many; ``bands`` as of ``parts``."""
        if self.blocks is not None and len(self.blocks):
            sides = self.blocks[:, 1::2] - self.blocks[:, ::2]
            n_queries, n_keys = (
                min(n, int(m)) for n, m in zip((n_queries, n_keys), sides.max(0), strict=True)
            )
        widths = [band.width for band in self.block_bands if band.width is not None]
        if widths and len(widths) == len(self.block_bands) and not bands:
            n_queries, n_keys = min(n_queries, max(widths)), min(n_keys, max(widths))
        return n_queries, n_keys

    def parts(self, block: Ranges, *, bands: bool = False) -> Iterator[tuple[BandPart, Band]]:
        """Parts that hold each kept pair of a block once, and the band of each; of a geometry
        without rules.

        Args:
            bands: parts may be bands.
        """
        for sides, band in self.within(block):
            ends = *sides.queries, *sides.keys
            if not bands:
                yield from ((part, band) for part in band.parts(*ends))
                continue
            least = band.within(*ends)
            if least is not None:
                yield least, band

    def keeps(self, at: Indices) -> torch.Tensor:
        """Which pairs of a tile are kept: bool, (b or 1, h or 1, q, k); of several tiles, without
        functions, (tiles, 1, 1, q, k)."""
        mod = self.mask_mod(at.keys.device)
        if not self.functions:  # our own rules broadcast, which takes less time than torch.vmap
            rows, columns = at.queries[..., None, None, :, None], at.keys[..., None, None, None, :]
            kept = mod(at.entries[:1], at.heads[:1], rows, columns)
            return kept.expand(torch.broadcast_shapes(rows.shape, columns.shape))
        found = over_pairs(mod)(at.entries, at.heads, at.queries, at.keys)
        # Where a dimension is expanded, one of its entries is enough.
        for dim in (0, 1):
            if found.shape[dim] > 1 and found.stride(dim) == 0:
                found = found.narrow(dim, 0, 1)
        return found

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        mods = [] if self.band.keeps_all else [_in_band(self.band)]
        mods += [rule.mask_mod(device) for rule in (*self.rules, *self.same)]
        return reduce(_and, mods) if mods else lambda b, h, q, k: q >= 0

    def count(self, n_queries: int, n_keys: int) -> int:
        """How many pairs it keeps; those that the rules leave out are counted as well."""
        every = Ranges.of(0, n_queries, 0, n_keys)
        return sum(band.count(*part.queries, *part.keys) for part, band in self.within(every))


def _band_of(low: int, high: int) -> Band:
    """A block's bounds as a band."""
    return Band(None if low <= -UNBOUNDED else int(low), None if high >= UNBOUNDED else int(high))


def bounds_of(band: Band) -> tuple[int, int]:
    """A band as a block's bounds."""
    low = -UNBOUNDED if band.low is None else band.low
    return low, UNBOUNDED if band.high is None else band.high


def _in_band(band: Band) -> MaskMod:
    """A band as FlexAttention's ``mask_mod``."""
    low, high = band.low, band.high
    if low is None:
        return lambda b, h, q, k: k - q <= high
    if high is None:
        return lambda b, h, q, k: k - q >= low
    return lambda b, h, q, k: (k - q >= low) & (k - q <= high)


class FunctionRule(Rule):
    """A user's function as a rule."""

    def __init__(self, keeps: MaskMod) -> None:
        self._keeps, self.functions = keeps, (keeps,)

    def verdict(self, block: Ranges) -> Verdict:
        """See ``Rule``."""
        return PARTIAL

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        return self._keeps


class EqualIds(Rule):
    """The rule that the ids of query and key are equal, (n,) and (m,) int64."""

    def __init__(self, by_query: NDArray[np.int64], by_key: NDArray[np.int64]) -> None:
        self._ids, self.placed_bytes = (by_query, by_key), by_query.nbytes + by_key.nbytes
        self._placed: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def verdict(self, block: Ranges) -> Verdict:
        """EMPTY where no id of the queries can be one of the keys.

        Raises:
            ValueError: a token has no id.
        """
        (low, high), (least, most) = self._folded(block, np.minimum, np.maximum)
        if low > most or least > high:
            return EMPTY
        return FULL if low == high == least == most else PARTIAL

    def _folded(self, block: Ranges, *folds: np.ufunc) -> list[list[int]]:
        """What the ids of a block's queries are folded to, and those of its keys."""
        found = []
        for (start, stop), ids in zip(block, self._ids, strict=True):
            if stop > len(ids):
                raise ValueError(
                    f"there are ids of {counted(len(ids), 'token')}, not of token {stop - 1}"
                )
            found.append([int(fold.reduce(ids[start:stop])) for fold in folds])
        return found

    def _on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The ids on a device."""
        if device not in self._placed:
            with no_torch_modes():
                placed = tuple(torch.from_numpy(ids.copy()).to(device) for ids in self._ids)
            self._placed[device] = placed
        return self._placed[device]

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        of_query, of_key = self._on(device)
        return lambda b, h, q, k: of_query[q] == of_key[k]


class GroupBits(EqualIds):
    """The rule that query and key have no group bit in common (paper, section 4): the verdict on a
    block follows from the bitwise OR and AND of both sides."""

    def verdict(self, block: Ranges) -> Verdict:
        """EMPTY where all queries share a bit with all keys."""
        (any_q, all_q), (any_k, all_k) = self._folded(block, np.bitwise_or, np.bitwise_and)
        if all_q & all_k:
            return EMPTY
        return PARTIAL if any_q & any_k else FULL

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        of_query, of_key = self._on(device)
        return lambda b, h, q, k: (of_query[q] & of_key[k]) == 0


class PlacesInBand(EqualIds):
    """The rule that ``key - place`` lies in a band, where queries stand at places of their own.

    Args:
        places: (n,) int64, of the queries, in numbers of keys.
        n_keys: how many keys there are.
    """

    def __init__(self, places: NDArray[np.int64], n_keys: int, band: Band) -> None:
        super().__init__(places, np.arange(n_keys))
        self._band = band

    def verdict(self, block: Ranges) -> Verdict:
        """FULL or EMPTY where the band is at every place between the first and the last."""
        (first, last), keys = self._folded(block, np.minimum, np.maximum)
        return self._band.verdict(Ranges.of(first, last + 1, keys[0], keys[1] + 1))

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        places, keys = self._on(device)
        in_band = _in_band(self._band)
        return lambda b, h, q, k: in_band(b, h, places[q], keys[k])


class AnyOf(Rule):
    """The rule that at least one of several geometries keeps a pair."""

    def __init__(self, every: tuple[Geometry, ...]) -> None:
        self.every = every
        self.functions = tuple(function for one in every for function in one.functions)
        self.placed_bytes = sum(one.placed_bytes for one in every)

    def verdict(self, block: Ranges) -> Verdict:
        """See ``Rule``."""
        found: Verdict = EMPTY
        for one in self.every:
            found = either(found, one.verdict(block))
            if found is FULL:
                break
        return found

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        return reduce(_or, [one.mask_mod(device) for one in self.every])


def geometry_of(mask_mod: MaskMod | None) -> Geometry:
    """What a ``mask_mod`` keeps; None keeps everything."""
    if isinstance(mask_mod, Geometry):
        return mask_mod
    return Geometry(rules=() if mask_mod is None else (FunctionRule(mask_mod),))


def _and(one: MaskMod, other: MaskMod) -> MaskMod:
    return lambda b, h, q, k: one(b, h, q, k) & other(b, h, q, k)


def _or(one: MaskMod, other: MaskMod) -> MaskMod:
    return lambda b, h, q, k: one(b, h, q, k) | other(b, h, q, k)


def _intersect_blocks(one: Geometry, other: Geometry) -> tuple[Blocks, Bounds | None]:
    """What the blocks of two geometries have in common, and the bounds that both have there."""
    rows = [
        (*part.queries, *part.keys, *bounds_of(band & narrower))
        for block, band in one.within(Ranges.of(0, UNBOUNDED, 0, UNBOUNDED))
        for part, narrower in other.within(block)
    ]
    found = np.array(sorted(rows), dtype=np.int64).reshape(-1, 6)
    bounded = one.bounds is not None or other.bounds is not None
    return found[:, :4], found[:, 4:] if bounded else None
