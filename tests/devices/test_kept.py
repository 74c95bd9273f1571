"""The pools that calls share: who waits for whom."""

from __future__ import annotations

import threading

import pytest

from quorum_attention.devices import pool as kept
from quorum_attention.devices.pool import Pool
from quorum_attention.devices.processes import Turn

NAMES = ["cpu", "cpu"]
SECONDS = 20.0


class Without(Pool):
    """A pool without workers."""

    def __init__(self, devices: object) -> None:
        self._workers, self._threads, self._turn = [], None, Turn()
        self.mending, self.closed = threading.Event(), 0

    def mend(self) -> None:
        self.mending.set()
        super().mend()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "Pool", Without)
    # Of this test alone: a thread that waits for good has the lock of nobody else.
    monkeypatch.setattr(kept, "_pools", {})
    monkeypatch.setattr(kept, "_lock", threading.Lock())


def in_a_thread(ask: object) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(ask())  # type: ignore[operator]
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_a_call_from_progress_is_told_so_while_another_thread_waits_for_its_turn() -> None:
    pool = kept.kept_pool(NAMES)
    other: list[tuple[threading.Thread, list[object]]] = []

    def call() -> Pool:
        with pool._turn.taken():  # a pass, and what its progress= does
            pool.mending.clear()  # type: ignore[attr-defined]
            other.append(in_a_thread(lambda: kept.kept_pool(NAMES)))
            assert pool.mending.wait(SECONDS)  # type: ignore[attr-defined]
            return kept.kept_pool(NAMES)

    first, said = in_a_thread(call)
    first.join(SECONDS)
    assert not first.is_alive(), "the two wait for each other"
    assert "within another one" in str(said[0])
    second, found = other[0]
    second.join(SECONDS)
    assert found == [pool]


def test_a_pool_that_is_closed_meanwhile_is_not_handed_out() -> None:
    pool = kept.kept_pool(NAMES)
    with pool._turn.taken():
        waiting, found = in_a_thread(lambda: kept.kept_pool(NAMES))
        assert pool.mending.wait(SECONDS)  # type: ignore[attr-defined]
        closing, _ = in_a_thread(kept.close)
        closing.join(SECONDS)
        assert not closing.is_alive()
    waiting.join(SECONDS)
    assert isinstance(found[0], Without)
    assert found[0] is not pool
    # What was mended after it had been closed is closed, too.
    assert pool.closed == 2  # type: ignore[attr-defined]
