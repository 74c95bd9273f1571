"""``Pool``: several devices, a worker process each, that compute one call together; and the pools
that calls with several ``devices`` share."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count as count_from
from threading import Lock, RLock
from typing import Any

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.options import Arguments, Budget, CallOptions, Several
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.validation import Tensors
from quorum_attention.counts import shown, whole_number
from quorum_attention.devices.buffers import give_back
from quorum_attention.devices.call import request_on_several
from quorum_attention.devices.partition import Sums, pieces_of
from quorum_attention.devices.processes import Worker, end, end_after, start
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.devices.scheduler import Coordinator, Schedule
from quorum_attention.devices.simulate import expected_speed
from quorum_attention.devices.worker import PassSpec
from quorum_attention.execution.device.lookup import backend_of, every_device, on_host, present
from quorum_attention.execution.problem import Workload
from quorum_attention.execution.report import Report
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask


def names_of(devices: str | torch.device | Sequence[str | torch.device]) -> list[str]:
    """Devices as torch writes them, with their numbers.

    Raises:
        ValueError, TypeError, NotImplementedError: none is named, or one that is not here.
    """
    if isinstance(devices, str) and devices == "all":
        every = every_device()
        if not every:
            raise ValueError('devices="all" needs a CUDA device, and there is none here')
        return [str(device) for device in every]
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    if not devices:
        raise ValueError("devices must name at least one device, got none")
    places = [present(device, "devices") for device in devices]
    own = [place for place in places if not on_host(place)]
    if len(set(own)) < len(own):
        raise ValueError(f"devices must name each GPU once, got {shown([str(p) for p in places])}")
    return [str(place) for place in places]


class Pool(Several):
    """Worker processes, one for each device, that share the work of an attention call.

    A call is cut into parts that do not depend on each other: key/value heads first, then, where
    they do not divide among the devices, rows. Each device has parts of its own, by its speed, and
    then takes those of others, so devices of unequal speed end together. It computes a part as an
    ordinary call, under its own budget, with its own recovery. A worker that is killed, hangs or
    runs out of memory at every depth gives its part back and the others finish.

    Inputs in shared memory (``tensor.share_memory_()``) or mapped from files are handed over as
    they are; others are copied into shared memory, and the report says how much.

    Give it to calls as ``devices=``, or use its own ``attention``. Use it as a context manager, or
    ``close`` it; it also ends with the program. Calls of several threads follow one another.

    Args:
        devices: as torch writes them, "cuda:0" or "cpu"; or "all" CUDA devices of this machine.
        threads: threads of each worker, for CPU devices; None: torch's default.

    Raises:
        ValueError, TypeError: ``devices`` names none, or one that is not here.
        RuntimeError: a worker did not start.
    """

    def __init__(
        self, devices: str | Sequence[str | torch.device] = "all", *, threads: int | None = None
    ) -> None:
        names = names_of(devices)
        count = None if threads is None else whole_number(threads, "threads", 1)
        self._threads = count
        self._workers = start(names, count)
        end_after(self, self._workers)
        self._lock, self._process, self._within = RLock(), os.getpid(), False
        self.numbers = count_from(1)  # of passes

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """Wait for the calls of other threads.

        Raises:
            RuntimeError: this thread has one already, and would wait for itself; or the process was
                forked from the pool's.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "these workers belong to the process that this one was forked from: open a Pool "
                "here, or give the devices by name"
            )
        with self._lock:
            if self._within:
                raise RuntimeError(
                    "a call began within another one of the same workers (from its progress=, "
                    "say): it would wait for itself"
                )
            try:
                self._within = True
                yield
            finally:
                self._within = False

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of its workers, also those that are gone."""
        return tuple(self._workers)

    @property
    def devices(self) -> list[str]:
        """The devices whose workers are alive."""
        return [worker.device for worker in self._workers if worker.alive]

    def join(self, device: str | torch.device) -> None:
        """Start a worker for one more device, or for one whose worker was lost. It takes part from
        the next pass on."""
        self._workers.extend(start(names_of([device]), self._threads))

    def mend(self) -> None:
        """Start a worker in the place of each that was lost."""
        with self._one_call():
            for number, worker in enumerate(self._workers):
                if not worker.alive or not worker.process.is_alive():
                    worker.kill()
                    self._workers[number] = start([worker.device], self._threads)[0]

    def close(self) -> None:
        """End the workers; the pool is of no use afterwards."""
        end(self._workers)
        give_back()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @uncompiled
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        budget: Budget | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        out: torch.Tensor | None = None,
        progress: Any = None,
        report: PoolReport | None = None,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` on all devices of the pool, with gradients.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, dropout_seed: as
                there; tensors in host memory or on a CUDA device.
            budget: of each device; a list has one for each.
            depth, kernel: as there, of each device.
            out, progress: as there; progress is counted in parts.
            report: filled with what happened.

        Returns:
            (..., heads, n_queries, value_dim), in shared memory if the inputs are in host memory.

        Raises:
            Errors as of ``quorum_attention.attention``; RuntimeError: no worker is left, with what
            was done until then.
        """
        said = Arguments(
            attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, out,
            written=CallOptions(
                budget, None, depth, kernel, devices=self, progress=progress,
                report=None if report is None else Report(pool=report),
            ),
        )  # fmt: skip
        return attend(*request_on_devices("attention", query, key, value, said), out)[0]

    def run(
        self,
        spec: PassSpec,
        work: Workload,
        budgets: Sequence[int | None],
        report: PoolPass,
        sums: Sums | None,
        progress: Callable[[int, int, str], None] | None,
    ) -> None:
        """Run a pass on the workers; see ``Coordinator``.

        Args:
            work: dtype and head_dim, on which the speed of a device depends.
            budgets: of each worker; those beyond have the last one's.
            sums: adds up gradients; None in a forward.
            progress: told blocks that are done.
        """
        with self._one_call():
            # Another thread may close the pool at any time, or start one more worker.
            workers = list(self._workers)
            here = [n for n, worker in enumerate(workers) if worker.alive]
            if not here:
                raise RuntimeError(
                    "the pool has no worker: it was closed, or all of them were lost"
                )
            each = [budgets[min(n, len(budgets) - 1)] for n in range(len(workers))]
            speeds = {
                n: expected_speed(
                    workers[n].device, workers[n].name, work.dtype, work.head_dim,
                    backward=spec.backward,
                )
                for n in here
            }  # fmt: skip
            alike = spec.steady and len({(workers[n].name, each[n]) for n in here}) == 1
            at_once = all(backend_of(torch.device(workers[n].device)).own_memory for n in here)
            pieces = pieces_of(spec.call, speeds, alike=alike, at_once=at_once)
            schedule = Schedule(spec.call, speeds, pieces)
            Coordinator(workers, spec, schedule, each, report, sums, progress).run()


