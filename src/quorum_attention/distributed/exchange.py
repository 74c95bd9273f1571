"""Rows from rank to rank: several tensors as one message, sent while something else is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.distributed.marks import read_mark, write_marks
from quorum_attention.distributed.peers import begun
from quorum_attention.distributed.watch import Watch, sends_nothing
from quorum_attention.execution.device.lookup import on_host

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

    def as_message(self) -> torch.Tensor | None:
        """The content as a message of bytes, if its memory is one as it is."""
        content = self.content
        assert content is not None
        same = content.dtype == self.dtype and content.shape == self.shape
        if not same or not content.is_contiguous() or content.nbytes != self.nbytes:
            return None
        return content.detach().view(-1).view(torch.uint8)

    def read(self, message: torch.Tensor, at: int) -> torch.Tensor:
        """The parcel's tensor in a message of bytes, from byte ``at``."""
        exact = math.prod(self.shape) * self.dtype.itemsize
        return message[at : at + exact].view(self.dtype).view(self.shape)


class Delivery:
    """Parcels that are under way.

    Made by all ranks of the group together, of the same parcels in the same order; a rank may leave
    out those that it neither sends nor gets.

    Args:
        watch: the pass.
        mark: what the last rank sends the others at the end of its messages; None: nothing.

    Attributes:
        inbox, outbox: the messages; where one parcel is all that is sent, its content itself.
        received_bytes: from other ranks.
    """

    def __init__(
        self,
        parcels: Sequence[Parcel],
        group: dist.ProcessGroup,
        device: torch.device,
        watch: Watch,
        mark: int | None = None,
    ) -> None:
        here, ranks = group.rank(), group.size()
        self._watch, self._tail = watch, False
        self._here = here
        self._parcels = [p for p in parcels if p.target == here]
        outgoing = [p for p in parcels if p.source == here and p.target != here]
        self._incoming = [p for p in self._parcels if p.source != here]
        self._incoming.sort(key=lambda p: p.source)
        sent = [sum(p.nbytes for p in outgoing if p.target == rank) for rank in range(ranks)]
        got = [sum(p.nbytes for p in self._incoming if p.source == rank) for rank in range(ranks)]
        self.received_bytes = sum(got)
        last = ranks - 1
        if mark is not None and here == last:
            sent = [n + _ALIGNMENT * (target != here) for target, n in enumerate(sent)]
        elif mark is not None:
            got[last] += _ALIGNMENT
            self._tail = True
        self.inbox = torch.empty(sum(got), dtype=torch.uint8, device=device)
        alone = outgoing[0].as_message() if len(outgoing) == 1 else None
        if alone is not None and sum(sent) == alone.numel():
            self.outbox = alone
        else:
            self.outbox = torch.empty(sum(sent), dtype=torch.uint8, device=device)
            starts = [0, *accumulate(sent)][:ranks]
            for parcel in outgoing:
                assert parcel.content is not None
                parcel.read(self.outbox, starts[parcel.target]).copy_(parcel.content)
                starts[parcel.target] += parcel.nbytes
            if mark is not None and here == last:
                for at in starts[:last]:
                    write_marks(self.outbox[at : at + _ALIGNMENT], 1, mark)
        self._work: Any = None
        # A dry run refuses a message from a rank that sends none.
        if self.outbox.numel() or not sends_nothing(group):
            messages = self.inbox, self.outbox, got, sent
            work = dist.all_to_all_single(*messages, group=group, async_op=True)
            self._work = begun(group, work)
        self._waited = self._work is None

    def contents(self) -> list[torch.Tensor]:
        """What came for this rank, in the order of the parcels; its own parcels as they are.

        On a GPU the current stream waits for it, and each other one on which this is asked again.

        Raises:
            ValueError: it is of another call.
        """
        if not self._waited:
            self._watch.wait(self._work)
            self._waited = True
        elif self._work is not None and not on_host(self.inbox.device):
            self._work.wait()
        if self._tail:
            self._watch.check(read_mark(self.inbox))
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


__all__ = ["Delivery", "Parcel"]
