"""Seeds handed to processes that may crash or hang without taking the run with them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from random_calls.pool import BLOCK, kind_of

# A call takes milliseconds (in Triton's interpreter a minute); longer without a word is a hang.
_PATIENCE = 300.0
# What cuBLAS sets up once for every thread would be taken for the call's.
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


@dataclass(frozen=True)
class How:
    """How seeds are run.

    Attributes:
        device: "cpu" or "cuda".
        jobs: processes at once.
        threads: of each process.
        chunk: seeds of a process; then another takes its place.
        failing: whether allocations of every call fail.
        kernel: on a GPU, draw calls of this kernel alone.
        seconds: stop after so many.
    """

    device: str = "cpu"
    jobs: int = 1
    threads: int = 1
    chunk: int = 2000
    failing: bool = False
    kernel: str | None = None
    seconds: float | None = None


def lots(first: int, count: int, how: How) -> list[list[int]]:
    """The seeds of each process, in order.

    On a GPU a process gets seeds of few kinds, one kind after the other: what it has compiled,
    loaded and tried out serves the next. Seeds of no kind take long, and come last.
    """
    seeds = list(range(first, first + count))
    if how.device == "cpu":
        return [seeds[i :: how.jobs] for i in range(how.jobs)]
    kinds = {block: kind_of(block * BLOCK) for block in {seed // BLOCK for seed in seeds}}
    rest = [seed for seed in seeds if kinds[seed // BLOCK] is not None]
    rest.sort(key=lambda seed: (kinds[seed // BLOCK], seed))
    free = [seed for seed in seeds if kinds[seed // BLOCK] is None]
    at = [len(rest) * i // how.jobs for i in range(how.jobs + 1)]
    return [[*rest[at[i] : at[i + 1]], *free[i :: how.jobs]] for i in range(how.jobs)]


def rows(first: int, count: int, how: How) -> Iterator[dict[str, Any]]:
    """What became of each seed; of one whose process died or hung, that."""
    heard: queue.Queue[dict[str, Any] | None] = queue.Queue()
    drivers = [_Driver(lot, how, heard) for lot in lots(first, count, how)]
    over = threading.Event()

    def stop() -> None:
        over.set()
        for driver in drivers:
            driver.stop()

    clock = threading.Timer(how.seconds or threading.TIMEOUT_MAX, stop)
    clock.daemon = True
    clock.start()
    try:
        for driver in drivers:
            driver.start()
        at_work = len(drivers)
        while at_work:
            row = heard.get()
            if row is None:
                at_work -= 1
            elif not over.is_set():
                yield row
    finally:
        clock.cancel()
        stop()


class _Driver(threading.Thread):
    """Starts one process after the other for a lot of seeds, and passes on what they say."""

    def __init__(self, seeds: list[int], how: How, heard: queue.Queue[Any]) -> None:
        super().__init__(daemon=True)
        self.seeds, self.how, self.heard = seeds, how, heard
        self.process: subprocess.Popen[str] | None = None
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            with suppress(OSError):
                self.process.kill()

    def run(self) -> None:
        try:
            while self.seeds and not self.stopped:
                # Each process has a cache of its own, where no calibration is.
                with tempfile.TemporaryDirectory(prefix="random-calls-") as cache:
                    self._one_process(cache)
        finally:
            self.heard.put(None)

    def _one_process(self, cache: str) -> None:
        how = self.how
        command = [sys.executable, "-m", "random_calls", "--serve", "--device", how.device]
        command += ["--threads", str(how.threads), *(["--failing"] if how.failing else [])]
        command += ["--kernel", how.kernel] if how.kernel else []
        self.process = process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | _NO_WORKSPACE | {"QUORUM_ATTENTION_CACHE": cache},
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        left = self.seeds[: how.chunk]
        with suppress(OSError), process.stdin:
            process.stdin.write("\n".join(map(str, left)))
        lost, hangs = False, threading.Event()

        def give_up() -> None:
            hangs.set()
            process.kill()

        while True:
            clock = threading.Timer(_PATIENCE, give_up)
            clock.start()
            line = process.stdout.readline()
            clock.cancel()
            if not line:
                break
            if line.startswith("{"):
                row = json.loads(line)
                left, self.seeds = left[1:], self.seeds[1:]
                lost = row["lost"]
                self.heard.put(row)
        code = process.wait()
        if left and not lost and not self.stopped:
            self.seeds = self.seeds[1:]
            self.heard.put(
                crashed(left[0], how, "hangs" if hangs.is_set() else f"ends the process ({code})")
            )


def crashed(seed: int, how: How, what: str) -> dict[str, Any]:
    """The row of a seed whose process did not live to tell."""
    from random_calls.draw import draw

    return {
        "seed": seed, "outcome": "wrong", "kinds": [what],
        "text": f"{what}: {draw(seed, how.device, failing=how.failing)}",
        "refusal": "", "once": [], "ratios": {}, "ran": [], "route": "", "dtype": "", "kernel": "",
        "seconds": 0.0, "lost": False,
    }  # fmt: skip
