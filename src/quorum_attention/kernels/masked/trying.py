"""Tries a geometry on pairs of a task, on the device, some blocks of 128 by 128 pairs at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import FULL, PARTIAL
from quorum_attention.kernels.kit.block_masks import BLOCK, piece
from quorum_attention.kernels.kit.block_masks import Geometry as Pairs
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.outside import outside
from quorum_attention.kernels.positions import positions
from quorum_attention.kernels.protocol import Indices, TaskTensors
from quorum_attention.kernels.rectangles import four_dims
from quorum_attention.kernels.workspace import SLACK_BYTES, UNSPLIT_BYTES

UNTRIED = 3
"""The code of a block beside those of verdicts: a rule has to be asked about its pairs."""

Codes = NDArray[np.int8]
# Bytes for each pair that is tried at a time: a rule's own temporaries, a few of int64, among them.
_PAIR_BYTES = 64
# Bytes of a block's words.
WORD_BYTES = BLOCK * BLOCK // 8
# Bounds of the bytes for trying, and again for words.
_LEAST, _MOST = 16 << 20, 256 << 20
# Blocks that are listed on the device at a time, to be tried: that many times those tried at once.
_LISTED = 64


@dataclass(frozen=True, slots=True)
class Room:
    """How much of a task is tried at a time.

    Attributes:
        nbytes: for trying, and again for words.
        lanes: batch entries times heads for which rules differ.
        n_queries, n_keys: tokens of the task.
    """

    nbytes: int
    lanes: int
    n_queries: int
    n_keys: int

    @classmethod
    def of(cls, rows_bytes: int, lanes: int, n_queries: int, n_keys: int) -> Room:
        """The room for a task whose rows of queries and values have so many bytes together."""
        return cls(min(max(rows_bytes // 2, _LEAST), _MOST), max(1, lanes), n_queries, n_keys)

    @property
    def _every(self) -> int:
        """All blocks of the task."""
        return max(1, -(-self.n_queries // BLOCK) * -(-self.n_keys // BLOCK))

    @property
    def blocks(self) -> int:
        """Blocks tried at a time."""
        return min(self._every, max(1, self.nbytes // (_PAIR_BYTES * BLOCK * BLOCK * self.lanes)))

    @property
    def listed(self) -> int:
        """Blocks listed on the device at a time."""
        return min(self._every, _LISTED * self.blocks)

    @property
    def words(self) -> int:
        """Blocks whose words there are at a time."""
        return min(self._every, max(1, self.nbytes // (WORD_BYTES * self.lanes)))

    @property
    def device_bytes(self) -> int:
        """Upper bound of the device bytes that trying takes, words among them."""
        tried = self.blocks * _PAIR_BYTES * BLOCK * BLOCK * self.lanes
        words = self.words * WORD_BYTES * self.lanes
        # Positions and pieces of every token, made and padded.
        tokens = 4 * 8 * (self.n_queries + self.n_keys + 2 * BLOCK) + 3 * 8 * self.listed
        unsplit = 4 * min(tried, UNSPLIT_BYTES) + min(words, UNSPLIT_BYTES)
        return tried + words + tokens + unsplit + 4 * min(tokens, UNSPLIT_BYTES) + SLACK_BYTES


class Pieces(NamedTuple):
    """Where a task's rectangles are, if they are not everything (``kit.block_masks.Geometry``).

    Attributes:
        rows, columns: (nq,), (nk,) int64, the piece that each query and each key lies in.
        table: (pieces, pieces) bool, which of them a rectangle holds.
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    table: NDArray[np.bool_]

    @classmethod
    def of(cls, pairs: Pairs) -> Pieces | None:
        """The pieces of rectangles; None if these are all pairs."""
        if pairs.table.all():
            return None
        rows = piece(pairs.query_edges, np.arange(len(pairs.queries)))
        return cls(rows, piece(pairs.key_edges, np.arange(len(pairs.keys))), pairs.table)


