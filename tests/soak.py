"""A soak: random calls for minutes or hours, alone, of three threads at once and
interrupted, each held against float64; whether the process grows.

``PYTHONPATH=src:tests python -m soak --minutes 60 --seed 1``. Exit status 0: no call
was wrong, nothing grew, nothing was left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations, cycle
from pathlib import Path
from statistics import median
from typing import Any

MIB = 1 << 20
# What each may grow by over the second half of a soak: the slope through its rows,
# times the time. A leak of 1 KB a call is 20 MiB in the second half of an hour. Less
# than these is what torch's allocators, its compiler's caches and glibc's free lists do
# by themselves.
LIMITS = {
    "anonymous": 48 * MIB, "device": 4 * MIB, "descriptors": 4, "threads": 4, "children": 1,
    "shared_files": 1, "temporary_files": 4,
}  # fmt: skip


def prepare(device: str) -> None:
    """The environment of this process; before torch is imported."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        # cuBLAS sets its workspace up once for every thread.
        "CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0",
        # oneDNN keeps compiled code for 1,024 shapes of products in bf16, 0.6 MB each.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32",
    }  # fmt: skip
    with contextlib.suppress(AttributeError):
        # M_ARENA_MAX: what threads free does not stay in pieces of arenas of theirs.
        ctypes.CDLL(None).mallopt(-8, 1)
    os.environ["QUORUM_ATTENTION_CACHE"] = tempfile.mkdtemp(prefix="cache-")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class Soak:
    """One run: what was called and found so far, and rows of what the process held."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.draw = device, random.Random(seed)
        self.rows: list[dict[str, float]] = []
        self.calls: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, seconds: float, every: float) -> bool:
        """Whether no call was wrong and nothing grew."""
        import torch

        torch.set_num_threads(1)
        for kind in KINDS:  # the warm-up: what is made once is made
            self.step(kind)
        began, passed = time.monotonic(), 0.0
        self._row(passed)
        for kind in cycle(KINDS):
            passed = time.monotonic() - began
            if passed >= seconds:
                break
            if passed - self.rows[-1]["seconds"] > every:
                self._row(passed)
            self.step(kind)
        self._row(passed)
        self.wrong += grown(self.rows)
        return not self.wrong

    def step(self, kind: Callable[[Soak], None]) -> None:
        """Some calls of a kind."""
        already = len(self.wrong)
        try:
            kind(self)
        except Exception:
            self.wrong.append(traceback.format_exc())
        for words in self.wrong[already:]:
            print(f"WRONG {kind.__name__}: {words}", flush=True)

    def cases(self, count: int) -> list[Any]:
        """Neighbouring seeds of random_calls: on a GPU they share what has to be
        compiled."""
        from random_calls.draw import BLOCK, draw

        first = self.draw.randrange(1 << 40) // BLOCK * BLOCK
        return [draw(seed, self.device) for seed in range(first, first + count)]

    def judge(self, kind: str, verdict: Any) -> None:
        """Count a verdict; only a kernel asked for by name may refuse."""
        self.calls[kind] += 1
        refused = verdict.outcome == "refused"
        allowed = verdict.refusal.startswith("NotImplementedError: kernel '")
        if verdict.outcome == "wrong" or (refused and not allowed):
            self.wrong.append(f"seed {verdict.case.seed}: {verdict}")

    def _row(self, seconds: float) -> None:
        row = {"seconds": round(seconds, 1), "calls": self.calls.total(), **held()}
        self.rows.append(row)
        print(
            ", ".join(f"{name} {number:,}" for name, number in row.items()), flush=True
        )


def alone(soak: Soak) -> None:
    """Calls of random_calls: routes, masks, strides, budgets, failing allocations."""
    from random_calls.run import check

    for case in soak.cases(16):
        soak.judge("alone", check(case, soak.device))


def at_once(soak: Soak) -> None:
    """Calls of three threads at once, without what changes the process for all of its
    threads."""
    from random_calls.run import check

    cases = [replace(case, failure=None) for case in soak.cases(3)]
    with ThreadPoolExecutor(3) as threads:
        for verdict in threads.map(lambda case: check(case, soak.device), cases):
            # A device's allocator counts what all threads take.
            if not all(
                words.startswith("more memory than") for words in verdict.wrong or [""]
            ):
                soak.judge("at once", verdict)


class Interrupt(KeyboardInterrupt):
    """Of a timer."""


def interrupted(soak: Soak) -> None:
    """A call interrupted at a random instant leaves its inputs alone, and the next is
    right."""
    import torch
    from random_calls.call import CallResults, perform
    from random_calls.run import Verdict, check
    from random_calls.tensors import make

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    for case in soak.cases(4):
        if "native" in case.kernel and soak.device == "cpu":
            continue  # Triton's interpreter swaps parts of Triton for others as it runs
        case = replace(case, failure=None)
        began = time.perf_counter()
        soak.judge("interrupted", check(case, soak.device))
        took = (time.perf_counter() - began) / 2
        lives = torch.device(soak.device if case.residency == "device" else "cpu")
        inputs = make(case, lives)
        results = CallResults()
        # A call that is refused is refused again.
        try:
            with contextlib.suppress(NotImplementedError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                signal.setitimer(
                    signal.ITIMER_REAL, max(1e-5, soak.draw.random() * took)
                )
                perform(case, inputs, torch.device(soak.device), results)
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            soak.calls["interrupts"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        again = Verdict(case)
        if soak.device != "cpu":
            torch.cuda.synchronize()
        for memory in (*inputs.read_only, *results.targets):
            if memory.changed():
                again.add("an interrupt changed memory of others", memory.name)
        soak.judge("interrupted", again if again.wrong else check(case, soak.device))
    signal.signal(signal.SIGALRM, before)


KINDS = (alone, at_once, interrupted)


def held() -> dict[str, float]:
    """What this process holds by itself, workers ended and caches of bounded size
    emptied."""
    import torch

    from quorum_attention import devices

    devices.close()
    torch._dynamo.reset()
    for found in gc.get_objects():
        if type(found) is functools._lru_cache_wrapper:
            ours = (found.__module__ or "").startswith(
                ("quorum_attention", "random_calls")
            )
            if ours and found.cache_parameters()["maxsize"] is not None:
                found.cache_clear()
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    device = 0
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        device = torch.cuda.memory_allocated()
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return {
        "anonymous": (resident - shared) * os.sysconf("SC_PAGE_SIZE"),
        "device": device,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(multiprocessing.active_children()),
        "shared_files": len(list(Path("/dev/shm").glob(f"*{os.getpid()}*"))),
        "temporary_files": len(os.listdir(tempfile.gettempdir())),
    }


def grown(rows: Sequence[dict[str, float]]) -> list[str]:
    """What grew over the second half, in words.

    The slope is the median of those through all pairs of rows (Theil and Sen): a few
    rows that jump move it little.
    """
    half, found = rows[len(rows) // 2 :], []
    pairs = [(a, b) for a, b in combinations(half, 2) if b["seconds"] > a["seconds"]]
    for name, limit in LIMITS.items():
        slopes = [(b[name] - a[name]) / (b["seconds"] - a["seconds"]) for a, b in pairs]
        added = median(slopes or [0.0]) * (half[-1]["seconds"] - half[0]["seconds"])
        if added > limit:
            found.append(
                f"{name} grew by {added:,.0f} in the second half; {limit:,} is allowed"
            )
    return found


def main() -> int:
    """0 where nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="how long (default 5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which calls (default 0)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        prepare(given.device)
        soak, seconds = Soak(given.device, given.seed), 60 * given.minutes
        passed = soak.run(seconds, min(60.0, seconds / 12))
        print(dict(soak.calls))
        print(
            "passed"
            if passed
            else f"FAILED: {len(soak.wrong)}, the last {soak.wrong[-1]}"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
