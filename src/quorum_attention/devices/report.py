"""What a call on several devices did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quorum_attention.execution.report import PassReport, Report
from quorum_attention.plain_types import JsonObject
from quorum_attention.units import counted, format_bytes, format_seconds

# The counts of a pass that are added up over its parts.
_SUMMED = (
    "units",
    "loaded_bytes",
    "stored_bytes",
    "repeated_units",
    "recovery_seconds",
)


@dataclass(slots=True)
class PartTiming:
    """A part that a device computed, by one call.

    Attributes:
        device: the number of the device in its pool.
        index: the number of the part.
        start, stop: seconds since the pass began, as the pool's process saw it.
        report: what the device's own call did.
    """

    device: int
    index: int
    start: float
    stop: float
    report: Report

    def to_dict(self) -> JsonObject:
        """Return device, part and times, for JSON."""
        return {
            "device": self.device,
            "part": self.index,
            "start": self.start,
            "stop": self.stop,
        }


@dataclass(slots=True)
class PoolPass:
    """One pass on a pool of devices.

    Attributes:
        devices: names, in the pool's order.
        seconds: wall-clock time of the pass.
        copied_bytes: bytes of tensors that were copied into shared memory.
        parts: the number of parts of the call.
        ran: what ran where and when, in the order in which it ended.
        history: a line for each device that failed or joined.
    """

    devices: list[str] = field(default_factory=list)
    seconds: float = 0.0
    copied_bytes: int = 0
    parts: int = 0
    ran: list[PartTiming] = field(default_factory=list)
    history: list[str] = field(default_factory=list)

    def parts_of(self, device: int) -> list[PartTiming]:
        """Return the parts that a device computed."""
        return [part for part in self.ran if part.device == device]

    def busy(self, device: int) -> float:
        """Return the seconds in which a device computed."""
        return sum(part.stop - part.start for part in self.parts_of(device))

    def to_dict(self) -> JsonObject:
        """Return the pass in plain types, for JSON."""
        return {
            "devices": self.devices,
            "seconds": self.seconds,
            "copied_bytes": self.copied_bytes,
            "parts": self.parts,
            "history": self.history,
            "ran": [part.to_dict() for part in self.ran],
        }

    def __str__(self) -> str:
        parts = counted(self.parts, "part")
        devices = counted(len(self.devices), "device")
        summary = f"{parts} on {devices}, {format_seconds(self.seconds)}"
        if self.copied_bytes:
            summary += f", {format_bytes(self.copied_bytes)} copied into shared memory"
        lines = [summary]
        for number, name in enumerate(self.devices):
            parts = counted(len(self.parts_of(number)), "part")
            busy_share = 0.0
            if self.seconds:
                busy_share = self.busy(number) / self.seconds
            lines.append(f"  {name}: {parts}, busy {busy_share:.0%}")
        lines += [f"  {line}" for line in self.history]
        return "\n".join(lines)


@dataclass
class PoolReport:
    """The report of a pool's call. The call fills ``forward``, and its backward
    ``backward``."""

    forward: PoolPass | None = None
    backward: PoolPass | None = None

    def to_dict(self) -> JsonObject:
        """Return the report in plain types, for JSON: who computed each part and
        when."""
        return {
            name: None if pool_pass is None else pool_pass.to_dict()
            for name, pool_pass in vars(self).items()
        }

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {pool_pass}"
            for name, pool_pass in vars(self).items()
            if pool_pass is not None
        )


def merge_reports(pool_pass: PoolPass, *, backward: bool) -> PassReport:
    """Return a pass of several devices as that of one device.

    Counts are sums, peaks are those of the worst part, and the plan is that of the
    deepest part.
    """
    reports: list[PassReport] = []
    kernels: dict[str, int] = {}
    recoveries = list(pool_pass.history)
    for part in pool_pass.ran:
        kernels |= part.report.total.kernels
        report = part.report.backward if backward else part.report.forward
        if report is not None:
            reports.append(report)
            device = pool_pass.devices[part.device]
            recoveries += [f"{device}: {line}" for line in report.recoveries]
    deepest = max(
        reports, key=lambda report: len(report.levels), default=PassReport("")
    )
    sums = {name: sum(getattr(part, name) for part in reports) for name in _SUMMED}
    peaks = [report.peak_bytes or 0 for report in reports]
    planned_peaks = [report.planned_peak_bytes for report in reports]
    return replace(
        deepest,
        **sums,
        kernel="+".join(kernels),
        n_groups=pool_pass.parts,
        seconds=pool_pass.seconds,
        planned_peak_bytes=max(planned_peaks, default=0),
        peak_bytes=max(peaks, default=0) or None,
        recoveries=recoveries,
    )
