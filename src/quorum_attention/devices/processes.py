"""The worker processes of a pool: started, asked, listened to, ended.

Processes, not threads: threads that issue for two devices wait for each other's interpreter, and
were slower than one device in small budgets. Workers belong to the process that started them, not
to one that is forked off it: two processes that talk to one worker read each other's answers.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing

from quorum_attention.devices.worker import Answer, work

# Seconds until a worker has to be ready: it imports torch and opens its device.
_START_SECONDS = 180.0
# Until the exit code of one that has closed its pipe is known.
_EXIT_SECONDS = 1.0


@dataclass(eq=False)
class Worker:
    """A worker process.

    Attributes:
        device: as torch writes it.
        process, pipe: to talk to it.
        name: the device's own name.
        alive: whether it has not ended, nor been given up.
    """

    device: str
    process: Any
    pipe: Connection
    name: str = ""
    alive: bool = True

    def send(self, message: object) -> bool:
        """Send a message; False if the worker is gone."""
        # Before: that something cannot be sent is not the worker's fault.
        said = pickle.dumps(message)
        try:
            self.pipe.send_bytes(said)
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it at once, if it has not ended. It holds nothing that outlives it."""
        if self.alive:
            self.alive = False
            self.process.kill()
            self.process.join()
            self.pipe.close()


def start(devices: Sequence[str], threads: int | None) -> list[Worker]:
    """A worker for each device, ready to compute.

    Raises:
        RuntimeError: one did not start, and all are ended.
    """
    context, workers = torch.multiprocessing.get_context("spawn"), list[Worker]()
    try:
        for device in devices:
            ours, theirs = context.Pipe()
            name, told = f"quorum-attention {device}", (device, threads, theirs)
            process = context.Process(target=work, args=told, name=name, daemon=True)
            with theirs:
                process.start()
            workers.append(Worker(device, process, ours))
        limit = time.monotonic() + _START_SECONDS
        for worker in workers:
            _wait_for(worker, max(0.0, limit - time.monotonic()))
    except BaseException:  # an interrupt, or no more files or processes may be had
        end(workers)
        raise
    return workers


def _wait_for(worker: Worker, seconds: float) -> None:
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
        f"the worker of {worker.device} did not start (exit code {worker.process.exitcode}): a "
        "program that uses several devices has to be in a file, which workers import, with its "
        'work under `if __name__ == "__main__":`'
    )


def end(workers: Sequence[Worker]) -> None:
    """End workers; they are gone when this returns."""
    for worker in workers:
        worker.kill()


def listen(workers: Mapping[int, Worker]) -> list[tuple[int, Answer | None]]:
    """What workers say next, by number; None instead of an answer from one that is gone."""
    numbers: dict[Any, int] = {worker.pipe: number for number, worker in workers.items()}
    heard: list[tuple[int, Answer | None]] = []
    for pipe in wait(list(numbers)):
        try:
            heard.append((numbers[pipe], workers[numbers[pipe]].pipe.recv()))
        except Exception:  # it is gone, or says what nobody understands
            heard.append((numbers[pipe], None))
    return heard
