"""How long planning takes: 10^9 tokens, two levels of 57 chunks, no tensor anywhere.

    python benchmarks/plan.py [--tokens 1000000000] [--levels 57,57] [--sample 200] [--json FILE]

Times are of a process whose imports are done. "first" includes what is done once a process: for
qa.plan the numerical check of the inner kernel. Targets are held against medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition
from quorum_attention.writing import write_text

# Seconds that the project promises.
TARGETS = {"decomposition": 0.05, "plan": 0.05, "task": 0.001, "rectangles": 0.001}


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def sample_tasks(decomposition: Decomposition, count: int) -> dict[str, list[float]]:
    """Seconds of task(path), and of the new task's rectangles, for random paths."""
    seconds: dict[str, list[float]] = {"task": [], "rectangles": []}
    for _ in range(count):
        path = tuple(random.randrange(c) for c in decomposition.levels)
        taken, task = timed(lambda path=path: decomposition.task(path))
        seconds["task"].append(taken)
        taken, _ = timed(lambda task=task: task.rectangles(True))
        seconds["rectangles"].append(taken)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--levels", default="57,57", help="chunk counts, comma-separated")
    parser.add_argument("--sample", type=int, default=200, help="tasks to time")
    parser.add_argument("--json")
    args = parser.parse_args()
    levels = tuple(int(c) for c in args.levels.split(",") if c)

    first, decomposition = timed(lambda: Decomposition(args.tokens, levels))

    def make_plan() -> qa.Plan:
        return qa.plan(args.tokens, levels=levels, is_causal=True, device="cpu")

    seconds = {
        "decomposition": [first],
        "plan": [timed(make_plan)[0] for _ in range(5)],
        **sample_tasks(decomposition, args.sample),
    }
    print(f"{args.tokens} tokens, levels {levels}: {decomposition.n_tasks} tasks")
    print(f"  {'':14s}{'median':>10s}{'max':>10s}{'first':>10s}{'target':>10s}   (ms)")
    summary = {}
    for name, taken in seconds.items():
        median, worst = statistics.median(taken), max(taken)
        summary[name] = {
            "median": median,
            "max": worst,
            "first": taken[0],
            "target": TARGETS[name],
            "met": median < TARGETS[name],
        }
        numbers = "".join(f"{1e3 * s:10.3f}" for s in (median, worst, taken[0], TARGETS[name]))
        verdict = "met" if median < TARGETS[name] else "MISSED"
        print(f"  {name:14s}{numbers}   {verdict}" + ("" if worst < TARGETS[name] else ", max not"))
    if args.json:
        result = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "quorum_attention": qa.__version__,
            "arguments": vars(args),
            "summary": summary,
            "seconds": seconds,
        }
        write_text(args.json, json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
