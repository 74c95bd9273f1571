"""A worker lets go of what it holds when it has had nothing to do for a while."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.pool import Pool
from quorum_attention.pool.hired import Hired
from quorum_attention.pool.messages import Begin, Compute, Done, End, Failed
from quorum_attention.pool.parts import Part
from quorum_attention.pool.run import Coordinator
from quorum_attention.pool.worker import answer

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")


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


def test_it_says_what_was_new_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its first order of some sizes; and how long it opened memory. Which orders a worker gets
    is another matter, and on a busy machine another one each time."""
    parts: list[Part] = []
    said: list[tuple[Done, tuple[Any, ...]]] = []
    finished = Coordinator._finished

    def noted(self: Any, number: int, answer: Done) -> None:
        done = self._done

        def noted_part(part: Part, targets: Any) -> None:
            parts.append(part)
            done(part, targets)

        self._done = noted_part
        finished(self, number, answer)
        self._done = done
        rows = parts[-1].rows
        sizes = parts[-1].heads.length, rows.length.bit_length(), rows.start > 0
        said.append((answer, (number, *sizes)))

    monkeypatch.setattr(Coordinator, "_finished", noted)
    with Pool(["cpu", "cpu"], threads=1) as pool:
        for heads in (2, 2, 6, 6, 2):
            q = torch.randn(1, heads, 300, 8).share_memory_()
            qa.attention(q, q, q, devices=pool)
    met: set[tuple[Any, ...]] = set()
    for one, order in said:
        assert 0.0 < one.opening < one.seconds
        assert one.new == (order not in met)
        met.add(order)
    assert len(said) == len(parts) > len(met) > 1


@pytest.mark.parametrize("said", [Begin, End])
def test_a_pool_that_was_interrupted_as_it_spoke_loses_no_worker_and_no_memory(
    monkeypatch: pytest.MonkeyPatch, said: type
) -> None:
    """Some have heard that a pass begins or ends, and others have not."""
    send, heard = Hired.send, [0]

    def interrupted(self: Hired, message: object) -> bool:
        if isinstance(message, said):
            heard[0] += 1
            if heard[0] == 2:
                raise KeyboardInterrupt
        return send(self, message)

    with Pool(["cpu", "cpu"], threads=1) as pool:
        before: list[Any] = [worker.process.pid for worker in pool.workers]
        q = torch.randn(1, 4, 100, 8)
        monkeypatch.setattr(Hired, "send", interrupted)
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

    said = answer(Scarce(), Compute(1, 0, None))
    assert isinstance(said, Failed)
    assert said.memory
    assert not said.broken
