"""A worker lets go of what it holds when it has had nothing to do for a while."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.call.block import Block, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices import Pool, worker
from quorum_attention.devices.buffers import MappedBuffers
from quorum_attention.devices.processes import Worker
from quorum_attention.devices.worker import Begin, Compute, Done, End, Failed, _Pass, answer
from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import BACKENDS, HOST


def test_memory_of_a_pass_is_let_go_of() -> None:
    with Pool("cpu", threads=1) as pool:
        maps = Path(f"/proc/{pool.workers[0].process.pid}/maps")

        def mapped() -> int:
            return maps.read_text(encoding="utf-8").count("memfd:quorum-attention")

        q = torch.randn(1, 2, 100, 8)
        qa.attention(q, q, q, devices=pool)
        assert mapped() > 0  # the next pass may read it again
        del q
        gc.collect()
        until = time.monotonic() + 10
        while mapped():
            assert time.monotonic() < until
            time.sleep(0.05)
        q = torch.randn(1, 2, 100, 8)
        assert torch.allclose(qa.attention(q, q, q, devices=pool), qa.attention(q, q, q), atol=1e-5)


@pytest.mark.parametrize("said", [Begin, End])
def test_a_pool_that_was_interrupted_as_it_spoke_loses_no_worker_and_no_memory(
    monkeypatch: pytest.MonkeyPatch, said: type
) -> None:
    """Some have heard that a pass begins or ends, and others have not."""
    send, heard = Worker.send, [0]

    def interrupted(self: Worker, message: object) -> bool:
        if isinstance(message, said):
            heard[0] += 1
            if heard[0] == 2:
                raise KeyboardInterrupt
        return send(self, message)

    with Pool(["cpu", "cpu"], threads=1) as pool:
        before: list[Any] = [worker.process.pid for worker in pool.workers]
        q = torch.randn(1, 4, 100, 8)
        monkeypatch.setattr(Worker, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            qa.attention(q, q, q, devices=pool)
        monkeypatch.undo()
        del q
        for _ in range(2):
            q = torch.randn(1, 4, 100, 8)
            made = qa.attention(q, q, q, devices=pool)
            assert torch.allclose(made, qa.attention(q, q, q), atol=1e-5)
        assert [w.process.pid for w in pool.workers if w.process.is_alive()] == before
        del q, made
        gc.collect()
        until = time.monotonic() + 10
        for pid in before:
            maps = Path(f"/proc/{pid}/maps")
            while "memfd:quorum-attention" in maps.read_text(encoding="utf-8"):
                assert time.monotonic() < until
                time.sleep(0.05)


@pytest.mark.parametrize(
    "fail", [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: bytearray(1 << 60)]
)
def test_memory_that_runs_out_beside_the_call_gives_the_part_back_too(
    fail: Callable[[], object],
) -> None:
    """Where it opens tensors, or makes room for a gradient: torch's allocator for the CPU raises a
    plain RuntimeError there."""

    class Scarce:
        unequal = False

        def compute(self, message: Compute, report: qa.Report) -> None:
            fail()

    said = answer(Scarce(), Compute(1, PART))
    assert isinstance(said, Failed)
    assert said.memory
    assert not said.broken


# Rows of one head: the gradients of its keys are added up with those of other parts.
PART = Block(Interval(0, 1), Interval(0, 1), Interval(2, 6), Interval(0, 6))
NAMES = ("grad_key", "grad_value")


class Watched(Backend):
    """Notes at each wait for the device which of the opened tensors are still there.

    Attributes:
        seen: how many were, at each wait.
        opened: those that a worker has opened.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.opened: list[weakref.ref[Any]] = []

    @property
    def there(self) -> int:
        return sum(one() is not None for one in self.opened)

    def open(self, handle: torch.Tensor) -> torch.Tensor:
        """Another tensor of the same memory, as one that was opened; its memory has an owner whose
        end is seen, whatever views of it there are."""
        owner = handle.numpy().view()
        self.opened.append(weakref.ref(owner))
        return torch.from_numpy(owner)

    def synchronize(self, device: torch.device) -> None:
        self.seen.append(self.there)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched()
    monkeypatch.setitem(BACKENDS, "cpu", made)
    monkeypatch.setattr(worker, "opened", made.open)
    return made


def backward() -> tuple[_Pass, Compute, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A pass in a worker, a part of it, where its sums go, and what they should be."""
    query, key, value, grad_out = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(4))
    out, lse = qa.attention_with_lse(query, key, value, scale=0.5)
    rows = (slice(0, 1), slice(0, 1), slice(2, 6))
    leaves = [t[:, :1].clone().requires_grad_() for t in (key, value)]
    made = torch.softmax(query[rows] @ leaves[0].mT * 0.5, -1) @ leaves[1]
    made.backward(grad_out[rows])
    wanted = {name: torch.as_tensor(t.grad) for name, t in zip(NAMES, leaves, strict=True)}
    tensors = {
        "query": query, "key": key, "value": value, "grad_out": grad_out, "out": out, "lse": lse,
        "grad_query": torch.zeros_like(query),
    }  # fmt: skip
    options = {"depth": "auto", "kernel": "auto", "accumulator": "auto"}
    sums = {name: torch.zeros(1, 1, 6, 4, dtype=torch.float64) for name in NAMES}
    tensors |= {name: torch.zeros_like(key) for name in NAMES}
    begin = Begin(1, True, WholeCall((1,), 2, 2, 6, 6, scale=0.5), tensors, options)
    return _Pass(begin, HOST, MappedBuffers()), Compute(1, PART, sums), sums, wanted


def opened_by(watched: Watched) -> int:
    """All that were opened for a part are seen at the wait, and none is held on to after it."""
    assert watched.seen
    assert all(n == len(watched.opened) for n in watched.seen)
    return watched.there


def test_after_the_device_has_done_its_work(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorum_attention.devices.buffers.opened", lambda handle: handle)
    one, message, sums, wanted = backward()
    said = answer(one, message)
    assert isinstance(said, Done), said
    for name in NAMES:
        assert torch.allclose(sums[name], wanted[name])
    assert len(watched.opened) == 2
    assert opened_by(watched) == 0


@pytest.mark.parametrize("kind", [OutOfMemoryError, ValueError])
def test_also_where_a_part_fails(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Its kernels may still run."""

    def fails(*given: Any, **more: Any) -> None:
        raise kind("no")

    monkeypatch.setattr("quorum_attention.devices.buffers.opened", watched.open)
    monkeypatch.setattr(worker, "compute_block", fails)
    one, message, _, _ = backward()
    said = answer(one, message)
    assert isinstance(said, Failed)
    assert said.memory == (kind is OutOfMemoryError)
    assert len(watched.opened) == 11
    opened_by(watched)
    one.end()
    del one
    assert watched.there == 0
