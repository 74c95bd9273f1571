"""Calls on a farm give what one device gives, whoever dies; here with workers in this process."""

from __future__ import annotations

import gc
import os
import random
import signal
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_farm import Case, MaskedCase
from helpers_workers import quick_workers

import quorum_attention as qa
from quorum_attention.devices.messages import Compute, Done, Failed
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.devices.scheduler import Hand
from quorum_attention.errors import BudgetError, OutOfMemoryError
from quorum_attention.farm import Farm
from quorum_attention.farm import call as farm_call
from quorum_attention.farm import compute as farm_compute
from quorum_attention.farm.crew import Alone, Here
from quorum_attention.farm.processes import Processes


class Mortal(Alone):
    """Workers of which one dies now and then, before, within or after a unit, and others come."""

    def __init__(self, draw: random.Random, count: int, deaths: int) -> None:
        self.hands: list[Hand] = [Here("cpu") for _ in range(count)]
        self.expected = count
        self._draw, self._deaths, self._dead = draw, deaths, 0
        self.begun: Counter[Any] = Counter()
        self.cost: Counter[Any] = Counter()

    def recruits(self, wait: bool) -> list[Hand]:
        came: list[Hand] = []
        while self._dead and (wait or self._draw.random() < 0.3):
            self._dead -= 1
            came.append(Here("cpu"))
        self.hands += came
        return came

    def listen(
        self, workers: Sequence[Any], seconds: float | None
    ) -> list[tuple[Any, Done | Failed | None]]:
        worker = self._draw.choice(list(workers))
        work = worker.asked.part
        self.begun[work] += 1
        if not self._deaths or self._draw.random() > 0.2:
            return [(worker, worker.answer())]
        self._deaths -= 1
        self._dead += 1
        self.cost[work] += 1
        how = self._draw.choice(["before", "within", "after"])
        with pytest.MonkeyPatch.context() as patch:
            if how == "within":
                patch.setattr(farm_compute, "write_state", _half_written)
            if how != "before":
                worker.answer()
        return [(worker, None)]


def _half_written(path: str, tensors: Sequence[torch.Tensor]) -> None:
    Path(path).write_bytes(b"nothing of use")
    raise OSError("it was killed here")


@pytest.mark.parametrize("seed", range(10))
def test_as_on_one_device(seed: int, tmp_path: Path) -> None:
    case, farm = Case(seed), Farm.of(Alone("cpu"))
    case.in_memory(farm)
    case.in_files(farm, tmp_path)


@pytest.mark.parametrize("seed", range(12))
def test_whoever_dies(seed: int, tmp_path: Path) -> None:
    """Only what a dead worker was at is computed again."""
    case = Case(1000 + seed)
    deaths = case.draw.randint(1, 3)  # four at one unit end the call
    for run in (case.in_memory, lambda farm: case.in_files(farm, tmp_path)):
        crew = Mortal(case.draw, case.draw.randint(1, 3), deaths)
        run(Farm.of(crew))
        # Forward and backward have the same units: each is begun twice, and once more a death.
        for work, times in crew.begun.items():
            assert times <= 2 + crew.cost[work]


def test_in_processes(tmp_path: Path) -> None:
    """Without Ray; one of two workers is killed, and the other one finishes."""
    with quick_workers():
        crew = Processes(["cpu", "cpu"], threads=1)
    with Farm.of(crew) as farm:
        case = Case(3001)
        case.in_memory(farm)
        case.in_files(farm, tmp_path)
        for seed in range(100, 104):
            MaskedCase(seed).in_memory(farm)  # what is sent arrives
        # Threads take turns: none hears what is said to another.
        with ThreadPoolExecutor(3) as threads:
            for _ in threads.map(lambda seed: Case(seed).in_memory(farm), range(3100, 3109)):
                pass
        os.kill(crew._workers[0].process.pid, signal.SIGKILL)
        case.in_memory(farm)
        with pytest.raises(ValueError, match="nonsense"):
            farm.attention(*case.inputs[:3], kernel="nonsense", **case.options)
    assert not any(worker.process.is_alive() for worker in crew._workers)


