"""A helper thread that the system does not grant ends no work and changes no result.

Bars: tests/progress/test_bar.py; copies through buffers:
tests/execution/device/test_staging.py.
"""

from __future__ import annotations

import ast
import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.late_cuda import stand_in
from helpers.sources import SOURCES, syntax_tree

from quorum_attention.bench.limits import PeakMemory
from quorum_attention.devices import prefault
from quorum_attention.execution.device import cuda
from quorum_attention.execution.device.page_locks import Copied, PageLocks
from quorum_attention.kernels import triton_launch
from quorum_attention.threads import in_spite_of_interrupts, start_executors

MAKES_THREADS = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadPool"}
# rich's displays, which redraw themselves in threads unless they are told not to.
DISPLAYS = {"Live", "Progress", "Status", "status", "track"}


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that were refused."""
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = syntax_tree(path)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func).rpartition(".")[2], node) for node in found]


def test_every_thread_of_the_package_may_be_refused() -> None:
    """Threads are started by ``threads.try_start``; displays have none."""
    makers = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for name, call in calls(path):
            if name in MAKES_THREADS:
                makers.append(path.name)
                assert (
                    "quorum_attention.threads import" in text
                    or path.name == "threads.py"
                )
            if name in DISPLAYS:
                assert "auto_refresh=False" in ast.unparse(call), path
            if name == "start" and "thread" in ast.unparse(call.func):
                assert path.name == "threads.py", f"{path}: call threads.started"
    assert len(makers) >= 5, "the search finds what there is"


def test_nothing_is_locked(
    no_threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = stand_in(monkeypatch, refused=lambda start: False)
    tensor = torch.zeros(100_000)
    with PageLocks([Copied(tensor, by_address=True)]) as locks:
        assert not locks.wants(tensor)
        assert not locks.covers(tensor)
        locks.begin()
        locks.release([tensor], lambda: True)
    assert no_threads == ["page locks"]
    assert not driver.locked
    assert not cuda._lock(tensor.data_ptr(), tensor.nbytes)
    assert not driver.locked


def test_pages_are_not_made_beforehand(no_threads: list[str]) -> None:
    memory = mmap.mmap(-1, 64 << 20)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    with prefault.prefaulting([tensor], wait=True):
        tensor[-1] = 1
    assert no_threads
    assert tensor[-1] == 1


def test_triton_is_imported_later(
    no_threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "triton_available", lambda: True)
    triton_launch.warm_up.__wrapped__()
    assert no_threads == ["imports Triton"]


def test_a_peak_that_nobody_sampled_is_not_known(no_threads: list[str]) -> None:
    with PeakMemory(torch.device("cpu")) as peak:
        torch.ones(1 << 20)
    assert no_threads
    assert peak.peak_bytes is None


@pytest.mark.parametrize("granted", [0, 1, 3])
def test_as_many_executors_as_the_system_grants(
    granted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its thread, so none is started later, and none keeps work that it
    refused."""
    start = threading.Thread.start
    begun: list[Any] = []

    def limited(thread: threading.Thread) -> None:
        if len(begun) == granted:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    executors = start_executors(3, "helps")
    assert len(executors) == granted
    for number, executor in enumerate(executors):
        assert executor.submit(lambda n=number: n + 1).result(timeout=20) == number + 1
    assert len(begun) == granted
    for executor in executors:
        executor.shutdown()


@pytest.mark.parametrize(
    "interrupt",
    [KeyboardInterrupt, SystemExit, TimeoutError],
    ids=lambda kind: kind.__name__,
)
def test_an_interrupted_action_is_done_before_the_interrupt_is_raised(
    interrupt: type[BaseException],
) -> None:
    """Handlers of signals raise all three: of Ctrl-C, of SIGTERM, of an alarm."""
    runs: list[int] = []

    def action() -> None:
        runs.append(len(runs))
        if len(runs) <= 5:
            raise interrupt

    with pytest.raises(interrupt):
        in_spite_of_interrupts(action)
    assert len(runs) == 6


def test_an_action_that_fails_each_time_ends_with_its_error() -> None:
    """It was run again forever."""
    runs: list[int] = []

    def action() -> None:
        runs.append(len(runs))
        if len(runs) < 10_000:
            raise OSError

    with pytest.raises(OSError):
        in_spite_of_interrupts(action)
    assert len(runs) < 10_000


def test_interrupts_are_never_too_many() -> None:
    """Memory that others read is not given up, however often Ctrl-C is pressed."""
    runs: list[int] = []

    def action() -> None:
        runs.append(len(runs))
        if len(runs) <= 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_spite_of_interrupts(action)
    assert len(runs) == 1001
