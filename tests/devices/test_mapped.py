"""Shared memory is mapped once, seen as it is, and let go of when it is of no use."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from quorum_attention.devices.buffers import MappedBuffers, handle_of, room
from quorum_attention.execution.device.page_locks import Locker, addresses


class Driver:
    """Locks and unlocks, made up."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, n_bytes: int) -> bool:
        assert n_bytes > 0
        assert not any(a < address + n_bytes and address < a + n for a, n in self.locked.items())
        self.locked[address] = n_bytes
        return True

    def unlock(self, address: int) -> None:
        del self.locked[address]

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether it is in a locked range, all of it."""
        start, stop = addresses(tensor)
        return any(a <= start and stop <= a + n for a, n in self.locked.items())


@pytest.mark.parametrize("seed", range(8))
def test_memory_is_locked_once_within_a_bound_and_unlocked(seed: int) -> None:
    draw = random.Random(seed)
    driver = Driver()
    most_bytes, locked = draw.choice([1 << 40, 12 << 20]), 0
    openings = MappedBuffers(Locker(driver.lock, driver.unlock, lambda: None), most_bytes)
    shape = (4, 6, draw.choice([1000, 2048, 3333]), 64)
    every = [room(shape, torch.uint8) for _ in range(4)]
    for _ in range(40):
        if draw.random() < 0.1:
            every[draw.randrange(4)] = room(shape, torch.uint8)
        openings.begin_pass()
        for tensor in draw.sample(every, draw.randint(1, 4)):
            low, high = sorted(draw.sample(range(7), 2))
            rows = draw.choice([slice(None), slice(draw.randint(0, 500), None)])
            handle = handle_of(draw.choice([tensor, tensor[draw.randrange(4)][low:high, rows]]))
            there = openings.open(handle)
            result = draw.random() < 0.5
            openings.lock(handle, result=result)
            locked += driver.covers(there)
            assert sum(driver.locked.values()) <= most_bytes
    assert locked
    del tensor, there
    every.clear()
    gc.collect()
    openings.forget_gone()
    assert not driver.locked
