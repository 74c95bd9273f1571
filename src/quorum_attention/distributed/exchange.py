"""Rows from rank to rank: several tensors as one message, sent while something else is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.decomposition.intervals import Interval, counted
from quorum_attention.distributed.partition import Needed, Piece

# Parts of a message begin at multiples of this, so that each can be read as a tensor of any dtype.
_ALIGNMENT = 16


class Moving(NamedTuple):
    """Rows that move, of several tensors.

    Attributes:
        likes: of each tensor its sizes (batch, any heads, any rows, ...) and its dtype.
        content: the rows of the n-th tensor, asked for at their source.
    """

    piece: Piece
    likes: Sequence[torch.Tensor]
    content: Callable[[int], torch.Tensor]


# Where a tensor is in the message of a rank: its first byte, shape and dtype.
_Place = tuple[int, int, tuple[int, ...], torch.dtype]


class Transfer:
    """Rows that are under way, in one message to each rank.

    Made by all ranks of the group together, of the same rows in the same order; a rank may leave
    out those that it neither sends nor gets.

    Args:
        device: of the messages.
        back: from who computed them to who owns them; else from the owner.
        state: dtype of rows that come back and have to be added up.

    Attributes:
        coming: the pieces that this rank gets.
        received_bytes: from other ranks.
    """

    def __init__(
        self,
        every: Iterable[Moving],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        back: bool = False,
        state: torch.dtype | None = None,
    ) -> None:
        here, ranks = group.rank(), group.size()
        outgoing: list[list[tuple[_Place, torch.Tensor]]] = [[] for _ in range(ranks)]
        sent, got = [0] * ranks, [0] * ranks
        self._slots: list[list[torch.Tensor | _Place]] = []
        self.coming: list[Piece] = []
        for piece, likes, content in every:
            source, target = (piece.rank, piece.owner) if back else (piece.owner, piece.rank)
            slots: list[torch.Tensor | _Place] = []
            for number, like in enumerate(likes):
                shape = (like.shape[0], piece.heads.length, piece.rows.length, *like.shape[3:])
                dtype = state if back and not piece.alone and state is not None else like.dtype
                n_bytes = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
                if source == target == here:
                    slots.append(content(number))
                elif source == here:
                    outgoing[target].append(((target, sent[target], shape, dtype), content(number)))
                    sent[target] += n_bytes
                elif target == here:
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

    def arrived(self) -> list[list[torch.Tensor]]:
        """The tensors of each piece that came; this rank's own as they are.

        On a GPU the current stream waits for it.
        """
        self._work.wait()
        return [
            [
                slot if isinstance(slot, torch.Tensor) else _read(self._inbox, self._starts, slot)
                for slot in slots
            ]
            for slots in self._slots
        ]


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


__all__ = ["Gathered", "Moving", "Transfer"]
