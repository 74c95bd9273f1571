"""What watches over every test sees what it should: helpers_leftovers and helpers_uninitialised."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import pytest
import torch
from helpers_leftovers import left_since, standing
from helpers_uninitialised import nonsense
from helpers_workers import quick_workers

from quorum_attention.devices import Pool


def a_thread() -> ExitStack:
    stack, end = ExitStack(), threading.Event()
    thread = threading.Thread(target=lambda: end.wait(60), name="stuck")
    thread.start()
    stack.callback(thread.join)
    stack.callback(end.set)
    return stack


def an_ended_process() -> ExitStack:
    stack, process = ExitStack(), subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    stack.callback(process.wait)
    return stack


def a_worker() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(quick_workers())
    stack.enter_context(Pool("cpu", threads=1))
    return stack


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (a_thread, "the thread stuck"),
        (a_worker, "the process [0-9]+: .*(forkserver|spawn).*"),
        (an_ended_process, "the process [0-9]+: ended, not waited for"),
        (lambda: tempfile.TemporaryDirectory(suffix=".unfinished"), "the file /.*unfinished"),
    ],
)
def test_what_is_left_is_seen(kind: Callable[[], AbstractContextManager[None]], words: str) -> None:
    before = standing()
    with kind():
        (left,) = left_since(before, patience_s=0.0)
    assert re.fullmatch(words, left), left
    assert not left_since(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool])
def test_fresh_memory_is_nonsense(dtype: torch.dtype) -> None:
    like = torch.zeros(3, 2, dtype=dtype)
    filler = torch.full((3, 2), nonsense(dtype), dtype=dtype)
    for tensor in (torch.empty(3, 2, dtype=dtype), torch.empty_like(like), like.new_empty(3, 2)):
        torch.testing.assert_close(tensor, filler, equal_nan=True, rtol=0, atol=0)
