"""A measurement has a process of its own, and ends with whoever asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import quorum_attention
from quorum_attention.bench import processes
from quorum_attention.bench.processes import Processes
from quorum_attention.bench.spec import FAILED, OK, OUT_OF_MEMORY, UNSUPPORTED, Spec


@pytest.fixture
def running() -> Iterator[Processes]:
    with Processes(timeout=300) as found:
        yield found


def spec(method: str, tokens: int, **others) -> Spec:
    fields = {"heads": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "repeats": 1}
    return Spec(method, tokens, device="cpu", **{**fields, **others})


def test_figures_of_a_process_of_its_own(running: Processes) -> None:
    answer = running.measure(spec("quorum-depth-1", 500, backward=True, repeats=2))
    assert answer.status == OK, answer.reason
    assert len(answer.forward_seconds) == len(answer.backward_seconds) == 2
    assert min(*answer.forward_seconds, *answer.backward_seconds, answer.first_seconds) > 0
    assert answer.report["backward"]["levels"] == [7]


def test_errors_are_those_of_the_dtype(running: Processes) -> None:
    for dtype, low, high in (("float32", 1e-8, 2e-6), ("float16", 1e-4, 2e-3)):
        answer = running.measure(spec("quorum", 300, dtype=dtype, backward=True, draws=2))
        assert set(answer.errors) == {"out", "grad_query", "grad_key", "grad_value"}
        assert all(len(e) == 2 and all(low < x < high for x in e) for e in answer.errors.values())


def test_a_kernel_against_itself(running: Processes) -> None:
    answer = running.measure(spec("dense", 200, draws=1, itself=True))
    assert set(answer.differences) == {"out", "dQ", "dK", "dV"}, answer.reason


def test_out_of_memory_is_recorded_as_such(running: Processes) -> None:
    answer = running.measure(spec("sdpa", 65_536, budget_bytes=1 << 20))
    assert answer.status == OUT_OF_MEMORY, answer.reason
    assert answer.stage == "forward"
    # The limit was that process's: the next has all there is.
    assert running.measure(spec("sdpa", 4_096)).status == OK


def test_what_is_not_here_is_said_and_not_fatal(running: Processes) -> None:
    for method, why in (("cudnn", "NVIDIA"), ("stream-cqsa", ""), ("flex", "CUDA")):
        answer = running.measure(spec(method, 100))
        assert answer.status == UNSUPPORTED
        assert why in answer.reason


def test_a_crash_is_an_answer_and_the_next_one_works(running: Processes) -> None:
    answer = running.measure(spec("no such method", 100))
    assert answer.status == FAILED
    assert "no such method" in answer.reason
    assert running.measure(spec("sdpa", 100)).status == OK


def test_a_timeout_is_an_answer_and_the_next_one_works() -> None:
    with Processes(timeout=0.01) as few:
        answer = few.measure(spec("sdpa", 100))
        assert answer.status == FAILED
        assert "not done after 0.01 s" in answer.reason
        few.timeout = 300
        assert few.measure(spec("sdpa", 100)).status == OK


def test_who_is_killed_is_replaced() -> None:
    with Processes(timeout=300) as found:
        assert found.measure(spec("sdpa", 100)).status == OK
        assert found._server is not None
        found._server.kill()
        found._server.wait()
        answer = found.measure(spec("sdpa", 100))
        assert answer.status == FAILED
        assert "-9" in answer.reason
        assert found.measure(spec("sdpa", 100)).status == OK


def test_what_is_loaded_beforehand_touches_no_device_and_sets_no_thread_to_work() -> None:
    """A process that has a GPU or threads cannot be forked."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADS], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "1 thread"


_LOADS = """
import os, threading, torch

def touched(*arguments, **options):
    raise AssertionError("a device was asked for")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = touched
import quorum_attention.bench.server
assert not torch.cuda.is_initialized()
print(threading.active_count(), "thread")
"""


def alive(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a parent ends")
def test_nothing_outlives_whoever_is_killed(tmp_path: Path) -> None:
    """A measurement that goes on would take the memory and the time of the next run's."""
    source = str(Path(quorum_attention.__file__).parents[1])
    asking = subprocess.Popen(
        [sys.executable, "-c", _ASKS], env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert asking.stdout is not None
    server, child = (int(asking.stdout.readline()) for _ in range(2))
    assert alive(server)
    assert alive(child)
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    until = time.monotonic() + 60
    while (alive(server) or alive(child)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(server)
    assert not alive(child)


_ASKS = """
from quorum_attention.bench.processes import Processes
from quorum_attention.bench.spec import Spec

class Telling(Processes):
    def _line(self, until):
        line = super()._line(until)
        if until is None:
            print(self._server.pid, int(line), sep="\\n", flush=True)
        return line

with Telling(600) as found:  # hours of work
    found.measure(
        Spec("sdpa", 1 << 16, heads=1, kv_heads=1, device="cpu", dtype="float32", repeats=9999)
    )
"""


def test_a_ctrl_c_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Processes(600)
    numbers: list[int] = []
    line = Processes._line

    def stopped(self: Processes, until: float | None) -> bytes:
        if until is not None:
            raise KeyboardInterrupt
        numbers.append(int(line(self, until)))
        assert self._server is not None
        numbers.append(self._server.pid)
        return str(numbers[0]).encode()

    monkeypatch.setattr(processes.Processes, "_line", stopped)
    with pytest.raises(KeyboardInterrupt):
        found.measure(spec("sdpa", 1 << 16, repeats=9999))
    until = time.monotonic() + 60
    while any(map(alive, numbers)) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(numbers) == 2
    assert not any(map(alive, numbers))
