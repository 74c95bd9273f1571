"""A worker lets go of what it holds when it has had nothing to do for a while."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.call.block import Block, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices import Pool
from quorum_attention.devices.buffers import MappedBuffers
from quorum_attention.devices.worker import BlockWorker, Compute, PassSpec
from quorum_attention.execution.device.lookup import HOST


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


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: bytearray(1 << 60),
        lambda: mmap.mmap(-1, 1 << 60),
    ],
)
def test_memory_that_runs_out_beside_the_call_gives_the_part_back_too(
    fail: Callable[[], object],
) -> None:
    """Where it opens tensors, or makes room for a gradient: torch's allocator for the CPU raises a
    plain RuntimeError there."""

    class Scarce(MappedBuffers):
        def open(self, handle: Any) -> torch.Tensor:
            fail()
            raise AssertionError

    block = Block(Interval(0, 1), Interval(0, 1), Interval(2, 6), Interval(0, 6))
    tensors: Any = {"query": None}
    spec = PassSpec(1, True, WholeCall((1,), 2, 2, 6, 6), tensors=tensors)
    said = BlockWorker(HOST, Scarce()).answer(Compute(spec, block))
    assert said.memory
    assert not said.broken
