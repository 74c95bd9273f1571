"""What watches over every test sees what it should: helpers_leftovers and helpers_uninitialised."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers_leftovers import left_since, page_locked, standing
from helpers_uninitialised import nonsense
from helpers_workers import quick_workers

from quorum_attention.devices import Pool


def a_thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=lambda: end.wait(60), name="stuck")
    thread.start()
    yield
    end.set()
    thread.join()


def an_ended_process() -> Iterator[None]:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield
    process.wait()


def a_worker() -> Iterator[None]:
    with quick_workers(), Pool("cpu", threads=1):
        yield


def a_file() -> Iterator[None]:
    with tempfile.NamedTemporaryFile(suffix=".unfinished"):
        yield


def a_setting() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


def a_lock() -> Iterator[None]:
    page_locked.add(4096)
    yield
    page_locked.discard(4096)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (a_thread, "the thread stuck"),
        (a_worker, "the process [0-9]+: .*(forkserver|spawn).*"),
        (an_ended_process, "the process [0-9]+: ended, not waited for"),
        (a_file, "the file /.*unfinished"),
        (a_setting, "threads of torch: [0-9]+ instead of [0-9]+"),
        (a_lock, "1 page-locked ranges"),
    ],
)
def test_what_is_left_is_seen(kind: Callable[[], Iterator[None]], words: str) -> None:
    before = standing()
    with contextmanager(kind)():
        (left,) = left_since(before, patience_s=0.0)
    assert re.fullmatch(words, left), left
    assert not left_since(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_device_bytes_are_seen() -> None:
    before = standing()
    held = torch.zeros(8 << 20, device="cuda")
    (left,) = left_since(before, patience_s=0.0)
    assert "bytes on the device" in left
    del held
    assert not left_since(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool])
def test_fresh_memory_is_nonsense(dtype: torch.dtype) -> None:
    like = torch.zeros(3, 2, dtype=dtype)
    filler = torch.full((3, 2), nonsense(dtype), dtype=dtype)
    for tensor in (torch.empty(3, 2, dtype=dtype), torch.empty_like(like), like.new_empty(3, 2)):
        torch.testing.assert_close(tensor, filler, equal_nan=True, rtol=0, atol=0)


def test_random_numbers_are_those_of_the_test(request: pytest.FixtureRequest) -> None:
    """Of its name, not of what ran before it."""
    more = os.environ.get("QUORUM_ATTENTION_SEED", "")
    assert torch.initial_seed() == zlib.crc32(f"{request.node.nodeid}{more}".encode())
