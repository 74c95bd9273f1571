"""Rows on their way between ranks: inputs to the ranks that compute with them, results
back.

An exchange is planned and packed, then started, then waited for. Each rank sends one
message to each other rank, which has all tensors of all row slices between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.arithmetic import round_up
from quorum_attention.distributed.assignment import Operand, RowSlice
from quorum_attention.distributed.gathered_rows import GatheredRows, Shards
from quorum_attention.distributed.groups import GroupMember
from quorum_attention.kernels.carving import view_at
from quorum_attention.kernels.tensors import NamedTensors

# Tensors of a message begin at multiples of this, so that each can be viewed in any
# dtype.
_ALIGNMENT = 16


class RowFormat(NamedTuple):
    """Sizes and dtype of the rows of a tensor.

    Attributes:
        name: of the tensor.
        row_sizes: the dimensions after (batch, heads, rows).
    """

    name: str
    dtype: torch.dtype
    batch: int
    row_sizes: tuple[int, ...]


class TensorPlace(NamedTuple):
    """Where a tensor lies in a message: its first byte."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of its bytes."""
        return view_at(
            buffer,
            self.start,
            self.shape,
            self.dtype,
        )


class MessagePlan(NamedTuple):
    """Tensors in one buffer, those to or from rank 0 first.

    Attributes:
        bytes_of_ranks: how many bytes are to or from each rank.
        places: where the tensors of each row slice lie.
    """

    bytes_of_ranks: list[int]
    places: dict[RowSlice, list[TensorPlace]]

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Return the buffer, uninitialised."""
        n_bytes = sum(self.bytes_of_ranks)
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)


Formats = tuple[tuple[RowFormat, ...], ...]
"""Of the tensors of each operand."""


class ExchangePlan(NamedTuple):
    """The messages of a rank.

    Attributes:
        inbox, outbox: from and to all other ranks.
        arriving: the row slices that are for this rank, its own among them, with the
            names of their tensors. Results are added up in this order.
    """

    inbox: MessagePlan
    outbox: MessagePlan
    arriving: list[tuple[RowSlice, list[str]]]


@lru_cache(maxsize=1024)
def _plan_exchange(
    row_slices: tuple[RowSlice, ...],
    formats: Formats,
    rank: int,
    n_ranks: int,
    sum_dtype: torch.dtype | None,
) -> ExchangePlan:
    """Plan an exchange of inputs, or of results.

    Args:
        row_slices: of this rank, on all ranks in the same order.
        sum_dtype: of results that have to be added up; None: inputs are sent.
    """
    inbox = MessagePlan([0] * n_ranks, {})
    outbox = MessagePlan([0] * n_ranks, {})
    arriving: list[tuple[RowSlice, list[str]]] = []
    moving: list[tuple[int, MessagePlan, RowSlice]] = []
    for part in row_slices:
        names = [row_format.name for row_format in formats[part.operand]]
        if not names:
            continue
        source, target = _ends_of(part, is_result=sum_dtype is not None)
        if target == rank:
            arriving.append((part, names))
        if source == target:
            continue
        if target == rank:
            moving.append((source, inbox, part))
        else:
            moving.append((target, outbox, part))
    # The order of slices with the same peer stays.
    for peer, message, part in sorted(moving, key=itemgetter(0)):
        start = sum(message.bytes_of_ranks)
        dtype = None if part.is_exclusive else sum_dtype
        places = _places_from(start, part, formats[part.operand], dtype)
        message.places[part] = places
        message.bytes_of_ranks[peer] += _end_of(places[-1]) - start
    return ExchangePlan(inbox, outbox, arriving)


def _ends_of(part: RowSlice, is_result: bool) -> tuple[int, int]:
    """Return the ranks that send and get a row slice."""
    return (part.rank, part.owner) if is_result else (part.owner, part.rank)


def _places_from(
    start: int,
    part: RowSlice,
    formats: Iterable[RowFormat],
    dtype: torch.dtype | None,
) -> list[TensorPlace]:
    """Return the places of a row slice's tensors, one behind the other.

    Args:
        dtype: None: the tensors' own.
    """
    places: list[TensorPlace] = []
    for row_format in formats:
        shape = (
            row_format.batch,
            part.heads.length,
            part.rows.length,
            *row_format.row_sizes,
        )
        place = TensorPlace(row_format.name, start, shape, dtype or row_format.dtype)
        places.append(place)
        start = _end_of(place)
    return places


def _end_of(place: TensorPlace) -> int:
    """Return where the next tensor begins."""
    n_bytes = math.prod(place.shape) * place.dtype.itemsize
    return place.start + round_up(n_bytes, _ALIGNMENT)


class Exchange:
    """Row slices that are sent between the ranks.

    All ranks of the group make an exchange together, of the same slices in the same
    order. A rank may leave out slices that it neither sends nor gets. What is sent is
    packed at once.

    Args:
        row_slices: of this rank.
        like: this rank's rows; what is sent has the names, sizes and dtypes of their
            tensors.
        rows_of: the rows of this rank that a row slice is cut from.
        member: this rank.
        sum_dtype: results are sent back, those that have to be added up in this dtype;
            None: inputs are sent.
    """

    def __init__(
        self,
        row_slices: tuple[RowSlice, ...],
        like: Shards,
        rows_of: Callable[[RowSlice], GatheredRows],
        member: GroupMember,
        sum_dtype: torch.dtype | None = None,
    ) -> None:
        plan = _plan_exchange(
            row_slices,
            _formats_of(like),
            member.rank,
            member.n_ranks,
            sum_dtype,
        )
        device = like[Operand.QUERY].device
        self._plan = plan
        self._member = member
        self._work: Any = None
        self._inbox = plan.inbox.allocate(device)
        self._outbox = plan.outbox.allocate(device)
        for part, places in plan.outbox.places.items():
            tensors = rows_of(part).at(part.heads, [part.rows])
            for place in places:
                place.view(self._outbox).copy_(tensors[place.name])
        self._arriving: list[tuple[RowSlice, NamedTensors]] = []
        for part, names in plan.arriving:
            if part.rank == part.owner:
                tensors = rows_of(part).at(part.heads, [part.rows])
                local_rows = {name: tensors[name] for name in names}
                self._arriving.append((part, local_rows))
                continue
            places = plan.inbox.places[part]
            received = {place.name: place.view(self._inbox) for place in places}
            self._arriving.append((part, received))

    @property
    def received_bytes(self) -> int:
        """The bytes that come from other ranks."""
        return self._inbox.numel()

    @property
    def messages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes that come, and those that are sent."""
        return self._inbox, self._outbox

    def start(self) -> None:
        """Send the message to each rank, beside what the caller does next."""
        if self._member.n_ranks == 1:
            return
        self._work = dist.all_to_all_single(
            self._inbox,
            self._outbox,
            self._plan.inbox.bytes_of_ranks,
            self._plan.outbox.bytes_of_ranks,
            group=self._member.group,
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


def _formats_of(rows: Shards) -> Formats:
    """Return what the tensors of each operand are like."""
    formats: list[tuple[RowFormat, ...]] = []
    for operand in Operand:
        formats_of_operand: list[RowFormat] = []
        for name, tensor in rows[operand].tensors.items():
            batch, _, _, *row_sizes = tensor.shape
            row_format = RowFormat(name, tensor.dtype, batch, tuple(row_sizes))
            formats_of_operand.append(row_format)
        formats.append(tuple(formats_of_operand))
    return tuple(formats)
