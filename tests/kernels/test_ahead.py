"""Kernels compiled ahead: each in a thread, waited for by its first launch, failures put off."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from quorum_attention.kernels import ahead

GPU = torch.device("cuda", 0)


class Kernel:
    """A compiled kernel: ``loaded`` once it has been asked for ``run``."""

    def __init__(self) -> None:
        self.loaded = threading.Event()

    @property
    def run(self) -> None:
        self.loaded.set()


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Triton's driver, made up: the names of the threads that have set it up or used it."""
    asked: list[str] = []
    active = SimpleNamespace(
        get_current_target=lambda: asked.append(threading.current_thread().name)
    )
    runtime = SimpleNamespace(driver=SimpleNamespace(active=active))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield asked
    assert not ahead.RUNNING


def test_the_first_launch_waits_for_its_kernel_and_for_no_other() -> None:
    go = {"a": threading.Event(), "b": threading.Event()}
    made = {"a": Kernel(), "b": Kernel()}

    def compiled(name: str) -> Kernel:
        assert go[name].wait(20)
        return made[name]

    for name in go:
        ahead.begin(name, GPU, lambda name=name: compiled(name))  # type: ignore[misc]
    go["a"].set()
    ahead.wait("a")
    assert made["a"].loaded.is_set()
    assert not made["b"].loaded.is_set()
    assert list(ahead.RUNNING) == ["b"]
    threading.Timer(0.05, go["b"].set).start()
    ahead.wait("b")
    assert made["b"].loaded.is_set()
    ahead.wait("b")


def test_what_fails_is_left_to_the_first_launch() -> None:
    def compiled() -> Kernel:
        raise RuntimeError("no C compiler")

    ahead.begin("a", GPU, compiled)
    ahead.wait("a")


def test_the_driver_is_set_up_by_one_thread_after_the_other(driver: list[str]) -> None:
    for name in "abcd":
        ahead.begin(name, GPU, Kernel)
    for name in "abcd":
        ahead.wait(name)
    assert sorted(driver) == [f"compiles {name}" for name in "abcd"]


def test_a_kernel_of_another_dtype_waits_for_the_one_before() -> None:
    go, first, second = threading.Event(), Kernel(), Kernel()

    def slow() -> Kernel:
        assert go.wait(20)
        return first

    ahead.begin("a", GPU, slow)
    threading.Timer(0.05, go.set).start()
    ahead.begin("a", GPU, lambda: second)
    assert first.loaded.is_set()
    ahead.wait("a")
    assert second.loaded.is_set()
