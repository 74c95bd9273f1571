"""Shared memory of results is used again when they are freed, and by nobody before."""

from __future__ import annotations

import gc
import mmap
import os
import random

import pytest
import torch

from quorum_attention.pool import rooms
from quorum_attention.pool.rooms import give_back, kept_room, result_for
from quorum_attention.pool.shared import InFile, Shared

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")
SHAPE = (2, 1 << 10, 1 << 10)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> object:
    gc.collect()
    give_back()
    yield
    gc.collect()
    give_back()


def file_of(tensor: torch.Tensor) -> str:
    handle = Shared.made(tensor).handle
    assert isinstance(handle, InFile)
    return handle.path


def test_used_again_when_it_is_freed() -> None:
    first, fresh = kept_room(SHAPE, torch.uint8)
    assert fresh
    second, fresh = kept_room(SHAPE, torch.uint8)
    assert fresh
    assert file_of(first) != file_of(second)
    path, view = file_of(first), first[1, 5:]
    del first
    _third, fresh = kept_room(SHAPE, torch.uint8)
    assert fresh  # a view is still in use
    del view
    again, fresh = kept_room((1 << 20,), torch.float16)
    assert not fresh
    assert again.shape == (1 << 20,)
    assert file_of(again) == path
    again.fill_(3)
    assert (torch.from_file(path, True, 1 << 20, dtype=torch.float16) == 3).all()


def test_given_back() -> None:
    def files() -> int:
        return sum(
            "memfd:quorum" in os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{n}")
        )

    before = files()
    kept_room(SHAPE, torch.uint8)
    assert files() > before
    give_back()
    assert files() == before


def test_small_ones_are_not_kept() -> None:
    for _ in range(2):
        _, fresh = kept_room((100, 10), torch.float32)
        assert fresh


@pytest.mark.parametrize("keep", [False, True])
def test_results(keep: bool) -> None:
    for turn in range(2):
        made, fresh = result_for(SHAPE, torch.uint8, torch.device("cpu"), keep)
        assert fresh == (not keep or turn == 0)
        assert isinstance(Shared.made(made).handle, InFile)
        del made


@pytest.mark.parametrize("seed", range(5))
def test_nobody_shares_a_room(seed: int) -> None:
    draw = random.Random(seed)
    held: list[tuple[torch.Tensor, int]] = []
    for value in range(60):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        made, _ = kept_room((draw.randint(1, 3), 1 << 20), torch.int8)
        made.fill_(value)
        held.append((made, value))
        # Memory is shared by whole pages, of each of which a byte is looked at.
        assert all(bool((t[:, :: mmap.PAGESIZE] == v).all()) for t, v in held)
    assert rooms._kept._free_bytes <= rooms._kept.most_bytes
