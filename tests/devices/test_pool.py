"""Calls on worker processes give what one device gives, also when a worker is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path

import numpy as np
import pytest
import torch

import quorum_attention as qa
from quorum_attention.devices import Pool, PoolReport
from quorum_attention.errors import BudgetError


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(["cpu", "cpu"], threads=1) as made:
        yield made
    # Its socket would outlive the folder that the tests have for temporary files.
    resource_sharer.stop(timeout=5)  # type: ignore[attr-defined]


def compare(pool: Pool, tensors: list[torch.Tensor], **options: object) -> PoolReport:
    """A call and its gradients on the pool and on one device."""
    found = []
    report = PoolReport()
    for function, more in ((pool.attention, {"report": report}), (qa.attention, {})):
        q, k, v = (t.detach().clone().requires_grad_() for t in tensors[:3])
        out = function(q, k, v, enable_gqa=True, **options, **more)  # type: ignore[operator]
        out.backward(tensors[3])
        found.append([out.detach(), q.grad, k.grad, v.grad])
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}[tensors[0].dtype]
    for got, wanted in zip(*found, strict=True):
        assert (got - wanted).abs().max() <= bound * wanted.abs().max().clamp_min(1.0)
    return report


def test_what_others_can_have_is_not_copied(pool: Pool, tmp_path: Path) -> None:
    shape = (1, 2, 300, 16)
    q = torch.randn(shape).share_memory_()
    np.save(tmp_path / "key.npy", np.random.default_rng(0).standard_normal(shape, np.float32))
    k = torch.from_numpy(np.load(tmp_path / "key.npy", mmap_mode="r+"))
    out = torch.from_numpy(np.memmap(tmp_path / "out", np.float32, "w+", shape=shape))
    report = PoolReport()
    got = pool.attention(q, k, k, is_causal=True, out=out, report=report)
    assert report.forward is not None
    assert report.forward.copied_bytes == 0
    assert torch.allclose(got, qa.attention(q, k, k, is_causal=True), atol=1e-5)
    assert torch.equal(torch.from_numpy(np.fromfile(tmp_path / "out", np.float32)), out.flatten())


def test_errors_come_through(pool: Pool) -> None:
    q = torch.randn(1, 2, 4000, 8)
    with pytest.raises(BudgetError, match="budget"):
        pool.attention(q, q, q, budget=1000)
    with pytest.raises(ValueError, match="key"):
        pool.attention(q, q[..., :4], q)
    compare(pool, [torch.randn(1, 2, 50, 8)] * 4)  # its workers are well


def test_a_worker_killed_in_the_middle() -> None:
    """Forward and backward: the other one finishes, and another one joins."""
    with Pool(["cpu", "cpu"], threads=1) as pool:
        _kill_workers(pool)


def _kill_workers(pool: Pool) -> None:
    tensors = [torch.randn(1, 6, 1500, 16) for _ in range(4)]
    for seconds in (0.01, 0.15):
        worker = next(worker for worker in pool._workers if worker.alive)
        timer = threading.Timer(seconds, os.kill, (worker.process.pid, signal.SIGKILL))
        timer.start()
        for _ in range(4):
            compare(pool, tensors, is_causal=True)
        timer.join()
        worker.process.join()
        compare(pool, tensors, is_causal=True)
        assert len(pool.devices) == 1
        pool.join("cpu")
        report = compare(pool, tensors, is_causal=True)
        assert report.forward is not None
        assert len({one.device for one in report.forward.ran}) == 2


def test_a_closed_pool() -> None:
    pool = Pool("cpu", threads=1)
    processes = [worker.process for worker in pool._workers]
    pool.close()
    assert not any(process.is_alive() for process in processes)
    q = torch.randn(1, 1, 10, 8)
    with pytest.raises(RuntimeError, match="no worker"):
        pool.attention(q, q, q)


@pytest.mark.parametrize(
    ("devices", "said"),
    [([], "at least one"), ("tpu", "devices"), (["cuda:99"], "CUDA device"), ("all", "CUDA")],
)
def test_devices_that_are_not_here(devices: str | list[str], said: str) -> None:
    if torch.cuda.is_available() and devices == "all":
        pytest.skip("there are CUDA devices here")
    with pytest.raises(ValueError, match=said):
        Pool(devices)
