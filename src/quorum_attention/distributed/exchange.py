"""Rows from rank to rank: several tensors as one message, sent while something else is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.decomposition.intervals import Interval, below, counted, union
from quorum_attention.distributed.partition import Needed, Piece
from quorum_attention.kernels.merge import add_, merge_

# Parts of a message begin at multiples of this, so that each can be read as a tensor of any dtype.
_ALIGNMENT = 16
_Like = tuple[tuple[int, ...], torch.dtype]


class Transfer:
    """Rows that are under way, in one message to each rank.

    Made by all ranks of the group together, of the same pieces in the same order; a rank may leave
    out those that it neither sends nor gets.

    Args:
        shards: tensors of queries and of keys, which give the device, the dtype and all sizes
            (batch, any heads, any rows, ...) but heads and rows.
        content: of a piece, the rows themselves; asked for at their source.
        state: dtype of rows that have to be added up, if rows go from who computed them to who
            owns them; None: they come from their owner.

    Attributes:
        received_bytes: from other ranks.
        messages: what came, and what is sent.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        shards: tuple[Sequence[Gathered], Sequence[Gathered]],
        content: Callable[[Piece], Sequence[torch.Tensor]],
        group: dist.ProcessGroup,
        state: torch.dtype | None = None,
    ) -> None:
        here, ranks, device = group.rank(), group.size(), shards[0][0].tensor.device
        outgoing, incoming = ([list[_Like]() for _ in range(ranks)] for _ in range(2))
        sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        coming: list[tuple[Piece, int, Sequence[torch.Tensor]]] = []
        for piece in pieces:
            ends = piece.owner, piece.rank
            source, target = ends if state is None else ends[::-1]
            own = content(piece) if source == here else ()
            likes = [
                (
                    (t.shape[0], piece.heads.length, piece.rows.length, *t.shape[3:]),
                    t.dtype if state is None or piece.alone else state,
                )
                for t in (one.tensor for one in shards[piece.of_keys])
            ]
            if target == here:
                coming.append((piece, source, own))
                if source != here:
                    incoming[source] += likes
            elif source == here:
                outgoing[target] += likes
                sent[target] += own
        outbox, go, places = _message(outgoing, device)
        inbox, come, came = _message(incoming, device)
        for place, rows in zip(chain(*places), chain(*sent), strict=True):
            place.copy_(rows)
        self.messages, self.received_bytes = (inbox, outbox), sum(come)
        queues = [iter(each) for each in came]
        self._arrived: list[tuple[Piece, Sequence[torch.Tensor]]] = [
            (piece, own or [next(queues[source]) for _ in shards[piece.of_keys]])
            for piece, source, own in coming
        ]
        self._work: Any = None
        if ranks > 1:
            self._work = dist.all_to_all_single(inbox, outbox, come, go, group=group, async_op=True)

    def arrived(self) -> list[tuple[Piece, Sequence[torch.Tensor]]]:
        """The pieces that came with their tensors; this rank's own as they are.

        On a GPU the current stream waits for it.
        """
        if self._work is not None:
            self._work.wait()
        return self._arrived


def _message(
    likes: Sequence[Sequence[_Like]], device: torch.device
) -> tuple[torch.Tensor, list[int], list[list[torch.Tensor]]]:
    """A message to or from each rank: all its bytes, how many are of each rank, and its tensors."""
    exact = [[math.prod(shape) * dtype.itemsize for shape, dtype in each] for each in likes]
    sizes = [[-(-n // _ALIGNMENT) * _ALIGNMENT for n in each] for each in exact]
    message = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=device)
    parts = iter(message.split([n for each in sizes for n in each]))
    tensors = [
        [next(parts)[:n].view(dtype).view(shape) for n, (shape, dtype) in zip(*both, strict=True)]
        for both in zip(exact, likes, strict=True)
    ]
    return message, [sum(each) for each in sizes], tensors


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
    def of(
        cls, needed: Needed, arrived: Sequence[tuple[Interval, torch.Tensor]], like: torch.Tensor
    ) -> Gathered:
        """Put together from rows that came; ``like`` (batch, any heads, any rows, ...) gives dtype,
        device and the other sizes."""
        if len(arrived) == 1:
            return cls(needed, arrived[0][1])
        sizes = (like.shape[0], needed.heads.length, counted(needed.rows), *like.shape[3:])
        made = cls(needed, like.new_empty(sizes))
        for rows, content in arrived:
            made.at(rows).copy_(content)
        return made

    @staticmethod
    def add(
        sides: Sides,
        of_keys: bool,
        needed: Needed,
        computed: Needed,
        parts: Sequence[torch.Tensor],
    ) -> None:
        """Add up what was computed for some of the needed rows; an output and its lse, which
        others may hold, are merged into tensors of their own."""
        merges, name = parts[-1].dim() == 3, (of_keys, needed.heads)
        if name not in sides:
            if computed == needed and not merges:
                sides[name] = [Gathered(needed, part) for part in parts]
                return
            sides[name] = [Gathered.of(needed, (), part) for part in parts]
            for one in sides[name]:
                one.tensor.fill_(-math.inf if merges and one is sides[name][-1] else 0.0)
        totals, lengths = sides[name], [rows.length for rows in computed.rows]
        split = zip(*(part.split(lengths, dim=2) for part in parts), strict=True)
        for rows, some in zip(computed.rows, split, strict=True):
            targets = [total.at(rows, heads=computed.heads) for total in totals]
            if merges:
                merge_(*targets, *some)
                continue
            for target, one in zip(targets, some, strict=True):
                add_(target, one)

    def at(self, *pieces: Interval, heads: Interval | None = None) -> torch.Tensor:
        """Rows of all its heads, or of some; a view where nothing lies between them here."""
        some = self.tensor
        if heads is not None and heads != self.needed.heads:
            some = some.narrow(1, heads.start - self.needed.heads.start, heads.length)
        views = [some.narrow(2, *run) for run in _runs(self.needed.rows, pieces)]
        return views[0] if len(views) == 1 else torch.cat(views, dim=2)


# Tensors of some rows: of keys and values or of queries, by their heads.
Sides = dict[tuple[bool, Interval], list[Gathered]]


@lru_cache(maxsize=4096)
def _runs(rows: tuple[Interval, ...], pieces: tuple[Interval, ...]) -> list[tuple[int, int]]:
    """Where ``pieces`` lie among ``rows``, without gaps between these: first row and length."""
    starts = [counted(below(rows, piece.start)) for piece in pieces]
    runs = union((n, n + piece.length) for n, piece in zip(starts, pieces, strict=True))
    return [(run.start, run.length) for run in runs]
