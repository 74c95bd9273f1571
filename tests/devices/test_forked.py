"""A pool in places that are not its own: forked processes, within one of its calls; and
its end."""

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
from quorum_attention.devices import Pool, PoolReport, worker_process


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
    """Number of a process that was forked off; its status says whether ``does`` was
    true."""
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


def test_a_forked_process_gets_none_of_its_parents_answers_and_ends_no_workers(
    pool: Pool,
) -> None:
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


def in_a_fork(does: Callable[[], bool], meanwhile: Callable[[], object]) -> bool:
    """Whether ``does`` is true in a forked process, after ``meanwhile`` has run in this
    one."""
    ready, go = os.pipe()

    def waits() -> bool:
        os.close(go)
        os.read(ready, 1)
        return does()

    process = forked(waits)
    os.close(ready)
    try:
        meanwhile()
    finally:
        os.close(go)
    return ended_well(process)


@pytest.mark.parametrize("tokens", [20, 5000], ids=["small", "large"])
def test_results_belong_to_one_process(pool: Pool, tokens: int) -> None:
    """They are in shared memory: a forked process wrote into its parent's results, and
    the parent's next calls wrote into what the forked process held."""
    query = torch.randn(1, 4, tokens, 16, requires_grad=True)
    out = attention(query, query, query, devices=pool)
    grad_query = torch.autograd.grad(out.sum(), query, retain_graph=True)[0]
    results = [out.detach(), grad_query]
    copies = [result.clone() for result in results]

    def are_the_same() -> bool:
        return all(map(torch.equal, results, copies))

    def child() -> bool:
        same = are_the_same()
        for result in results:
            result.fill_(7.0)
        return same and not any((result != 7.0).any() for result in results)

    def parent() -> None:
        results[1].mul_(2)
        copies[1].mul_(2)
        assert ended_well(
            forked(lambda: are_the_same() and all(t.zero_() is t for t in results))
        )
        assert are_the_same()
        results[1].div_(2)
        copies[1].div_(2)

    assert in_a_fork(child, parent)
    assert are_the_same()
    # The backward reads shared memory of the forward; an input is a result of before
    # the fork.
    again = torch.autograd.grad(out.sum(), query)[0]
    assert torch.equal(again, grad_query)
    report = PoolReport()
    wanted = torch.nn.functional.scaled_dot_product_attention(*[results[1]] * 3)
    found = pool.attention(*[results[1]] * 3, report=report)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert report.forward.copied_bytes >= results[1].nbytes
    results[1].fill_(3.0)
    pool.attention(query.detach(), query.detach(), query.detach(), out=results[1])
    assert torch.equal(results[1], copies[0])


def test_what_the_parent_frees_and_computes_changes_nothing_in_a_fork(
    pool: Pool,
) -> None:
    query = torch.randn(1, 4, 5000, 16)
    results = [attention(query, query, query, devices=pool) for _ in range(3)]
    copies = [result.clone() for result in results]

    def parent() -> None:
        results.clear()
        assert all(call(pool, 5000) for _ in range(4))

    assert in_a_fork(lambda: all(map(torch.equal, results, copies)), parent)


def test_a_fork_in_the_middle_of_a_call(pool: Pool) -> None:
    """The call goes on, and neither process sees what the other one writes
    afterwards."""
    query = torch.randn(1, 4, 5000, 16)
    earlier = attention(query, query, query, devices=pool)
    copy = earlier.clone()
    forks: list[int] = []

    def fork_once(*_: object) -> None:
        if not forks:
            forks.append(
                forked(
                    lambda: torch.equal(earlier, copy) and earlier.zero_() is earlier
                )
            )

    found = attention(query, query, query, devices=pool, progress=fork_once)
    assert ended_well(forks[0])
    assert torch.equal(earlier, copy)
    assert torch.equal(found, copy)


def test_shared_memory_of_the_programs_own_stays_shared(pool: Pool) -> None:
    query, out = (torch.randn(1, 4, 300, 16).share_memory_() for _ in range(2))

    def child() -> bool:
        query.fill_(1.0)
        return True

    assert ended_well(forked(child))
    assert (query == 1.0).all()
    report = PoolReport()
    pool.attention(query, query, query, out=out, report=report)
    assert report.forward.copied_bytes == 0
    assert ended_well(forked(lambda: torch.equal(out, query) and out.zero_() is out))
    assert not out.any()


_FORKED_BACKWARD = """
import os, torch
from torch.nn.functional import scaled_dot_product_attention
from quorum_attention import attention, devices
if __name__ == "__main__":
    # OpenMP's threads do not survive a fork: the forked process would wait for them in any of
    # torch's operations that uses several.
    torch.set_num_threads(1)
    query = torch.randn(1, 4, 3000, 16, requires_grad=True)
    leaf = query.detach().clone().requires_grad_()
    out = attention(query, query, query, devices=["cpu", "cpu"])
    ready, go = os.pipe()
    process = os.fork()
    if process == 0:
        os.read(ready, 1)
        grad_query = torch.autograd.grad(out.square().sum(), query)[0]
        wanted = scaled_dot_product_attention(leaf, leaf, leaf).square().sum()
        right = torch.allclose(grad_query, torch.autograd.grad(wanted, leaf)[0], atol=1e-4)
        devices.close()
        os._exit(0 if right else 3)
    del out
    other = torch.randn(1, 4, 3000, 16)
    attention(other, other, other, devices=["cpu", "cpu"])
    os.write(go, b"x")
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


@pytest.mark.slow
def test_the_backward_of_a_parents_call_in_a_fork(tmp_path: Path) -> None:
    """Workers of the forked process read its own memory: the parent's may have another
    call's."""
    (tmp_path / "program.py").write_text(_FORKED_BACKWARD)
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_a_call_within_a_call_of_the_same_pool(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="wait for itself"):
        call(pool, progress=lambda *_: call(pool))
    assert call(pool)


@pytest.mark.parametrize("closed", [False, True])
def test_a_pool_that_is_closed_or_forgotten_takes_its_workers_along(
    closed: bool,
) -> None:
    pool = Pool("cpu", threads=1)
    pool.add_device("cpu")
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


@pytest.mark.slow
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
    monkeypatch.setattr(worker_process, "_START_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=r"did not start .* has to be in a file"):
        Pool(["cpu", "cpu"], threads=1)
    assert len(multiprocessing.active_children()) == before
