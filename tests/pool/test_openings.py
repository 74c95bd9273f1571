"""Shared memory is mapped once, seen as it is, and let go of when it is of no use."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from quorum_attention.pool.openings import Openings
from quorum_attention.pool.shared import Shared, room

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")


def mapped() -> int:
    """How many mappings of such memory this process has."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:quorum-attention")


def test_once_for_all_views() -> None:
    before = mapped()
    openings = Openings()
    tensor = room((4, 3, 500, 8), torch.float16)
    tensor.copy_(torch.randn(4, 3, 500, 8))
    views = [tensor, tensor[1:3, 2], tensor[..., 7:].transpose(0, 2), tensor.view(torch.int16)]
    there = [openings.open(Shared.made(view).handle) for view in views]
    for one, other in zip(there, views, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    assert mapped() == before + 2  # here, and once there
    there[0][3, 1] = 5
    assert (tensor[3, 1] == 5).all()


def test_let_go_of() -> None:
    gc.collect()
    before = mapped()
    openings = Openings()
    first, second = (room((1 << 16,), torch.uint8) for _ in range(2))
    assert mapped() == before + 2
    kept = openings.open(Shared.made(first).handle)
    openings.open(Shared.made(second).handle)
    openings.forget_unused()  # the pass that opened both
    openings.open(Shared.made(second).handle)
    openings.forget_unused()  # another one, which has no use for the first
    assert mapped() == before + 4  # a tensor still refers to it
    kept[7] = 3
    assert first[7] == 3
    del kept
    waited(lambda: mapped() == before + 3)
    openings.forget_gone()
    assert mapped() == before + 3  # it is still there
    del second
    openings.forget_gone()
    waited(lambda: mapped() == before + 1)
    del first
    gc.collect()
    assert mapped() == before


def waited(done: object) -> None:
    """A thread takes mappings apart."""
    until = time.monotonic() + 5
    while not done():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)
