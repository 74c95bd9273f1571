"""Rows from rank to rank: several tensors as one message, sent while something else is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.decomposition.intervals import Interval, counted, union
from quorum_attention.distributed.partition import Needed, Piece

# Parts of a message begin at multiples of this, so that each can be read as a tensor of any dtype.
_ALIGNMENT = 16
# Where a tensor is in the message of a rank: its first byte, shape and dtype.
_Place = tuple[int, int, tuple[int, ...], torch.dtype]
_OfPiece = Callable[[Piece], Sequence[torch.Tensor]]


class Transfer:
    """Rows that are under way, in one message to each rank.

    Made by all ranks of the group together, of the same pieces in the same order; a rank may leave
    out those that it neither sends nor gets.

    Args:
        likes: of a piece, its tensors' sizes (batch, any heads, any rows, ...), dtypes and device.
        content: of a piece, the rows themselves; asked for at their source.
        state: dtype of rows that have to be added up, if rows go from who computed them to who
            owns them; None: they come from their owner.

    Attributes:
        coming: the pieces that this rank gets.
        received_bytes: from other ranks.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        likes: _OfPiece,
        content: _OfPiece,
        group: dist.ProcessGroup,
        device: torch.device,
        state: torch.dtype | None = None,
    ) -> None:
        here, ranks = group.rank(), group.size()
        outgoing: list[list[tuple[_Place, torch.Tensor]]] = [[] for _ in range(ranks)]
        sent, got = [0] * ranks, [0] * ranks
        self._slots: list[list[torch.Tensor | _Place]] = []
        self.coming: list[Piece] = []
        for piece in pieces:
            source, target = piece.owner, piece.rank
            if state is not None:
                source, target = target, source
            rows = content(piece) if source == here else ()
            slots: list[torch.Tensor | _Place] = list(rows) if target == here else []
            for number, like in enumerate(likes(piece) if source != target else ()):
                shape = (like.shape[0], piece.heads.length, piece.rows.length, *like.shape[3:])
                dtype = like.dtype if state is None or piece.alone else state
                n_bytes = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
                if source == here:
                    outgoing[target].append(((target, sent[target], shape, dtype), rows[number]))
                    sent[target] += n_bytes
                else:
                    slots.append((source, got[source], shape, dtype))
                    got[source] += n_bytes
            if target == here:
                self.coming.append(piece)
                self._slots.append(slots)
        self.received_bytes, self._starts = sum(got), [0, *accumulate(got)]
        self._inbox = torch.empty(sum(got), dtype=torch.uint8, device=device)
        self._outbox = torch.empty(sum(sent), dtype=torch.uint8, device=device)
        starts = [0, *accumulate(sent)]
        for place, tensor in (one for each in outgoing for one in each):
            _read(self._outbox, starts, place).copy_(tensor)
        messages = self._inbox, self._outbox, got, sent
        self._work: Any = dist.all_to_all_single(*messages, group=group, async_op=True)

    def arrived(self) -> list[tuple[Piece, list[torch.Tensor]]]:
        """The pieces that came with their tensors; this rank's own as they are.

        On a GPU the current stream waits for it.
        """
        self._work.wait()
        rows = [
            [
                slot if isinstance(slot, torch.Tensor) else _read(self._inbox, self._starts, slot)
                for slot in slots
            ]
            for slots in self._slots
        ]
        return list(zip(self.coming, rows, strict=True))


def _read(message: torch.Tensor, starts: Sequence[int], place: _Place) -> torch.Tensor:
    """The tensor at a place of a message of bytes; ``starts``: of each rank's part."""
    rank, at, shape, dtype = place
    first = starts[rank] + at
    exact = math.prod(shape) * dtype.itemsize
    return message[first : first + exact].view(dtype).view(shape)


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
    def zeros(cls, needed: Needed, like: torch.Tensor, dtype: torch.dtype) -> Gathered:
        """Zeros for the rows; ``like`` (batch, any heads, any rows, ...) gives the other sizes."""
        sizes = (like.shape[0], needed.heads.length, counted(needed.rows), *like.shape[3:])
        return cls(needed, torch.zeros(sizes, dtype=dtype, device=like.device))

    @classmethod
    def of(
        cls, needed: Needed, arrived: Sequence[tuple[Piece, torch.Tensor]], like: torch.Tensor
    ) -> Gathered:
        """Put together from pieces; ``like`` as in ``zeros``."""
        if len(arrived) == 1:
            return cls(needed, arrived[0][1])
        made = cls.zeros(needed, like, like.dtype)
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
        places = [(self._position(start), stop - start) for start, stop in pieces]
        some = self.tensor.narrow(1, heads.start - self.needed.heads.start, heads.length)
        runs = union((low, low + length) for low, length in places)
        views = [some.narrow(2, run.start, run.length) for run in runs]
        return views[0] if len(views) == 1 else torch.cat(views, dim=2)

    def _position(self, row: int) -> int:
        before = 0
        for start, stop in self.needed.rows:
            if start <= row < stop:
                return before + row - start
            before += stop - start
        raise ValueError(f"row {row} is not in {self.needed.rows}")


__all__ = ["Gathered", "Transfer"]
