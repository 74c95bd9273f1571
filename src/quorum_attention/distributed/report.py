"""What one rank did in a sharded call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from quorum_attention.execution.report import Report
from quorum_attention.units import counted, format_bytes


@dataclass(slots=True)
class ShardedReport:
    """The report of a call of ``distributed.attention``. Each rank has its own.

    Attributes:
        way: how the pairs were shared among the ranks (distributed/strategies.py).
        rank: this rank's number in the group.
        ranks: the number of ranks of the group.
        pairs: query-key pairs that this rank computes.
        imbalance: the pairs of the busiest rank, divided by an equal share.
        forward_bytes: bytes that this rank received in the forward.
        backward_bytes: bytes that this rank received in the backward.
        most_forward_bytes: planned bytes that the busiest rank receives in a forward.
        stages: number of exchanges that overlap with computation.
        kept: whether gathered inputs are kept for the backward.
        calls: what each attention call of this rank did, in order.
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

    def fill(self, group: dist.ProcessGroup, **fields: Any) -> None:
        """Set the fields that are given; all others are emptied."""
        ShardedReport.__init__(
            self,
            rank=group.rank(),
            ranks=group.size(),
            **fields,
        )

    def __str__(self) -> str:
        received = f"{format_bytes(self.forward_bytes)} received"
        if self.backward_bytes:
            received += f" forward, {format_bytes(self.backward_bytes)} backward"
        return (
            f"rank {self.rank} of {self.ranks}: {self.way}, "
            f"{counted(self.pairs, 'pair')} (busiest rank: {self.imbalance:.3f} of an "
            f"equal share), {received}"
        )
