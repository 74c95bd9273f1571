"""What is prepared ahead: each in a thread, waited for by its first use, failures put off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_threads_prepare_waits_for_nobody() -> None:
    """Even if it happened while a thread held the lock; and the child has its usual interval."""
    usual, go = sys.getswitchinterval(), threading.Event()
    ahead.begin("a", GPU, lambda: go.wait(20))
    with ahead._lock:
        child = os.fork()
        if not child:
            ahead.wait("a")
            done: list[int] = []
            ahead.begin("b", GPU, lambda: done.append(1))
            ahead.wait("b")
            fine = done == [1] and not ahead.RUNNING and sys.getswitchinterval() == usual
            os._exit(0 if fine else 1)
    assert wait_for(child) == 0
    assert list(ahead.RUNNING) == ["a"]
    go.set()
    ahead.wait("a")


def wait_for(child: int, seconds: float = 20.0) -> int | None:
    """How a child ended; None where it hangs, and is killed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_a_process_that_ends_lets_its_threads_finish() -> None:
    """What they keep on disk is whole, and nothing hangs or crashes."""
    program = """if True:
        import time, torch
        from quorum_attention.kernels import ahead
        torch.cuda.set_device = lambda device: None
        def work():
            time.sleep(0.3)
            print("finished", flush=True)
        ahead.begin("a", torch.device("cuda", 0), work)
        print("ends", flush=True)
        """
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["ends", "finished"]), done.stderr
