"""Workers are ended with whoever started them, also where that is interrupted or forgotten."""

from __future__ import annotations

import gc
import multiprocessing
import os

import pytest
from helpers_processes import run_python

from quorum_attention.devices.processes import Worker, end_after


class Process:
    """A process that ends when it is killed."""

    exitcode, pid = None, 1

    def __init__(self) -> None:
        self.killed = 0

    def is_alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed += 1

    def join(self, seconds: float | None = None) -> None: ...


def worker() -> Worker:
    ours, _ = multiprocessing.Pipe()
    return Worker("cpu", Process(), ours)


class Nobody:
    """Who has workers."""


def test_an_owner_that_is_forgotten_takes_its_workers_along() -> None:
    owner, mine = Nobody(), [worker()]
    end_after(owner, mine)
    mine.append(worker())  # it has joined later
    del owner
    gc.collect()
    assert all(one.process.killed == 1 for one in mine)


_STOPPED = """
import multiprocessing, os, signal, time
from quorum_attention.devices.processes import Worker, end_after
class Nobody: pass
def sleeps():
    time.sleep(100)
owner = Nobody()
process = multiprocessing.get_context("fork").Process(target=sleeps, daemon=True)
process.start()
os.kill(process.pid, signal.SIGSTOP)
ours, _ = multiprocessing.Pipe()
end_after(owner, [Worker("cpu", process, ours)])
signal.alarm(20)
print(process.pid)
"""


def test_a_program_ends_although_a_worker_is_stopped() -> None:
    ended = run_python(_STOPPED)
    assert ended.returncode == 0, ended.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.stdout), 0)
