"""Seeds handed to processes that may crash or hang without taking the run with them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from random_calls.pool import BLOCK, kind_of

# A call takes milliseconds (in Triton's interpreter a minute); longer without a word is a hang.
_PATIENCE = 300.0
# What cuBLAS sets up once for every thread would be taken for the call's.
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
Seeds = tuple[int, int]


@dataclass(frozen=True)
class How:
    """How seeds are run.

    Attributes:
        device: "cpu" or "cuda".
        jobs: processes.
        threads: of each process.
        chunk: seeds of a process; then another takes its place.
        free: whether cases are drawn freely on a GPU too.
        kernel: on a GPU, draw calls of this kernel alone.
        seconds: stop after so many.
    """

    device: str = "cpu"
    jobs: int = 1
    threads: int = 1
    chunk: int = 2000
    free: bool = False
    kernel: str | None = None
    seconds: float | None = None


class _Worker:
    """A process at work, the seeds that it has been given and what it has said of them."""

    def __init__(self, lot: int, how: How, cache: str) -> None:
        self.lot = lot
        self.next = self.stop = 0
        self.done = 0
        self.lost = False
        self.heard = time.monotonic()
        command = [sys.executable, "-m", "random_calls", "--serve", "--device", how.device]
        command += ["--threads", str(how.threads), *(["--free"] if how.free else [])]
        command += ["--kernel", how.kernel] if how.kernel else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | _NO_WORKSPACE | {"QUORUM_ATTENTION_CACHE": cache},
        )  # fmt: skip

    def give(self, seeds: Seeds) -> None:
        """Some more to do."""
        self.next, self.stop = seeds
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended: that is heard of
            self.process.stdin.write(f"{seeds[0]} {seeds[1]}\n")
            self.process.stdin.flush()

    def dismiss(self) -> None:
        """No more to do."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def end(self) -> int | None:
        """Stop it, where it has not stopped by itself."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


def lots(first: int, count: int, how: How) -> list[deque[Seeds]]:
    """For each process its runs of seeds, in order.

    On a GPU a process gets runs of few kinds, one kind after the other: what it has compiled,
    loaded and tried out serves the next. Seeds of no kind take long, and come last, in short runs.
    """
    stop = first + count
    starts = [first, *range((first // BLOCK + 1) * BLOCK, stop, BLOCK)]
    runs = list(zip(starts, [*starts[1:], stop], strict=True))
    if how.device == "cpu" or how.free:
        return [deque(runs[i :: how.jobs]) for i in range(how.jobs)]
    kinds = {seeds: kind_of(seeds[0]) for seeds in runs}
    rest = sorted((seeds for seeds in runs if kinds[seeds] is not None), key=lambda s: kinds[s])
    free = [(seed, seed + 1) for a, b in runs if kinds[a, b] is None for seed in range(a, b)]
    at = [len(rest) * i // how.jobs for i in range(how.jobs + 1)]
    return [deque([*rest[at[i] : at[i + 1]], *free[i :: how.jobs]]) for i in range(how.jobs)]


def rows(first: int, count: int, how: How) -> Iterator[dict[str, Any]]:
    """What became of each seed; of one whose process died or hung, that."""
    with tempfile.TemporaryDirectory(prefix="random-calls-") as folder:
        run = _Run(lots(first, count, how), how, folder)
        try:
            yield from run.rows()
        finally:
            for worker in run.working:
                worker.end()


class _Run:
    def __init__(self, todo: list[deque[Seeds]], how: How, folder: str) -> None:
        self.todo, self.how, self.folder = todo, how, folder
        self.begun = 0
        self.heard: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
        self.working: set[_Worker] = set()

    def rows(self) -> Iterator[dict[str, Any]]:
        started = time.monotonic()
        for lot in range(self.how.jobs):
            self.begin(lot)
        while self.working:
            with suppress(queue.Empty):
                yield from self.said(*self.heard.get(timeout=1.0))
            for worker in [w for w in self.working if time.monotonic() - w.heard > _PATIENCE]:
                yield from self.gone(worker, "hangs")
            if self.how.seconds and time.monotonic() - started > self.how.seconds:
                return

    def seeds(self, lot: int) -> Seeds | None:
        """The next of a lot; where it is empty, the last of the longest."""
        if self.todo[lot]:
            return self.todo[lot].popleft()
        longest = max(self.todo, key=len)
        return longest.pop() if longest else None

    def begin(self, lot: int) -> None:
        """A process for what is left to do, if anything is."""
        seeds = self.seeds(lot)
        if seeds is None:
            return
        # Each has a cache of its own, where no calibration is.
        self.begun += 1
        worker = _Worker(lot, self.how, f"{self.folder}/{self.begun}")
        self.working.add(worker)
        threading.Thread(target=self.listen, args=(worker,), daemon=True).start()
        worker.give(seeds)

    def listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            self.heard.put((worker, line))
        self.heard.put((worker, None))

    def said(self, worker: _Worker, line: str | None) -> Iterator[dict[str, Any]]:
        if worker not in self.working:
            return
        if line is None:
            code = worker.process.wait()
            yield from self.gone(worker, f"ends the process ({code})")
        elif line.startswith("{"):
            worker.heard = time.monotonic()
            row = json.loads(line)
            worker.next, worker.done = row["seed"] + 1, worker.done + 1
            worker.lost = row["lost"]
            yield row
            if worker.next >= worker.stop:
                seeds = self.seeds(worker.lot) if worker.done < self.how.chunk else None
                if seeds is None:
                    worker.dismiss()
                else:
                    worker.give(seeds)

    def gone(self, worker: _Worker, what: str) -> Iterator[dict[str, Any]]:
        """Another takes its place; the seed that it was at may be why."""
        self.working.discard(worker)
        worker.end()
        if worker.next < worker.stop:
            rest = worker.next
            if not worker.lost:  # else it has said why
                yield crashed(worker.next, self.how, what)
                rest += 1
            if rest < worker.stop:
                self.todo[worker.lot].appendleft((rest, worker.stop))
        self.begin(worker.lot)


def crashed(seed: int, how: How, what: str) -> dict[str, Any]:
    """The row of a seed whose process did not live to tell."""
    from random_calls.draw import draw

    return {
        "seed": seed, "outcome": "wrong", "kinds": [what],
        "text": f"{what}: {draw(seed, how.device, free=how.free)}",
        "refusal": "", "once": [], "ratios": {}, "ran": [], "route": "", "dtype": "", "kernel": "",
        "parts": {}, "compiled": [], "lost": False,
    }  # fmt: skip
