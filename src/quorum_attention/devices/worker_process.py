"""Worker processes, as their pool's process sees them: started, talked to and ended.

Processes, not threads: threads that issue for two devices wait for each other's
interpreter, and were slower than one device in small budgets.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing

from quorum_attention.devices.messages import Answer, StoredHeads
from quorum_attention.devices.worker_loop import run_worker

# A worker has to be ready by then: it imports torch and opens its device.
_START_SECONDS = 180.0
# The exit code of a worker that has closed its pipe is known by then.
_EXIT_SECONDS = 1.0


@dataclass(eq=False)
class Worker:
    """A worker process.

    Attributes:
        device: the device as torch writes it.
        process: the process.
        pipe: this process's end of the pipe to it.
        name: the device's own name.
        alive: False once it has ended or was given up.
    """

    device: str
    process: Any
    pipe: Connection
    name: str = ""
    alive: bool = True

    def send(self, message: object) -> bool:
        """Send a message. Return False if the worker is gone."""
        # Before: that something cannot be sent is not the worker's fault.
        data = pickle.dumps(message)
        try:
            self.pipe.send_bytes(data)
        except OSError:
            return False
        return True

    def receive(self) -> Answer | StoredHeads | None:
        """Return the worker's next answer or note; None if it is gone."""
        try:
            answer: Answer | StoredHeads = self.pipe.recv()
        except Exception:  # the worker is gone, or sends what cannot be read
            return None
        return answer

    def kill(self) -> None:
        """End the process at once, if it has not ended. It holds nothing that outlives
        it."""
        if self.alive:
            self.alive = False
            self.process.kill()
            self.process.join()
            self.pipe.close()


def start_workers(devices: Sequence[str], threads: int | None) -> list[Worker]:
    """Return a worker for each device, ready to compute.

    Args:
        threads: of each worker of a CPU device; None for torch's default.

    Raises:
        RuntimeError: one did not start, and all are ended.
    """
    workers: list[Worker] = []
    try:
        for device in devices:
            worker = _start(device, threads)
            workers.append(worker)
        deadline = time.monotonic() + _START_SECONDS
        for worker in workers:
            _wait_until_ready(worker, max(0.0, deadline - time.monotonic()))
    except BaseException:  # an interrupt, or no more files or processes may be had
        end_workers(workers)
        raise
    return workers


def _start(device: str, threads: int | None) -> Worker:
    """Start a worker, without waiting for it."""
    context = torch.multiprocessing.get_context("spawn")
    pool_end, worker_end = context.Pipe()
    process = context.Process(
        target=run_worker,
        args=(device, threads, worker_end),
        name=f"quorum-attention {device}",
        daemon=True,
    )
    with worker_end:
        process.start()
    return Worker(device, process, pool_end)


def _wait_until_ready(worker: Worker, seconds: float) -> None:
    """Wait until a worker is ready.

    Raises:
        RuntimeError: it is not.
    """
    try:
        if worker.pipe.poll(seconds):
            worker.name = worker.pipe.recv()
            return
    except (EOFError, OSError):
        worker.process.join(_EXIT_SECONDS)
    raise RuntimeError(
        f"the worker of {worker.device} did not start (exit code "
        f"{worker.process.exitcode}): a program that uses several devices has to be in "
        "a file, which workers import, with its "
        'work under `if __name__ == "__main__":`'
    )


def end_workers(workers: Sequence[Worker]) -> None:
    """End workers; they are gone when this returns."""
    for worker in workers:
        worker.kill()


def next_answers(
    workers: Mapping[int, Worker],
) -> Iterator[tuple[int, Answer | StoredHeads | None]]:
    """Wait until any worker answers, and yield the answers and notes there are, by the
    workers' numbers.

    None stands for the answer of a worker that is gone.
    """
    ready = wait([worker.pipe for worker in workers.values()])
    for number, worker in workers.items():
        if worker.pipe in ready:
            yield number, worker.receive()
