"""Which pairs one batch entry keeps under a ``Mask``: a band, blocks, and rules of
single pairs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from quorum_attention.decomposition import EMPTY, FULL, Ranges, Verdict
from quorum_attention.decomposition.bands import Band, BandPart
from quorum_attention.decomposition.pairs import kept_by_both, kept_by_either
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.blocks import Blocks
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


@dataclass(frozen=True, eq=False)
class Geometry:
    """The kept pairs of a batch entry; as a ``mask_mod`` one that knows of a block of
    positions whether it is empty or full.

    Attributes:
        band: pairs have to lie in it.
        blocks: pairs have to lie in one of them; None is no such rule.
        rules: all of them have to keep a pair.
        block_rules: ``blocks`` as rules of single pairs.
    """

    band: Band = field(default_factory=Band)
    blocks: Blocks | None = None
    rules: tuple[Rule, ...] = ()
    block_rules: tuple[Rule, ...] = ()
    _differ: Cache[tuple[bool, bool]] = field(
        default_factory=lambda: Cache(16), repr=False
    )

    @property
    def is_band(self) -> bool:
        """Whether pairs have to lie in the band, and nothing else."""
        return self.blocks is None and not self.rules

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is masked."""
        return self.is_band and self.band.keeps_all

    @property
    def functions(self) -> tuple[MaskMod, ...]:
        """The users' functions in its rules."""
        return tuple(function for rule in self.rules for function in rule.functions)

    @property
    def seen(self) -> Hashable:
        """A key that changes when a tensor that its functions read changes, as far as
        can be seen."""
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
        rules = (*self.rules, *self.block_rules)
        return sum(rule.placed_bytes for rule in rules)

    @property
    def block_bands(self) -> tuple[Band, ...]:
        """The bands that pairs lie in: that of each block, or that of all of them."""
        if self.blocks is None:
            return (self.band,)
        return tuple(self.band & band for band in self.blocks.distinct_bands)

    @property
    def has_block_windows(self) -> bool:
        """Whether bands differ between blocks, and have lower bounds."""
        if self.blocks is None or not self.blocks.has_bands:
            return False
        return any(band.low is not None for band in self.block_bands)

    def __and__(self, geometry: Geometry) -> Geometry:
        """Pairs that both keep."""
        if self.blocks is None:
            blocks = geometry.blocks
        elif geometry.blocks is None:
            blocks = self.blocks
        else:
            blocks = self.blocks & geometry.blocks
        return Geometry(
            band=self.band & geometry.band,
            blocks=blocks,
            rules=(*self.rules, *geometry.rules),
            block_rules=(*self.block_rules, *geometry.block_rules),
        )

    def __or__(self, geometry: Geometry) -> Geometry:
        """Pairs that either keeps."""
        return Geometry(rules=(AnyOf((self, geometry)),))

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        """Which pairs are kept: FlexAttention's ``mask_mod``."""
        return self.mask_mod(query.device)(
            batch,
            head,
            query,
            key,
        )

    @cached_property
    def _judges(self) -> tuple[Band | Blocks | Rule, ...]:
        blocks = () if self.blocks is None else (self.blocks,)
        return (self.band, *blocks, *self.rules)

    def verdict(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions; PARTIAL for users' functions."""
        verdict: Verdict = FULL
        for judge in self._judges:
            verdict = kept_by_both(verdict, judge.verdict(block))
            if verdict is EMPTY:
                break
        return verdict

    def within(self, block: Ranges) -> Iterator[tuple[Ranges, Band]]:
        """The parts of ``block`` that lie in the blocks of the geometry, and the band
        of each."""
        if self.blocks is None:
            return iter([(block, self.band)])
        return self.blocks.within(block, self.band)

    def largest_part(
        self, n_queries: int, n_keys: int, *, bands: bool = False
    ) -> tuple[int, int]:
        """The most queries and keys of a part of a block of so many; ``bands`` as of
        ``parts``."""
        if self.blocks is not None:
            block_queries, block_keys = self.blocks.longest
            n_queries = min(n_queries, block_queries)
            n_keys = min(n_keys, block_keys)
        widths = [band.width for band in self.block_bands if band.width is not None]
        if bands or len(widths) < len(self.block_bands):
            return n_queries, n_keys
        widest = max(widths)
        return min(n_queries, widest), min(n_keys, widest)

    def parts(
        self, block: Ranges, *, bands: bool = False
    ) -> Iterator[tuple[BandPart, Band]]:
        """Parts that hold each kept pair of a block once, and the band of each; of a
        geometry without rules.

        Args:
            bands: parts may be bands.
        """
        for ranges, band in self.within(block):
            bounds = (*ranges.queries, *ranges.keys)
            if bands:
                smallest_part = band.within(*bounds)
                parts = [] if smallest_part is None else [smallest_part]
            else:
                parts = list(band.parts(*bounds))
            for part in parts:
                yield part, band

    def keeps(self, at: Indices) -> torch.Tensor:
        """Which pairs of a tile are kept: bool, (b or 1, h or 1, q, k); of several
        tiles, without functions, (tiles, 1, 1, q, k)."""
        mask_mod = self.mask_mod(at.keys.device)
        if not self.functions:
            # Our own rules broadcast, which takes less time than torch.vmap.
            rows = at.queries[..., None, None, :, None]  # (tiles, 1, 1, q, 1)
            columns = at.keys[..., None, None, None, :]  # (tiles, 1, 1, 1, k)
            is_kept = mask_mod(
                at.entries[:1],
                at.heads[:1],
                rows,
                columns,
            )
            # Not by their shapes alone: torch's function imports sympy.
            pairs, _ = torch.broadcast_tensors(rows, columns)
            return is_kept.expand(pairs.shape)
        keeps_pairs = over_pairs(mask_mod)
        is_kept = keeps_pairs(at.entries, at.heads, at.queries, at.keys)  # (b, h, q, k)
        # Where a dimension is expanded, one of its entries is enough.
        for dim in (0, 1):
            if is_kept.shape[dim] > 1 and is_kept.stride(dim) == 0:
                is_kept = is_kept.narrow(dim, 0, 1)
        return is_kept

    def mask_mod(self, device: torch.device) -> MaskMod:
        """See ``Rule``."""
        mask_mods: list[MaskMod] = []
        if not self.band.keeps_all:
            mask_mods.append(mask_mod_of_band(self.band))
        rules = (*self.rules, *self.block_rules)
        mask_mods.extend(rule.mask_mod(device) for rule in rules)
        return all_of(mask_mods)

    def count(self, n_queries: int, n_keys: int) -> int:
        """How many pairs it keeps; those that the rules leave out are counted as
        well."""
        all_pairs = Ranges.from_bounds(0, n_queries, 0, n_keys)
        n_pairs = 0
        for part, band in self.within(all_pairs):
            n_pairs += band.count(*part.queries, *part.keys)
        return n_pairs


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
                break
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
