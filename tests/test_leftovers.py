"""What watches over every test sees what it should: helpers_leftovers and helpers_uninitialised."""

from __future__ import annotations

import _thread
import os
import re
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from helpers_leftovers import left_since, page_locked, standing
from helpers_memory import FailingAllocations
from helpers_uninitialised import nonsense
from helpers_workers import quick_workers

from quorum_attention.devices import Pool


@contextmanager
def a_thread():  # type: ignore[no-untyped-def]
    end = threading.Event()
    thread = threading.Thread(target=lambda: end.wait(60), name="stuck")
    thread.start()
    yield
    end.set()
    thread.join()


@contextmanager
def a_process():  # type: ignore[no-untyped-def]
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate(b"\n")


@contextmanager
def an_ended_process():  # type: ignore[no-untyped-def]
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield
    process.wait()


@contextmanager
def a_worker():  # type: ignore[no-untyped-def]
    with quick_workers(), Pool("cpu", threads=1):
        yield


@contextmanager
def a_file():  # type: ignore[no-untyped-def]
    with tempfile.NamedTemporaryFile(suffix=".unfinished"):
        yield


@contextmanager
def a_setting():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@contextmanager
def a_lock():  # type: ignore[no-untyped-def]
    page_locked.add(4096)
    yield
    page_locked.discard(4096)


LEFT = {
    "the thread stuck": a_thread,
    r"the process [0-9]+: .*input\(\)": a_process,
    "the process [0-9]+: .*(forkserver|spawn).*": a_worker,
    "the process [0-9]+: ended, not waited for": an_ended_process,
    "the file /.*unfinished": a_file,
    "threads of torch: [0-9]+ instead of [0-9]+": a_setting,
    "1 page-locked ranges": a_lock,
}


@pytest.mark.parametrize("words", list(LEFT))
def test_what_is_left_is_seen(words: str) -> None:
    kind: Callable[[], AbstractContextManager[None]] = LEFT[words]
    before = standing()
    with kind():
        (left,) = left_since(before, patience_s=0.0)
    assert re.fullmatch(words, left), left
    assert not left_since(before)


def test_what_ends_in_a_moment_is_waited_for() -> None:
    before = standing()
    thread = threading.Thread(target=lambda: threading.Event().wait(0.1))
    thread.start()
    assert not left_since(before)


def test_threads_that_python_did_not_start_do_not_count() -> None:
    """As the threads of torch's autograd on a GPU, which stay."""
    before, known, end = standing(), threading.Event(), threading.Event()

    def foreign() -> None:
        assert isinstance(threading.current_thread(), threading._DummyThread)
        known.set()
        end.wait(60)

    _thread.start_new_thread(foreign, ())
    assert known.wait(60)
    assert not left_since(before, patience_s=0.0)
    end.set()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_device_bytes_are_seen() -> None:
    before = standing()
    held = torch.zeros(8 << 20, device="cuda")
    (left,) = left_since(before, patience_s=0.0)
    assert "bytes on the device" in left
    del held
    assert not left_since(before)


@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: torch.empty(3, 2, dtype=dtype),
        lambda dtype: torch.empty_like(torch.zeros(3, 2, dtype=dtype)),
        lambda dtype: torch.empty_strided((3, 2), (1, 4), dtype=dtype),
        lambda dtype: torch.zeros(1, dtype=dtype).new_empty(3, 2),
    ],
    ids=["empty", "empty_like", "empty_strided", "new_empty"],
)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool]
)
def test_fresh_memory_is_nonsense(make, dtype) -> None:  # type: ignore[no-untyped-def]
    tensor = make(dtype)
    assert tensor.shape == (3, 2)
    assert tensor._version == 0
    filler = torch.full((3, 2), nonsense(dtype), dtype=dtype)
    torch.testing.assert_close(tensor, filler, equal_nan=True, rtol=0, atol=0)


def test_what_is_watched_or_is_no_memory_is_let_be() -> None:
    assert torch.empty(3, device="meta").is_meta
    with FailingAllocations(2) as watched:
        torch.empty(3)
    assert watched.seen == 1


def test_random_numbers_are_those_of_the_test(request: pytest.FixtureRequest) -> None:
    """Of its name, not of what ran before it."""
    more = os.environ.get("QUORUM_ATTENTION_SEED", "")
    assert torch.initial_seed() == zlib.crc32(f"{request.node.nodeid}{more}".encode())
