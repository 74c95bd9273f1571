"""What is prepared ahead: each in a thread, waited for by its first use, failures put off."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from quorum_attention.kernels import ahead

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = sys.getswitchinterval()
    yield
    assert not ahead.RUNNING
    assert sys.getswitchinterval() == before


def test_who_needs_it_waits_for_it_and_for_nothing_else() -> None:
    go = {"a": threading.Event(), "b": threading.Event()}
    done: list[str] = []

    def work(name: str) -> None:
        assert go[name].wait(20)
        done.append(name)

    for name in go:
        ahead.begin(name, GPU, lambda name=name: work(name))  # type: ignore[misc]
    go["a"].set()
    ahead.wait("a")
    assert done == ["a"]
    assert list(ahead.RUNNING) == ["b"]
    threading.Timer(0.05, go["b"].set).start()
    ahead.wait("b")
    assert done == ["a", "b"]
    ahead.wait("b")


def test_what_fails_is_left_to_the_first_use() -> None:
    def work() -> None:
        raise RuntimeError("no C compiler")

    ahead.begin("a", GPU, work)
    ahead.wait("a")


def test_the_same_for_another_dtype_waits_for_the_one_before() -> None:
    go, done = threading.Event(), []

    def slow() -> None:
        assert go.wait(20)
        done.append("first")

    ahead.begin("a", GPU, slow)
    threading.Timer(0.05, go.set).start()
    ahead.begin("a", GPU, lambda: done.append("second"))
    ahead.wait("a")
    assert done == ["first", "second"]


def test_while_threads_prepare_the_lock_changes_hands_quickly() -> None:
    """From the first to the last of them, and not where another interval has been set meanwhile."""
    usual, go = sys.getswitchinterval(), {"a": threading.Event(), "b": threading.Event()}
    seen: list[float] = []

    def work(name: str) -> None:
        assert go[name].wait(20)
        seen.append(sys.getswitchinterval())

    for name in go:
        ahead.begin(name, GPU, lambda name=name: work(name))  # type: ignore[misc]
    for name in go:
        go[name].set()
        ahead.wait(name)
    assert seen == pytest.approx([5e-4, 5e-4])
    assert sys.getswitchinterval() == usual
    go["a"].clear()
    ahead.begin("a", GPU, lambda: work("a"))
    sys.setswitchinterval(0.25)
    go["a"].set()
    ahead.wait("a")
    assert sys.getswitchinterval() == 0.25
    sys.setswitchinterval(usual)


def test_a_thread_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="new thread"):
        ahead.begin("a", GPU, lambda: None)