def test_a_unit_that_kills_every_worker(tmp_path: Path) -> None:
    class Deadly(Mortal):
        def listen(self, workers: Sequence[Any], seconds: float | None) -> Any:
            self._dead += 1
            return [(workers[0], None)]

    q = torch.randn(1, 1, 2000, 8)
    with pytest.raises(RuntimeError, match=r"task 0 of 13.*was begun 4 times.*0 of 13 units"):
        Farm.of(Deadly(random.Random(0), 1, 0)).attention(q, q, q, chunks=13)


def test_nobody_is_left() -> None:
    class Lost(Alone):
        def listen(self, workers: Sequence[Any], seconds: float | None) -> Any:
            return [(workers[0], None)]

    q = torch.randn(1, 1, 2000, 8)
    with pytest.raises(RuntimeError, match="no device is left after 0 of 7 parts"):
        Farm.of(Lost("cpu")).attention(q, q, q, chunks=7)


def test_a_worker_without_memory_leaves_its_units_to_others() -> None:
    class Small(Here):
        def answer(self) -> Done | Failed:
            message = self.asked
            assert isinstance(message, Compute)
            return Failed(message.number, message.index, True, OutOfMemoryError("no"), "")

    class Two(Alone):
        def __init__(self) -> None:
            self.hands: list[Hand] = [Small("cpu"), Here("cpu")]
            self.expected = 2

    q = torch.randn(1, 2, 1000, 8)
    report = PoolReport()
    out = Farm.of(Two()).attention(q, q, q, chunks=7, report=report)
    assert torch.allclose(out, qa.attention(q, q, q), atol=1e-5)
    assert isinstance(report.forward, PoolPass)
    assert {one.device for one in report.forward.ran} == {1}


def test_budgets_of_workers() -> None:
    q = torch.randn(1, 1, 3000, 16)
    report = PoolReport()
    out = Farm.of(Alone("cpu", 8 << 20)).attention(q, q, q, chunks=7, is_causal=True, report=report)
    assert torch.allclose(out, qa.attention(q, q, q, is_causal=True), atol=1e-5)
    assert report.forward is not None
    for one in report.forward.ran:
        assert one.report.forward is not None
        assert one.report.forward.budget_bytes <= 8 << 20
    with pytest.raises(BudgetError):
        Farm.of(Alone("cpu", 1000)).attention(q, q, q)


