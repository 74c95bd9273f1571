"""Views of a head group's part of a tensor, never a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from quorum_attention.execution.workload import Group

Axis = Literal["query", "key"]


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor (*batch, heads, n, width) whose rows and heads are those of queries or of keys."""

    tensor: torch.Tensor
    axis: Axis

    def blocks(self, group: Group) -> list[torch.Tensor]:
        """The group's part: a view (heads, n, width) for each batch entry."""
        heads = group.query_heads if self.axis == "query" else group.key_heads
        return [self.tensor[entry][heads] for entry in group.entries]


@dataclass(frozen=True, slots=True)
class GroupBuffer:
    """The home of one head group's state, used by one group after another: (entries, heads, n,
    width)."""

    tensor: torch.Tensor
    axis: Axis

    def blocks(self, group: Group) -> list[torch.Tensor]:
        """The group's part: a view (heads, n, width) for each batch entry."""
        heads = group.query_heads if self.axis == "query" else group.key_heads
        count = heads.stop - heads.start
        return [self.tensor[entry, :count] for entry in range(len(group.entries))]


def group_part(tensor: torch.Tensor, group: Group, axis: Axis) -> torch.Tensor:
    """A head group's part of (*batch, heads, ...), as a view (1, heads, ...); of one entry."""
    heads = group.query_heads if axis == "query" else group.key_heads
    return tensor[group.entries[0]][heads].unsqueeze(0)
