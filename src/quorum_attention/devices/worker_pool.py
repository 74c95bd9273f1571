"""The worker processes of several devices, as one pool."""

from __future__ import annotations

import multiprocessing.process
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count as count_from
from multiprocessing.util import Finalize
from threading import RLock
from weakref import WeakSet

import torch

from quorum_attention.argument_checks import whole_number
from quorum_attention.call.options import DevicePool
from quorum_attention.devices.device_names import device_names
from quorum_attention.devices.shared_memory import give_back
from quorum_attention.devices.worker_process import Worker, end_workers, start_workers

_all_pools: WeakSet[WorkerPool] = WeakSet()


class WorkerPool(DevicePool, AbstractContextManager["WorkerPool"]):
    """Worker processes, one for each device. They end with the pool or the program.

    Args:
        devices: as ``device_names`` takes them.
        threads: threads of each worker, for CPU devices; None for torch's default.

    Raises:
        ValueError, TypeError: ``devices`` names none, or one that is not here.
        RuntimeError: a worker did not start.

    Attributes:
        workers: all workers, also those that are gone.
        pass_numbers: gives each pass its number.
    """

    def __init__(
        self, devices: str | Sequence[str | torch.device], *, threads: int | None = None
    ) -> None:
        names = device_names(devices)
        self._threads = None if threads is None else whole_number(threads, "threads", 1)
        self.workers = start_workers(names, self._threads)
        # When nobody refers to the pool any more, or the program ends: by itself Python
        # would only ask workers to end, and wait for one that is stopped for ever.
        Finalize(self, end_workers, (self.workers,), exitpriority=1)
        self._lock = RLock()
        self._is_in_use = False
        self.pass_numbers = count_from(1)
        _all_pools.add(self)

    @contextmanager
    def exclusive(self) -> Iterator[list[Worker]]:
        """Yield the workers for one call, or for what changes them. Other threads wait.

        Raises:
            RuntimeError: this thread has them already, and would wait for itself.
        """
        with self._lock:
            if self._is_in_use:
                raise RuntimeError(
                    "a call began within another one of the same workers (from its "
                    "progress=, say): it would wait for itself"
                )
            try:
                self._is_in_use = True
                yield self.workers
            finally:
                self._is_in_use = False

    @property
    def devices(self) -> list[str]:
        """The devices whose workers are alive."""
        return [worker.device for worker in self.workers if worker.alive]

    def add_device(self, device: str | torch.device) -> None:
        """Start a worker for one more device, or for one whose worker was lost."""
        with self.exclusive() as workers:
            workers.extend(start_workers(device_names([device]), self._threads))

    def restart_lost(self) -> None:
        """Start a worker in the place of each that was lost."""
        with self.exclusive() as workers:
            for number, worker in enumerate(workers):
                if not worker.alive or not worker.process.is_alive():
                    worker.kill()
                    workers[number] = start_workers([worker.device], self._threads)[0]

    def close(self) -> None:
        """End the workers, after a call of another thread. The pool is of no use
        afterwards."""
        with self.exclusive() as workers:
            end_workers(workers)
        give_back()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _abandon(self) -> None:
        """In a forked process: leave the workers to the parent.

        Two processes that talk to one worker would read each other's answers. Another
        thread of the parent may have had the lock.
        """
        self._lock = RLock()
        self._is_in_use = False
        for worker in self.workers:
            worker.alive = False
            worker.pipe.close()
            # Python would end them, as its own children, when this process ends.
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]


def _abandon_all() -> None:
    for pool in list(_all_pools):
        pool._abandon()


os.register_at_fork(after_in_child=_abandon_all)
