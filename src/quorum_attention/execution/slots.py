"""A slot: the device memory of one resident task, laid out once and carved for every task."""

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
    """Fields of a slot would overlap: an error in this library, never in the caller's code."""


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to the alignment of a slot's fields."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a slot: (entries, heads, rows, width) of ``dtype``.

    Attributes:
        offset: in bytes from the slot's start.
        rows: most rows of each head.
        fixed: whether it has ``rows`` rows for every task.
        over: the input whose memory it uses: a finished result overwrites rows of that input, which
            must not be read any more. None: it has memory of its own.
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
    """The layout of a slot.

    Attributes:
        fields: by name.
        slot_bytes: bytes of one slot.
        group: the largest head group a slot holds.
        shared: query heads that share a key/value head.

    Raises:
        LayoutError: a field reaches out of the slot, or overlaps another that it is not ``over``.
    """

    fields: dict[str, Field]
    slot_bytes: int
    group: GroupSize
    shared: int

    def __post_init__(self) -> None:
        placed = sorted((self.byte_range(name), name) for name in self.fields)
        for (start, stop), name in placed:
            if start % ALIGNMENT or not 0 <= start <= stop <= self.slot_bytes:
                raise LayoutError(f"field {name!r} lies at {start} to {stop} of {self.slot_bytes}")
        # A finished result uses the memory of its input, so it is checked below instead.
        apart = [item for item in placed if self.fields[item[1]].over is None]
        for ((_, stop), name), ((start, _), other) in pairwise(apart):
            if stop > start:
                raise LayoutError(f"fields {name!r} and {other!r} overlap")
        for field in self.fields.values():
            if field.over is None:
                continue
            (start, stop), (low, high) = self.byte_range(field.name), self.byte_range(field.over)
            if start != low or stop > -(-high // ALIGNMENT) * ALIGNMENT:
                raise LayoutError(f"field {field.name!r} does not fit over {field.over!r}")

    def heads(self, axis: Axis) -> int:
        """Heads of the largest group, of queries or of keys."""
        return self.group.kv_heads * (self.shared if axis == "query" else 1)

    def byte_range(self, name: str) -> tuple[int, int]:
        """The bytes [start, stop) of a slot that the field ``name`` may use."""
        field = self.fields[name]
        count = self.group.batch * self.heads(field.axis) * field.rows
        return field.offset, field.offset + count * field.row_bytes

    def slots(self, arena: torch.Tensor, count: int) -> dict[int, torch.Tensor]:
        """The first ``count`` slots of an arena (uint8), by number."""
        size = self.slot_bytes
        return {number: arena[number * size : (number + 1) * size] for number in range(count)}

    def keeps(self, name: str) -> bool:
        """Whether rows of the input ``name`` survive when *other* rows are finished.

        They do, unless a finished result with rows of another size is written over the input.
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

        It is dense for the given sizes, so that a kernel always gets contiguous rows.

        Raises:
            LayoutError: the field is too small for the given sizes.
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
        """A field with ``rows`` elements for each entry and key/value head, for every task."""
        self.fields[name] = Field(name, "key", 1, dtype, self.end, rows, fixed=True)
        self.end += aligned(self.group.batch * self.group.kv_heads * rows * dtype.itemsize)

    def finish(self, name: str, width: int, dtype: torch.dtype, over: str) -> None:
        """A finished result: over an input, or in memory of its own if it does not fit there."""
        under = self.fields[over]
        if self.size(under.axis, width, dtype) <= self.size(under.axis, under.width, under.dtype):
            self.fields[name] = Field(
                name, under.axis, width, dtype, under.offset, under.rows, over=over
            )
        else:
            self.add(name, under.axis, width, dtype)

    def layout(self) -> SlotLayout:
        return SlotLayout(self.fields, self.end, self.group, self.shared)


# The planner's search asks for the same layout with every number of slots.
@lru_cache(maxsize=64)
def slot_layout(
    spec: PassSpec,
    work: Workload,
    group: GroupSize,
    rows: tuple[int, int],
    result_dtype: torch.dtype,
    *,
    scaled: bool = False,
    axis: Axis | None = None,
) -> SlotLayout:
    """The slot of a task: inputs, states, and finished rows if the results have another dtype.

    Finished rows overwrite an input that is no longer needed. To run a task again, its inputs have
    to be loaded again.

    Args:
        rows: most queries and keys of a task (``Schedule.task_rows``).
        scaled: whether to add the fields of a scaled backward (execution/scaling.py).
        axis: leave out what is not of this side, queries or keys; None: have both.
    """
    built = _Builder(group, work.queries_per_key_head, rows)
    states = [state for state in spec.states if axis in (None, state.axis)]
    for item in spec.inputs:
        if axis not in (None, item.axis):
            continue
        built.add(item.name, item.axis, item.columns(work), item.dtype(work))
    for state in states:
        built.add(f"state_{state.name}", state.axis, state.columns(work), work.state_dtype)
    if scaled:
        built.add_fixed("unscale", 1, torch.float32)
        built.add_fixed("overflow", 1, torch.int32)
    if result_dtype != work.state_dtype:
        for state in states:
            if state.over is not None:
                built.finish(f"final_{state.name}", state.columns(work), result_dtype, state.over)
    return built.layout()
