"""Many random calls against float64, on some processes; says what was run and what is wrong."""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

# A call takes milliseconds (in Triton's interpreter a minute); longer without a word is a hang.
_PATIENCE = 300.0
# What cuBLAS sets up once for every thread would be taken for the call's.
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def main() -> int:
    """0 where nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m random_calls", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="seeds (default 1000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--json", help="file for the summary")
    parser.add_argument("--seed", type=int, help="run this one alone, and say everything of it")
    parser.add_argument("--failing", action="store_true", help="an allocation of every call fails")
    parser.add_argument("--kernel", help="on a GPU: draw calls of this kernel alone")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve or given.seed is not None:
        return _in_this_process(given)
    found = Summary(given.first)
    for row in rows(given.first, given.count, given.jobs, given.seconds, sys.argv[1:]):
        found.add(row)
    print(found.text())
    if given.json:
        Path(given.json).write_text(json.dumps(found.data(), indent=1), encoding="utf-8")
    return 1 if found.wrong else 0


def _in_this_process(given: argparse.Namespace) -> int:
    """One seed in words; or each a line of JSON, for the process that has begun this one."""
    import torch

    from random_calls.run import check_seed, is_lost

    options = {"failing": given.failing, "kernel": given.kernel}
    if given.seed is not None:
        verdict = check_seed(given.seed, given.device, **options)
        print(f"{verdict}\nerrors as shares of what is allowed: {verdict.ratios}")
        print("ran:", verdict.ran)
        return 1 if verdict.outcome == "wrong" else 0
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is imported by now is not looked through again and again
    for seed in range(given.first, given.first + given.count):
        verdict = check_seed(seed, given.device, **options)
        case, names = verdict.case, ("outcome", "kinds", "refusal", "once", "ratios")
        counted = {"route": case.route, "dtype": case.dtype, "kernel": case.kernel}
        row = {name: getattr(verdict, name) for name in names}
        row |= {"seed": seed, "text": str(verdict), "counted": counted, "ran": verdict.ran}
        print(json.dumps(row), flush=True)
        if verdict.outcome == "wrong" and is_lost(torch.device(given.device)):
            return 1  # another process goes on
    return 0


def rows(first: int, count: int, jobs: int, seconds: float | None, arguments: list[str]) -> Any:
    """What became of each seed, from processes that may crash or hang: of a seed whose process did,
    that."""
    heard: queue.Queue[dict[str, Any] | None] = queue.Queue()
    over, at_work = threading.Event(), list[subprocess.Popen[str]]()

    def run(seed: int, stop: int) -> None:
        """One process after the other, until all seeds are done."""
        while seed < stop and not over.is_set():
            # Each has a cache of its own, where no calibration is.
            with tempfile.TemporaryDirectory(prefix="random-calls-") as cache:
                command = [sys.executable, "-m", "random_calls", *arguments, "--serve"]
                process = subprocess.Popen(
                    [*command, "--first", str(seed), "--count", str(stop - seed)],
                    stdout=subprocess.PIPE, text=True,
                    env=os.environ | _NO_WORKSPACE | {"QUORUM_ATTENTION_CACHE": cache},
                )  # fmt: skip
                at_work.append(process)
                assert process.stdout is not None
                while True:
                    clock = threading.Timer(_PATIENCE, process.kill)
                    clock.start()
                    line = process.stdout.readline()
                    clock.cancel()
                    if not line:
                        break
                    if line.startswith("{"):
                        heard.put(json.loads(line))
                        seed += 1
                code = process.wait()
            if code != 1 and seed < stop and not over.is_set():  # killed by itself, or a hang
                what = f"ends the process ({code})"
                heard.put({"seed": seed, "outcome": "wrong", "kinds": [what], "text": what})
                seed += 1
        heard.put(None)

    edges = [first + count * n // jobs for n in range(jobs + 1)]
    for n in range(jobs):
        threading.Thread(target=run, args=(edges[n], edges[n + 1]), daemon=True).start()
    began, left = time.monotonic(), jobs
    try:
        while left:
            limit = None if seconds is None else max(0.0, began + seconds - time.monotonic())
            row = heard.get(timeout=limit)
            if row is None:
                left -= 1
            else:
                yield row
    except queue.Empty:
        pass  # the time is over
    finally:
        over.set()
        for process in at_work:
            process.kill()


class Summary:
    """Of many seeds; says of a wrong one so at once."""

    def __init__(self, first: int) -> None:
        self.first, self.began = first, time.monotonic()
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.worst: dict[str, tuple[float, int]] = {}
        # Seeds by what is wrong, by refusal, and by what was off but not again.
        self.seeds: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.failing: list[dict[str, Any]] = []

    @property
    def wrong(self) -> int:
        return self.counts["outcome"]["wrong"]

    def add(self, row: dict[str, Any]) -> None:
        """One seed."""
        self.counts["outcome"][row["outcome"]] += 1
        for name, value in row.get("counted", {}).items():
            self.counts[name][value] += 1
        for which, way, levels, _ in row.get("ran", ()):
            self.counts["way"][f"{which}, {way}"] += 1
            self.counts["levels"]["x".join(map(str, levels)) or "none"] += 1
        for name, ratio in row.get("ratios", {}).items():
            if row["outcome"] == "right" and ratio > self.worst.get(name, (-1.0, 0))[0]:
                self.worst[name] = ratio, row["seed"]
        once, refusal = row.get("once", ()), row.get("refusal")
        for what, names in ("wrong", row["kinds"]), ("once", once), ("refused", [refusal]):
            for name in filter(None, names):
                self.seeds[what][name].append(row["seed"])
        if row["outcome"] == "wrong":
            self.failing.append({"seed": row["seed"], "text": row["text"]})
            print(row["text"], flush=True)

    def text(self) -> str:
        """Everything, for people."""
        count, spent = self.counts["outcome"].total(), time.monotonic() - self.began
        lines = [f"{count} calls in {spent:.0f} s ({1000 * spent / max(1, count):.1f} ms each)"]
        for name, counter in self.counts.items():
            lines.append(f"{name}: {', '.join(f'{n} {what}' for what, n in counter.most_common())}")
        lines += [f"worst {n}, of what is allowed: {r:.3f} (seed {s})"
                  for n, (r, s) in sorted(self.worst.items())]  # fmt: skip
        for what, table in self.seeds.items():
            lines += [f"{what}: {name} (seeds {sorted(s)[:8]})" for name, s in table.items()]
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Everything, for machines."""
        return {
            "first": self.first, "calls": self.counts["outcome"].total(),
            "seconds": time.monotonic() - self.began, "counts": self.counts, "worst": self.worst,
            "seeds": self.seeds, "failing": self.failing,
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
