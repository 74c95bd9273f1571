"""Memory of a GPU that a worker was given counts as given back, whenever the worker is lost."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

import pytest

from quorum_attention.pool import Pool
from quorum_attention.pool.hired import Hired
from quorum_attention.pool.messages import Begin, End, Ended
from quorum_attention.pool.parts import Sizes


class Given:
    """Stands for memory of a GPU."""

    released = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class Fake:
    """A worker that is there, with the other end of its pipe in ``other``."""

    pipe: Any = None
    other: Any = None
    alive: bool = True
    sent: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pipe, self.other = Pipe()

    def send(self, message: object) -> bool:
        self.sent.append(message)
        return self.alive

    def kill(self) -> None:
        self.alive = False


@pytest.mark.parametrize("fate", ["lets go", "is gone", "was killed", "hangs"])
def test_the_end_of_a_pass(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorum_attention.pool.hired._CONFIRM_SECONDS", 0.05)
    worker, given = Fake(), Given()
    hired = Hired(worker, None)  # type: ignore[arg-type]
    hired._given.append(given)  # type: ignore[arg-type]
    match fate:
        case "lets go":
            worker.other.send("what it had still to say")
            worker.other.send(Ended(3))
        case "is gone":
            worker.alive = False
        case "was killed":
            worker.other.close()
    assert hired.send(End(3)) == (fate == "lets go")
    assert worker.sent == [End(3, confirm=True)]
    assert given.released == (fate != "lets go")
    assert worker.alive == (fate == "lets go")
    hired.kill()
    assert given.released == (fate != "lets go")  # never twice


def test_nothing_is_waited_for_where_nothing_was_given() -> None:
    worker = Fake()
    assert Hired(worker, None).send(End(1))  # type: ignore[arg-type]
    assert worker.sent == [End(1)]


def test_a_worker_says_that_it_has_let_go() -> None:
    with Pool(["cpu"]) as pool:
        (worker,) = pool.workers
        sizes = Sizes(1, 1, 1, 4, 4, False, False)
        hired, given = Hired(worker, None), Given()
        for _ in range(2):
            number = pool.number()
            hired.send(Begin(number, False, sizes, {}))
            hired._given.append(given)  # type: ignore[arg-type]
            assert hired.send(End(number))
        assert given.released == 0
        hired.send(Begin(9, False, sizes, {}))
        hired._given.append(given)  # type: ignore[arg-type]
        os.kill(worker.process.pid, signal.SIGKILL)
        assert not hired.send(End(9))
        assert given.released == 1
