"""The worker processes of a pool: started, asked, listened to, ended.

Processes, not threads: threads that issue for two devices wait for each other's interpreter, and
were slower than one device in small budgets. Workers belong to the process that started them, not
to one that is forked off it: two processes that talk to one worker read each other's answers.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import pickle
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pickle import UnpicklingError
from threading import RLock
from typing import Any

import torch.multiprocessing

from quorum_attention.devices.worker import Done, Failed, work

# Seconds until a worker has to be ready: it imports torch and opens its device.
_START_SECONDS = 180.0
# Until the exit code of one that has closed its pipe is known.
_EXIT_SECONDS = 1.0

_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _let_go() -> None:
    """In a process that was forked off: its workers are the other's."""
    for worker in list(_workers):
        with suppress(Exception):
            worker.alive = False
            worker.pipe.close()
            # Python would end them, as its own children, when this process ends.
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]
    _workers.clear()


os.register_at_fork(after_in_child=_let_go)


@dataclass(eq=False)
class Worker:
    """A worker process.

    Attributes:
        device: as torch writes it.
        process, pipe: to talk to it.
        name: the device's own name.
        alive: whether it has not ended, nor been given up.
        closing: held by who ends it.
    """

    device: str
    process: Any
    pipe: Connection
    name: str = ""
    alive: bool = True
    closing: Any = field(default_factory=RLock, repr=False)

    def send(self, message: object) -> bool:
        """Send a message; False if the worker is gone."""
        # Before: that something cannot be sent is not the worker's fault.
        said = pickle.dumps(message)
        try:
            self.pipe.send_bytes(said)
        except (OSError, ValueError, TypeError):  # the last two: another thread has closed it
            return False
        return True

    def kill(self) -> None:
        """End it at once."""
        self.alive = False
        # The thread that closes the pool, and one whose call runs there: closed twice at once, a
        # pipe's number may be another file's already.
        with self.closing:
            if self.process.pid is not None:  # else it never began
                if self.process.is_alive():
                    self.process.kill()
                self.process.join()
            self.pipe.close()


def start(devices: Sequence[str], threads: int | None) -> list[Worker]:
    """A worker for each device, ready to compute.

    Raises:
        RuntimeError: one did not start, and all are ended; or this process may start none.
    """
    _check_may_start()
    context, workers = torch.multiprocessing.get_context("spawn"), list[Worker]()
    try:
        for device in devices:
            ours, theirs = context.Pipe()
            name, told = f"quorum-attention {device}", (device, threads, theirs)
            process = context.Process(target=work, args=told, name=name, daemon=True)
            workers.append(Worker(device, process, ours))
            _workers.add(workers[-1])
            with theirs:
                process.start()
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
    answer = None
    with suppress(EOFError, OSError, UnpicklingError):
        answer = worker.pipe.recv() if worker.pipe.poll(seconds) else None
    if isinstance(answer, str):
        worker.name = answer
        return
    worker.process.join(_EXIT_SECONDS)
    code = worker.process.exitcode
    raise RuntimeError(
        f"the worker of {worker.device} did not start"
        + (f" (exit code {code})" if code is not None else "")
        + '; a script that uses a pool needs `if __name__ == "__main__":` around its work'
    )


def end_after(owner: object, workers: list[Worker]) -> None:
    """Have workers end when nobody refers to their ``owner`` any more, or the program ends: by
    itself Python would only ask them to, and wait for one that is stopped for ever."""
    Finalize(owner, end, (workers,), exitpriority=1)


def end(workers: Sequence[Worker]) -> None:
    """End workers; they are gone when this returns. They hold nothing that outlives them."""
    for worker in workers:
        if worker.alive:
            worker.kill()


def _check_may_start() -> None:
    """Refuse what multiprocessing would say less clearly, or when a worker has ended."""
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "several devices need a worker process each, and this process may start none: it is a "
            "daemon of multiprocessing, such as a worker of multiprocessing.Pool, of a DataLoader "
            "or of another pool; or a worker imports a script that uses a pool without `if "
            '__name__ == "__main__":` around its work'
        )
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or not script or hasattr(sys, "frozen"):
        return
    if not os.path.exists(script):
        raise RuntimeError(
            f"the workers of several devices import the program, and it is in no file ({script}): "
            'save it as a script, with its work under `if __name__ == "__main__":`'
        )


def listen(
    workers: dict[int, Worker], seconds: float | None
) -> list[tuple[int, Done | Failed | None]]:
    """What workers say next, by number; None instead of an answer from one that is gone.

    Empty if nobody says anything for so many seconds.
    """
    numbers: dict[Any, int] = {worker.pipe: number for number, worker in workers.items()}
    heard: list[tuple[int, Done | Failed | None]] = []
    try:
        ready = wait(list(numbers), seconds)
    except (OSError, ValueError):
        # Another thread has closed the pool meanwhile.
        ready = [worker.pipe for worker in workers.values() if not worker.alive]
        if not ready:
            raise
    for pipe in ready:
        try:
            heard.append((numbers[pipe], workers[numbers[pipe]].pipe.recv()))
        except Exception:  # it is gone, it says what nobody understands, or another thread ended it
            heard.append((numbers[pipe], None))
    return heard
