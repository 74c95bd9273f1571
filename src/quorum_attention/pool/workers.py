"""The worker processes of a pool: started, asked, listened to, ended."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pickle import UnpicklingError
from threading import RLock
from typing import Any

import torch
import torch.multiprocessing

from quorum_attention.execution.device.lookup import on_host
from quorum_attention.pool.forked import check_process, not_for_forks
from quorum_attention.pool.messages import Begun, Done, Failed, Ready
from quorum_attention.pool.paces import Readings
from quorum_attention.pool.shelf import Shelf
from quorum_attention.pool.worker import work

# Seconds until a worker has to be ready: it imports torch and opens its device.
_START_SECONDS = 180.0
_END_SECONDS = 5.0
# Until the exit code of one that has closed its pipe is known.
_EXIT_SECONDS = 1.0


class _Pickler(ForkingPickler):
    """Sends tensors in ordinary memory, a mask's, by value.

    Torch would move them to shared memory and have a thread of this process hand over its open
    files. Where a worker dies in that moment it prints an error, and keeps a file open for good.
    """

    def reducer_override(self, found: Any) -> Any:
        if type(found) is not torch.Tensor or not on_host(found.device) or found.is_shared():
            return NotImplemented
        return pickle.loads, (pickle.dumps(found.detach().clone()),)  # not all that it is a view of


def _pickled(message: object) -> memoryview:
    said = io.BytesIO()
    _Pickler(said).dump(message)
    return said.getbuffer()


@dataclass(slots=True)
class Worker:
    """A worker process.

    Attributes:
        device: as torch writes it.
        process, pipe: to talk to it.
        name: the device's own name.
        alive: whether it has not ended, nor been given up.
        readings: how quick it was.
        owner: number of the process that started it.
        shelf: where an order waits for it; None: it has no such place.
        closing: held by who ends it.
    """

    device: str
    process: Any
    pipe: Connection
    name: str = ""
    alive: bool = True
    readings: Readings = field(default_factory=Readings)
    owner: int = field(default_factory=os.getpid)
    shelf: Shelf | None = None
    closing: Any = field(default_factory=RLock, repr=False, compare=False)

    @property
    def label(self) -> str:
        """Its device, for people."""
        return f"{self.device} ({self.name})"

    def send(self, message: object) -> bool:
        """Send a message; False if the worker is gone.

        Raises:
            RuntimeError: it is another process's.
        """
        check_process(self.owner)
        # Of its own: what cannot be sent (no file or no memory is left here) is not the worker's.
        said = _pickled(message)
        try:
            self.pipe.send_bytes(said)
        except (OSError, ValueError, TypeError):  # the last two: another thread has closed it
            return False
        return True

    def queue(self, message: object) -> bool:
        """Have a message wait until it has answered the one before; False if it cannot."""
        return self.shelf is not None and self.shelf.put(message)

    def withdraw(self) -> bool:
        """Take back what waits; False if the worker has it already."""
        return self.shelf is None or self.shelf.take_back()

    def kill(self) -> None:
        """End it at once, if it is this process's."""
        self.alive = False
        if os.getpid() != self.owner:
            return
        # The thread that closes the pool, and one whose call runs there: closed twice at once, a
        # pipe's number may be another file's already.
        with self.closing:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()
            self.pipe.close()
            if self.shelf is not None:
                self.shelf.close()


def start(
    devices: Sequence[str],
    threads: int | None,
    work: Callable[..., None] = work,
    shelves: bool = False,
) -> list[Worker]:
    """A worker for each device, ready to compute.

    Args:
        work: what its process does: says ``Ready``, and then obeys. Its arguments are a device, the
            threads and a pipe; and the outlet of its shelf, or None, where there are ``shelves``.

    Raises:
        RuntimeError: one did not start, and all are ended; or this process may start none.
    """
    _check_may_start()
    workers: list[Worker] = []
    try:
        for device in devices:
            _begin(device, threads, work, shelves, workers)
        limit = time.monotonic() + _START_SECONDS
        for worker in workers:
            _wait_for(worker, max(0.0, limit - time.monotonic()))
    except BaseException:  # an interrupt, or no more files or processes may be had
        for each in workers:
            each.kill()
        raise
    return workers


def _begin(
    device: str, threads: int | None, work: Callable[..., None], shelves: bool, begun: list[Worker]
) -> None:
    """Begin the process of a worker, which is one of ``begun`` even if that is interrupted."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    shelf = Shelf.made() if shelves else None
    outlet = ((None if shelf is None else shelf.outlet),) if shelves else ()
    process = context.Process(
        target=work,
        args=(device, threads, theirs, *outlet),
        name=f"quorum-attention {device}",
        daemon=True,
    )
    not_for_forks(process, ours)
    worker = Worker(device, process, ours, shelf=shelf)
    try:
        process.start()
    finally:
        theirs.close()
        if process.pid is not None:
            begun.append(worker)


def _wait_for(worker: Worker, seconds: float) -> None:
    """Wait until a worker is ready.

    Raises:
        RuntimeError: it is not.
    """
    answer = None
    with suppress(EOFError, OSError, UnpicklingError):
        answer = worker.pipe.recv() if worker.pipe.poll(seconds) else None
    if isinstance(answer, Ready):
        worker.name = answer.name
        return
    worker.process.join(_EXIT_SECONDS)
    code = worker.process.exitcode
    raise RuntimeError(
        f"the worker of {worker.device} did not start"
        + (f" (exit code {code})" if code is not None else "")
        + '; a script that uses a pool needs `if __name__ == "__main__":` around its work'
    )


def end(workers: Sequence[Worker]) -> None:
    """End workers, kindly those that are idle; they are gone when this returns. Nothing happens to
    those of another process."""
    here = [one for one in workers if one.alive]
    for one in here:
        one.alive = False
    mine = [one for one in here if one.owner == os.getpid()]
    try:
        for one in mine:
            one.send(None)
        limit = time.monotonic() + _END_SECONDS
        for one in mine:
            one.process.join(max(0.0, limit - time.monotonic()))
    finally:
        for one in mine:
            one.kill()


def end_after(owner: object, workers: list[Worker]) -> None:
    """Have workers end when nobody refers to their ``owner`` any more, or the program ends: by
    itself Python would only ask them to, and wait for one that is stopped for ever."""
    Finalize(owner, _kill, (workers,), exitpriority=1)


def _kill(workers: list[Worker]) -> None:
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
    workers: Sequence[Worker], seconds: float | None
) -> list[tuple[Worker, Begun | Done | Failed | None]]:
    """What workers say next; None instead of an answer from one that is gone.

    Empty if nobody says anything for so many seconds.
    """
    sources: dict[Any, Worker] = {worker.pipe: worker for worker in workers}
    heard: list[tuple[Worker, Begun | Done | Failed | None]] = []
    try:
        ready = wait(list(sources), seconds)
    except (OSError, ValueError):
        # Another thread has closed the pool meanwhile.
        heard = [(worker, None) for worker in workers if not worker.alive]
        if not heard:
            raise
        return heard
    for pipe in ready:
        worker = sources[pipe]
        try:
            heard.append((worker, worker.pipe.recv()))
        except Exception:  # it is gone, it says what nobody understands, or another thread ended it
            heard.append((worker, None))
    return heard


__all__ = ["Worker", "end", "end_after", "listen", "start"]
