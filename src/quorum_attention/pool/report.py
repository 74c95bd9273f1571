"""What a call on several devices did."""

from __future__ import annotations

from dataclasses import dataclass, field

from quorum_attention.execution.report import Report
from quorum_attention.sizes import format_bytes, format_seconds


@dataclass(slots=True)
class Ran:
    """A part that a device computed.

    Attributes:
        device: number of the device in its pool.
        index: of the part.
        start, stop: seconds since the pass began.
        report: what the device's own call did.
    """

    device: int
    index: int
    start: float
    stop: float
    report: Report


@dataclass(slots=True)
class PoolPass:
    """One pass on a pool of devices.

    Attributes:
        devices: names, in the pool's order.
        seconds: wall-clock time of the pass.
        copied_bytes: of tensors that other processes could not have as they were.
        parts: how many parts the call had.
        ran: what ran where and when; its parts in the order in which they ended.
        history: a line for each device that failed or joined.
    """

    devices: list[str] = field(default_factory=list)
    seconds: float = 0.0
    copied_bytes: int = 0
    parts: int = 0
    ran: list[Ran] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def busy(self, device: int) -> float:
        """Seconds in which a device computed."""
        return sum(one.stop - one.start for one in self.ran if one.device == device)

    def __str__(self) -> str:
        lines = [
            f"{self.parts} parts on {len(self.devices)} devices, {format_seconds(self.seconds)}"
        ]
        if self.copied_bytes:
            lines[0] += f", {format_bytes(self.copied_bytes)} copied into shared memory"
        for number, name in enumerate(self.devices):
            count = sum(one.device == number for one in self.ran)
            share = self.busy(number) / self.seconds if self.seconds else 0.0
            lines.append(f"  {name}: {count} parts, busy {share:.0%}")
        return "\n".join(lines + [f"  {line}" for line in self.history])


@dataclass(slots=True)
class PoolReport:
    """Filled by a pool's calls; the backward's part by the backward."""

    forward: PoolPass | None = None
    backward: PoolPass | None = None


__all__ = ["PoolPass", "PoolReport", "Ran"]
