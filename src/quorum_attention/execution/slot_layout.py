"""The layout of a slot: which tensors of a task lie where in one piece of device memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.execution.head_groups import Axis, GroupSize
from quorum_attention.execution.pass_spec import PassSpec, RowSpec
from quorum_attention.kernels.protocol import CallShape

ALIGNMENT = 256


class LayoutError(RuntimeError):
    """Fields of a slot would overlap: an error in this library, never in the caller's code."""


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to the alignment of a slot's fields."""
    return round_up(n_bytes, ALIGNMENT)


@dataclass(frozen=True, slots=True)
class SlotField:
    """One tensor of a slot: (entries, heads, rows, width) of ``dtype``.

    Attributes:
        offset: in bytes from the slot's start.
        n_bytes: for the most entries, heads and rows.
        over: the input whose memory it uses: a finished result overwrites rows of that input, which
            must not be read any more. None: it has memory of its own.
    """

    name: str
    axis: Axis
    width: int
    dtype: torch.dtype
    offset: int
    n_bytes: int
    over: str | None = None

    @property
    def stop(self) -> int:
        """Where the next field may begin."""
        return self.offset + aligned(self.n_bytes)

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
        shared: query heads that share a key/value head.

    Raises:
        LayoutError: a field reaches out of the slot, or overlaps another that it is not ``over``.
    """

    fields: dict[str, SlotField]
    slot_bytes: int
    shared: int

    def __post_init__(self) -> None:
        misplaced = next(self._misplaced_fields(), None)
        if misplaced is not None:
            placed = sorted(self.fields.values(), key=lambda field: field.offset)
            raise LayoutError(f"field {misplaced.name!r} does not lie where it may: {placed}")

    def _misplaced_fields(self) -> Iterator[SlotField]:
        """Yield the fields that do not lie where they may."""
        placed = sorted(self.fields.values(), key=lambda field: field.offset)
        for field in placed:
            if field.offset < 0 or field.offset % ALIGNMENT:
                yield field
            if field.stop > self.slot_bytes:
                yield field
        separate = [field for field in placed if field.over is None]
        for before, after in pairwise(separate):
            if before.stop > after.offset:
                yield after
        # A finished result lies in the memory of its input.
        for field in placed:
            if field.over is None:
                continue
            under = self.fields[field.over]
            if field.offset != under.offset or field.stop > under.stop:
                yield field

    def keeps(self, name: str) -> bool:
        """Whether rows of the input ``name`` survive when *other* rows are finished.

        They do, unless a finished result with rows of another size is written over the input.
        """
        row_bytes = self.fields[name].row_bytes
        results = [field for field in self.fields.values() if field.over == name]
        return all(result.row_bytes == row_bytes for result in results)

    def carve(
        self, slot: torch.Tensor, name: str, entries: int, kv_heads: int, rows: int
    ) -> torch.Tensor:
        """The field ``name`` of a slot (uint8) as a dense (entries, heads, rows, width).

        It is dense for the given sizes, so that a kernel always gets contiguous rows.

        Raises:
            LayoutError: the field is too small for the given sizes.
        """
        field = self.fields[name]
        heads = kv_heads * self.shared if field.axis == "query" else kv_heads
        n_bytes = entries * heads * rows * field.row_bytes
        if n_bytes > field.n_bytes:
            raise LayoutError(f"field {name!r} has {field.n_bytes} bytes of {n_bytes}")
        numbers = slot[field.offset : field.offset + n_bytes].view(field.dtype)
        return numbers.view(entries, heads, rows, field.width)


# The planner's search asks for the same layout with every number of slots.
@lru_cache(maxsize=64)
def slot_layout(
    spec: PassSpec,
    shape: CallShape,
    group: GroupSize,
    rows: tuple[int, int],
    result_dtype: torch.dtype,
    *,
    axis: Axis | None = None,
) -> SlotLayout:
    """The slot of a task: inputs, states, and finished rows if the results have another dtype.

    Finished rows overwrite an input that is no longer needed. To run a task again, its inputs have
    to be loaded again.

    Args:
        rows: most queries and keys of a task (``Schedule.task_rows``).
        axis: leave out the tensors of the other side, queries or keys; None: have both.
    """
    most_queries, most_keys = rows
    fields: dict[str, SlotField] = {}
    slot_bytes = 0

    def add(name: str, spec: RowSpec, dtype: torch.dtype, over: str | None = None) -> None:
        """Add a field of this side: over an input if it fits there, else behind all others."""
        nonlocal slot_bytes
        if axis not in (None, spec.axis):
            return
        most_rows = most_queries if spec.axis == "query" else most_keys
        n_bytes = spec.count(shape, group, most_rows) * dtype.itemsize
        if over is not None and aligned(n_bytes) <= aligned(fields[over].n_bytes):
            offset = fields[over].offset
        else:
            over = None
            offset = slot_bytes
            slot_bytes += aligned(n_bytes)
        columns = spec.n_columns(shape)
        fields[name] = SlotField(name, spec.axis, columns, dtype, offset, n_bytes, over)

    for item in spec.inputs:
        add(item.name, item, item.dtype(shape))
    for state in spec.states:
        add(f"state_{state.name}", state, shape.state_dtype)
    for state in spec.states:
        if result_dtype != shape.state_dtype and state.over is not None:
            add(f"final_{state.name}", state, result_dtype, state.over)
    return SlotLayout(fields, slot_bytes, shape.queries_per_key_head)
