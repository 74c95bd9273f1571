"""What a call did: plan, recoveries, bytes, memory, time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from threading import Lock
from typing import Any

from quorum_attention.units import counted, format_bytes, format_seconds

# One for all: it is held for a few additions, and a lock of its own would keep a total
# from being copied or pickled.
_LOCK = Lock()


class InWords:
    """Notebooks show such an object as its words, in the colours of their theme."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from html import escape  # only where a notebook shows a report

        return f'<pre style="white-space:pre-wrap">{escape(str(self))}</pre>'


@dataclass(slots=True)
class Total(InWords):
    """The sum of all passes that had a ``Report``. Any thread may add to it.

    Attributes:
        forwards: the number of forwards. A forward that a checkpoint runs again counts
            again.
        backwards: the number of backwards.
        cut: the number of passes that ran in more than one unit: in several head
            groups, or in tasks.
        seconds: host wall-clock time of all passes. On CUDA with results on the device
            this is the time to launch their work, not to compute it.
        peak_bytes: the largest peak of device memory of a pass, measured if possible,
            else planned. Short calls run without a plan, and have no peak.
        recoveries: how many times a pass ran out of memory and recovered.
        recovery_seconds: the seconds that recoveries took.
        kernels: the number of passes of each kernel.
    """

    forwards: int = 0
    backwards: int = 0
    cut: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    recoveries: int = 0
    recovery_seconds: float = 0.0
    kernels: dict[str, int] = field(default_factory=dict)

    def add(self, report: PassReport, *, backward: bool) -> None:
        """Add one pass."""
        peak_bytes = report.peak_bytes or report.planned_peak_bytes
        with _LOCK:
            if backward:
                self.backwards += 1
            else:
                self.forwards += 1
            if report.cut:
                self.cut += 1
            self.seconds += report.seconds
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
            self.recoveries += len(report.recoveries)
            self.recovery_seconds += report.recovery_seconds
            n_passes = self.kernels.get(report.kernel, 0)
            self.kernels[report.kernel] = n_passes + 1

    def to_dict(self) -> dict[str, Any]:
        """The total in plain types, for JSON."""
        with _LOCK:
            return asdict(self)

    def __str__(self) -> str:
        if not self.forwards + self.backwards:
            return "nothing has run yet"
        forwards = counted(self.forwards, "forward")
        backwards = counted(self.backwards, "backward")
        lines = [
            f"passes: {forwards}, {backwards}, {self.cut} of them cut",
            f"time: {format_seconds(self.seconds)}",
        ]
        if (
            self.peak_bytes
        ):  # measured where a budget or a call's own report asks for it
            lines.append(f"largest peak of memory: {format_bytes(self.peak_bytes)}")
        if self.recoveries:
            cost = format_seconds(self.recovery_seconds)
            lines.append(f"recoveries: {self.recoveries}, which cost {cost}")
        # A copy: another thread may meet another kernel meanwhile.
        for name, n_passes in dict(self.kernels).items():
            passes = counted(n_passes, "pass", "passes")
            lines.append(f"kernel {name}: {passes}")
        return "\n".join(lines)