class Trial:
    """A geometry and the pairs of a task, on its device.

    Args:
        sizes: how many of the task's first tokens are queries, and keys.
        pieces: of the task's rectangles.
        apart: whether the geometry differs between batch entries, and between heads.
    """

    def __init__(
        self,
        geometry: Geometry,
        task: TaskTensors,
        sizes: tuple[int, int],
        pieces: Pieces | None,
        apart: tuple[bool, bool],
    ) -> None:
        device, first = task.query.device, task.first_head
        self._geometry = geometry
        self._entries = torch.tensor(task.entries[: None if apart[0] else 1], device=device)
        heads = task.query.shape[1] if apart[1] else 1
        self._heads = torch.arange(first, first + heads, device=device)
        self._queries, self._keys = (_padded(positions(task.task, 0, n, device)) for n in sizes)
        self._table: torch.Tensor | None = None
        if pieces is not None:
            self._table = torch.from_numpy(pieces.table).to(device)
            self._rows, self._columns = (
                _padded(torch.from_numpy(of).to(device)) for of in pieces[:2]
            )

    @property
    def lanes(self) -> tuple[int, int]:
        """(entries, heads) for which it is tried."""
        return len(self._entries), len(self._heads)

    @outside()
    def settle(self, codes: Codes, room: Room) -> None:
        """Give every block that is UNTRIED its verdict, in place: of all lanes together."""
        every = np.stack(np.nonzero(codes == UNTRIED))
        device, found = self._queries.device, []
        for start in range(0, every.shape[1], room.listed):
            some = torch.from_numpy(every[:, start : start + room.listed]).to(device)
            parts = [
                self._verdicts(*some[:, at : at + room.blocks])
                for at in range(0, some.shape[1], room.blocks)
            ]
            found.append(torch.cat(parts).cpu().numpy())
        if found:
            codes[every[0], every[1]] = np.concatenate(found)

    def _verdicts(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """The verdicts of blocks, (blocks,) int8."""
        kept = self._kept(rows, columns)
        count = kept.sum(dim=(1, 2, 3, 4), dtype=torch.int64)
        codes = (count > 0).to(torch.int8) * PARTIAL
        return codes.masked_fill_(count == kept[0].numel(), FULL)

    def _kept(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Which pairs of blocks are kept: (blocks, entries, heads, 128, 128) bool."""
        within = torch.arange(BLOCK, device=rows.device)
        r, c = (blocks[:, None] * BLOCK + within for blocks in (rows, columns))
        kept: torch.Tensor = torch.vmap(self._keeps)(self._queries[r], self._keys[c])
        if self._table is not None:
            pieces = self._rows[r][:, :, None], self._columns[c][:, None]
            kept = kept & self._table[pieces][:, None, None]
        return kept

    def words(self, rows: torch.Tensor, columns: torch.Tensor, room: Room) -> torch.Tensor:
        """Which pairs of blocks are kept: (entries, heads, blocks, 128, 4) int32, a bit for a key.

        Args:
            rows, columns: (blocks,) int64, the blocks, on the device.
        """
        n, device = len(rows), rows.device
        found = torch.empty((*self.lanes, n, BLOCK, BLOCK // 32), dtype=torch.int32, device=device)
        bits = (1 << torch.arange(8, device=device)).to(torch.uint8)
        for start in range(0, n, room.blocks):
            some = slice(start, start + room.blocks)
            kept = self._kept(rows[some], columns[some])
            eighths = kept.unflatten(-1, (-1, 8)).to(torch.uint8).mul_(bits)
            packed = eighths.sum(-1, dtype=torch.uint8).view(torch.int32)
            found[:, :, some] = packed.permute(1, 2, 0, 3, 4)
            del kept, eighths
        return found

    def _keeps(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which pairs are kept: bool, (entries, heads, queries, keys), for the lanes."""
        at = Indices(self._entries, self._heads, queries, keys)
        return four_dims(self._geometry.keeps(at)).expand(*self.lanes, -1, -1).contiguous()


def _padded(tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` (n,), the last of them repeated up to whole blocks."""
    missing = -len(tokens) % BLOCK
    return torch.cat([tokens, tokens[-1:].expand(missing)]) if missing else tokens
