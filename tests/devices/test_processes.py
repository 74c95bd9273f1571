"""Workers are ended with whoever started them, also where that is interrupted or forgotten."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from multiprocessing import Pipe
from typing import Any

import pytest
from helpers_processes import run_python

from quorum_attention.call.block import WholeCall
from quorum_attention.devices import Pool, processes
from quorum_attention.devices.processes import Worker, end_after, start
from quorum_attention.devices.worker import Begin, End, Ended

CALL = WholeCall((1,), 1, 1, 1, 1)


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


class Given:
    """Stands for memory of a GPU."""

    released = 0

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("fate", ["lets go", "is gone", "was killed", "hangs"])
def test_the_end_of_a_pass(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorum_attention.devices.processes._CONFIRM_SECONDS", 0.05)
    given, (ours, other) = Given(), Pipe()
    one: Any = Worker("cpu", Process(), ours, given=[given])  # type: ignore[list-item]
    match fate:
        case "lets go":
            other.send("what it had still to say")
            other.send(Ended(3))
        case "is gone":
            ours.close()
        case "was killed":
            other.close()
    one.end(End(3))
    assert given.released == (fate != "lets go")
    assert one.alive == (fate == "lets go")
    one.kill()
    assert given.released == (fate != "lets go")  # never twice
    if fate == "lets go":
        assert other.recv() == End(3, confirm=True)


def test_a_worker_says_that_it_has_let_go() -> None:
    with Pool(["cpu"]) as pool:
        (worker,), given = pool.workers, Given()
        for number in range(2):
            worker.begin(Begin(number, False, CALL), None)
            worker.given.append(given)  # type: ignore[arg-type]
            worker.end(End(number))
            assert worker.alive
        assert given.released == 0
        worker.begin(Begin(9, False, CALL), None)
        worker.given.append(given)  # type: ignore[arg-type]
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.end(End(9))
        assert not worker.alive
        assert given.released == 1
