"""What ``check_kernel`` found, as data and in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from quorum_attention.units import counted, format_error

Verdict = Literal["bit-identical", "exact within rounding", "not exact"]


@dataclass(frozen=True, slots=True)
class Broken:
    """Something that is wrong: the cause, and where it was seen."""

    cause: str
    where: str


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One way to cut a call against the same call uncut.

    Attributes:
        levels, layout: how tokens were cut.
        is_causal: whether the call was causal.
        heads_per_group: query heads of a unit; None if heads and batch entries stayed together.
        sizes: how sizes differ from those asked for ("4 heads over 2"); "" if they do not.
        verdict: the verdict on all results together.
        errors: by result, the largest difference from the uncut call, as a share of the uncut
            call's largest value.
        limit: the largest error that counts as rounding.
        rows: the first wrong rows, as (result, batch, head, row); at most five.
    """

    levels: tuple[int, ...]
    layout: str
    is_causal: bool
    heads_per_group: int | None
    sizes: str
    verdict: Verdict
    errors: dict[str, float]
    limit: float
    rows: tuple[tuple[str, int, int, int], ...]

    def worst(self) -> tuple[str, float]:
        """The result with the largest error, and that error."""
        return max(self.errors.items(), key=lambda item: item[1])

    def wrong(self) -> list[str]:
        """The results that differ by more than rounding."""
        return [name for name, error in self.errors.items() if error > self.limit]

    def __str__(self) -> str:
        levels = " x ".join(map(str, self.levels))
        name = f"levels {levels}, {self.layout}" if levels else "tokens uncut"
        if self.heads_per_group is not None:
            name += f", heads {self.heads_per_group} at a time"
        kind = "causal" if self.is_causal else "plain"
        return f"{name}, {kind}" + (f", {self.sizes}" if self.sizes else "")


@dataclass(slots=True, repr=False)
class CheckResult:
    """What ``check_kernel`` found.

    Attributes:
        kernel: the kernel's name.
        cases: every cut that was tried.
        broken: what is wrong, and where it was seen.
        cause: the likeliest cause of what is wrong; None if nothing is.
        others: the other causes that were found.
        skipped: what could not be tried, and why.
    """

    kernel: str
    cases: list[CaseResult] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    cause: str | None = None
    others: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all cases; "not exact" also if a law is broken."""
        if self.broken:
            return "not exact"
        order: tuple[Verdict, ...] = ("bit-identical", "exact within rounding", "not exact")
        return max((c.verdict for c in self.cases), key=order.index, default="not exact")

    @property
    def exact(self) -> bool:
        """Whether every case is exact, and no law is broken."""
        return self.verdict != "not exact"

    def __bool__(self) -> bool:
        """``exact``."""
        return self.exact

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {self.verdict}, {counted(len(self.cases), 'way')} to cut"]
        if self.cause:
            lines.append(f"cause: {self.cause}")
        lines += [f"also: {other}" for other in self.others]
        lines += dict.fromkeys(f"{b.cause.partition(':')[0]}: {b.where}" for b in self.broken)
        wrong = [case for case in self.cases if case.verdict == "not exact"]
        if wrong:
            lines.append(
                f"{len(wrong)} of {counted(len(self.cases), 'cut')} differ; the worst of each kind:"
            )
        # Only the worst of each kind of cut is shown.
        shown: dict[tuple[bool, bool, str], CaseResult] = {}
        for case in wrong:
            of = (bool(case.levels), case.heads_per_group is not None, case.sizes)
            if of not in shown or case.worst()[1] > shown[of].worst()[1]:
                shown[of] = case
        for case in shown.values():
            name, error = case.worst()
            rows = ", ".join(f"{what}[{b}, {h}, {row}]" for what, b, h, row in case.rows)
            lines.append(
                f"  {case}: {name} has a relative error of {format_error(error)} (rounding: "
                f"at most {case.limit:.1e}); first wrong rows {rows}"
            )
        lines += [f"not tried: {reason}" for reason in self.skipped]
        return "\n".join(lines)

    __repr__ = __str__
