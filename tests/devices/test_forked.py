"""A pool in places that are not its own: forked processes, within one of its calls, in a daemon."""

from __future__ import annotations

import dis
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from quorum_attention import attention
from quorum_attention.devices import Pool, processes
from quorum_attention.devices import pool as kept
from quorum_attention.devices.processes import Turn

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


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


@FORKS
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


@FORKS
def test_a_forked_process_ends_no_workers_of_its_parent(pool: Pool) -> None:
    assert ended_well(forked(lambda: not multiprocessing.active_children()))


@FORKS
def test_a_fork_while_another_thread_starts_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "Pool", lambda names: names)
    has, may = threading.Event(), threading.Event()

    def holds() -> None:
        with kept._lock:
            has.set()
            may.wait(30)

    thread = threading.Thread(target=holds)
    thread.start()
    has.wait(30)

    def opens() -> bool:
        threading.Timer(10, os._exit, (3,)).start()
        found: Any = kept.kept_pool(["cpu"])
        return bool(found == ("cpu",))

    try:
        assert ended_well(forked(opens))
    finally:
        may.set()
        thread.join()


def test_a_call_within_a_call_of_the_same_pool(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match="wait for itself"):
        call(pool, progress=lambda *_: call(pool))
    assert call(pool)


def test_turns_follow_each_other() -> None:
    turn, order = Turn(), list[int]()

    def takes(number: int) -> None:
        for _ in range(50):
            with turn.taken():
                order.extend([number, number])

    threads = [threading.Thread(target=takes, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[::2] == order[1::2]
    assert len(order) == 400


def test_an_interrupt_at_any_moment_keeps_no_turn() -> None:
    """Python raises KeyboardInterrupt where a function begins, and after calls. Each of these
    places has its turn here."""

    def interrupted(at: int) -> bool:
        left, last = at, -1

        def trace(frame: Any, event: str, argument: object) -> Any:
            nonlocal left, last
            if frame.f_code.co_filename != processes.__file__:
                return None
            frame.f_trace_opcodes = True
            code = frame.f_code.co_code
            may = event == "call" or (last >= 0 and dis.opname[code[last]].startswith("CALL"))
            last = frame.f_lasti if event == "opcode" else -1
            left -= may
            if may and left < 0:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with turn.taken():
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    turn = Turn()
    for at in range(100):
        more = interrupted(at)
        assert not turn._lock._is_owned(), f"at place {at}"  # type: ignore[attr-defined]
        with turn.taken():
            assert turn._within
        if not more:
            break
    assert 3 < at < 99


def test_a_pool_that_is_closed_while_a_call_waits_for_its_turn() -> None:
    said = list[str]()

    def waits() -> None:
        try:
            call(made)
        except RuntimeError as error:
            said.append(str(error))

    with Pool(["cpu"], threads=1) as made:
        thread = threading.Thread(target=waits)
        with made._turn.taken():
            thread.start()
            thread.join(1)  # it has checked that there are workers, and waits
            assert thread.is_alive()
            made.close()
        thread.join(60)
    assert said == ["the pool has no worker: it was closed, or all of them were lost"]


def test_gradients_that_torch_maps_over_are_refused(pool: Pool) -> None:
    query = torch.randn(1, 2, 200, 8, requires_grad=True)
    out = attention(query, query, query, devices=pool)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(out, query, torch.randn(3, *out.shape), is_grads_batched=True)


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
