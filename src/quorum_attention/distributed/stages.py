"""The rows that a rank computes with in a stage: put together, and taken apart again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from quorum_attention.decomposition.intervals import Interval, counted
from quorum_attention.distributed.assignment import Needed, Piece


@dataclass(slots=True)
class Gathered:
    """A tensor of the rows that are needed, and of no others, in ascending order.

    Attributes:
        needed: heads and rows, in positions of the whole call.
        tensor: (batch, heads, rows, ...).
    """

    needed: Needed
    tensor: torch.Tensor

    @classmethod
    def empty(cls, needed: Needed, heads: int, like: torch.Tensor, dtype: torch.dtype) -> Gathered:
        """Room for the rows; ``like`` (batch, any heads, any rows, ...) gives the other sizes."""
        sizes = (like.shape[0], heads, counted(needed.rows), *like.shape[3:])
        return cls(needed, torch.empty(sizes, dtype=dtype, device=like.device))

    @classmethod
    def of(
        cls, needed: Needed, arrived: Sequence[tuple[Piece, torch.Tensor]], like: torch.Tensor
    ) -> Gathered:
        """Put together from pieces; ``like`` as in ``empty``."""
        if len(arrived) == 1:
            return cls(needed, arrived[0][1])
        made = cls.empty(needed, needed.heads.length, like, like.dtype)
        for piece, content in arrived:
            made.at(piece.rows).copy_(content)
        return made

    def at(self, rows: tuple[int, int], heads: Interval | None = None) -> torch.Tensor:
        """Consecutive rows, as a view; of all its heads, or of some."""
        taken = self.tensor.narrow(2, self._position(rows[0]), rows[1] - rows[0])
        if heads is None:
            return taken
        return taken.narrow(1, heads.start - self.needed.heads.start, heads.length)

    def over(self, pieces: Iterable[Interval], heads: Interval) -> torch.Tensor:
        """The rows of several intervals: a view where nothing lies between them here."""
        runs: list[list[int]] = []
        for start, stop in pieces:
            low = self._position(start)
            if runs and runs[-1][1] == low:
                runs[-1][1] += stop - start
            else:
                runs.append([low, low + stop - start])
        first = heads.start - self.needed.heads.start
        some = self.tensor.narrow(1, first, heads.length)
        views = [some.narrow(2, low, high - low) for low, high in runs]
        return views[0] if len(views) == 1 else torch.cat(views, dim=2)

    def _position(self, row: int) -> int:
        before = 0
        for start, stop in self.needed.rows:
            if start <= row < stop:
                return before + row - start
            before += stop - start
        raise ValueError(f"row {row} is not in {self.needed.rows}")


__all__ = ["Gathered"]
