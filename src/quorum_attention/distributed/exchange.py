"""Rows on their way between ranks: inputs to the ranks that compute with them, results
back.

An exchange is planned and packed, then started, then waited for. Each rank sends one
message to each other rank, which has all tensors of all row slices between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist

from quorum_attention.distributed.assignment import Operand, RowSlice
from quorum_attention.distributed.gathered_rows import (
    GatheredRows,
    RowsByHeads,
    Shards,
    empty_rows,
)
from quorum_attention.kernels.carving import bytes_of, views_of
from quorum_attention.kernels.tensors import NamedTensors

# Tensors of a message begin at multiples of this, so that each can be viewed in any
# dtype.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Parcel:
    """The tensors of a row slice, from one rank to another or to the same.

    Attributes:
        row_slice: the rows.
        source, target: ranks.
        specs: what is sent, by name, on the device "meta".
        rows: what the tensors are cut from; None on other ranks than the source.
    """

    row_slice: RowSlice
    source: int
    target: int
    specs: NamedTensors
    rows: GatheredRows | None

    @property
    def n_bytes(self) -> int:
        """The bytes of a message that the tensors take."""
        return bytes_of(self.specs.values(), _ALIGNMENT)

    def views(self, message: torch.Tensor) -> NamedTensors:
        """Return the tensors as views of their bytes of a message."""
        views = views_of(message, self.specs.values(), _ALIGNMENT)
        return dict(zip(self.specs, views, strict=True))

    def cut(self) -> NamedTensors:
        """Return the tensors to be sent, views where they are."""
        assert self.rows is not None, "only the source has the rows"
        parts = self.rows.at(self.row_slice.heads, [self.row_slice.rows])
        return {name: parts[name] for name in self.specs}


class Message:
    """Parcels to or from all other ranks in one buffer, uninitialised.

    Args:
        parcels: on all ranks in the same order.
        peer: the end of the parcels that is another rank.

    Attributes:
        buffer: bytes, those of rank 0 first.
        bytes_of_ranks: how many bytes are to or from each rank.
        tensors: views of the buffer, by row slice and name.
    """

    def __init__(
        self,
        parcels: Iterable[Parcel],
        peer: Literal["source", "target"],
        n_ranks: int,
        device: torch.device,
    ) -> None:
        # The order of parcels with the same peer stays.
        parcels = sorted(parcels, key=attrgetter(peer))
        self.bytes_of_ranks = [0] * n_ranks
        for parcel in parcels:
            rank = getattr(parcel, peer)
            self.bytes_of_ranks[rank] += parcel.n_bytes
        n_bytes = sum(self.bytes_of_ranks)
        self.buffer = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self.tensors: dict[RowSlice, NamedTensors] = {}
        start = 0
        for parcel in parcels:
            stop = start + parcel.n_bytes
            self.tensors[parcel.row_slice] = parcel.views(self.buffer[start:stop])
            start = stop


class Exchange:
    """Row slices that are sent between the ranks; made by ``inputs`` or ``results``.

    All ranks of the group make an exchange together, of the same slices in the same
    order. A rank may leave out slices that it neither sends nor gets.

    Args:
        parcels: of this rank; they are packed at once.
        device: of their tensors.
    """

    def __init__(
        self, parcels: Sequence[Parcel], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group = group
        self._work: Any = None
        rank = group.rank()
        moving = [parcel for parcel in parcels if parcel.source != parcel.target]
        incoming = [parcel for parcel in moving if parcel.target == rank]
        outgoing = [parcel for parcel in moving if parcel.source == rank]
        self._inbox = Message(incoming, "source", group.size(), device)
        self._outbox = Message(outgoing, "target", group.size(), device)
        for parcel in outgoing:
            places = self._outbox.tensors[parcel.row_slice]
            for name, tensor in parcel.cut().items():
                places[name].copy_(tensor)
        # The order of the parcels is the order in which results are added up.
        self._arriving: list[tuple[RowSlice, NamedTensors]] = []
        for parcel in parcels:
            if parcel.target != rank:
                continue
            if parcel.source == rank:
                tensors = parcel.cut()
            else:
                tensors = self._inbox.tensors[parcel.row_slice]
            self._arriving.append((parcel.row_slice, tensors))

    @classmethod
    def inputs(
        cls, row_slices: Iterable[RowSlice], shards: Shards, group: dist.ProcessGroup
    ) -> Exchange:
        """Pack rows of the shards, from their owners to the ranks that compute with
        them."""
        parcels: list[Parcel] = []
        for part in row_slices:
            shard = shards[part.operand]
            if shard.tensors:
                specs = _specs_of(part, shard)
                parcels.append(
                    Parcel(
                        part,
                        part.owner,
                        part.rank,
                        specs,
                        shard,
                    )
                )
        return cls(parcels, group, shards[Operand.QUERY].device)

    @classmethod
    def results(
        cls,
        row_slices: Iterable[RowSlice],
        computed: RowsByHeads,
        targets: Shards,
        state_dtype: torch.dtype,
        group: dist.ProcessGroup,
    ) -> Exchange:
        """Pack results, from the ranks that computed them to the owners of their rows.

        Args:
            computed: the results of this rank.
            targets: the rows of this rank that the results of all ranks are for.
            state_dtype: dtype of results that have to be added up.
        """
        parcels: list[Parcel] = []
        for part in row_slices:
            target = targets[part.operand]
            if target.tensors:
                dtype = None if part.is_exclusive else state_dtype
                specs = _specs_of(part, target, dtype)
                rows = computed.get(part.head_slice)
                parcels.append(
                    Parcel(
                        part,
                        part.rank,
                        part.owner,
                        specs,
                        rows,
                    )
                )
        return cls(parcels, group, targets[Operand.QUERY].device)

    @property
    def received_bytes(self) -> int:
        """The bytes that come from other ranks."""
        return self._inbox.buffer.numel()

    @property
    def messages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes that come, and those that are sent."""
        return self._inbox.buffer, self._outbox.buffer

    def start(self) -> None:
        """Send the message to each rank, beside what the caller does next."""
        if self._group.size() == 1:
            return
        self._work = dist.all_to_all_single(
            self._inbox.buffer,
            self._outbox.buffer,
            self._inbox.bytes_of_ranks,
            self._outbox.bytes_of_ranks,
            group=self._group,
            async_op=True,
        )

    def wait(self) -> list[tuple[RowSlice, NamedTensors]]:
        """Wait, and return the row slices that came, with their tensors; this rank's
        are views.

        On a GPU the current stream waits.
        """
        if self._work is not None:
            self._work.wait()
        return self._arriving


def _specs_of(
    row_slice: RowSlice, rows: GatheredRows, dtype: torch.dtype | None = None
) -> NamedTensors:
    """Return tensors on the device "meta" like those of ``rows``, for a row slice; in
    ``dtype``, if any."""
    n_heads = row_slice.heads.length
    return empty_rows(rows.tensors, n_heads, row_slice.rows.length, dtype, "meta")
