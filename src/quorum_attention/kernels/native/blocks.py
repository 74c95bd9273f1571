"""Rules that have to be evaluated, on the native kernel: the blocks of a task that they keep.

Which blocks are full and which are partial (``masked/block_table.py``) is found out once. In each
call rules are evaluated on the partial blocks, as many at a time as there is memory for: the kernel
is given a bit for each of their pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.masked.block_table import (
    BLOCK,
    PAIR_BYTES,
    SENT,
    BlockEvaluator,
    TaskPairs,
    blocks_key,
    listed_blocks,
)
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.native.runs import FIELDS, NO_DIAGONAL, WIDTH, Ints
from quorum_attention.kernels.protocol import TaskTensors
from quorum_attention.kernels.rectangles import SLACK_BYTES, UNSPLIT_BYTES

BIT_BYTES = BLOCK * BLOCK // 8
"""Bytes of a block's bits."""
# The smallest blocks of rows of the native kernel.
_SMALLEST = 16
# Bounds of the bytes for evaluating blocks, and again for their bits.
_LEAST, _MOST = 16 << 20, 256 << 20


class Room(NamedTuple):
    """How much of a task is evaluated at a time.

    Attributes:
        nbytes: for evaluating, and again for bits.
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
    def at_once(self) -> int:
        """Blocks evaluated at a time."""
        return self._blocks(PAIR_BYTES * BLOCK * BLOCK)

    @property
    def partial(self) -> int:
        """Partial blocks whose bits there are at a time."""
        return self._blocks(BIT_BYTES)

    def _blocks(self, block_bytes: int) -> int:
        """How many blocks there is room for, at most all of the task."""
        every = max(1, -(-self.n_queries // BLOCK) * -(-self.n_keys // BLOCK))
        return min(every, max(1, self.nbytes // (block_bytes * self.lanes)))

    @property
    def runs(self) -> int:
        """The most runs of a launch, along either axis; single blocks may have more."""
        full = max(3 * (self.n_queries + self.n_keys) // BLOCK + 64, self.partial // 2)
        return (full + self.partial) * (BLOCK // _SMALLEST)

    @property
    def device_bytes(self) -> int:
        """Upper bound of the device bytes that evaluating takes, bits and tables among them."""
        evaluated = self.at_once * PAIR_BYTES * BLOCK * BLOCK * self.lanes
        bits = self.partial * BIT_BYTES * self.lanes
        # Positions and pieces of every token, made and padded; the blocks that are sent.
        tokens = 4 * 8 * (self.n_queries + self.n_keys + 2 * BLOCK)
        tokens += 3 * 8 * SENT * self.at_once
        unsplit = 4 * min(evaluated, UNSPLIT_BYTES) + min(bits, UNSPLIT_BYTES)
        unsplit += 4 * min(tokens, UNSPLIT_BYTES)
        # Functions that are the same in all lanes have more blocks in the same bits.
        one = self._replace(lanes=1)
        tables = 2 * 4 * FIELDS * one.runs + 2 * 8 * one.partial
        tables += 4 * ((self.n_queries + self.n_keys) // _SMALLEST + 4)
        return evaluated + bits + tokens + unsplit + tables + SLACK_BYTES


class RuledTask:
    """Rectangles of a task under a geometry with rules."""

    pairs: TaskPairs

    def __init__(
        self, geometry: Geometry, task: TaskTensors, rectangles: tuple[Rectangle, ...]
    ) -> None:
        self._geometry, self._task, self._rectangles = geometry, task, rectangles
        self._evaluator: BlockEvaluator | None = None
        self.key = blocks_key(geometry, task, rectangles)
        depends = geometry.depends(task.query.device)
        batch, heads, n_queries, head_dim = task.query.shape
        n_keys, value_dim = task.value.shape[2:]
        lanes = (batch if depends[0] else 1) * (heads if depends[1] else 1)
        row_bytes = (head_dim + value_dim) * task.query.element_size()
        rows = batch * heads * max(n_queries, n_keys)
        self.room = Room.of(rows * row_bytes, lanes, n_queries, n_keys)

    def blocks(self) -> tuple[TaskPairs, Ints]:
        """The task's pairs, and full nodes and partial blocks as ``runs.pieces`` has them, by
        ascending queries; of partial ones ``mixed`` is 1."""
        # The geometry has the call's own causal rule.
        pairs = TaskPairs(self._task.task, self._rectangles)
        full, partial, _ = listed_blocks(self._geometry, self._task, pairs, self.room.nbytes)
        nodes = np.concatenate((full, partial))
        n_queries, n_keys = len(pairs.queries), len(pairs.keys)
        found = np.zeros((len(nodes), WIDTH), dtype=np.int64)
        found[:, :4] = np.minimum(nodes[:, 1:] * BLOCK, (n_queries, n_queries, n_keys, n_keys))
        found[:, 4] = NO_DIAGONAL
        found[len(full) :, 6] = 1
        return pairs, found[np.lexsort((found[:, 2], found[:, 0]))]

    @torch.no_grad()
    def bits(self, blocks: torch.Tensor | None) -> torch.Tensor:
        """``bits_of`` partial blocks, (2, blocks) on the host."""
        device = self._task.query.device
        if blocks is None or not blocks.numel():
            return torch.empty((1, 1, 1, 1, 1), dtype=torch.int32, device=device)  # not read
        if self._evaluator is None:
            self._evaluator = BlockEvaluator(self._geometry, self._task, self.pairs)
        return bits_of(self._evaluator, blocks.to(device, non_blocking=True), self.room.at_once)


def bits_of(evaluator: BlockEvaluator, blocks: torch.Tensor, at_once: int) -> torch.Tensor:
    """Which pairs of blocks are kept: (entries, heads, blocks, 128, 4) int32, a bit for a key.

    Args:
        blocks: (2, blocks) int64, their rows and columns, on the device.
        at_once: how many are evaluated at a time.
    """
    shape = (*evaluator.lanes, blocks.shape[1], BLOCK, BLOCK // 32)
    found = torch.empty(shape, dtype=torch.int32, device=blocks.device)
    powers = (1 << torch.arange(8, device=blocks.device)).to(torch.uint8)
    for start in range(0, blocks.shape[1], at_once):
        chosen = slice(start, start + at_once)
        kept = evaluator.kept(*blocks[:, chosen])
        eighths = kept.unflatten(-1, (-1, 8)).to(torch.uint8).mul_(powers)
        packed = eighths.sum(-1, dtype=torch.uint8).view(torch.int32)
        found[:, :, chosen] = packed.permute(1, 2, 0, 3, 4)
        del kept, eighths
    return found
