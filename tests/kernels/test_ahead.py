"""What is prepared ahead: each in a thread, waited for by its first use, failures put off."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from quorum_attention.kernels import ahead

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield
    assert not ahead.RUNNING


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
