"""Which pairs one batch entry keeps under a ``Mask``: a band, blocks, and rules of single pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Ranges, Verdict
from quorum_attention.decomposition.bands import Band, Part
from quorum_attention.decomposition.pairs import both, either, quarters, walk
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.functions import (
    BlockMask,
    depends_on_batch_head,
    over_pairs,
    versions,
)
from quorum_attention.kernels.protocol import Indices
from quorum_attention.mask import Keeps

Blocks = NDArray[np.int64]
"""(n, 4): query_start, query_stop, key_start, key_stop, by ascending queries; no two overlap."""

_EVERYWHERE = Band()
# Blocks in which a rule decides about pairs have at most this many queries, and keys.
TESTED = 512


class Rule(ABC):
    """A rule that has to be evaluated on pairs where its verdict is PARTIAL.

    Attributes:
        functions: the users' functions in it.
        opaque: those of them that say nothing of blocks.
        placed_bytes: device bytes of what it reads, once it is evaluated there.
    """

    functions: tuple[Keeps, ...] = ()
    opaque: tuple[Keeps, ...] = ()
    placed_bytes: int = 0

    @abstractmethod
    def verdict(self, block: Ranges, opaque: Verdict = PARTIAL) -> Verdict:
        """The verdict on a block of positions; ``opaque``: that of what says nothing of blocks."""

    @abstractmethod
    def keeps(self, at: Indices) -> torch.Tensor:
        """Which pairs it keeps: bool, broadcastable to (b, h, q, k)."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The kept pairs of a batch entry.

    Attributes:
        band: pairs have to lie in it.
        blocks: pairs have to lie in one of them; None is no such rule.
        rules: all of them have to keep a pair.
        same: what ``blocks`` say, as rules of single pairs.
    """

    band: Band = _EVERYWHERE
    blocks: Blocks | None = None
    rules: tuple[Rule, ...] = ()
    same: tuple[Rule, ...] = ()
    _differ: Cache[tuple[bool, bool]] = field(
        default_factory=lambda: Cache(16, lambda answer: 1), repr=False
    )

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is masked."""
        return self.band.keeps_all and self.blocks is None and not self.rules

    @property
    def functions(self) -> tuple[Keeps, ...]:
        """The users' functions in its rules."""
        return tuple(function for rule in self.rules for function in rule.functions)

    @property
    def seen(self) -> Hashable:
        """Another where a tensor that its functions read has changed, as far as can be seen."""
        return versions(*self.functions)

    def depends(self, device: torch.device) -> tuple[bool, bool]:
        """Whether its functions differ between batch entries, and between heads."""

        def find() -> tuple[bool, bool]:
            each = [depends_on_batch_head(f, device) for f in self.functions]
            return any(a for a, _ in each), any(b for _, b in each)

        return self._differ.get((device, self.seen), find)

    @property
    def opaque(self) -> tuple[Keeps, ...]:
        """The functions in its rules that say nothing of blocks."""
        return tuple(function for rule in self.rules for function in rule.opaque)

    @property
    def placed_bytes(self) -> int:
        """Device bytes of what its rules read, once they are tried there."""
        return sum(rule.placed_bytes for rule in (*self.rules, *self.same))

    def __and__(self, other: Geometry) -> Geometry:
        """Pairs that both keep."""
        blocks = self.blocks if other.blocks is None else other.blocks
        if self.blocks is not None and other.blocks is not None:
            blocks = _meeting(self.blocks, other.blocks)
        rules, same = (*self.rules, *other.rules), (*self.same, *other.same)
        return Geometry(self.band & other.band, blocks, rules, same)

    def verdict(self, block: Ranges, opaque: Verdict = PARTIAL) -> Verdict:
        """The verdict on a block of positions; ``opaque``: that of what says nothing of blocks."""
        found = self.band.verdict(block)
        if found is EMPTY:
            return EMPTY
        if self.blocks is not None:
            found = both(found, self._among(block))
        for rule in self.rules:
            if found is EMPTY:
                return EMPTY
            found = both(found, rule.verdict(block, opaque))
        return found

    def _among(self, block: Ranges) -> Verdict:
        near = self.near(block)
        if not len(near):
            return EMPTY
        (q0, q1), (k0, k1) = block
        if len(near) > 1:
            return PARTIAL
        a, b, c, d = near[0].tolist()
        return FULL if a <= q0 and q1 <= b and c <= k0 and k1 <= d else PARTIAL

    def near(self, block: Ranges) -> Blocks:
        """The blocks of the geometry that meet ``block``, whole."""
        assert self.blocks is not None
        (q0, q1), (k0, k1) = block
        first = int(np.searchsorted(self.blocks[:, 1], q0, side="right"))
        last = int(np.searchsorted(self.blocks[:, 0], q1, side="left"))
        near = self.blocks[first:last]
        found: Blocks = near[(near[:, 2] < k1) & (near[:, 3] > k0)]
        return found

    def within(self, block: Ranges) -> Iterator[tuple[int, int, int, int]]:
        """The parts of ``block`` that lie in the blocks of the geometry, by their bounds."""
        (q0, q1), (k0, k1) = block
        if self.blocks is None:
            yield q0, q1, k0, k1
            return
        for a, b, c, d in self.near(block).tolist():
            yield max(a, q0), min(b, q1), max(c, k0), min(d, k1)

    def most(self, n_queries: int, n_keys: int, *, bands: bool = False) -> tuple[int, int]:
        """The most queries and keys of a part of a block of so many; ``bands`` as of ``parts``."""
        if self.blocks is not None and len(self.blocks):
            sides = self.blocks[:, 1::2] - self.blocks[:, ::2]
            n_queries, n_keys = (
                min(n, int(m)) for n, m in zip((n_queries, n_keys), sides.max(0), strict=True)
            )
        width = self.band.width
        if width is not None and (self.rules or not bands):
            n_queries, n_keys = min(n_queries, width), min(n_keys, width)
        return n_queries, n_keys

    def parts(self, block: Ranges, *, bands: bool = False) -> Iterator[Part]:
        """Parts that hold each kept pair of a block once.

        Args:
            bands: parts may be bands, where there are no rules.

        In a ragged part the band and the rules are to be asked about each pair (``kept``).
        """
        for sides in self.within(block):
            if bands and not self.rules:
                least = self.band.within(*sides)
                if least is not None:
                    yield least
                continue
            for part in self.band.parts(*sides):
                if self.rules:
                    yield from self._ruled(part)
                else:
                    yield part

    def _ruled(self, part: Part) -> Iterator[Part]:
        """``part`` cut where the rules say so."""
        whole = Ranges.of(part.query_start, part.query_stop, part.key_start, part.key_stop)
        if Geometry(rules=self.rules).verdict(whole) is FULL:
            yield part
            return
        here = Geometry(self.band, None, self.rules)
        leaves = walk(whole, here.verdict, partial(quarters, unit=TESTED))
        for ((a, b), (c, d)), found in leaves:
            if found is not EMPTY:
                yield Part(a, b, c, d, "plain" if found is FULL else "ragged")

    def kept(self, at: Indices) -> torch.Tensor:
        """Which pairs of a tile band and rules keep: bool, broadcastable to (b, h, q, k)."""
        apart = at.keys[None, :] - at.queries[:, None]
        found = torch.ones_like(apart, dtype=torch.bool)
        if self.band.low is not None:
            found &= apart >= self.band.low
        if self.band.high is not None:
            found &= apart <= self.band.high
        for rule in self.rules:
            found = found & rule.keeps(at)
        return found

    def keeps(self, at: Indices) -> torch.Tensor:
        """Which pairs of a tile are kept: bool, broadcastable to (b, h, q, k)."""
        found = self.kept(at)
        for rule in self.same:
            found = found & rule.keeps(at)
        return found

    def count(self, n_queries: int, n_keys: int) -> int:
        """How many pairs it keeps; those that the rules leave out are counted as well."""
        if self.blocks is None:
            return self.band.count(0, n_queries, 0, n_keys)
        return sum(self.band.count(*block) for block in self.blocks.tolist())


