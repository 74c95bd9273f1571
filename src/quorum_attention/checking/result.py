"""The result of ``check_kernel``, as data and in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from quorum_attention.units import counted, format_error

Verdict = Literal["bit-identical", "exact within rounding", "not exact"]
_FROM_BEST_TO_WORST: tuple[Verdict, ...] = (
    "bit-identical",
    "exact within rounding",
    "not exact",
)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One way to cut a call against the same call uncut.

    Attributes:
        levels, layout: how tokens were cut.
        is_causal: whether the call was causal.
        heads_per_group: query heads of a unit; None if heads and batch entries stayed
            together.
        sizes: how sizes differ from those asked for ("4 heads over 2"); "" if they do
            not.
        verdict: the verdict on all results together.
        errors: by result, the largest difference from the uncut call, as a share of the
            uncut call's largest value.
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

    @property
    def largest_error(self) -> float:
        """The largest error of all results."""
        return max(self.errors.values())

    def __str__(self) -> str:
        levels = " x ".join(map(str, self.levels))
        name = f"levels {levels}, {self.layout}" if levels else "tokens uncut"
        if self.heads_per_group is not None:
            name += f", heads {self.heads_per_group} at a time"
        kind = "causal" if self.is_causal else "plain"
        sizes = f", {self.sizes}" if self.sizes else ""
        return f"{name}, {kind}{sizes}"


@dataclass(slots=True, repr=False)
class CheckResult:
    """The result of ``check_kernel``.

    Attributes:
        kernel: the kernel's name.
        cases: every cut that was tried.
        broken: a sentence for each test of uncut calls that failed.
        skipped: tests that could not be made, and why.
    """

    kernel: str
    cases: list[CaseResult] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all cases. It is "not exact" also if a test of uncut
        calls failed."""
        if self.broken or not self.cases:
            return "not exact"
        return max((case.verdict for case in self.cases), key=_FROM_BEST_TO_WORST.index)

    @property
    def exact(self) -> bool:
        """Whether every case is exact, and no test of uncut calls failed."""
        return self.verdict != "not exact"

    def __bool__(self) -> bool:
        """``exact``."""
        return self.exact

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        n_cases = len(self.cases)
        lines = [f"{self.kernel}: {self.verdict}, {counted(n_cases, 'way')} to cut"]
        lines += [f"wrong: {sentence}" for sentence in self.broken]
        wrong_cases = [case for case in self.cases if case.verdict == "not exact"]
        if wrong_cases:
            cuts = counted(n_cases, "cut")
            lines.append(
                f"{len(wrong_cases)} of {cuts} differ; the worst of each kind:"
            )
        worst_cases = _worst_of_each_kind(wrong_cases)
        lines += [f"  {_describe(case)}" for case in worst_cases]
        lines += [f"not tried: {reason}" for reason in self.skipped]
        return "\n".join(lines)

    __repr__ = __str__


def _worst_of_each_kind(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """The case with the largest error of each kind of cut."""
    worst: dict[tuple[bool, bool, str], CaseResult] = {}
    for case in cases:
        cuts_tokens = bool(case.levels)
        cuts_heads = case.heads_per_group is not None
        kind = (cuts_tokens, cuts_heads, case.sizes)
        if kind not in worst or case.largest_error > worst[kind].largest_error:
            worst[kind] = case
    return list(worst.values())


def _describe(case: CaseResult) -> str:
    """The largest error of a case and where it is."""
    name = max(case.errors, key=case.errors.__getitem__)
    rows = [
        f"{result}[{batch}, {head}, {row}]" for result, batch, head, row in case.rows
    ]
    return (
        f"{case}: {name} has a relative error of {format_error(case.largest_error)} "
        f"(rounding: at most {case.limit:.1e}); first wrong rows {', '.join(rows)}"
    )
