"""What many passes came to: counts, seconds and the largest peak, in all and by kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any

from quorum_attention.html_table import html_table
from quorum_attention.sizes import format_bytes, format_seconds

# One for all: it is held for a few additions, and a lock of its own would keep a total from being
# copied or pickled.
_LOCK = Lock()


@dataclass(slots=True)
class KernelTotal:
    """What the passes on one inner kernel came to.

    Attributes:
        passes: forwards and backwards.
        cut: those that ran in more than one unit.
        seconds: host wall-clock time.
    """

    passes: int = 0
    cut: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Total:
    """What all passes came to that a ``Report`` was given to. Any thread may add to it.

    Attributes:
        forwards, backwards: passes of each kind. Recomputed forwards (checkpoints) count again.
        cut: passes that ran in more than one unit: head group after head group, or as tasks.
        seconds: host wall-clock time of all passes. On CUDA with results on the device this is
            the time to issue their work, not the time that it takes.
        peak_bytes: the largest peak of device memory of one pass: as measured where it was, else
            as planned. Short calls, which run without a plan, have none.
        recoveries: failures for lack of memory that were recovered from.
        recovery_seconds: time that they cost.
        kernels: the same by the kernel's name.
    """

    forwards: int = 0
    backwards: int = 0
    cut: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    recoveries: int = 0
    recovery_seconds: float = 0.0
    kernels: dict[str, KernelTotal] = field(default_factory=dict)

    def add(
        self,
        kernel: str,
        *,
        backward: bool,
        seconds: float,
        cut: bool = False,
        peak_bytes: int = 0,
        recoveries: int = 0,
        recovery_seconds: float = 0.0,
    ) -> None:
        """Add one pass."""
        with _LOCK:
            if backward:
                self.backwards += 1
            else:
                self.forwards += 1
            self.cut += cut
            self.seconds += seconds
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
            self.recoveries += recoveries
            self.recovery_seconds += recovery_seconds
            own = self.kernels.setdefault(kernel, KernelTotal())
            own.passes += 1
            own.cut += cut
            own.seconds += seconds

    def to_dict(self) -> dict[str, Any]:
        """The total in plain types, for JSON."""
        with _LOCK:
            return asdict(self)

    def rows(self) -> list[tuple[str, list[str]]]:
        """The total as rows of a table; none where nothing has run."""
        if not self.forwards + self.backwards:
            return []
        rows = [
            ("passes", [f"{self.forwards} forward(s), {self.backwards} backward(s)"]),
            ("of them cut", [str(self.cut)]),
            ("time", [format_seconds(self.seconds)]),
            ("largest peak of memory", [format_bytes(self.peak_bytes)]),
        ]
        if self.recoveries:
            cost = format_seconds(self.recovery_seconds)
            rows.append(("recoveries", [f"{self.recoveries}, which cost {cost}"]))
        # A copy: another thread may meet another kernel meanwhile.
        for name, own in dict(self.kernels).items():
            text = f"{own.passes} pass(es), {own.cut} cut, {format_seconds(own.seconds)}"
            rows.append((f"kernel {name}", [text]))
        return rows

    def _repr_html_(self) -> str:
        """For notebooks: the total as a table."""
        rows = self.rows()
        return html_table("Total" if rows else "Total: nothing has run yet", rows)

    def __str__(self) -> str:
        if not self.forwards + self.backwards:
            return "nothing has run yet"
        lines = [
            f"{self.forwards} forward(s) and {self.backwards} backward(s), {self.cut} of them cut; "
            f"{format_seconds(self.seconds)}; largest peak {format_bytes(self.peak_bytes)}"
        ]
        if self.recoveries:
            lines.append(
                f"{self.recoveries} recoveries cost {format_seconds(self.recovery_seconds)}"
            )
        # A copy: another thread may meet another kernel meanwhile.
        for name, own in dict(self.kernels).items():
            lines.append(
                f"  {name}: {own.passes} pass(es), {own.cut} cut, {format_seconds(own.seconds)}"
            )
        return "\n".join(lines)
