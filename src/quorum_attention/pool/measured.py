"""How quick the devices of a pool are just now, alone or all at once.

Devices of one name need not be equally quick: the link of one to the host's memory may be slower
than that of another (14 and 50 GB/s were seen on one host), and links share what the memory gives.
So each worker measures its own, from and to shared memory as in a pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.planner.calibration import copies_now, rates_now
from quorum_attention.planner.machine import Machine
from quorum_attention.pool.messages import Measure, Measurement
from quorum_attention.pool.shared import Shared, opened, room

# A worker that has not measured anything after so long is given up.
_LIMIT_SECONDS = 120.0


def measured(place: torch.device, asked: Measure) -> Measurement:
    """In a worker: measure its device."""
    try:
        if asked.host is None:
            usual = backend_of(place).rates(place, asked.dtype, asked.head_dim)
            return Measurement(usual | rates_now(place, asked.dtype, asked.head_dim))
        host, kept = opened(asked.host), backend_of(place).kept
        locker = None if kept is None else kept.locker
        locked = locker is not None and locker.lock(host.data_ptr(), host.nbytes)
        try:
            return Measurement(copies_now(place, asked.dtype, host))
        finally:
            if locker is not None and locked:
                locker.wait()
                locker.unlock(host.data_ptr())
    except Exception as error:
        return Measurement({}, f"{type(error).__name__}: {error}")


def machines(workers: Sequence[Any], dtype: torch.dtype, head_dim: int) -> list[Machine]:
    """The rates of workers' devices, measured by all of them at the same time: their kernels, then
    their copies.

    Raises:
        RuntimeError: a worker ended, or could not measure.
    """
    places = [torch.device(worker.device) for worker in workers]
    hosts = [_touched(2 * backend_of(place).trial_sizes(place).copy_bytes) for place in places]
    kernels = _asked(workers, [Measure(dtype, head_dim) for _ in workers])
    copies = _asked(workers, [Measure(dtype, head_dim, Shared.made(host).handle) for host in hosts])
    return [
        Machine(**{**one.rates, **other.rates, "measured": True})
        for one, other in zip(kernels, copies, strict=True)
    ]


def _touched(n_bytes: int) -> torch.Tensor:
    return room((n_bytes,), torch.uint8).zero_()


def _asked(workers: Sequence[Any], messages: Sequence[Measure]) -> list[Measurement]:
    """The answers of all workers, which are at it together."""
    for worker, message in zip(workers, messages, strict=True):
        worker.send(message)
    limit = time.monotonic() + _LIMIT_SECONDS
    answers = [_answer(worker, limit) for worker in workers]
    for worker, answer in zip(workers, answers, strict=True):
        if answer is None:
            worker.kill()
    for worker, answer in zip(workers, answers, strict=True):
        if answer is None or answer.error:
            why = "it has ended" if answer is None else answer.error
            raise RuntimeError(f"the worker of {worker.label} has not measured its device: {why}")
    return [answer for answer in answers if answer is not None]


def _answer(worker: Any, limit: float) -> Measurement | None:
    with suppress(EOFError, OSError):
        while worker.pipe.poll(max(0.0, limit - time.monotonic())):
            said = worker.pipe.recv()
            if isinstance(said, Measurement):  # not the late answer of a pass that was broken off
                return said
    return None


__all__ = ["machines", "measured"]
