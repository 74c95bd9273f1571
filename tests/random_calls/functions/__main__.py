"""Many random calls with functions of users against float64; says what is wrong.

Exit status 0 where every call that must be right is, and every other is refused or right too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNNERS = ("eager", "compiled", "devices", "ranks")
# Of one process, or of one pair of ranks; then others take their place.
_AT_ONCE = 250


def main() -> int:
    """0 where nothing was wrong."""
    given = _arguments()
    if given.serve:
        for row in _rows(given.first, given.count, given.runner):
            print(json.dumps(row), flush=True)
        return 0
    began, rows = time.monotonic(), []
    for row in _of_processes(given):
        rows.append(row)
        if row["words"] and given.verbose:
            print(row["seed"], row["case"], *row["words"], sep="\n  ", flush=True)
    data = summary(rows) | {
        "runner": given.runner, "first": given.first, "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    print(text(data))
    if given.json:
        given.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if data["outcomes"].get("wrong") else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m random_calls.functions", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="seeds (default 1000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--runner", choices=RUNNERS, default="eager")
    parser.add_argument("--json", type=Path, help="file for the summary")
    parser.add_argument("--verbose", action="store_true", help="say all of every wrong call")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _rows(first: int, count: int, runner: str) -> Iterator[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    if runner == "ranks":
        from random_calls.functions.ranks import rows

        yield from rows(first, count)
        return
    from random_calls.functions.run import check_seed

    for seed in range(first, first + count):
        yield check_seed(seed, runner).row()


def _of_processes(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of processes that each make some hundred calls; what one did not tell is wrong."""
    parts = [
        (first, min(_AT_ONCE, given.first + given.count - first))
        for first in range(given.first, given.first + given.count, _AT_ONCE)
    ]
    with tempfile.TemporaryDirectory(prefix="random-calls-") as folder:
        environment = os.environ | {"QUORUM_ATTENTION_CACHE": folder, "OMP_NUM_THREADS": "1"}
        running: list[tuple[int, int, subprocess.Popen[str]]] = []
        while parts or running:
            while parts and len(running) < given.jobs:
                first, count = parts.pop(0)
                command = [sys.executable, "-m", "random_calls.functions", "--serve"]
                command += ["--first", str(first), "--count", str(count), "--runner", given.runner]
                output = Path(folder, str(first)).open("w")  # noqa: SIM115 (the process has it)
                process = subprocess.Popen(command, stdout=output, text=True, env=environment)
                output.close()
                running.append((first, count, process))
            first, count, process = running.pop(0)
            code = process.wait()
            lines = Path(folder, str(first)).read_text().splitlines()
            told = [json.loads(line) for line in lines if line.startswith("{")]
            yield from told
            for seed in sorted(set(range(first, first + count)) - {row["seed"] for row in told}):
                yield _untold(seed, code)


def _untold(seed: int, code: int) -> dict[str, Any]:
    return {
        "seed": seed, "outcome": "wrong", "what": "?", "place": "?", "trap": "?", "said": "",
        "words": [f"its process ended with {code}"], "case": "",
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the seeds of what is wrong by kind."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    wrong: dict[str, list[int]] = defaultdict(list)
    said: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for row in rows:
        sort = "must be right" if row["trap"] == "none" else f"trap: {row['trap']}"
        kinds[f"{sort}, {row['what']}"][row["outcome"]] += 1
        said[row["said"]] += bool(row["said"])
        if row["outcome"] == "wrong":
            words = row["words"][0].split(" is off by")[0]
            wrong[f"{sort}, {row['what']}: {words}"].append(row["seed"])
            places[row["place"]] += 1
    return {
        "calls": len(rows), "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "kinds": {kind: dict(found) for kind, found in sorted(kinds.items())},
        "refusals": dict(said.most_common()), "wrong": {k: v[:20] for k, v in wrong.items()},
        "wrong_counts": {k: len(v) for k, v in wrong.items()},
        "wrong_places": dict(places.most_common()),
    }  # fmt: skip


def text(data: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{data['calls']} calls, {data['runner']}, in {data['seconds']} s: {data['outcomes']}"]
    lines += [f"  {kind}: {found}" for kind, found in data["kinds"].items()]
    lines += ["refused:", *(f"  {n} x {said}" for said, n in data["refusals"].items())]
    if data["wrong"]:
        counted = sorted(data["wrong_counts"].items(), key=lambda item: -item[1])
        lines += ["wrong:"]
        lines += [f"  {n} x {kind} (seeds {data['wrong'][kind][:6]})" for kind, n in counted]
        lines += [f"  by place: {data['wrong_places']}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
