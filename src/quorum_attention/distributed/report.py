"""What ``distributed.attention`` did on a rank."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist

from quorum_attention.execution.report import Report
from quorum_attention.sizes import format_bytes


@dataclass(slots=True)
class ShardedReport:
    """Filled by ``distributed.attention``, on every rank for itself.

    Attributes:
        way: how pairs were given to ranks; it moved the fewest bytes of those that share the work
            evenly (distributed/partition.py).
        rank, ranks: of the group.
        pairs: query-key pairs that this rank computes.
        imbalance: the most pairs of any rank, over an equal share.
        forward_bytes, backward_bytes: received by this rank.
        most_forward_bytes: received in a forward by the rank that receives most, as counted
            beforehand.
        stages: transfers that go on beside computation.
        kept: whether the forward's inputs stay where they were computed with until the backward.
        calls: what each attention call of this rank did, in the order of the calls.
    """

    way: str = ""
    rank: int = 0
    ranks: int = 1
    pairs: int = 0
    imbalance: float = 1.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    most_forward_bytes: int = 0
    stages: int = 0
    kept: bool = False
    calls: list[Report] = field(default_factory=list)

    def fill(self, group: dist.ProcessGroup, **known: Any) -> None:
        """Fill in what is known; the rest is emptied."""
        fresh = ShardedReport(rank=group.rank(), ranks=group.size(), **known)
        for one in fields(self):
            setattr(self, one.name, getattr(fresh, one.name))

    def __str__(self) -> str:
        both = f"{format_bytes(self.forward_bytes)} received"
        if self.backward_bytes:
            both += f" forward, {format_bytes(self.backward_bytes)} backward"
        return (
            f"rank {self.rank} of {self.ranks}: {self.way}, {self.pairs:,} pairs "
            f"(the largest share is {self.imbalance:.3f} of an equal one), {both}"
        )
