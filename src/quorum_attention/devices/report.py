"""What a call on several devices did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from quorum_attention.execution.report import PassReport, Report
from quorum_attention.units import counted, format_bytes, format_seconds


@dataclass(slots=True)
class Ran:
    """A part that a device computed, by one call.

    Attributes:
        device: number of the device in its pool.
        index: of the part.
        start, stop: seconds since the pass began, as the coordinator saw it.
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
        ran: what ran where and when, in the order in which it ended.
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

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON."""
        names = ("devices", "seconds", "copied_bytes", "parts", "history")
        ran = [
            {"device": one.device, "part": one.index, "start": one.start, "stop": one.stop}
            for one in self.ran
        ]
        return {name: getattr(self, name) for name in names} | {"ran": ran}

    def __str__(self) -> str:
        lines = [
            f"{counted(self.parts, 'part')} on {counted(len(self.devices), 'device')}, "
            f"{format_seconds(self.seconds)}"
        ]
        if self.copied_bytes:
            lines[0] += f", {format_bytes(self.copied_bytes)} copied into shared memory"
        for number, name in enumerate(self.devices):
            count = sum(one.device == number for one in self.ran)
            share = self.busy(number) / self.seconds if self.seconds else 0.0
            lines.append(f"  {name}: {counted(count, 'part')}, busy {share:.0%}")
        return "\n".join(lines + [f"  {line}" for line in self.history])


@dataclass
class PoolReport:
    """Filled by a pool's calls; the backward's part by the backward."""

    forward: PoolPass | None = None
    backward: PoolPass | None = None

    def to_dict(self) -> dict[str, Any]:
        """In plain types, for JSON: of each part who computed it and when."""
        return {name: one and one.to_dict() for name, one in vars(self).items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {one}" for name, one in vars(self).items() if one is not None)


def as_one(of: PoolPass, backward: bool) -> PassReport:
    """A pass of several devices as that of one: counts are sums, peaks those of the worst part,
    and the plan that of the deepest."""
    parts = [one.report.backward if backward else one.report.forward for one in of.ran]
    watched = [part for part in parts if part is not None]
    kernels = {kernel: None for one in of.ran for kernel in one.report.total.kernels}
    names = ("units", "loaded_bytes", "stored_bytes", "repeated_units", "recovery_seconds")
    recoveries = [
        f"{of.devices[one.device]}: {line}"
        for one, part in zip(of.ran, parts, strict=True) if part is not None
        for line in part.recoveries
    ]  # fmt: skip
    return replace(
        max(watched, key=lambda part: len(part.levels), default=PassReport("")),
        kernel="+".join(kernels), n_groups=of.parts, seconds=of.seconds,
        planned_peak_bytes=max((part.planned_peak_bytes for part in watched), default=0),
        peak_bytes=max((part.peak_bytes for part in watched if part.peak_bytes), default=None),
        recoveries=[*of.history, *recoveries],
        **{name: sum(getattr(part, name) for part in watched) for name in names},
    )  # fmt: skip
