"""A pool in places that are not its own: forked processes, within one of its calls, in a daemon."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quorum_attention import attention
from quorum_attention.devices import Pool


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


def test_a_forked_process_gets_none_of_its_parents_answers(pool: Pool) -> None:
    def refused() -> bool:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="forked"):
                call(pool, 900)
        with pytest.raises(RuntimeError, match="forked"):
            pool.mend()
        pool.close()  # of no consequence there
        return True

    other = forked(refused)
    assert all(call(pool) for _ in range(10))
    assert ended_well(other)
    assert call(pool)
    assert len(pool.devices) == 2


def test_a_forked_process_ends_no_workers_of_its_parent(pool: Pool) -> None:
    assert ended_well(forked(lambda: not multiprocessing.active_children()))


def test_a_call_within_a_call_of_the_same_pool(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="wait for itself"):
        call(pool, progress=lambda *_: call(pool))
    assert call(pool)


_SCRIPT = """
import torch, quorum_attention as qa
q = torch.randn(1, 2, 200, 8)
if __name__ == "__main__":
    qa.attention(q, q, q, devices=["cpu", "cpu"])
"""


def test_programs_that_workers_cannot_import_are_told_so() -> None:
    ran = subprocess.run(
        [sys.executable, "-"], input=_SCRIPT, text=True, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "in no file (<stdin>)" in ran.stderr


def _daemons_call(_: int) -> str:
    try:
        Pool(["cpu"])
    except RuntimeError as error:
        return str(error)
    return "it started"


def test_daemons_are_told_that_they_may_start_no_workers() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (said,) = pool.map(_daemons_call, [0])
    assert "daemon" in said
