"""Rows from rank to rank: several tensors as one message, sent while something else is computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.decomposition.intervals import Interval, below, counted, union
from quorum_attention.distributed.partition import Piece, Side
from quorum_attention.kernels.merge import add_, merge_

# Parts of a message begin at multiples of this, so that each can be read as a tensor of any dtype.
_ALIGNMENT = 16
_Like = tuple[tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class Gathered:
    """Tensors of some rows, and of none between them, in ascending order.

    Attributes:
        heads, rows: in positions of the whole call.
        tensors: each (batch, heads, rows, ...).
    """

    heads: Interval
    rows: tuple[Interval, ...]
    tensors: list[torch.Tensor]

    @classmethod
    def like(
        cls, heads: Interval, rows: tuple[Interval, ...], tensors: Iterable[torch.Tensor]
    ) -> Gathered:
        """Uninitialised; batch, dtypes and dimensions of a row are those of ``tensors``."""
        sizes = heads.length, counted(rows)
        made = [t.new_empty((t.shape[0], *sizes, *t.shape[3:])) for t in tensors]
        return cls(heads, rows, made)

    def at(self, heads: Interval, *pieces: Interval) -> list[torch.Tensor]:
        """Some rows of some heads; views where nothing lies between the rows here."""
        some = self.tensors
        if heads != self.heads:
            some = [t.narrow(1, heads.start - self.heads.start, heads.length) for t in some]
        runs = _runs(self.rows, pieces)
        views = [[tensor.narrow(2, *run) for run in runs] for tensor in some]
        return [each[0] if len(each) == 1 else torch.cat(each, dim=2) for each in views]

    def write(self, heads: Interval, rows: Interval, parts: Iterable[torch.Tensor]) -> None:
        """Copy ``parts`` to some rows."""
        for target, part in zip(self.at(heads, rows), parts, strict=True):
            target.copy_(part)


# By what the rows are of.
Sides = dict[Side, Gathered]


def add_up(
    sums: Sides,
    side: Side,
    rows: tuple[Interval, ...],
    pieces: Sequence[Interval],
    parts: Sequence[torch.Tensor],
) -> None:
    """Add ``parts`` to some rows of a side's sum, which is one of ``rows``; an output and its
    log-sum-exp are merged."""
    merges = parts[-1].dim() == 3
    total = sums.get(side)
    if total is None:
        total = sums[side] = Gathered.like(side.heads, rows, parts)
        for number, tensor in enumerate(total.tensors):
            tensor.fill_(-math.inf if merges and number else 0.0)
    split = (part.split([piece.length for piece in pieces], dim=2) for part in parts)
    for piece, *some in zip(pieces, *split, strict=True):
        targets = total.at(side.heads, piece)
        if merges:
            merge_(*targets, *some)
            continue
        for target, part in zip(targets, some, strict=True):
            add_(target, part)


class Transfer:
    """Rows that are under way, in one message to each rank.

    Made by all ranks of the group together, of the same pieces in the same order; a rank may leave
    out those that it neither sends nor gets.

    Args:
        shards: of queries and of keys: this rank's rows, or where their results belong.
        results: what this rank has computed, if rows go from who computed them to who owns them;
            None: they come from their owner.
        state: dtype of results that have to be added up.

    Attributes:
        received_bytes: from other ranks.
        messages: what came, and what is sent.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        shards: tuple[Gathered, Gathered],
        group: dist.ProcessGroup,
        results: Sides | None = None,
        state: torch.dtype | None = None,
    ) -> None:
        here, ranks, device = group.rank(), group.size(), shards[0].tensors[0].device
        outgoing, incoming = ([list[_Like]() for _ in range(ranks)] for _ in range(2))
        sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        coming: list[tuple[Piece, int, Sequence[torch.Tensor]]] = []
        for piece in pieces:
            shard, heads = shards[piece.side.of_keys], piece.side.heads
            ends = piece.owner, piece.rank
            source, target = ends if results is None else ends[::-1]
            own: Sequence[torch.Tensor] = ()
            if source == here:
                rows = shard if results is None else results[piece.side]
                own = rows.at(heads, piece.rows)[: len(shard.tensors)]
            likes = [
                (
                    (t.shape[0], heads.length, piece.rows.length, *t.shape[3:]),
                    t.dtype if state is None or piece.alone else state,
                )
                for t in shard.tensors
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
        for place, part in zip(chain(*places), chain(*sent), strict=True):
            place.copy_(part)
        self.messages, self.received_bytes = (inbox, outbox), sum(come)
        queues = [iter(each) for each in came]
        self._arrived: list[tuple[Piece, Sequence[torch.Tensor]]] = [
            (piece, own or [next(queues[source]) for _ in shards[piece.side.of_keys].tensors])
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


@lru_cache(maxsize=4096)
def _runs(rows: tuple[Interval, ...], pieces: tuple[Interval, ...]) -> list[tuple[int, int]]:
    """Where ``pieces`` lie among ``rows``, without gaps between these: first row and length."""
    starts = [counted(below(rows, piece.start)) for piece in pieces]
    runs = union((n, n + piece.length) for n, piece in zip(starts, pieces, strict=True))
    return [(run.start, run.length) for run in runs]