_pools: dict[tuple[str, ...], Pool] = {}
_lock = Lock()


def _forked() -> None:
    """In a process that was forked off, maybe while another thread had the lock: the pools are its
    parent's."""
    global _lock
    _lock = Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forked)


def kept_pool(names: tuple[str, ...]) -> Pool:
    """The pool of these devices that calls share. It is started where there is none, or where no
    worker of it is left; a worker that was lost is started again.

    Raises:
        ValueError, TypeError, RuntimeError: as ``Pool``.
    """
    with _lock:
        pool = _pools.get(names)
        if pool is None:
            pool = _pools[names] = Pool(names)
            return pool
    # Without the lock: this waits for a call of another thread, whose progress= may ask for a pool
    # as well.
    pool.mend()
    return pool


def request_on_devices(
    function: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Arguments
) -> tuple[Tensors, Request]:
    """``request_of``, where ``devices`` may be several or a pool.

    Raises:
        Errors as of ``request_of`` and ``request_on_several``.
    """
    written = call.written
    pool: Any = written.devices
    if isinstance(pool, Pool):
        count, pool_of = len(pool.workers), lambda: pool
    else:
        names = tuple(names_of(pool))
        if len(names) == 1:
            one = written._replace(devices=names[0], budget=_of_one(written.budget))
            return request_of(function, query, key, value, call._replace(written=one))
        count, pool_of = len(names), lambda: kept_pool(names)
    inputs = query, key, value
    return request_on_several(function, inputs, call, count=count, pool_of=pool_of)


def _of_one(budget: Budget | None) -> Budget | None:
    return budget[0] if isinstance(budget, (list, tuple)) and len(budget) == 1 else budget


def close() -> None:
    """End the workers of calls with several ``devices``; the next such call starts others.

    They end with the program in any case. Until then each holds a CUDA context.
    """
    with _lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


atexit.register(close)
