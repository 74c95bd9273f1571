"""Rules that have to be evaluated: the blocks of a task that they keep, and the bits of
pairs.

Which blocks are full and which are partial (``masked/block_table.py``) is found out
once. In each call rules are evaluated on the partial blocks, as many at a time as there
is memory for: the kernel is given a bit for each of their pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.device_copies import to_device
from quorum_attention.kernels.limits import runs
from quorum_attention.kernels.masked.block_evaluator import (
    PAIR_BYTES,
    SENT,
    BlockEvaluator,
)
from quorum_attention.kernels.masked.block_nodes import BLOCK
from quorum_attention.kernels.masked.block_table import (
    blocks_key,
    listed_blocks,
    whole_region,
)
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.native.columns import EntryColumn, PieceColumn
from quorum_attention.kernels.native.pieces import NO_DIAGONAL, Ints
from quorum_attention.kernels.operator_sizes import SLACK_BYTES, UNSPLIT_BYTES
from quorum_attention.kernels.task_tensors import TaskTensors

BIT_BYTES = BLOCK * BLOCK // 8
"""Bytes of a block's bits."""
_EVALUATION_BYTES = PAIR_BYTES * BLOCK * BLOCK
# The smallest blocks of rows of the native kernel.
_SMALLEST_BLOCK = 16
# Bounds of the bytes for evaluating blocks, and again for their bits.
_MIN_BYTES = 16 << 20
_MAX_BYTES = 256 << 20


