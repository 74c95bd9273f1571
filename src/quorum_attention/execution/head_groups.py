"""Head groups: the batch entries and heads of a call that are computed together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.kernels.call_shape import CallShape

Axis = Literal["query", "key"]
"""One side of a call: its queries, or its keys and values."""

BatchBox = tuple[slice, ...]
"""Batch entries whose indices are a box: a range of positions in each batch
dimension."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The size of a head group.

    Heads never meet, so cutting between them costs nothing. A group is either some
    key/value heads of one batch entry (``batch`` is 1), or several whole batch entries.
    """

    batch: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Group:
    """One head group: a run of batch entries, and a range of key/value heads.

    Attributes:
        entry_numbers: the numbers of its batch entries, all batch dimensions flattened.
        batch_shape: the batch dimensions of the call.
        kv_start, kv_stop: its key/value heads.
        queries_per_key_head: query heads that share a key/value head.
    """

    entry_numbers: range
    batch_shape: tuple[int, ...]
    kv_start: int
    kv_stop: int
    queries_per_key_head: int

    @property
    def n_entries(self) -> int:
        """How many batch entries it has."""
        return len(self.entry_numbers)

    @property
    def first_entry(self) -> tuple[int, ...]:
        """The index of the first batch entry, one number for each batch dimension."""
        return batch_index(self.entry_numbers.start, self.batch_shape)

    @property
    def boxes(self) -> list[BatchBox]:
        """Its batch entries in order, as few boxes."""
        return list(batch_boxes(self.entry_numbers, self.batch_shape))

    @property
    def query_heads(self) -> slice:
        """The query heads that go with the key/value heads."""
        return slice(
            self.kv_start * self.queries_per_key_head,
            self.kv_stop * self.queries_per_key_head,
        )

    @property
    def key_heads(self) -> slice:
        """The key/value heads."""
        return slice(self.kv_start, self.kv_stop)

    def heads(self, axis: Axis) -> slice:
        """The heads of one side."""
        return self.query_heads if axis == "query" else self.key_heads


def batch_boxes(
    entry_numbers: range, batch_shape: tuple[int, ...]
) -> Iterator[BatchBox]:
    """Cut a run of batch entries into boxes, in order.

    There are at most two boxes for each batch dimension, less one, however many entries
    there are: so tensors are copied box by box, not entry by entry.

    Args:
        entry_numbers: the numbers of the entries, all batch dimensions flattened.
    """
    if not batch_shape:
        yield ()
        return
    _, *sizes = batch_shape
    inner_shape = tuple(sizes)
    n_inner = math.prod(inner_shape)
    start = entry_numbers.start
    while start < entry_numbers.stop:
        position, inner_start = divmod(start, n_inner)
        n_whole = (entry_numbers.stop - start) // n_inner
        if inner_start == 0 and n_whole > 0:
            yield (
                slice(position, position + n_whole),
                *(slice(0, size) for size in inner_shape),
            )
            start += n_whole * n_inner
            continue
        # Some of the entries at one position of the first dimension.
        stop = min(entry_numbers.stop, (position + 1) * n_inner)
        inner_numbers = range(inner_start, inner_start + stop - start)
        for box in batch_boxes(inner_numbers, inner_shape):
            yield slice(position, position + 1), *box
        start = stop


def batch_index(number: int, batch_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a batch entry by its number, one for each batch dimension."""
    index: list[int] = []
    for size in reversed(batch_shape):
        number, position = divmod(number, size)
        index.append(position)
    return tuple(reversed(index))


def group_sizes(shape: CallShape) -> list[GroupSize]:
    """Group sizes to choose from, largest first: batch entries are halved, then
    heads."""
    sizes: list[GroupSize] = []
    n_entries = shape.batch
    while n_entries > 1:
        sizes.append(GroupSize(n_entries, shape.kv_heads))
        n_entries = ceil_div(n_entries, 2)
    kv_heads = shape.kv_heads
    while kv_heads > 1:
        sizes.append(GroupSize(1, kv_heads))
        kv_heads = ceil_div(kv_heads, 2)
    sizes.append(GroupSize(1, 1))
    return sizes


def head_groups(shape: CallShape, size: GroupSize) -> Iterator[Group]:
    """The head groups of a call, none larger than ``size``, in order."""
    shared = shape.queries_per_key_head
    for first_entry in range(0, shape.batch, size.batch):
        end_entry = min(first_entry + size.batch, shape.batch)
        entry_numbers = range(first_entry, end_entry)
        for kv_start in range(0, shape.kv_heads, size.kv_heads):
            kv_stop = min(kv_start + size.kv_heads, shape.kv_heads)
            yield Group(
                entry_numbers,
                shape.batch_shape,
                kv_start,
                kv_stop,
                shared,
            )


def count_groups(shape: CallShape, size: GroupSize) -> int:
    """How many groups ``head_groups`` yields."""
    n_of_entries = ceil_div(shape.batch, size.batch)
    n_of_heads = ceil_div(shape.kv_heads, size.kv_heads)
    return n_of_entries * n_of_heads


def group_part(tensor: torch.Tensor, group: Group, axis: Axis) -> torch.Tensor:
    """A head group's part of (*batch, heads, ...), as a view (entries, heads, ...).

    The entries of the group follow each other in the last batch dimension.
    """
    heads = group.heads(axis)
    if not group.batch_shape:
        return tensor[heads].unsqueeze(0)
    *outer, start = group.first_entry
    # Without outer dimensions, ``tensor[()]`` would make a view for nothing.
    rows = tensor[tuple(outer)] if outer else tensor
    stop = start + group.n_entries
    return rows[start:stop, heads]
