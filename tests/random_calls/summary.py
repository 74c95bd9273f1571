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
        self.by_kernel: dict[str, list[float]] = defaultdict(list)
        self.slowest: list[tuple[float, int]] = []

    def add(self, row: dict[str, Any]) -> None:
        """One row."""
        self.by_kernel[f"{row['kernel']} {row['dtype']}"].append(row["seconds"])
        self.slowest = sorted([*self.slowest, (row["seconds"], row["seed"])])[-8:]
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
        means = ((sum(ts) / len(ts), len(ts), of) for of, ts in self.by_kernel.items())
        shown = (f"{of} {1000 * mean:.0f} x {n}" for mean, n, of in sorted(means, reverse=True))
        lines.append("milliseconds a call by kernel: " + ", ".join(shown))
        slowest = (f"{seed} {took:.1f}" for took, seed in reversed(self.slowest))
        lines.append("slowest seeds, s: " + ", ".join(slowest))
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
        }


def _few(seeds: list[int]) -> str:
    return ", ".join(map(str, sorted(seeds)[:8])) + (", ..." if len(seeds) > 8 else "")
