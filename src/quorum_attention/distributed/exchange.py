"""Rows on their way between ranks: inputs to the ranks that compute with them, results back.

An exchange is planned and packed, then started, then waited for. Each rank sends one message to
each other rank, which has all tensors of all row slices between the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.arithmetic import round_up
from quorum_attention.distributed.assignment import Operand, RowSlice
from quorum_attention.distributed.gathered_rows import (
    GatheredRows,
    NamedTensors,
    RowsByHeads,
    Shards,
)

# Tensors of a message begin at multiples of this, so that each can be viewed in any dtype.
_ALIGNMENT = 16


class TensorSpec(NamedTuple):
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Parcel:
    """The tensors of a row slice, from one rank to another or to the same.

    Attributes:
        row_slice: the rows.
        source, target: ranks.
        specs: what is sent, by name.
        rows: what the tensors are cut from; None on other ranks than the source.
    """

    row_slice: RowSlice
    source: int
    target: int
    specs: dict[str, TensorSpec]
    rows: GatheredRows | None

    def cut(self) -> NamedTensors:
        """Return the tensors to be sent, views where they are."""
        assert self.rows is not None, "only the source has the rows"
        parts = self.rows.at(self.row_slice.head_slice.heads, [self.row_slice.rows])
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
        n_bytes = sum(_padded_bytes(spec) for p in parcels for spec in p.specs.values())
        self.buffer = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self.bytes_of_ranks = [0] * n_ranks
        self.tensors: dict[RowSlice, NamedTensors] = {}
        remaining = self.buffer
        for parcel in parcels:
            views: NamedTensors = {}
            for name, spec in parcel.specs.items():
                size = _padded_bytes(spec)
                part = remaining[:size].view(spec.dtype)
                views[name] = part[: math.prod(spec.shape)].view(spec.shape)
                remaining = remaining[size:]
                self.bytes_of_ranks[getattr(parcel, peer)] += size
            self.tensors[parcel.row_slice] = views


class Exchange:
    """Row slices that are sent between the ranks; made by ``inputs`` or ``results``.

    All ranks of the group make an exchange together, of the same slices in the same order. A rank
    may leave out slices that it neither sends nor gets.

    Args:
        parcels: of this rank; they are packed at once.
        device: of their tensors.
    """

    def __init__(
        self, parcels: Iterable[Parcel], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group = group
        self._work: Any = None
        rank = group.rank()
        incoming = [p for p in parcels if p.target == rank]
        outgoing = [p for p in parcels if p.source == rank != p.target]
        foreign = [p for p in incoming if p.source != rank]
        self._inbox = Message(foreign, "source", group.size(), device)
        self._outbox = Message(outgoing, "target", group.size(), device)
        for parcel in outgoing:
            places = self._outbox.tensors[parcel.row_slice]
            for name, tensor in parcel.cut().items():
                places[name].copy_(tensor)
        self._arriving = [
            (p.row_slice, p.cut() if p.source == rank else self._inbox.tensors[p.row_slice])
            for p in incoming
        ]

    @classmethod
    def inputs(
        cls, row_slices: Iterable[RowSlice], shards: Shards, group: dist.ProcessGroup
    ) -> Exchange:
        """Pack rows of the shards, from their owners to the ranks that compute with them."""
        parcels: list[Parcel] = []
        for part in row_slices:
            shard = shards[part.operand]
            if shard.tensors:
                parcels.append(Parcel(part, part.owner, part.rank, _specs_of(part, shard), shard))
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
                parcels.append(Parcel(part, part.rank, part.owner, specs, rows))
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
        """Wait, and return the row slices that came, with their tensors; this rank's are views.

        On a GPU the current stream waits.
        """
        if self._work is not None:
            self._work.wait()
        return self._arriving


def _specs_of(
    row_slice: RowSlice, rows: GatheredRows, dtype: torch.dtype | None = None
) -> dict[str, TensorSpec]:
    """Return the specs of tensors like those of ``rows``, for a row slice; in ``dtype``, if any."""
    sizes = (row_slice.head_slice.heads.length, row_slice.rows.length)
    return {
        name: TensorSpec((tensor.shape[0], *sizes, *tensor.shape[3:]), dtype or tensor.dtype)
        for name, tensor in rows.tensors.items()
    }


def _padded_bytes(spec: TensorSpec) -> int:
    """Return the bytes that a tensor takes of a message."""
    return round_up(math.prod(spec.shape) * spec.dtype.itemsize, _ALIGNMENT)
