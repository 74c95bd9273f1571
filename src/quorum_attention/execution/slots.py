"""A slot: the device memory one resident task needs, laid out once and carved for every task."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quorum_attention.execution.rows import Axis
from quorum_attention.execution.workload import GroupSize, Workload

ALIGNMENT = 256
# Kernel calls of a task whose overflow is told apart (times entries and heads).
OVERFLOW_FLAGS = 64


def aligned(n_bytes: int) -> int:
    """``n_bytes`` rounded up to the alignment of a slot's fields."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a slot: (entries, heads, rows, width) of ``dtype``.

    ``offset`` is in bytes from the slot's start; fields may share bytes where their lifetimes do
    not meet (a finished result takes the place of an input of the same shape). ``rows`` is None
    where the task decides.
    """

    name: str
    axis: Axis
    width: int
    dtype: torch.dtype
    offset: int
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where everything lies in a slot.

    Attributes:
        fields: by name.
        slot_bytes: bytes of one slot.
        group: the largest head group a slot takes.
        shared: query heads to a key/value head.
    """

    fields: dict[str, Field]
    slot_bytes: int
    group: GroupSize
    shared: int

    def heads(self, axis: Axis) -> int:
        """Heads of the largest group, of queries or of keys."""
        return self.group.kv_heads * (self.shared if axis == "query" else 1)

    def keeps_inputs(self, name: str, overlay: str | None) -> bool:
        """Whether rows of the input ``name`` stay as they are while *other* rows are finished.

        They do unless a finished result of another row size is written over them.
        """
        if overlay is None:
            return True
        a, b = self.fields[name], self.fields[overlay]
        if a.offset != b.offset:
            return True
        return a.width * a.dtype.itemsize == b.width * b.dtype.itemsize

    def carve(
        self, slot: torch.Tensor, name: str, entries: int, kv_heads: int, rows: int
    ) -> torch.Tensor:
        """The field ``name`` of a slot (uint8) as a dense (entries, heads, rows, width).

        Dense for the sizes at hand, so that a kernel always gets contiguous rows.
        """
        field = self.fields[name]
        heads = kv_heads * (self.shared if field.axis == "query" else 1)
        rows = rows if field.rows is None else field.rows
        count = entries * heads * rows * field.width
        n_bytes = count * field.dtype.itemsize
        flat = slot[field.offset : field.offset + n_bytes].view(field.dtype)
        return flat.view(entries, heads, rows, field.width)


class _Builder:
    def __init__(self, group: GroupSize, shared: int, queries: int, keys: int) -> None:
        self.group, self.shared = group, shared
        self.rows = {"query": queries, "key": keys}
        self.fields: dict[str, Field] = {}
        self.end = 0

    def size(self, axis: Axis, width: int, dtype: torch.dtype) -> int:
        heads = self.group.kv_heads * (self.shared if axis == "query" else 1)
        return aligned(self.group.batch * heads * self.rows[axis] * width * dtype.itemsize)

    def add(self, name: str, axis: Axis, width: int, dtype: torch.dtype) -> None:
        self.fields[name] = Field(name, axis, width, dtype, self.end)
        self.end += self.size(axis, width, dtype)

    def add_fixed(self, name: str, rows: int, dtype: torch.dtype) -> None:
        """A field with ``rows`` elements for every entry and key/value head, whatever the task."""
        self.fields[name] = Field(name, "key", 1, dtype, self.end, rows)
        self.end += aligned(self.group.batch * self.group.kv_heads * rows * dtype.itemsize)

    def share(self, name: str, axis: Axis, width: int, dtype: torch.dtype, over: str) -> None:
        """Place a field over an earlier one, or at the end where it does not fit there."""
        place = self.fields[over]
        room = self.size(place.axis, place.width, place.dtype)
        if self.size(axis, width, dtype) <= room:
            self.fields[name] = Field(name, axis, width, dtype, place.offset)
        else:
            self.add(name, axis, width, dtype)

    def layout(self) -> SlotLayout:
        return SlotLayout(self.fields, self.end, self.group, self.shared)


def forward_layout(
    work: Workload, group: GroupSize, task_tokens: int, out_dtype: torch.dtype
) -> SlotLayout:
    """The slot of a forward task: inputs, running statistics, and the finished rows.

    The finished rows in their final dtype lie over the queries, which are no longer needed then.
    """
    built = _Builder(
        group,
        work.queries_per_key_head,
        min(task_tokens, work.n_queries),
        min(task_tokens, work.n_keys),
    )
    state = work.state_dtype
    built.add("query", "query", work.head_dim, work.dtype)
    built.add("key", "key", work.head_dim, work.dtype)
    built.add("value", "key", work.value_dim, work.dtype)
    built.add("state_out", "query", work.value_dim, state)
    built.add("state_lse", "query", 1, state)
    if out_dtype != state:
        built.share("final_out", "query", work.value_dim, out_dtype, over="query")
    return built.layout()


def backward_layout(
    work: Workload,
    group: GroupSize,
    task_tokens: int,
    gradient_dtype: torch.dtype,
    *,
    scaled: bool,
) -> SlotLayout:
    """The slot of a backward task: inputs, and three gradients that accumulate.

    ``scaled`` adds what a scaled backward notes on the device (execution/scaling.py).

    Finished gradients in their final dtype lie over the inputs that they are the gradients of.
    """
    built = _Builder(
        group,
        work.queries_per_key_head,
        min(task_tokens, work.n_queries),
        min(task_tokens, work.n_keys),
    )
    state = work.state_dtype
    built.add("query", "query", work.head_dim, work.dtype)
    built.add("key", "key", work.head_dim, work.dtype)
    built.add("value", "key", work.value_dim, work.dtype)
    built.add("out", "query", work.value_dim, work.dtype)
    built.add("grad_out", "query", work.value_dim, work.dtype)
    built.add("lse", "query", 1, state)
    built.add("state_query", "query", work.head_dim, state)
    built.add("state_key", "key", work.head_dim, state)
    built.add("state_value", "key", work.value_dim, state)
    if scaled:
        built.add_fixed("unscale", 1, torch.float32)
        built.add_fixed("overflow", OVERFLOW_FLAGS, torch.int32)
    if gradient_dtype != state:
        built.share("final_query", "query", work.head_dim, gradient_dtype, over="query")
        built.share("final_key", "key", work.head_dim, gradient_dtype, over="key")
        built.share("final_value", "key", work.value_dim, gradient_dtype, over="value")
    return built.layout()
