"""Units of work: whole heads, or cyclic quorum tasks of a head and merges of their partial states.

A task has ``l`` of the ``c`` chunks of a sequence, and every pair of chunks meets in one task. So a
task loads ``l / c`` of the rows and leaves a partial state of each of its chunks: statistics or
gradients. A chunk is merged when the states of the ``l`` tasks that hold it exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.decomposition.intervals import Interval
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


class Unit(NamedTuple):
    """What one Ray task computes, for a key/value head and the query heads that share it.

    Attributes:
        kind: "head": the whole head; "task": partial states of the chunks of a quorum task;
            "merge": the result of one chunk, from all its partial states.
        entry, head: batch entry and key/value head.
        number: of the task or the chunk.
    """

    kind: Literal["head", "task", "merge"]
    entry: int
    head: int
    number: int = 0

    def __str__(self) -> str:
        where = f"key/value head {self.head} of entry {self.entry}"
        return where if self.kind == "head" else f"{self.kind} {self.number} of {where}"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a call is cut: its heads stay whole, or each has ``chunks`` tasks.

    Attributes:
        call: which one.
        chunks: of a sequence, and tasks of a head; 1: heads are whole.
    """

    call: WholeCall
    chunks: int

    def quorum(self, task: int) -> tuple[int, ...]:
        """The chunks of a task, ascending."""
        return tuple(sorted((task + at) % self.chunks for at in _interest(self.chunks)))

    def tasks(self, chunk: int) -> frozenset[int]:
        """The tasks that hold a chunk."""
        return frozenset((chunk - at) % self.chunks for at in _interest(self.chunks))

    def queries(self, chunk: int) -> Interval:
        """The query rows of a chunk."""
        return self._rows(chunk, self.call.n_queries)

    def keys(self, chunk: int) -> Interval:
        """The key rows of a chunk."""
        return self._rows(chunk, self.call.n_keys)

    def block(self, unit: Unit, queries: int, keys: int) -> Block:
        """A chunk of queries and one of keys of a unit's head."""
        share, entries = self.call.heads // self.call.kv_heads, Interval(unit.entry, unit.entry + 1)
        heads = Interval(unit.head * share, (unit.head + 1) * share)
        return Block(entries, heads, self.queries(queries), self.keys(keys))

    def _rows(self, chunk: int, n: int) -> Interval:
        of = self.call
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


def cut_of(call: WholeCall, heads: int, workers: int, head_bytes: int, chunks: int | None) -> Cut:
    """How to cut a call for so many workers.

    Args:
        heads: key/value heads that are computed, of all batch entries.
        head_bytes: of the results of one key/value head.
        chunks: what the caller wants; 1: whole heads. None: heads are cut where there are fewer
            than ten for each worker, or where one has too many bytes; with dropout never.

    Raises:
        ValueError: there is no interest set of so many chunks, or heads may not be cut.
    """
    may_cut = call.dropout is None
    if chunks is not None:
        quorum_size(chunks)
        if chunks > 1 and not may_cut:
            raise ValueError(f"chunks must be 1 for a call with dropout_p, got {chunks}")
        return Cut(call, chunks)
    if not may_cut or (heads >= _UNITS * workers and head_bytes <= _WHOLE_BYTES):
        return Cut(call, 1)
    best = 1
    for size in quorum_sizes(_LARGEST_QUORUM):
        c = chunk_count(size)
        if c > 1 and min(call.n_queries, call.n_keys) < c * _FEWEST_TOKENS:
            break
        best = c
        few_bytes = size * head_bytes <= c * _WHOLE_BYTES
        if c > 3 and heads * c >= _UNITS * workers and few_bytes:
            break
    # Three chunks in three tasks of two: as many rows as two heads, so no cut is worth less.
    return Cut(call, best if best > 3 else 1)
