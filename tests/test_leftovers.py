"""What watches over every test sees what it should; and the soak test."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
import soak
import torch
from helpers.leftovers import left_since, standing
from helpers.processes import quick_workers
from helpers.uninitialised import nonsense

import quorum_attention
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
        (
            lambda: tempfile.TemporaryDirectory(suffix=".unfinished"),
            "the file /.*unfinished",
        ),
    ],
)
def test_what_is_left_is_seen(
    kind: Callable[[], AbstractContextManager[None]], words: str
) -> None:
    before = standing()
    with kind():
        (left,) = left_since(before, patience_s=0.0)
    assert re.fullmatch(words, left), left
    assert not left_since(before)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int32, torch.bool]
)
def test_fresh_memory_is_nonsense(dtype: torch.dtype) -> None:
    like = torch.zeros(3, 2, dtype=dtype)
    filler = torch.full((3, 2), nonsense(dtype), dtype=dtype)
    for tensor in (
        torch.empty(3, 2, dtype=dtype),
        torch.empty_like(like),
        like.new_empty(3, 2),
    ):
        torch.testing.assert_close(tensor, filler, equal_nan=True, rtol=0, atol=0)


SECONDS = 10


def rows(**grows: float) -> list[dict[str, float]]:
    """An hour of rows, a minute apart; what is named grows by so much a minute."""
    return [
        {"seconds": 60.0 * i}
        | {name: 1000 + grows.get(name, 0.0) * i for name in soak.LIMITS}
        for i in range(60)
    ]


@pytest.mark.parametrize("name", soak.LIMITS)
def test_a_leak_is_found_by_its_name(name: str) -> None:
    (words,) = soak.grown(rows(**{name: soak.LIMITS[name] / 20}))
    assert words.startswith(f"{name} grew by")


def test_a_warm_up_and_a_few_jumps_are_no_leak() -> None:
    found, limit = rows(), soak.LIMITS["anonymous"]
    for i, row in enumerate(found):
        row["anonymous"] = 10 * limit if i in (31, 40, 55) else min(i, 20) * limit
    assert soak.grown(found) == []


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_a_short_soak() -> None:
    seed = str(random.randrange(1 << 30))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = Path(quorum_attention.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "soak", "--minutes", str(SECONDS / 60), "--seed", seed,
         "--device", device],
        env=os.environ | {"PYTHONPATH": f"{source}:{Path(__file__).parent}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    assert all(
        f"'{kind}': " in done.stdout for kind in ("alone", "at once", "interrupts")
    )