class EvaluationBudget(NamedTuple):
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
    def for_rows(
        cls, rows_bytes: int, lanes: int, n_queries: int, n_keys: int
    ) -> EvaluationBudget:
        """The budget for a task whose rows of queries and values have so many bytes
        together."""
        nbytes = min(max(rows_bytes // 2, _MIN_BYTES), _MAX_BYTES)
        return cls(nbytes, max(1, lanes), n_queries, n_keys)

    @property
    def n_evaluated(self) -> int:
        """Blocks evaluated at a time."""
        return self._blocks_of(_EVALUATION_BYTES)

    @property
    def n_partial(self) -> int:
        """Partial blocks whose bits there are at a time."""
        return self._blocks_of(BIT_BYTES)

    def _blocks_of(self, block_bytes: int) -> int:
        """How many blocks there is room for, at most all of the task."""
        n_rows = ceil_div(self.n_queries, BLOCK)
        n_columns = ceil_div(self.n_keys, BLOCK)
        n_blocks = max(1, n_rows * n_columns)
        n_within = max(1, self.nbytes // (block_bytes * self.lanes))
        return min(n_blocks, n_within)

    @property
    def max_runs(self) -> int:
        """The most runs of a launch, along either axis; single blocks may have more."""
        n_tokens = self.n_queries + self.n_keys
        n_full = max(3 * n_tokens // BLOCK + 64, self.n_partial // 2)
        row_blocks_of_a_block = BLOCK // _SMALLEST_BLOCK
        return (n_full + self.n_partial) * row_blocks_of_a_block

    @property
    def device_bytes(self) -> int:
        """Upper bound of the device bytes that evaluating takes, bits and tables among
        them."""
        n_tokens = self.n_queries + self.n_keys
        evaluated = self.n_evaluated * _EVALUATION_BYTES * self.lanes
        bits = self.n_partial * BIT_BYTES * self.lanes
        # Positions and pieces of every token, made and padded; the blocks that are
        # sent.
        tokens = 4 * 8 * (n_tokens + 2 * BLOCK)
        tokens += 3 * 8 * SENT * self.n_evaluated
        unsplit = 4 * min(evaluated, UNSPLIT_BYTES)
        unsplit += min(bits, UNSPLIT_BYTES)
        unsplit += 4 * min(tokens, UNSPLIT_BYTES)
        # Functions that are the same in all lanes have more blocks in the same bits.
        single_lane = self._replace(lanes=1)
        tables = 2 * 4 * len(EntryColumn) * single_lane.max_runs
        tables += 2 * 8 * single_lane.n_partial
        tables += 4 * (n_tokens // _SMALLEST_BLOCK + 4)
        return evaluated + bits + tokens + unsplit + tables + SLACK_BYTES


class RuledTask:
    """Rectangles of a task under a geometry with rules.

    Attributes:
        key: what its blocks depend on.
        budget: how much of it is evaluated at a time.
    """

    def __init__(
        self, geometry: Geometry, task: TaskTensors, rectangles: tuple[Rectangle, ...]
    ) -> None:
        self._geometry = geometry
        self._task = task
        self._rectangles = rectangles
        self.key = blocks_key(geometry, task, rectangles)
        batch, heads, n_queries, head_dim = task.query.shape
        n_keys, value_dim = task.value.shape[2:]
        by_entry, by_head = geometry.depends(task.query.device)
        lanes = batch if by_entry else 1
        lanes *= heads if by_head else 1
        row_bytes = (head_dim + value_dim) * task.query.element_size()
        n_rows = batch * heads * max(n_queries, n_keys)
        self.budget = EvaluationBudget.for_rows(
            n_rows * row_bytes, lanes, n_queries, n_keys
        )

    def pieces(self) -> Ints:
        """Full nodes and parts of partial blocks as ``pieces_of`` has them, by
        ascending queries; the partial ones are mixed."""
        full, partial, _ = listed_blocks(
            self._geometry,
            self._task,
            whole_region(self._task),
            self._rectangles,
            self.budget.nbytes,
        )
        nodes = np.concatenate((full, partial))
        # Columns of nodes: lane, query_start, query_stop, key_start, key_stop.
        order = np.lexsort((nodes[:, 3], nodes[:, 1]))
        pieces: Ints = np.zeros((len(nodes), len(PieceColumn)), dtype=np.int64)
        pieces[:, : PieceColumn.DIAGONAL] = nodes[order, 1:]
        pieces[:, PieceColumn.DIAGONAL] = NO_DIAGONAL
        pieces[:, PieceColumn.MIXED] = order >= len(full)
        return pieces

    @torch.no_grad()
    def bits(self, blocks: torch.Tensor | None) -> torch.Tensor:
        """``bits_of`` partial blocks, (2, blocks) on the host."""
        device = self._task.query.device
        if blocks is None or blocks.numel() == 0:
            not_read = (1, 1, 1, 1, 1)
            return torch.empty(not_read, dtype=torch.int32, device=device)
        region = whole_region(self._task)
        evaluator = BlockEvaluator(self._geometry, self._task, region)
        blocks_on_device = to_device(blocks, device)
        return bits_of(evaluator, blocks_on_device, self.budget.n_evaluated)


def bits_of(
    evaluator: BlockEvaluator, blocks: torch.Tensor, n_evaluated: int
) -> torch.Tensor:
    """Which pairs of blocks are kept: (entries, heads, blocks, 128, 4) int32, a bit for
    a key.

    Args:
        blocks: (2, blocks) int64, their rows and columns, on the device.
        n_evaluated: how many are evaluated at a time.
    """
    n_blocks = blocks.shape[1]
    shape = (*evaluator.lanes, n_blocks, BLOCK, BLOCK // 32)
    bits = torch.empty(shape, dtype=torch.int32, device=blocks.device)
    powers = (1 << torch.arange(8, device=blocks.device)).to(torch.uint8)
    for chosen in runs(slice(0, n_blocks), n_evaluated):
        rows, columns = blocks[:, chosen]
        keep = evaluator.evaluate(rows, columns)
        eighths = keep.unflatten(-1, (-1, 8)).to(torch.uint8)
        eighths = eighths.mul_(powers)
        bytes_of_keys = eighths.sum(-1, dtype=torch.uint8)
        words = bytes_of_keys.view(torch.int32)
        bits[:, :, chosen] = words.permute(1, 2, 0, 3, 4)
        del keep, eighths
    return bits
