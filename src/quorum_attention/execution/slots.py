"""A slot: the device memory one resident task needs, laid out once and carved for every task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from quorum_attention.execution.pass_spec import PassSpec
from quorum_attention.execution.rows import Axis
from quorum_attention.execution.workload import GroupSize, Workload

ALIGNMENT = 256


class LayoutError(RuntimeError):
    """Fields of a slot would overlap: a mistake of this library, never of the caller's."""


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to the alignment of a slot's fields."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a slot: (entries, heads, rows, width) of ``dtype``.

    Attributes:
        offset: in bytes from the slot's start.
        rows: there is room for, in every head of the largest group.
        fixed: always so many rows, whatever the task.
        over: the input whose place it takes, of which no row may be read any more that it writes:
            a finished result. None: it has a place of its own.
    """

    name: str
    axis: Axis
    width: int
    dtype: torch.dtype
    offset: int
    rows: int
    fixed: bool = False
    over: str | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one head."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where everything lies in a slot.

    Attributes:
        fields: by name.
        slot_bytes: bytes of one slot.
        group: the largest head group a slot takes.
        shared: query heads to a key/value head.

    Raises:
        LayoutError: fields overlap of which none takes the other's place, or leave the slot.
    """

    fields: dict[str, Field]
    slot_bytes: int
    group: GroupSize
    shared: int

    def __post_init__(self) -> None:
        placed = sorted((self.extent(name), name) for name in self.fields)
        for (start, stop), name in placed:
            if start % ALIGNMENT or not 0 <= start <= stop <= self.slot_bytes:
                raise LayoutError(f"field {name!r} lies at {start} to {stop} of {self.slot_bytes}")
        # A finished result lies within the input's place, so it can be left out of the order.
        apart = [item for item in placed if self.fields[item[1]].over is None]
        for ((_, stop), name), ((start, _), other) in pairwise(apart):
            if stop > start:
                raise LayoutError(f"fields {name!r} and {other!r} overlap")
        for field in self.fields.values():
            if field.over is None:
                continue
            (start, stop), (low, high) = self.extent(field.name), self.extent(field.over)
            if start != low or stop > -(-high // ALIGNMENT) * ALIGNMENT:
                raise LayoutError(f"field {field.name!r} does not fit over {field.over!r}")

    def heads(self, axis: Axis) -> int:
        """Heads of the largest group, of queries or of keys."""
        return self.group.kv_heads * (self.shared if axis == "query" else 1)

    def extent(self, name: str) -> tuple[int, int]:
        """The bytes [start, stop) of a slot that the field ``name`` may use."""
        field = self.fields[name]
        count = self.group.batch * self.heads(field.axis) * field.rows
        return field.offset, field.offset + count * field.row_bytes

    def keeps(self, name: str) -> bool:
        """Whether rows of the input ``name`` stay as they are while *other* rows are finished.

        They do unless a finished result of another row size is written over them.
        """
        field = self.fields[name]
        return all(
            other.row_bytes == field.row_bytes
            for other in self.fields.values()
            if other.over == name
        )

    def carve(
        self, slot: torch.Tensor, name: str, entries: int, kv_heads: int, rows: int
    ) -> torch.Tensor:
        """The field ``name`` of a slot (uint8) as a dense (entries, heads, rows, width).

        Dense for the sizes at hand, so that a kernel always gets contiguous rows.

        Raises:
            LayoutError: it was laid out for less, and would reach into the next field.
        """
        field = self.fields[name]
        heads = kv_heads * (self.shared if field.axis == "query" else 1)
        rows = field.rows if field.fixed else rows
        room = (self.group.batch, self.group.kv_heads, field.rows)
        if any(asked > there for asked, there in zip((entries, kv_heads, rows), room, strict=True)):
            raise LayoutError(
                f"field {name!r} has room for {room} (entries, key/value heads, rows), and is "
                f"carved for {(entries, kv_heads, rows)}"
            )
        count = entries * heads * rows * field.width
        n_bytes = count * field.dtype.itemsize
        flat = slot[field.offset : field.offset + n_bytes].view(field.dtype)
        return flat.view(entries, heads, rows, field.width)


class _Builder:
    def __init__(self, group: GroupSize, shared: int, rows: tuple[int, int]) -> None:
        self.group, self.shared = group, shared
        self.rows = {"query": rows[0], "key": rows[1]}
        self.fields: dict[str, Field] = {}
        self.end = 0

    def size(self, axis: Axis, width: int, dtype: torch.dtype) -> int:
        heads = self.group.kv_heads * (self.shared if axis == "query" else 1)
        return aligned(self.group.batch * heads * self.rows[axis] * width * dtype.itemsize)

    def add(self, name: str, axis: Axis, width: int, dtype: torch.dtype) -> None:
        self.fields[name] = Field(name, axis, width, dtype, self.end, self.rows[axis])
        self.end += self.size(axis, width, dtype)

    def add_fixed(self, name: str, rows: int, dtype: torch.dtype) -> None:
        """A field with ``rows`` elements for every entry and key/value head, whatever the task."""
        self.fields[name] = Field(name, "key", 1, dtype, self.end, rows, fixed=True)
        self.end += aligned(self.group.batch * self.group.kv_heads * rows * dtype.itemsize)

    def finish(self, name: str, width: int, dtype: torch.dtype, over: str) -> None:
        """A finished result: in the place of an input, or at the end where it does not fit."""
        place = self.fields[over]
        if self.size(place.axis, width, dtype) <= self.size(place.axis, place.width, place.dtype):
            self.fields[name] = Field(
                name, place.axis, width, dtype, place.offset, place.rows, over=over
            )
        else:
            self.add(name, place.axis, width, dtype)

    def layout(self) -> SlotLayout:
        return SlotLayout(self.fields, self.end, self.group, self.shared)


# A search asks for the same one with every number of slots.
@lru_cache(maxsize=64)
def slot_layout(
    spec: PassSpec,
    work: Workload,
    group: GroupSize,
    rows: tuple[int, int],
    result_dtype: torch.dtype,
    *,
    scaled: bool = False,
) -> SlotLayout:
    """The slot of a task: inputs, states, and finished rows in another dtype than the state's.

    ``rows``: most queries and keys of a task (``Schedule.task_rows``); ``scaled`` adds what a
    scaled backward notes on the device (execution/scaling.py).

    Finished rows lie over an input that is no longer needed then: whoever runs a task again loads
    its inputs again.
    """
    built = _Builder(group, work.queries_per_key_head, rows)
    for item in spec.inputs:
        built.add(item.name, item.axis, item.columns(work), item.dtype(work))
    for state in spec.states:
        built.add(f"state_{state.name}", state.axis, state.columns(work), work.state_dtype)
    if scaled:
        built.add_fixed("unscale", 1, torch.float32)
        built.add_fixed("overflow", 1, torch.int32)
    if result_dtype != work.state_dtype:
        for state in spec.states:
            if state.over is not None:
                built.finish(f"final_{state.name}", state.columns(work), result_dtype, state.over)
    return built.layout()
