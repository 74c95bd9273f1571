"""What workers of a farm compute at a time: whole heads, or cyclic quorum tasks of one head.

A task has ``l`` of the ``c`` chunks of a sequence, and every pair of chunks meets in one task. So a
worker loads ``l / c`` of the rows, and leaves partial states of those rows behind: statistics that
are merged, or gradients that are added, with those of the ``l`` tasks that hold a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.partition import Sizes
from quorum_attention.quorums import chunk_count, interest_set, quorum_size, quorum_sizes

# Units for each worker, at least: the last one to end, or one that is lost, costs no more.
_UNITS = 10
# A head whose results are larger than this is cut: a worker has the results of whole heads in host
# memory before it writes them.
_WHOLE_BYTES = 1 << 30
# Chunks have this many tokens at least: the states of shorter ones take longer than their pairs.
_FEWEST_TOKENS = 256
_LARGEST_QUORUM = 14
_TILE = 128
# From so many tiles on one more in a chunk is next to nothing.
_LONG_TILES = 64


Head = tuple[int, int]
"""A batch entry and a key/value head of it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What one worker computes at a time.

    Attributes:
        entry: batch entry.
        kv: key/value heads, with all the query heads that share them.
        task: the task's owner, of those of one key/value head; None: the heads are whole.
    """

    entry: int
    kv: Interval
    task: int | None

    def pairs(self, cut: Cut) -> int:
        """Query-key pairs, as if keys and queries had the same positions where it is causal."""
        of = cut.sizes
        n, m = of.n_queries, of.n_keys
        pairs = n * (n + 1) // 2 if of.is_causal else n * m
        return max(1, self.kv.length * of.share * pairs // cut.chunks)

    def words(self, cut: Cut) -> str:
        """For people."""
        heads = f"key/value heads [{self.kv.start}, {self.kv.stop}) of entry {self.entry}"
        return heads if self.task is None else f"task {self.task} of {cut.chunks}, {heads}"


@dataclass(frozen=True, slots=True)
class Joint:
    """States of one chunk that are left and have to be brought together."""

    entry: int
    kv: Interval
    chunk: int

    def pairs(self, cut: Cut) -> int:
        """Next to nothing."""
        return 1

    def words(self, cut: Cut) -> str:
        """For people."""
        return f"states of chunk {self.chunk} of {cut.chunks}, key/value head {self.kv.start}"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a call is cut: its heads stay whole, or each has ``chunks`` tasks.

    Attributes:
        sizes: of the call.
        chunks: of a sequence, and tasks of a head; 1: heads are whole.
    """

    sizes: Sizes
    chunks: int

    def quorum(self, task: int) -> tuple[int, ...]:
        """The chunks of a task, ascending."""
        return tuple(sorted((task + at) % self.chunks for at in _interest(self.chunks)))

    def tasks(self, chunk: int) -> frozenset[int]:
        """The tasks that hold a chunk."""
        return frozenset((chunk - at) % self.chunks for at in _interest(self.chunks))

    def queries(self, chunk: int) -> Interval:
        """The query rows of a chunk."""
        return self._rows(chunk, self.sizes.n_queries)

    def keys(self, chunk: int) -> Interval:
        """The key rows of a chunk."""
        return self._rows(chunk, self.sizes.n_keys)

    def query_heads(self, unit: Unit | Joint) -> Interval:
        """The query heads of a unit."""
        share = self.sizes.share
        return Interval(unit.kv.start * share, unit.kv.stop * share)

    def _rows(self, chunk: int, n: int) -> Interval:
        of = self.sizes
        # A causal rule compares positions, so chunks of queries and keys begin at the same ones.
        span = max(of.n_queries, of.n_keys) if of.is_causal else n
        low, high = (_border(span, self.chunks, at) for at in (chunk, chunk + 1))
        return Interval(min(low, n), min(high, n))


def _border(n: int, c: int, chunk: int) -> int:
    """Where a chunk begins.

    Long chunks are equal but for the last, because a kernel prepares each new shape for as long as
    it computes some. Shorter ones are equal up to a tile, where tiles are small beside them.
    """
    size = -(-n // (c * _TILE)) * _TILE
    if size >= _LONG_TILES * _TILE and (c - 1) * size < n:
        return min(n, chunk * size)
    tile = _TILE if n >= 8 * c * _TILE else 1
    return n if chunk == c else n * chunk // (c * tile) * tile


@lru_cache
def _interest(c: int) -> tuple[int, ...]:
    return interest_set(quorum_size(c))


def cut_of(
    sizes: Sizes,
    workers: int,
    head_bytes: int,
    chunks: int | None = None,
    may_cut: bool = True,
    heads: int | None = None,
) -> Cut:
    """How to cut a call for so many workers.

    Args:
        head_bytes: of the results of one key/value head.
        chunks: what the caller wants; 1: whole heads. None: heads are cut where there are fewer
            than ten for each worker, or where one has too many bytes.
        may_cut: whether heads may be cut at all.
        heads: key/value heads of all batch entries, as far as they are to be computed; None: all.

    Raises:
        ValueError: there is no interest set of so many chunks, or heads may not be cut.
    """
    if chunks is not None:
        quorum_size(chunks)
        if chunks > 1 and not may_cut:
            raise ValueError(f"chunks must be 1 for a call with dropout_p, got {chunks}")
        return Cut(sizes, chunks)
    heads = sizes.batch * sizes.kv_heads if heads is None else heads
    if not may_cut or (heads >= _UNITS * workers and head_bytes <= _WHOLE_BYTES):
        return Cut(sizes, 1)
    best = 1
    for size in quorum_sizes(_LARGEST_QUORUM):
        c = chunk_count(size)
        if c > 1 and min(sizes.n_queries, sizes.n_keys) < c * _FEWEST_TOKENS:
            break
        best = c
        few_bytes = size * head_bytes <= c * _WHOLE_BYTES
        if c > 3 and heads * c >= _UNITS * workers and few_bytes:
            break
    # Three chunks in three tasks of two: as many rows as two heads, so no cut is worth less.
    return Cut(sizes, best if best > 3 else 1)


def units_of(cut: Cut, heads: Iterable[Head] | None = None) -> list[Unit]:
    """The units of a call, in the order in which workers should take them.

    Args:
        heads: those to compute; None: all.
    """
    of = cut.sizes
    if not of.n_queries:
        return []
    every = product(range(of.batch), range(of.kv_heads)) if heads is None else sorted(heads)
    tasks = range(cut.chunks) if cut.chunks > 1 else (None,)
    return [Unit(entry, Interval(head, head + 1), task) for entry, head in every for task in tasks]


__all__ = ["Cut", "Head", "Joint", "Unit", "cut_of", "units_of"]
