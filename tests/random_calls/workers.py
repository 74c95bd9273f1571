"""Seeds handed to processes that may crash or hang without taking the run with them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

# A call takes milliseconds (in Triton's interpreter a minute); longer without a word is a hang.
_PATIENCE = 300.0


# What cuBLAS sets up once for every thread would be taken for the call's.
_NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}


class _Worker:
    """A process at work on a run of seeds, and what it has said so far."""

    def __init__(self, first: int, stop: int, device: str, threads: int) -> None:
        self.next, self.stop = first, stop
        self.heard = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "random_calls", "--rows", "--first", str(first),
             "--count", str(stop - first), "--device", device, "--threads", str(threads)],
            stdout=subprocess.PIPE, text=True, env=os.environ | _NO_WORKSPACE,
        )  # fmt: skip

    def end(self) -> int | None:
        """Stop it, where it has not stopped by itself."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


def rows(
    first: int, count: int, jobs: int, device: str, threads: int, chunk: int, seconds: float | None
) -> Iterator[dict[str, Any]]:
    """What became of each seed; of one whose process died or hung, that."""
    heard: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
    todo = [(a, min(a + chunk, first + count)) for a in range(first, first + count, chunk)][::-1]
    working: set[_Worker] = set()
    started = time.monotonic()

    def listen(worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            heard.put((worker, line))
        heard.put((worker, None))

    def lost(worker: _Worker, what: str) -> dict[str, Any]:
        seed = worker.next
        if seed + 1 < worker.stop:
            todo.append((seed + 1, worker.stop))
        return crashed(seed, device, what)

    try:
        while todo or working:
            while todo and len(working) < jobs:
                worker = _Worker(*todo.pop(), device, threads)
                working.add(worker)
                threading.Thread(target=listen, args=(worker,), daemon=True).start()
            try:
                worker, line = heard.get(timeout=1.0)
            except queue.Empty:
                for worker in [w for w in working if time.monotonic() - w.heard > _PATIENCE]:
                    working.discard(worker)
                    worker.end()
                    yield lost(worker, "hangs")
                line = ""
            if line is None and worker in working:
                working.discard(worker)
                code = worker.end()
                if worker.next < worker.stop:
                    yield lost(worker, f"ends the process ({code})")
            elif line and worker in working and line.startswith("{"):
                worker.heard = time.monotonic()
                row = json.loads(line)
                worker.next = row["seed"] + 1
                yield row
            if seconds and time.monotonic() - started > seconds:
                return
    finally:
        for worker in working:
            worker.end()


def crashed(seed: int, device: str, what: str) -> dict[str, Any]:
    """The row of a seed whose process did not live to tell."""
    from random_calls.draw import draw

    return {
        "seed": seed, "outcome": "wrong", "kinds": [what], "text": f"{what}: {draw(seed, device)}",
        "refusal": "", "once": [], "ratios": {}, "ran": [], "route": "", "dtype": "",
        "seconds": 0.0,
    }  # fmt: skip
