"""Each worker measures its own device: kernels, and copies from and to shared memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.pool import Pool
from quorum_attention.pool.measured import measured
from quorum_attention.pool.messages import Measure
from quorum_attention.pool.shared import Shared, room


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(["cpu", "cpu"], threads=1) as made:
        yield made


def test_rates_of_each_device(pool: Pool) -> None:
    found = pool.measure(torch.float32)
    assert len(found) == 2
    for one in found:
        assert one.measured
        assert one.threads == 1  # the worker's, not this process's
        assert one.flops > 1e8
        assert one.up_bytes_per_second > 1e7
    q = torch.randn(1, 2, 50, 8)
    assert torch.allclose(qa.attention(q, q, q, devices=pool), qa.attention(q, q, q), atol=1e-5)


def test_one_after_the_other(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []

    def noted(workers: list[Any], *of: object) -> list[Any]:
        at_once.append(len(workers))
        return workers

    monkeypatch.setattr("quorum_attention.pool.pool.machines", noted)
    assert len(pool.measure(alone=True)) == len(pool.measure()) == 2
    assert at_once == [1, 1, 2]


def test_what_cannot_be_measured(pool: Pool) -> None:
    with pytest.raises(RuntimeError, match=r"has not measured its device: .*int8"):
        pool.measure(torch.int8)
    assert len(pool.devices) == 2


def test_a_worker_that_ends_meanwhile(pool: Pool) -> None:
    process = pool.workers[0].process
    os.kill(process.pid, signal.SIGSTOP)  # it would measure for a second
    timer = threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(RuntimeError, match="it has ended"):
        pool.measure(torch.int8)
    timer.join()
    assert len(pool.devices) == 1


def test_copies_are_those_of_the_memory_that_is_handed_over() -> None:
    host = room((1 << 20,), torch.uint8)
    host[: 1 << 19] = 7
    said = measured(torch.device("cpu"), Measure(torch.float32, 64, Shared.made(host).handle))
    assert not said.error
    assert said.rates["up_bytes_per_second"] > 0
    assert (host == 7).all()  # one half was copied over the other
