"""The tables of a task's launches, as many as memory bounds ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from quorum_attention.kernels.masked.block_nodes import BLOCK
from quorum_attention.kernels.native.columns import PieceColumn
from quorum_attention.kernels.native.config import Tiling
from quorum_attention.kernels.native.pieces import Ints, Window
from quorum_attention.kernels.native.rule_blocks import BIT_BYTES
from quorum_attention.kernels.native.runs import Runs
from quorum_attention.kernels.torch_private import no_torch_modes


class LaunchTables(NamedTuple):
    """A launch on the host.

    Attributes:
        tables: in the order of the tilings.
        blocks: rows and columns of the partial blocks of rules, (2, blocks); None
            without rules.
    """

    tables: tuple[Runs, ...]
    blocks: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        block_bytes = 0 if self.blocks is None else self.blocks.nbytes
        return block_bytes + sum(runs.packed.nbytes for runs in self.tables)


@dataclass(frozen=True, slots=True)
class TableMaker:
    """Makes the tables of launches from the pieces of a task.

    Attributes:
        n_queries, n_keys: of the task.
        tilings: of the Triton kernels of a pass.
        window: of the launches.
        pinned: whether tables are in page-locked memory.
        has_rules: whether pieces may be partial blocks of rules.
        max_entries: the most entries of all tables of a launch. A task with more is
            launched in parts.
        max_partial_blocks: the most partial blocks of rules of a launch.
    """

    n_queries: int
    n_keys: int
    tilings: tuple[Tiling, ...]
    window: Window | None
    pinned: bool
    has_rules: bool = False
    max_entries: float = math.inf
    max_partial_blocks: float = math.inf

    def launches(self, pieces: Ints) -> Iterator[LaunchTables]:
        """Yield launches of pieces, each within the limits, or of a single piece."""
        half = len(pieces) // 2
        if half == 0:
            yield self._launch(pieces)
            return
        n_partial = (pieces[:, PieceColumn.MIXED] == 1).sum()
        if n_partial <= self.max_partial_blocks:
            launch = self._launch(pieces)
            if sum(len(runs.entries) for runs in launch.tables) <= self.max_entries:
                yield launch
                return
        yield from self.launches(pieces[:half])
        yield from self.launches(pieces[half:])

    def _launch(self, pieces: Ints) -> LaunchTables:
        blocks = None
        if self.has_rules:
            is_partial = pieces[:, PieceColumn.MIXED] == 1
            pieces = pieces.copy()
            bit_starts = np.arange(is_partial.sum()) * (BIT_BYTES // 4)
            pieces[is_partial, PieceColumn.SHIFT] = bit_starts
            corners = pieces[is_partial][
                :, [PieceColumn.QUERY_START, PieceColumn.KEY_START]
            ]
            blocks = self._on_host(corners.T // BLOCK)
        return LaunchTables(
            tuple(self._table(pieces, tiling) for tiling in self.tilings), blocks
        )

    def _table(self, pieces: Ints, tiling: Tiling) -> Runs:
        n_rows = self.n_queries if tiling.axis == "query" else self.n_keys
        return Runs.of_pieces(pieces, n_rows, tiling, self.window, pinned=self.pinned)

    @no_torch_modes()  # because it is cached
    def _on_host(self, blocks: Ints) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(blocks))
        return tensor.pin_memory() if self.pinned else tensor
