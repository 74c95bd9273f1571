"""Rows from rank to rank: several tensors as one message, sent while something else is computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.decomposition.intervals import Interval, counted
from quorum_attention.distributed.partition import Needed, Piece

# Parts of a message begin at multiples of this, so that each can be read as a tensor of any dtype.
_ALIGNMENT = 16


@dataclass(slots=True)
class Parcel:
    """A tensor on its way.

    Attributes:
        source, target: ranks of the group.
        shape, dtype: of the tensor.
        content: the tensor, at its source; anything elsewhere.
    """

    source: int
    target: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    content: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in a message."""
        exact = math.prod(self.shape) * self.dtype.itemsize
        return -(-exact // _ALIGNMENT) * _ALIGNMENT

    def read(self, message: torch.Tensor, at: int) -> torch.Tensor:
        """The parcel's tensor in a message of bytes, from byte ``at``."""
        exact = math.prod(self.shape) * self.dtype.itemsize
        return message[at : at + exact].view(self.dtype).view(self.shape)


class Delivery:
    """Parcels that are under way.

    Made by all ranks of the group together, of the same parcels in the same order; a rank may leave
    out those that it neither sends nor gets.

    Args:
        device: of the messages.

    Attributes:
        inbox, outbox: the messages.
        received_bytes: from other ranks.
    """

    def __init__(
        self,
        parcels: Sequence[Parcel],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        here, ranks = group.rank(), group.size()
        self._here = here
        self._parcels = [p for p in parcels if p.target == here]
        outgoing = [p for p in parcels if p.source == here and p.target != here]
        self._incoming = [p for p in self._parcels if p.source != here]
        self._incoming.sort(key=lambda p: p.source)
        sent = [sum(p.nbytes for p in outgoing if p.target == rank) for rank in range(ranks)]
        got = [sum(p.nbytes for p in self._incoming if p.source == rank) for rank in range(ranks)]
        self.received_bytes = sum(got)
        self.inbox = torch.empty(sum(got), dtype=torch.uint8, device=device)
        self.outbox = torch.empty(sum(sent), dtype=torch.uint8, device=device)
        starts = [0, *accumulate(sent)]
        for parcel in outgoing:
            assert parcel.content is not None
            parcel.read(self.outbox, starts[parcel.target]).copy_(parcel.content)
            starts[parcel.target] += parcel.nbytes
        messages = self.inbox, self.outbox, got, sent
        self._work: Any = dist.all_to_all_single(*messages, group=group, async_op=True)

    def contents(self) -> list[torch.Tensor]:
        """What came for this rank, in the order of the parcels; its own parcels as they are.

        On a GPU the current stream waits for it.
        """
        self._work.wait()
        arrived: dict[int, torch.Tensor] = {}
        at = 0
        for parcel in self._incoming:
            arrived[id(parcel)] = parcel.read(self.inbox, at)
            at += parcel.nbytes
        found = []
        for parcel in self._parcels:
            own = parcel.content if parcel.source == self._here else arrived[id(parcel)]
            assert own is not None
            found.append(own)
        return found


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


__all__ = ["Delivery", "Gathered", "Parcel"]
