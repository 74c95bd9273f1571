"""A pool in places that are not its own: forked processes, within one of its calls; and its end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quorum_attention import attention
from quorum_attention.devices import Pool, worker


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(["cpu", "cpu"], threads=1) as made:
        yield made


def call(pool: Any, tokens: int = 300, **options: Any) -> bool:
    """Whether a call is right."""
    query = torch.randn(1, 4, tokens, 16)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    return torch.allclose(
        attention(query, query, query, devices=pool, **options), wanted, atol=1e-5
    )


def forked(does: Callable[[], bool]) -> int:
    """Number of a process that was forked off; its status says whether ``does`` was true."""
    number = os.fork()
    if number:
        return number
    status = 1
    try:
        status = 0 if does() else 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended_well(number: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0


def test_a_forked_process_gets_none_of_its_parents_answers_and_ends_no_workers(pool: Pool) -> None:
    def refused() -> bool:
        with pytest.raises(RuntimeError, match="forked"):
            call(pool, 900)
        pool.close()  # of no consequence there
        return not multiprocessing.active_children()

    other = forked(refused)
    assert all(call(pool) for _ in range(10))
    assert ended_well(other)
    assert call(pool)
    assert len(pool.devices) == 2


def test_a_call_within_a_call_of_the_same_pool(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="wait for itself"):
        call(pool, progress=lambda *_: call(pool))
    assert call(pool)


@pytest.mark.parametrize("closed", [False, True])
def test_a_pool_that_is_closed_or_forgotten_takes_its_workers_along(closed: bool) -> None:
    pool = Pool("cpu", threads=1)
    pool.join("cpu")
    processes = [each.process for each in pool.workers]
    if closed:
        pool.close()
        with pytest.raises(RuntimeError, match="no worker"):
            call(pool)
    del pool
    gc.collect()
    assert not any(process.is_alive() for process in processes)


_SCRIPT = """
import os, signal, torch
from quorum_attention import attention, devices
if __name__ == "__main__":
    pool, q = devices.Pool("cpu"), torch.randn(1, 2, 200, 8)
    attention(q, q, q, devices=pool)
    os.kill(pool.workers[0].process.pid, signal.SIGSTOP)
    signal.alarm(20)
    print(pool.workers[0].process.pid)
"""


def test_a_program_ends_although_a_worker_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_SCRIPT)
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(ran.stdout), signal.SIG_DFL)


def test_workers_that_do_not_start_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(multiprocessing.active_children())
    monkeypatch.setattr(worker, "_START_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=r"did not start .* has to be in a file"):
        Pool(["cpu", "cpu"], threads=1)
    assert len(multiprocessing.active_children()) == before
