"""Counts what random calls did."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from random_calls.run import Verdict


def row_of(verdict: Verdict) -> dict[str, Any]:
    """A verdict in plain types, for another process or a file."""
    case = verdict.case
    return {
        "seed": case.seed,
        "outcome": verdict.outcome,
        "kinds": verdict.kinds,
        "text": str(verdict) if verdict.outcome == "wrong" else "",
        "refusal": verdict.refusal,
        "once": verdict.once,
        "ratios": verdict.ratios,
        "ran": [(a, b, "x".join(map(str, c)) or "none", d) for a, b, c, d in verdict.ran],
        "route": case.route + (", results given" if case.results.given else ""),
        "dtype": case.dtype,
        "kernel": case.kernel,
        "parts": verdict.parts,
    }


class Summary:
    """Of many verdicts."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.seconds = 0.0
        self.outcomes: Counter[str] = Counter()
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.worst: dict[str, tuple[float, int]] = {}
        self.kinds: dict[str, list[int]] = defaultdict(list)
        self.refusals: dict[str, list[int]] = defaultdict(list)
        self.failing: list[dict[str, Any]] = []
        self.once: list[dict[str, Any]] = []
        self.parts: Counter[str] = Counter()
        self.by_kernel: dict[str, list[float]] = defaultdict(list)
        self.slowest: list[tuple[float, int, str]] = []
        self.compiled: dict[str, Counter[str]] = defaultdict(Counter)
        self.compilations: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """One row."""
        self._add_times(row)
        self.outcomes[row["outcome"]] += 1
        self.counts["route"][row["route"]] += 1
        self.counts["dtype"][row["dtype"]] += 1
        for which, way, levels, kernel in row["ran"]:
            self.counts["way"][f"{which}, {way}"] += 1
            self.counts["levels"][levels] += 1
            self.counts["kernel"][kernel] += 1
        for name, ratio in row["ratios"].items():
            if row["outcome"] == "right" and ratio > self.worst.get(name, (-1.0, 0))[0]:
                self.worst[name] = (ratio, row["seed"])
        for kind in set(row["kinds"]):
            self.kinds[kind].append(row["seed"])
        if row["refusal"]:
            self.refusals[row["refusal"]].append(row["seed"])
        if row["outcome"] == "wrong":
            self.failing.append({"seed": row["seed"], "text": row["text"]})
        if row["once"]:
            self.once.append({"seed": row["seed"], "text": "; ".join(row["once"])})

    def _add_times(self, row: dict[str, Any]) -> None:
        self.parts.update(row["parts"])
        took = sum(row["parts"].values())
        of = f"{row['kernel']} {row['dtype']}"
        self.by_kernel[of].append(took)
        self.slowest = sorted([*self.slowest, (took, row["seed"], of)], reverse=True)[:8]
        for one in row["compiled"]:
            found = self.compiled[one["kernel"]]
            found["loaded" if one["held"] else "compiled"] += 1
            found["milliseconds"] += round(1000 * one["seconds"])
            if not one["held"]:
                self.compilations.append(one | {"seed": row["seed"]})

    def times(self) -> list[str]:
        """Where time went: seconds of all processes together."""
        lines = []
        if self.parts:
            count = max(1, sum(self.outcomes.values()))
            shown = (f"{name} {1000 * t / count:.1f}" for name, t in self.parts.most_common())
            lines.append("milliseconds a call in its process: " + ", ".join(shown))
            slowest = (f"{seed} ({of}) {t:.1f}" for t, seed, of in self.slowest)
            lines.append("slowest seeds, s: " + ", ".join(slowest))
            means = {of: (sum(ts) / len(ts), len(ts)) for of, ts in self.by_kernel.items()}
            shown = (
                f"{of} {1000 * mean:.0f} x {n}"
                for of, (mean, n) in sorted(means.items(), key=lambda item: -item[1][0])
            )
            lines.append("milliseconds a call by kernel: " + ", ".join(shown))
        for name, found in sorted(self.compiled.items(), key=lambda item: -item[1]["milliseconds"]):
            distinct = len({one["of"] for one in self.compilations if one["kernel"] == name})
            lines.append(
                f"  {name}: compiled {found['compiled']} times ({distinct} different), loaded "
                f"{found['loaded']}, {found['milliseconds'] / 1000:.1f} s"
            )
        return lines

    def progress(self) -> str:
        """One line."""
        count, spent = sum(self.outcomes.values()), self.seconds
        rest = ", ".join(f"{n} {what}" for what, n in self.outcomes.most_common())
        return (
            f"{count} calls in {spent:.0f} s ({1000 * spent / max(1, count):.1f} ms each): {rest}"
        )

    def text(self) -> str:
        """Everything, for people."""
        lines = [self.progress()]
        for name, counter in self.counts.items():
            shown = ", ".join(f"{what} {n}" for what, n in counter.most_common(40))
            lines.append(f"{name}: {shown}")
        if self.worst:
            lines.append("worst errors of right calls, as shares of what is allowed:")
            lines += [f"  {n}: {r:.3f} (seed {s})" for n, (r, s) in sorted(self.worst.items())]
        lines += self.times()
        lines += [f"off, and not again: seed {one['seed']}, {one['text']}" for one in self.once]
        for title, table in (("refused", self.refusals), ("wrong", self.kinds)):
            if table:
                lines.append(f"{title}:")
            for what, seeds in sorted(table.items(), key=lambda item: -len(item[1])):
                lines.append(f"  {len(seeds)} x {what} (seeds {_few(seeds)})")
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Everything, for machines."""
        return {
            "first": self.first,
            "calls": sum(self.outcomes.values()),
            "seconds": self.seconds,
            "outcomes": dict(self.outcomes),
            "counts": {name: dict(counter) for name, counter in self.counts.items()},
            "worst": self.worst,
            "refusals": {what: sorted(seeds)[:20] for what, seeds in self.refusals.items()},
            "wrong": {what: sorted(seeds) for what, seeds in self.kinds.items()},
            "failing": self.failing,
            "once": self.once,
            "seconds_by_part": dict(self.parts),
            "compiled": {name: dict(found) for name, found in self.compiled.items()},
        }


def _few(seeds: list[int]) -> str:
    return ", ".join(map(str, sorted(seeds)[:8])) + (", ..." if len(seeds) > 8 else "")