class FunctionRule(Rule):
    """A user's function as a rule."""

    def __init__(self, keeps: Keeps) -> None:
        self._keeps, self.functions = keeps, (keeps,)
        self.opaque = () if isinstance(keeps, BlockMask) else (keeps,)

    def verdict(self, block: Ranges, opaque: Verdict = PARTIAL) -> Verdict:
        """Its own verdict, if it has one."""
        return self._keeps.verdict(block) if isinstance(self._keeps, BlockMask) else opaque

    def keeps(self, at: Indices) -> torch.Tensor:
        """Which pairs it keeps."""
        keeps = self._keeps
        if isinstance(keeps, BlockMask):
            keeps = keeps.on(at.keys.device)
        return over_pairs(keeps)(at.entries, at.heads, at.queries, at.keys)


class AnyOf(Rule):
    """The rule that at least one of several geometries keeps a pair."""

    def __init__(self, every: tuple[Geometry, ...]) -> None:
        self.every = every
        self.functions = tuple(function for one in every for function in one.functions)
        self.opaque = tuple(function for one in every for function in one.opaque)
        self.placed_bytes = sum(one.placed_bytes for one in every)

    def verdict(self, block: Ranges, opaque: Verdict = PARTIAL) -> Verdict:
        """The verdict on a block of positions."""
        found: Verdict = EMPTY
        for one in self.every:
            found = either(found, one.verdict(block, opaque))
            if found is FULL:
                break
        return found

    def keeps(self, at: Indices) -> torch.Tensor:
        """Which pairs it keeps."""
        found = torch.zeros((1, 1), dtype=torch.bool, device=at.keys.device)
        for one in self.every:
            found = found | one.keeps(at)
        return found


def _meeting(one: Blocks, other: Blocks) -> Blocks:
    """What two lists of blocks have in common."""
    found = []
    by_other = Geometry(blocks=other)
    for a, b, c, d in one.tolist():
        for e, f, g, h in by_other.near(Ranges.of(a, b, c, d)).tolist():
            found.append((max(a, e), min(b, f), max(c, g), min(d, h)))
    return np.array(sorted(found), dtype=np.int64).reshape(-1, 4)
