"""Launches of the native kernel for a table of blocks, and the runs of each.

A launch is a part of the table: some rows of blocks, or some columns of one row, so that there is
memory for the words of its mixed blocks. Clear blocks of a row (for the keys' half of a backward,
of a column) are one run; a mixed one is a run of its own, which says where its words begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quorum_attention.decomposition import FULL, PARTIAL
from quorum_attention.kernels.kit.block_table import BLOCK, Codes
from quorum_attention.kernels.native.runs import FIELDS, NO_DIAGONAL

# Columns of the tables: one more than the fields, where a block's words begin.
WIDTH = len(FIELDS) + 1
# Bytes of a block's words.
WORD_BYTES = BLOCK * BLOCK // 8
# The smallest blocks of rows of the native kernel.
_SMALLEST = 16


@dataclass(frozen=True, eq=False)
class Launch:
    """A part of a table of blocks.

    Attributes:
        top, left: its first row and column of blocks.
        codes: its verdicts.
        n_queries, n_keys: tokens of it.
    """

    top: int
    left: int
    codes: Codes
    n_queries: int
    n_keys: int

    @property
    def rows(self) -> slice:
        """Its queries, local positions."""
        return slice(self.top * BLOCK, self.top * BLOCK + self.n_queries)

    @property
    def columns(self) -> slice:
        """Its keys, local positions."""
        return slice(self.left * BLOCK, self.left * BLOCK + self.n_keys)

    def mixed(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and columns, in the whole table, of its mixed blocks, in the order of words."""
        rows, columns = np.nonzero(self.codes == PARTIAL)
        return rows + self.top, columns + self.left

    def runs(
        self, block: int, axis: Literal["query", "key"]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(starts, entries) as ``native.runs.table`` returns them, positions counted from the
        part's first; ``block``: rows of a block along ``axis``, which divide 128."""
        by_query = axis == "query"
        codes = self.codes if by_query else self.codes.T
        along, across = self.n_queries, self.n_keys
        if not by_query:
            along, across = across, along
        line, first, stop, word = _items(codes, self.codes, by_query=by_query)
        shares = BLOCK // block
        # Each item meets several blocks of rows.
        number = np.repeat(line * shares, shares) + np.tile(np.arange(shares), len(line))
        item = np.repeat(np.arange(len(line)), shares)
        live = number * block < along
        number, item = number[live], item[live]
        order = np.lexsort((first[item], number))
        number, item = number[order], item[order]
        entries = np.empty((len(item), WIDTH), dtype=np.int32)
        a, b = (0, 2) if by_query else (2, 0)
        entries[:, a] = number * block
        entries[:, a + 1] = np.minimum((number + 1) * block, along)
        entries[:, b] = first[item] * BLOCK
        entries[:, b + 1] = np.minimum(stop[item] * BLOCK, across)
        entries[:, 4], entries[:, 5] = NO_DIAGONAL, 0
        entries[:, 6] = word[item] >= 0
        entries[:, 7] = np.maximum(word[item], 0) * (WORD_BYTES // 4)
        starts = np.searchsorted(number, np.arange(-(-along // block) + 1))
        return starts.astype(np.int32), entries


def _items(
    codes: Codes, own: Codes, *, by_query: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(line, first, stop, word) of the runs of clear blocks, word -1, and of the mixed blocks."""
    edges = np.diff(np.pad(codes == FULL, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    line, first = np.nonzero(edges == 1)
    _, stop = np.nonzero(edges == -1)
    mixed, at = np.nonzero(codes == PARTIAL)
    word = np.arange(len(mixed))
    if not by_query:
        numbers = np.zeros(own.shape, dtype=np.int64)
        numbers[np.nonzero(own == PARTIAL)] = word
        word = numbers.T[mixed, at]
    clear = np.full(len(line), -1)
    return (
        np.concatenate((line, mixed)), np.concatenate((first, at)),
        np.concatenate((stop, at + 1)), np.concatenate((clear, word)),
    )  # fmt: skip


def most_runs(n_queries: int, n_keys: int, words: int) -> int:
    """The most runs of clear blocks of a launch, along either axis."""
    return max(4 * (n_queries + n_keys) // BLOCK + 64, words // 2)


def table_bytes(n_queries: int, n_keys: int, words: int) -> int:
    """Upper bound of the device bytes of both tables of a launch, and of its list of blocks."""
    runs = (most_runs(n_queries, n_keys, words) + words) * (BLOCK // _SMALLEST) * WIDTH * 4
    starts = 4 * ((n_queries + n_keys) // _SMALLEST + 4)
    return 2 * runs + starts + 2 * 8 * words


def launches(codes: Codes, n_queries: int, n_keys: int, words: int) -> Iterator[Launch]:
    """The parts of a table with no more than ``words`` mixed blocks each, by ascending rows; those
    with nothing to compute are left out."""
    most = most_runs(n_queries, n_keys, words)
    waiting = [(0, codes.shape[0], 0, codes.shape[1])]
    while waiting:
        top, bottom, left, right = waiting.pop()
        part = codes[top:bottom, left:right]
        if not part.any():
            continue
        if _fits(part, words, most):
            rows = min(bottom * BLOCK, n_queries) - top * BLOCK
            yield Launch(top, left, part, rows, min(right * BLOCK, n_keys) - left * BLOCK)
            continue
        if bottom - top > 1:
            middle = (top + bottom) // 2
            waiting += [(middle, bottom, left, right), (top, middle, left, right)]
        else:
            middle = (left + right) // 2
            waiting += [(top, bottom, middle, right), (top, bottom, left, middle)]


def _fits(part: Codes, words: int, most: int) -> bool:
    if np.count_nonzero(part == PARTIAL) > words:
        return False
    clear = part == FULL
    by_rows = np.count_nonzero(clear[:, 1:] & ~clear[:, :-1]) + np.count_nonzero(clear[:, 0])
    by_columns = np.count_nonzero(clear[1:] & ~clear[:-1]) + np.count_nonzero(clear[0])
    return bool(by_rows <= most and by_columns <= most)