def test_masks_and_strided_results() -> None:
    """Whole heads with a mask; and results that are not in rows one after the other."""
    farm = Farm.of(Alone("cpu"))
    q, k = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 50, 8)
    for shape in ((2, 4, 70, 50), (4, 1, 50), (70, 50), (2, 1, 1, 50)):
        mask = torch.randn(shape)
        wanted = qa.attention(q, k, k, mask, enable_gqa=True)
        assert torch.allclose(farm.attention(q, k, k, mask, enable_gqa=True), wanted, atol=1e-5)
    base = torch.zeros(2, 4, 8, 70)
    out = base.transpose(2, 3)
    got = farm.attention(q, k, k, enable_gqa=True, out=out, chunks=3)
    assert got.data_ptr() == base.data_ptr()
    assert torch.allclose(out, qa.attention(q, k, k, enable_gqa=True), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunks": 8}, "8"),
        ({"chunks": 0}, "chunks"),
        ({"chunks": 7, "dropout_p": 0.5}, "chunks must be 1 for a call with dropout_p, got 7"),
        ({"attn_mask": qa.Mask(documents=torch.zeros(19, dtype=torch.int64))}, "Mask.documents"),
        ({"kernel": "nonsense"}, "nonsense"),
        ({"depth": -1}, "depth"),
        ({"out": torch.zeros(1, 2, 20, 9)}, "out"),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    q = torch.randn(1, 2, 20, 8)
    with pytest.raises((ValueError, TypeError), match=said):
        Farm.of(Alone("cpu")).attention(q, q, q, **change)


@pytest.mark.parametrize("chunks", [1, 7])
def test_a_log_sum_exp_over_anything_else_is_refused_before_any_work(
    chunks: int, tmp_path: Path
) -> None:
    """It would be written over inputs that are read again, or over the output."""
    np.save(tmp_path / "in", np.ones((4, 1, 2, 20, 8), np.float32))
    mapped = torch.from_numpy(np.load(tmp_path / "in.npy", mmap_mode="r+"))
    query, key, value, out = mapped
    other = torch.from_numpy(np.load(tmp_path / "in.npy", mmap_mode="r+"))
    only_read = np.load(tmp_path / "in.npy", mmap_mode="r")[0, ..., 0]
    over = {
        "query": query[..., 0], "key": key.flatten()[-40:].view(1, 2, 20), "out": out[..., 3],
        "value": other[2, ..., 7],
    }  # fmt: skip
    call = Farm.of(Alone("cpu")).attention_with_lse
    for name, lse in over.items():
        with pytest.raises(ValueError, match=f"lse must not share memory with {name}"):
            call(query, key, value, out=out, lse=lse, chunks=chunks)
    for lse, said in (
        (torch.zeros(1, 2, 1).expand(1, 2, 20), "lse must not be an expanded tensor"),
        (torch.zeros(1, 2, 20, requires_grad=True), "lse must not require a gradient"),
        (only_read, "lse must be writable"),
        (torch.zeros(1, 2, 21), r"lse must have shape \(1, 2, 20\)"),
    ):
        with pytest.raises(ValueError, match=said):
            call(query, key, value, out=out, lse=lse, chunks=chunks)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lse must be torch\.float32"):
        call(query, key, value, lse=torch.zeros(1, 2, 20, dtype=torch.float64))
    assert (mapped == 1).all()


def test_what_cannot_be_sent_or_has_no_gradient() -> None:
    q, farm = torch.randn(1, 2, 20, 8), Farm.of(Alone("cpu"))
    with pytest.raises(NotImplementedError, match=r"Mask\.keeps must be sent to other processes"):
        farm.attention(q, q, q, qa.Mask(keeps=lambda b, h, query, key: key < 5))
    bias = torch.zeros(20, 20, requires_grad=True)
    with pytest.raises(NotImplementedError, match="attn_mask that requires a gradient"):
        farm.attention(q, q, q, bias)
    with pytest.raises(NotImplementedError, match="kernel must be a name"):
        farm.attention(q, q, q, kernel=qa.kernels.get_kernel("dense"))  # type: ignore[arg-type]


def test_inputs_are_held_by_autograd_alone() -> None:
    """A call that its caller has let go of keeps no tensor until garbage is collected."""
    gc.disable()
    try:
        q = torch.randn(1, 2, 50, 8, requires_grad=True)
        there = weakref.ref(q)
        out = Farm.of(Alone("cpu")).attention(q, q, q)
        del q, out
        assert there() is None
    finally:
        gc.enable()


def test_nothing_to_compute() -> None:
    farm = Farm.of(Alone("cpu"))
    q, k = torch.randn(1, 2, 0, 8), torch.randn(1, 2, 5, 8)
    assert farm.attention(q, k, k).shape == (1, 2, 0, 8)
    for shape in ((1, 0, 5, 8), (0, 2, 5, 8)):
        assert farm.attention(*[torch.ones(shape)] * 3).shape == shape
    assert torch.equal(farm.attention(k, q, q), torch.zeros(1, 2, 5, 8))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_another_thread_asks_for_a_turn() -> None:
    with farm_call._lock:
        number = os.fork()
        if not number:
            signal.alarm(10)
            try:
                with farm_call._turn_of(Alone("cpu")):
                    os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