@dataclass(slots=True)
class PassReport:
    """One pass, forward or backward.

    ``devices/report.py`` sums each field over devices, ``Total`` some over calls.

    Attributes:
        kernel: the inner kernel's name.
        levels: the number of chunks at each level, at the end of the pass (after a
            recovery there are more levels than planned); () is uncut.
        planned_levels: as planned.
        n_groups: the number of head groups.
        heads_per_group: query heads in each group.
        n_cap: slots at the end of the pass.
        streams: kernel calls of a task in flight at once.
        accumulator: "device", "host", or "none" if nothing had to be merged.
        units: (head group, task) units computed.
        seconds: host wall-clock time of the pass. On CUDA with results on the device,
            this is only the time to launch its work.
        left_out: the share of tokens that were left out of tasks, because no pair of
            them is kept there (docs/architecture.md, "Trimmed tasks").
        loaded_bytes: bytes copied into slots, from host memory or within the device.
            Masks are not counted.
        stored_bytes: bytes copied out of slots.
        planned_peak_bytes: the most device bytes of the pass, as planned.
        budget_bytes: the budget it was planned for; None if none was given.
        peak_bytes: the most device bytes beyond those allocated before, measured by the
            device's allocator; None on a CPU, whose allocator does not count.
        repeated_units: units run again because a scaled fp16 gradient overflowed
            (execution/scaling.py).
        dropout_p: the call's chance of dropout; None without dropout.
        dropout_seed: the call's seed of dropout; None without dropout.
        timed: whether ``stages`` are measured.
        stages: device seconds of each stage (execution/device/clock.py); empty for an
            uncut call.
        recoveries: one line for each recovery.
        recovery_seconds: seconds lost to failures: from the end of the last unit before
            each failure until the next attempt.
    """

    kernel: str
    levels: tuple[int, ...] = ()
    planned_levels: tuple[int, ...] = ()
    n_groups: int = 1
    heads_per_group: int = 0
    n_cap: int = 0
    accumulator: str = "none"
    streams: int = 1
    units: int = 0
    left_out: float = 0.0
    seconds: float = 0.0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    planned_peak_bytes: int = 0
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    repeated_units: int = 0
    dropout_p: float | None = None
    dropout_seed: int | None = None
    timed: bool = False
    stages: dict[str, float] = field(default_factory=dict)
    recoveries: list[str] = field(default_factory=list)
    recovery_seconds: float = 0.0

    @property
    def cut(self) -> bool:
        """Whether the pass ran in more than one unit."""
        has_tasks = bool(self.levels or self.planned_levels)
        return has_tasks or self.n_groups > 1

    @property
    def overlap(self) -> float | None:
        """Share of the transfers' time that was hidden by compute, 0 to 1; None if not
        measured."""
        loads = self.stages.get("h2d", 0.0)
        stores = self.stages.get("d2h", 0.0)
        transfers = loads + stores
        if transfers <= 0:
            return None
        on_device = sum(self.stages.values()) - transfers
        shown = self.seconds - on_device
        return min(1.0, max(0.0, 1 - shown / transfers))

    def add_stages(self, seconds: Mapping[str, float]) -> None:
        """Add device seconds by stage."""
        for stage, spent in seconds.items():
            before = self.stages.get(stage, 0.0)
            self.stages[stage] = before + spent

    def cells(self) -> dict[str, str]:
        """Return the report as values by label, for people. What does not apply is left
        out."""
        loaded = format_bytes(self.loaded_bytes)
        stored = format_bytes(self.stored_bytes)
        groups = counted(self.n_groups, "group")
        heads = counted(self.heads_per_group, "head")
        stages = [
            f"{stage} {format_seconds(spent)}"
            for stage, spent in self.stages.items()
            if spent
        ]
        cells = {
            "kernel": self.kernel,
            "levels": " x ".join(map(str, self.levels)) or "none (uncut)",
            "units": f"{self.units} ({groups} of {heads}, {self.n_cap} at a time)",
            "accumulators": self.accumulator,
            "time": format_seconds(self.seconds),
            "planned peak": format_bytes(self.planned_peak_bytes),
            "measured peak": _bytes_or_nothing(self.peak_bytes),
            "budget": _bytes_or_nothing(self.budget_bytes),
            "copied": f"{loaded} in, {stored} out",
            "stages": ", ".join(stages),
            "copies hidden by compute": ""
            if self.overlap is None
            else f"{self.overlap:.0%}",
        }
        if self.dropout_p is not None:
            cells["dropout"] = f"{self.dropout_p:g}, seed {self.dropout_seed}"
        if self.left_out:
            cells["tokens trimmed from tasks"] = f"{self.left_out:.0%}"
        if self.repeated_units:
            cells["units repeated after an overflow"] = str(self.repeated_units)
        if self.recoveries:
            cells["recovered"] = "; ".join(self.recoveries)
            cells["recoveries cost"] = format_seconds(self.recovery_seconds)
        return {label: text for label, text in cells.items() if text}


def _pass_to_dict(report: PassReport | None) -> dict[str, Any] | None:
    """A pass's report in plain types, for JSON."""
    if report is None:
        return None
    return {**asdict(report), "overlap": report.overlap}


def _pass_in_words(name: str, report: PassReport) -> str:
    """A pass's report, one line for each thing that applies."""
    lines = [f"{name}:"]
    for label, text in report.cells().items():
        lines.append(f"{label}: {text}")
    return "\n  ".join(lines)


def _bytes_or_nothing(n_bytes: int | None) -> str:
    """``n_bytes`` in words; nothing for None."""
    return "" if n_bytes is None else format_bytes(n_bytes)


@dataclass
class Report(InWords):
    """Tells what a call did. Pass an empty report as ``report=``, and print it
    afterwards.

    The call fills ``forward``, and its backward ``backward``. After several calls they
    describe the last one. ``mask_gradient`` has a line that says how the gradient of
    ``attn_mask`` was computed, and a line for each time that it ran out of memory. On
    CUDA the measurement of the peak resets torch's counter of peak memory.

    ``pool`` says what each device did if there are several (``devices.PoolReport``);
    else it is None.

    ``total`` adds up all passes of all calls with this report. A report that was given
    to ``quorum_attention.using(report=...)`` gets nothing but ``total``.

    Examples:
        >>> report = qa.Report()
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, depth=1, report=report)
        >>> len(report.forward.levels), report.backward
        (1, None)
    """

    forward: PassReport | None = None
    backward: PassReport | None = None
    mask_gradient: list[str] = field(default_factory=list)
    pool: Any = None
    total: Total = field(default_factory=Total)
    # Whether stages are measured, which takes launches of its own.
    timed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The last call in plain types, for JSON (``total.to_dict`` has all calls)."""
        data: dict[str, Any] = {
            "forward": _pass_to_dict(self.forward),
            "backward": _pass_to_dict(self.backward),
        }
        if self.mask_gradient:
            data["mask_gradient"] = list(self.mask_gradient)
        if self.pool is not None:
            data["pool"] = self.pool.to_dict()
        return data

    def draw(self, path: str | PathLike[str]) -> None:
        """Write a picture of the report to ``path`` (needs matplotlib: the ``draw``
        extra)."""
        from quorum_attention.pictures import draw_report

        draw_report(path, self.to_dict())

    def __str__(self) -> str:
        parts: list[str] = []
        if self.forward is not None:
            parts.append(_pass_in_words("forward", self.forward))
        if self.backward is not None:
            parts.append(_pass_in_words("backward", self.backward))
        parts += [f"mask gradient: {line}" for line in self.mask_gradient]
        if self.pool is not None:
            parts.append(str(self.pool))
        return "\n".join(parts) or str(self.total)
