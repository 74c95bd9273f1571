"""Workers are ended with whoever started them, also where that is interrupted or forgotten."""

from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

import pytest
from helpers_processes import run_python

from quorum_attention.devices import processes
from quorum_attention.devices.processes import Worker, end_after, start


class Process:
    """A process that ends when it is killed."""

    exitcode = None

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


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("at", ["_begin", "_wait_for"])
def test_a_start_that_is_broken_off_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], at: str
) -> None:
    made: list[Worker] = []

    def begin(device: str, threads: Any, begun: list[Worker]) -> None:
        if at == "_begin" and made:
            raise error
        made.append(worker())
        begun.append(made[-1])

    def wait_for(one: Worker, seconds: float) -> None:
        if at == "_wait_for" and one is made[-1]:
            raise error

    monkeypatch.setattr(processes, "_begin", begin)
    monkeypatch.setattr(processes, "_wait_for", wait_for)
    with pytest.raises(error):
        start(["cpu", "cpu"], 1)
    assert made
    assert all(one.process.killed and not one.alive for one in made)


def test_an_owner_that_is_forgotten_takes_its_workers_along() -> None:
    owner, mine = Nobody(), [worker()]
    end_after(owner, mine)
    mine.append(worker())  # it has joined later
    del owner
    gc.collect()
    assert all(one.process.killed == 1 for one in mine)


def test_what_cannot_be_sent_does_not_count_as_a_lost_worker() -> None:
    class Unsendable:
        def __reduce__(self) -> Any:
            raise OSError("no file is left")

    one = worker()
    with pytest.raises(OSError, match="no file"):
        one.send(Unsendable())
    assert one.alive
    one.pipe.close()
    assert not one.send(None)


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
