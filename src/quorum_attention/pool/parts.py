"""A call in parts that devices compute independently of each other: heads first, then rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from quorum_attention.decomposition.intervals import Interval

# The largest part is such a share of what one device has to do in all. A lost worker loses no more.
_OF_A_DEVICE = 4
# Where devices are not alike: parts for each device, and for the slowest that counts, at least.
_UNEQUAL = 10
# Devices that together do less than this share of the work do not count there; and most parts.
_NEGLIGIBLE, _MOST_PARTS = 0.03, 2000
# Rows are cut at multiples of a kernel's tile.
_TILE = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a call.

    Attributes:
        rows_may_be_cut: whether a head may be cut between rows.
        all_keys: whether a part has all keys also where none of its queries sees the last of them.
    """

    batch: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    is_causal: bool
    rows_may_be_cut: bool = True
    all_keys: bool = False

    @property
    def share(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads


class Part(NamedTuple):
    """Some rows of some query heads of one batch entry, with all the keys they see.

    Results of its queries are complete. Gradients of its keys are complete where it has all rows of
    all query heads of a key/value head (``whole``), else they have to be added up.
    """

    entry: int
    heads: Interval
    rows: Interval
    whole: bool

    def kv(self, sizes: Sizes) -> Interval:
        """The key/value heads that it reads."""
        return Interval(self.heads.start // sizes.share, -(-self.heads.stop // sizes.share))

    def n_keys(self, sizes: Sizes) -> int:
        """How many keys it reads, from the first."""
        cut = sizes.is_causal and sizes.rows_may_be_cut and not sizes.all_keys
        return min(self.rows.stop, sizes.n_keys) if cut else sizes.n_keys

    def pairs(self, sizes: Sizes) -> int:
        """Query-key pairs, as if nothing but later keys were masked."""
        low, high = self.rows
        return self.heads.length * (_pairs(sizes, high) - _pairs(sizes, low))


def parts_of(
    sizes: Sizes, devices: int, even: bool = True, paces: Collection[float] = ()
) -> list[Part]:
    """The parts of a call for so many devices, in the order in which devices should take them.

    Large parts come first and small ones last, so that devices end together though nobody knows
    beforehand how fast each is. A part is a few whole key/value heads as long as there are enough
    of them; the last ones are cut between query heads and between rows if that is needed for an
    even end.

    Args:
        even: whether the devices are alike: whole heads are then in as many runs beside each other
            as there are devices, each with its small parts last. If they are not alike, everything
            is cut finer.
        paces: how long each takes for a pair, relative to the others, where that is known.
    """
    heads = sizes.batch * sizes.kv_heads
    if heads == 0 or not sizes.n_queries:
        return []
    if devices == 1:
        return [part for at in range(heads) for part in _whole(sizes, at, 1)]
    if even:
        # The last heads, those that do not divide among the devices, are cut into a piece a device.
        cut, wanted = heads % devices, devices // math.gcd(heads % devices or 1, devices)
    else:
        # The slowest device may have a small part of the work to do: small pieces only.
        cut, wanted = heads, math.ceil(_UNEQUAL * _slowest(devices, paces) / heads)
    pieces = min(wanted, _most_pieces(sizes))
    cut = cut if pieces > 1 else 0
    found: list[Part] = []
    largest = max(1, heads // (devices * _OF_A_DEVICE))
    runs = devices if even else 1
    for number in range(runs):
        at, stop = ((heads - cut) * n // runs for n in (number, number + 1))
        while at < stop:
            shared = 2 if even else 2 * devices
            run = min(stop - at, max(1, min(largest, math.ceil((stop - at) / shared))))
            found += _whole(sizes, at, run)
            at += run
    for head in range(heads - cut, heads):
        found += _cut(sizes, head, pieces)
    return found


def homes_of(sizes: Sizes, parts: Sequence[Part], devices: Sequence[int]) -> dict[Part, int]:
    """The device that should take each part of ``parts_of``, among so many that are alike.

    Each has as much work, of whole heads and of pieces, and the same in every call of these sizes.
    """
    found: dict[Part, int] = {}
    for whole in (True, False):
        mine = [part for part in parts if part.whole == whole]
        every, before = sum(part.pairs(sizes) for part in mine), 0
        for part in mine:
            pairs = part.pairs(sizes)
            middle = (before + pairs / 2) / max(1, every)
            found[part] = devices[min(len(devices) - 1, int(middle * len(devices)))]
            before += pairs
    return found


def cut_part(sizes: Sizes, part: Part, pieces: int) -> list[Part]:
    """A part in pieces: each of its heads in at most so many of equal work. Itself if it cannot be
    cut."""
    if part.whole:
        count = min(pieces, _most_pieces(sizes))
        first = part.entry * sizes.kv_heads
        heads = range(first + part.kv(sizes).start, first + part.kv(sizes).stop)
        one = partial(_cut, pieces=count) if count > 1 else partial(_whole, count=1)
        return [piece for head in heads for piece in one(sizes, head)]
    if part.heads.length > 1 or not sizes.rows_may_be_cut:
        return [part]
    low, high = (_pairs(sizes, row) for row in part.rows)
    every = _pairs(sizes, sizes.n_queries)
    between = (_row(sizes, (low + (high - low) * n / pieces) / every) for n in range(1, pieces))
    rows = {*part.rows, *(round(row / _TILE) * _TILE for row in between)}
    cuts = sorted(row for row in rows if part.rows.start <= row <= part.rows.stop)
    return [part._replace(rows=Interval(*pair)) for pair in pairwise(cuts)]


def _slowest(devices: int, paces: Collection[float]) -> float:
    """How many times the work of the slowest device that counts all of it is; at least as many as
    there are devices."""
    speeds = sorted(1 / pace for pace in paces)
    every, left_out = sum(speeds), 0.0
    for speed in speeds:
        left_out += speed
        if left_out > _NEGLIGIBLE * every:
            return min(_MOST_PARTS / _UNEQUAL, max(devices, every / speed))
    return devices


def joined(sizes: Sizes, one: Part, other: Part) -> Part | None:
    """Two parts as one, where the second goes on where the first ends and one call can compute
    both; else None."""
    if one.entry != other.entry:
        return None
    if one.heads == other.heads and one.rows.stop == other.rows.start:
        heads, rows = one.heads, Interval(one.rows.start, other.rows.stop)
    elif one.rows == other.rows and one.heads.stop == other.heads.start:
        heads, rows = Interval(one.heads.start, other.heads.stop), one.rows
    else:
        return None
    first, last = heads.start // sizes.share, (heads.stop - 1) // sizes.share
    complete = heads == (first * sizes.share, (last + 1) * sizes.share)
    if first != last and not complete:
        return None  # a call has as many query heads for each key/value head
    return Part(one.entry, heads, rows, complete and rows == (0, sizes.n_queries))


def _most_pieces(sizes: Sizes) -> int:
    """Into how many pieces a key/value head can be cut."""
    rows = sizes.n_queries // _TILE if sizes.rows_may_be_cut else 1
    return max(1, rows * sizes.share)


def _whole(sizes: Sizes, first: int, count: int) -> Iterator[Part]:
    """Whole key/value heads, numbered through all batch entries; a part for each entry."""
    rows, last = Interval(0, sizes.n_queries), first + count
    while first < last:
        entry, head = divmod(first, sizes.kv_heads)
        run = min(last - first, sizes.kv_heads - head)
        heads = Interval(head * sizes.share, (head + run) * sizes.share)
        yield Part(entry, heads, rows, True)
        first += run


def _cut(sizes: Sizes, head: int, pieces: int) -> Iterator[Part]:
    """One key/value head in pieces of equal work: between query heads where they divide, else the
    query heads one after the other, cut between rows."""
    entry, kv = divmod(head, sizes.kv_heads)
    first = kv * sizes.share
    for piece in range(pieces):
        low, high = (_point(sizes, sizes.share * at / pieces) for at in (piece, piece + 1))
        if low[0] == high[0]:
            yield from _piece(entry, first + low[0], 1, low[1], high[1])
            continue
        start = low[0]
        if low[1]:
            yield from _piece(entry, first + start, 1, low[1], sizes.n_queries)
            start += 1
        yield from _piece(entry, first + start, high[0] - start, 0, sizes.n_queries)
        yield from _piece(entry, first + high[0], 1, 0, high[1])


def _pairs(sizes: Sizes, rows: int) -> int:
    """Query-key pairs of the first so many rows of a head."""
    if not sizes.is_causal:
        return rows * sizes.n_keys
    square = min(rows, sizes.n_keys)
    return square * (square + 1) // 2 + (rows - square) * sizes.n_keys


def _piece(entry: int, head: int, count: int, low: int, high: int) -> Iterator[Part]:
    if count > 0 and low < high:
        yield Part(entry, Interval(head, head + count), Interval(low, high), False)


def _point(sizes: Sizes, at: float) -> tuple[int, int]:
    """Query head and row at which ``at`` heads' work is done."""
    head = math.floor(at + 1e-9)
    part = max(0.0, at - head)
    row = _row(sizes, part)
    if not sizes.rows_may_be_cut:
        return round(at), 0
    return head, min(sizes.n_queries, round(row / _TILE) * _TILE)


def _row(sizes: Sizes, part: float) -> float:
    """The row at which a part of a head's work is done."""
    if not sizes.is_causal:
        return part * sizes.n_queries
    pairs = part * _pairs(sizes, sizes.n_queries)
    square = min(sizes.n_queries, sizes.n_keys)
    above = square * square / 2
    return math.sqrt(2 * pairs) if pairs <= above else square + (pairs - above) / sizes.n_keys


__all__ = ["Part", "Sizes", "cut_part", "homes_of", "joined", "parts_of"]
