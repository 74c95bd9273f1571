"""The layout of a slot: which tensors of a task lie where in one piece of device
memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from quorum_attention.execution.head_groups import Axis, GroupSize
from quorum_attention.execution.pass_spec import PassSpec, RowSpec
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.carving import aligned, view_at


class LayoutError(RuntimeError):
    """A task is larger than a slot: an error in this library, never in the caller's
    code."""


@dataclass(frozen=True, slots=True)
class SlotField:
    """One tensor of a slot: (entries, heads, rows, width) of ``dtype``.

    Attributes:
        offset: in bytes from the slot's start.
        n_bytes: for the most entries, heads and rows.
        over: the input whose memory it uses: a finished result overwrites rows of that
            input, which must not be read any more. None: it has memory of its own.
    """

    name: str
    axis: Axis
    width: int
    dtype: torch.dtype
    offset: int
    n_bytes: int
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
        shared: query heads that share a key/value head.
        common: the fields that all slots have in one place; None: there are none.
    """

    fields: dict[str, SlotField]
    slot_bytes: int
    shared: int
    common: SlotLayout | None = None

    def bytes_of(self, n_slots: int) -> int:
        """Bytes of so many slots, and of what they have in common."""
        common_bytes = 0 if self.common is None else self.common.slot_bytes
        return n_slots * self.slot_bytes + common_bytes

    def keeps(self, name: str) -> bool:
        """Whether rows of the input ``name`` survive when *other* rows are finished.

        They do, unless a finished result with rows of another size is written over the
        input.
        """
        row_bytes = self.fields[name].row_bytes
        for result in self.fields.values():
            if result.over == name and result.row_bytes != row_bytes:
                return False
        return True

    def carve(
        self, slot: torch.Tensor, name: str, entries: int, kv_heads: int, rows: int
    ) -> torch.Tensor:
        """The field ``name`` of a slot (uint8) as a dense (entries, heads, rows,
        width).

        It is dense for the given sizes, so that a kernel always gets contiguous rows.

        Raises:
            LayoutError: the field is too small for the given sizes.
        """
        field = self.fields[name]
        n_heads = kv_heads * self.shared if field.axis == "query" else kv_heads
        sizes = (entries, n_heads, rows, field.width)
        n_bytes = math.prod(sizes) * field.dtype.itemsize
        if n_bytes > field.n_bytes:
            raise LayoutError(f"field {name!r} has {field.n_bytes} bytes of {n_bytes}")
        return view_at(slot, field.offset, sizes, field.dtype)


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
    common_states: bool = False,
) -> SlotLayout:
    """The slot of a task: inputs, states, and finished rows if the results have another
    dtype.

    Finished rows overwrite an input that is no longer needed. To run a task again, its
    inputs have to be loaded again.

    Args:
        rows: most queries and keys of a task (``Schedule.task_rows``).
        axis: leave out the tensors of the other side, queries or keys; None: have both.
        common_states: states that are finished when their unit is computed are in one
            place for all slots: the next unit may overwrite them.
    """
    builder = _LayoutBuilder(shape, group, rows, axis)
    common = _LayoutBuilder(shape, group, rows, axis)
    for item in spec.inputs:
        builder.add(item.name, item, item.dtype(shape))
    for state in spec.states:
        # A state that is a result itself is copied out of the slot.
        is_common = common_states and state.over is not None
        place = common if is_common else builder
        place.add(f"state_{state.name}", state, shape.state_dtype)
    if result_dtype != shape.state_dtype:
        for state in spec.states:
            if state.over is not None:
                builder.add(
                    f"final_{state.name}",
                    state,
                    result_dtype,
                    over=state.over,
                )
    shared = shape.queries_per_key_head
    common_layout = None
    if common.fields:
        common_layout = SlotLayout(common.fields, common.slot_bytes, shared)
    return SlotLayout(builder.fields, builder.slot_bytes, shared, common_layout)


@dataclass(slots=True)
class _LayoutBuilder:
    """The fields of a slot so far.

    Attributes:
        shape: the call's sizes.
        group: the largest head group.
        rows: most queries and keys of a task.
        axis: the side whose fields are added; None: both.
        fields: by name.
        slot_bytes: where the next field begins.
    """

    shape: CallShape
    group: GroupSize
    rows: tuple[int, int]
    axis: Axis | None
    fields: dict[str, SlotField] = field(default_factory=dict)
    slot_bytes: int = 0

    def add(
        self, name: str, spec: RowSpec, dtype: torch.dtype, over: str | None = None
    ) -> None:
        """Add a field: over an input if it fits there, else behind all others."""
        if self.axis not in (None, spec.axis):
            return
        most_queries, most_keys = self.rows
        most_rows = most_queries if spec.axis == "query" else most_keys
        n_numbers = spec.count(self.shape, self.group, most_rows)
        n_bytes = n_numbers * dtype.itemsize
        under = None if over is None else self.fields[over]
        if under is not None and aligned(n_bytes) <= aligned(under.n_bytes):
            offset = under.offset
        else:
            over = None
            offset = self.slot_bytes
            self.slot_bytes += aligned(n_bytes)
        width = spec.n_columns(self.shape)
        self.fields[name] = SlotField(
            name,
            spec.axis,
            width,
            dtype,
            offset,
            n_bytes,
            over,
        )
