"""Many random calls against float64, on some processes; says what was run and what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from random_calls.pool import only


def main() -> int:
    """0 where nothing was wrong."""
    given = _arguments()
    only(given.kernel)
    if given.seed is not None:
        return _one(given)
    if given.serve:
        return _serve(given)
    from random_calls.summary import Summary
    from random_calls.workers import How, rows

    started = shown = time.monotonic()
    summary = Summary(given.first)
    how = How(
        given.device, given.jobs, given.threads, given.chunk, given.failing, given.kernel,
        given.seconds,
    )  # fmt: skip
    for row in rows(given.first, given.count, how):
        summary.add(row)
        if row["text"]:
            print(row["text"], flush=True)
        now = time.monotonic()
        summary.seconds = now - started
        if now - shown > 10:
            shown = now
            print(f"... {summary.progress()}", flush=True)
    print(summary.text())
    if given.json:
        Path(given.json).write_text(json.dumps(summary.data(), indent=1), encoding="utf-8")
    return 1 if summary.outcomes["wrong"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m random_calls", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="seeds (default 1000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--json", help="file for the summary")
    parser.add_argument("--seed", type=int, help="run this one alone, and say everything of it")
    parser.add_argument(
        "--simplest", action="store_true", help="with --seed: look for a simpler one"
    )
    parser.add_argument("--chunk", type=int, default=2000, help="seeds of one process")
    parser.add_argument(
        "--failing", action="store_true", help="let an allocation of every call fail"
    )  # fmt: skip
    parser.add_argument("--kernel", help="on a GPU: draw calls of this kernel alone")
    parser.add_argument(
        "--serve", action="store_true",
        help="read seeds line by line; one line of JSON for every seed",
    )  # fmt: skip
    return parser.parse_args()


def _one(given: argparse.Namespace) -> int:
    from random_calls.run import check_seed, simplest

    verdict = check_seed(given.seed, given.device, failing=given.failing)
    print(verdict)
    print("errors as shares of what is allowed:", verdict.ratios)
    print("ran:", verdict.ran)
    if given.simplest and verdict.outcome == "wrong":
        print("simplest found:", simplest(verdict.case, given.device))
    return 1 if verdict.outcome == "wrong" else 0


def _serve(given: argparse.Namespace) -> int:
    import gc

    import torch

    from random_calls.draw import draw
    from random_calls.run import check_seed, failed, is_lost
    from random_calls.summary import row_of

    torch.set_num_threads(given.threads)
    gc.collect()
    gc.freeze()  # what is imported by now is not looked through again and again
    for seed in map(int, sys.stdin):
        began = time.perf_counter()
        try:
            verdict = check_seed(seed, given.device, failing=given.failing)
        except Exception as error:
            verdict = failed(draw(seed, given.device, failing=given.failing), error)
        row = row_of(verdict) | {"seconds": time.perf_counter() - began}
        row["lost"] = verdict.outcome == "wrong" and is_lost(torch.device(given.device))
        print(json.dumps(row), flush=True)
        if row["lost"]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
