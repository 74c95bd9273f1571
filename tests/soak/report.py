"""A soak in Markdown."""

from __future__ import annotations

from typing import Any

from soak.verdict import LIMITS

_SHOWN = 20


def markdown(data: dict[str, Any]) -> str:
    """Verdict, calls by kind, growth beside its limits, and some rows."""
    rows = data["rows"]
    minutes = rows[-1]["seconds"] / 60
    verdict = "passed" if data["passed"] else "FAILED"
    lines = [
        f"# Soak of {minutes:.0f} minutes, {data['device']}, torch {data['torch']}: {verdict}", "",
        f"Seed {data['seed']}: {sum(data['calls'].values()):,} calls, {len(data['wrong'])} wrong.",
        "", "| kind | calls | seconds |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {k} | {n:,} | {data['seconds'][k]:,.0f} |" for k, n in data["calls"].items()]
    lines += [f"| {kind} | not run: {why} | |" for kind, why in data["skipped"].items()]
    lines += ["", "| event | times |", "|---|---|"]
    lines += [f"| {event} | {n:,} |" for event, n in sorted(data["events"].items())]
    lines += ["", "| grew in the second half | by | allowed |", "|---|---|---|"]
    lines += [f"| {k} | {added:,.0f} | {LIMITS[k]:,} |" for k, added in data["growth"].items()]
    if data["complaints"] or data["wrong"]:
        lines += ["", *(f"* {one}" for one in [*data["complaints"], *data["wrong"]])]
    names = list(rows[0])
    lines += ["", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    every = max(1, len(rows) // _SHOWN)
    shown = [row for i, row in enumerate(rows) if i % every == 0 or row is rows[-1]]
    lines += [f"| {' | '.join(f'{row[name]:,}' for name in names)} |" for row in shown]
    return "\n".join(lines) + "\n"
