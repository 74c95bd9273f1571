"""Row-wise views of a call's tensors: one head group at a time, never a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from quorum_attention.execution.workload import Group

Axis = Literal["query", "key"]


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor (*batch, heads, n, width) whose rows belong to queries or to keys.

    ``heads`` says which heads it has: those of the queries or those of the keys.
    """

    tensor: torch.Tensor
    axis: Axis

    def blocks(self, group: Group) -> list[torch.Tensor]:
        """The group's part: one (heads, n, width) view per batch entry."""
        heads = group.query_heads if self.axis == "query" else group.key_heads
        return [self.tensor[entry][heads] for entry in group.entries]


@dataclass(frozen=True, slots=True)
class GroupBuffer:
    """A buffer (entries, heads, n, width) that holds one group at a time: an accumulator's home."""

    tensor: torch.Tensor
    axis: Axis

    def blocks(self, group: Group) -> list[torch.Tensor]:
        """The group's part: one (heads, n, width) view per batch entry."""
        heads = group.query_heads if self.axis == "query" else group.key_heads
        count = heads.stop - heads.start
        return [self.tensor[entry, :count] for entry in range(len(group.entries))]


def group_part(tensor: torch.Tensor, group: Group, axis: Axis) -> torch.Tensor:
    """A head group's part of (*batch, heads, ...) as (1, heads, ...), a view; of one entry."""
    heads = group.query_heads if axis == "query" else group.key_heads
    return tensor[group.entries[0]][heads].unsqueeze(0)
