"""Evaluates users' functions for the pairs of blocks, on the device."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import FULL, PARTIAL, Rectangle
from quorum_attention.kernels.masked.block_nodes import BLOCK, Ints
from quorum_attention.kernels.masked.geometry import Geometry
from quorum_attention.kernels.task_tensors import Indices, TaskTensors
from quorum_attention.kernels.torch_private import capturing, no_torch_modes

PAIR_BYTES = 64
"""Device bytes for each pair that is evaluated at a time: a function's own temporaries,
a few tensors of int64, among them."""
SENT = 64
"""Blocks that are sent to the device at a time: that many times those evaluated at
once."""

Codes = NDArray[np.int8]
_BLOCK_PAIRS = BLOCK * BLOCK


def evaluated_bytes(lanes: int, nbytes: int) -> int:
    """Bound of the bytes that ``listed_blocks`` with so many takes, for a function that
    differs in ``lanes`` heads and batch entries."""
    return max(nbytes, PAIR_BYTES * _BLOCK_PAIRS * lanes)


class BlockEvaluator:
    """Evaluates which pairs of blocks of a region a geometry keeps, on the task's
    device.

    All pairs of a block are evaluated, also of one that rectangles hold in part.
    """

    def __init__(
        self, geometry: Geometry, task: TaskTensors, region: Rectangle
    ) -> None:
        indices = task.indices(region)
        differs_by_entry, differs_by_head = geometry.depends(task.query.device)
        self._geometry = geometry
        self._entries = indices.entries if differs_by_entry else indices.entries[:1]
        self._heads = indices.heads if differs_by_head else indices.heads[:1]
        self._queries = _by_blocks(indices.queries)
        self._keys = _by_blocks(indices.keys)

    @property
    def lanes(self) -> tuple[int, int]:
        """(entries, heads) for which blocks are evaluated."""
        return len(self._entries), len(self._heads)

    @no_torch_modes()
    def codes(self, blocks: Ints, nbytes: int) -> Codes:
        """FULL, PARTIAL or EMPTY, (blocks, entries, heads).

        Args:
            blocks: (2, blocks), their rows and columns.
            nbytes: for evaluating them.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        device = self._queries.device
        if capturing(device):
            raise RuntimeError(
                "a mask's function has to be evaluated before a CUDA graph is "
                "captured: make one such call first, as warm-up"
            )
        codes = [np.zeros((0, *self.lanes), dtype=np.int8)]
        block_bytes = PAIR_BYTES * _BLOCK_PAIRS * math.prod(self.lanes)
        at_once = max(1, nbytes // block_bytes)
        for start in range(0, blocks.shape[1], SENT * at_once):
            sent = torch.from_numpy(blocks[:, start : start + SENT * at_once]).to(
                device
            )
            parts = [
                self._codes(rows, columns)
                for rows, columns in sent.split(at_once, dim=1)
            ]
            codes.append(torch.cat(parts).cpu().numpy())
        return np.concatenate(codes)

    def _codes(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        is_kept = self.evaluate(rows, columns)
        counts = is_kept.sum(dim=(3, 4), dtype=torch.int64)
        has_pairs = counts > 0
        codes = has_pairs.to(torch.int8) * PARTIAL
        return codes.masked_fill_(counts == _BLOCK_PAIRS, FULL)

    def evaluate(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Tell which pairs of blocks are kept, (blocks, entries, heads, 128, 128)."""
        queries = self._queries[rows]
        keys = self._keys[columns]
        if not self._geometry.functions:
            return self._evaluate_block(
                queries, keys
            )  # our own rules take blocks as they are
        is_kept: torch.Tensor = torch.vmap(self._evaluate_block)(queries, keys)
        return is_kept

    def _evaluate_block(
        self, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Tell which pairs are kept of one block (128,) or, without functions, of
        several."""
        is_kept = self._geometry.keeps(
            Indices(self._entries, self._heads, queries, keys)
        )
        return is_kept.expand(
            *is_kept.shape[:-4], *self.lanes, BLOCK, BLOCK
        ).contiguous()


def _by_blocks(tokens: torch.Tensor) -> torch.Tensor:
    """``tokens`` (n,) as (blocks, 128), the last of them repeated up to a whole
    block."""
    missing = -len(tokens) % BLOCK
    copies = tokens[-1:].expand(missing)
    whole_blocks = torch.cat([tokens, copies])
    return whole_blocks.view(-1, BLOCK)
