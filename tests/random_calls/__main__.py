"""Many random calls against float64, on some processes; says what became of them."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

# A call takes milliseconds (in Triton's interpreter a minute); longer without a word is
# a hang.
_PATIENCE = 300.0
# Calls of one process.
_AT_ONCE = 200
# What cuBLAS sets up once for every thread would be taken for the call's.
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


def main() -> int:
    """0 where nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m random_calls", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="seeds (default 1000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument(
        "--failing", action="store_true", help="an allocation of every call fails"
    )
    parser.add_argument("--kernel", help="on a GPU: draw calls of this kernel alone")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.seed is not None:
        given.serve, given.first, given.count = True, given.seed, 1
    if given.serve:
        return _serve(given)
    began, outcomes = time.monotonic(), Counter[str]()
    seeds: dict[str, list[int]] = defaultdict(list)  # by what is wrong, or refused
    for row in rows(given.first, given.count, given.jobs, sys.argv[1:]):
        outcomes[row["outcome"]] += 1
        for name in row["said"]:
            seeds[name].append(row["seed"])
        if row["outcome"] == "wrong":
            print(f"seed {row['seed']}: {row['text']}", flush=True)
    print(
        f"{outcomes.total()} calls in {time.monotonic() - began:.0f} s: "
        f"{dict(outcomes)}"
    )
    for name, some in seeds.items():
        print(f"{name}: {len(some)}, seeds {sorted(some)[:8]}")
    return 1 if outcomes["wrong"] else 0


def _serve(given: argparse.Namespace) -> int:
    """A line of JSON for each seed."""
    import torch

    from random_calls.run import check_seed, is_lost

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is imported by now is not looked through again and again
    for seed in range(given.first, given.first + given.count):
        verdict = check_seed(
            seed, given.device, failing=given.failing, kernel=given.kernel
        )
        said = [*verdict.kinds, *filter(None, [verdict.refusal])]
        row = {
            "seed": seed,
            "outcome": verdict.outcome,
            "said": said,
            "text": str(verdict),
        }
        print(json.dumps(row) if given.seed is None else verdict, flush=True)
        if verdict.outcome == "wrong" and (
            given.seed is not None or is_lost(torch.device(given.device))
        ):
            return 1  # another process goes on
    return 0


def rows(
    first: int, count: int, jobs: int, arguments: list[str]
) -> Iterator[dict[str, Any]]:
    """What became of each seed, from processes that may crash or hang: of a seed whose
    process did, that."""
    stop = first + count
    blocks = [
        (seed, min(seed + _AT_ONCE, stop)) for seed in range(first, stop, _AT_ONCE)
    ]
    with ThreadPoolExecutor(jobs) as threads:
        for some in threads.map(partial(_run, arguments), blocks):
            yield from some


def _run(arguments: list[str], block: tuple[int, int]) -> list[dict[str, Any]]:
    """One process after the other, until all seeds of a block are done."""
    (seed, stop), heard = block, []
    while seed < stop:
        # Each has a cache of its own, where no calibration is.
        with tempfile.TemporaryDirectory(prefix="random-calls-") as cache:
            command = [sys.executable, "-m", "random_calls", *arguments, "--serve"]
            process = subprocess.Popen(
                [*command, "--first", str(seed), "--count", str(stop - seed)],
                stdout=subprocess.PIPE, text=True,
                env=os.environ | _NO_WORKSPACE | {"QUORUM_ATTENTION_CACHE": cache},
            )  # fmt: skip
            line = "first"
            while line:
                clock = threading.Timer(_PATIENCE, process.kill)
                clock.start()
                line = process.stdout.readline()
                clock.cancel()
                if line.startswith("{"):
                    heard.append(json.loads(line))
                    seed += 1
            code = process.wait()
        if code != 1 and seed < stop:  # killed by itself, or a hang
            what = f"ends the process ({code})"
            heard.append(
                {"seed": seed, "outcome": "wrong", "said": [what], "text": what}
            )
            seed += 1
    return heard


if __name__ == "__main__":
    sys.exit(main())
