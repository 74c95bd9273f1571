"""Page locks: what is locked, that it is unlocked whatever happens, and what cannot be locked."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.execution.device import page_locks
from quorum_attention.execution.device.page_locks import PageLocks

Extent = tuple[int, int]


class Runtime:
    """The calls of CUDA's runtime that lock; refuses what begins at ``refused``."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refused: set[int] = set()
        self.cleared = 0

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert start not in self.locked
        if start in self.refused:
            return 712
        self.locked[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        del self.locked[start]
        return 0

    def clear(self) -> None:
        self.cleared += 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(page_locks, "_WORTH_LOCKING_BYTES", 1024)
    monkeypatch.setattr(page_locks, "_clear_last_cuda_error", made.clear)
    return made


def test_locked_within_the_block_and_not_after_it(runtime: Runtime) -> None:
    large, small = torch.zeros(1024), torch.zeros(16)
    with PageLocks([large, small]) as locks:
        assert runtime.locked == {large.data_ptr(): 4096}
        assert locks.covers(large)
        assert locks.covers(large[100:200])
        assert not locks.covers(small)
    assert not runtime.locked
    assert not locks.covers(large)


def test_unlocked_after_a_failure_too(runtime: Runtime) -> None:
    with pytest.raises(ZeroDivisionError), PageLocks([torch.zeros(1024)]):
        raise ZeroDivisionError
    assert not runtime.locked


def test_what_overlaps_is_locked_once(runtime: Runtime) -> None:
    """Views of one packed tensor, as of a projection."""
    packed = torch.zeros(3, 4096)
    views = [packed[0], packed[:2], packed[1, 100:3000], packed[2, ::2]]
    with PageLocks(views) as locks:
        starts = {packed.data_ptr(): 2 * 4096 * 4, packed[2].data_ptr(): 4095 * 4}
        assert runtime.locked == starts
        assert all(locks.covers(view) for view in views)
        assert not locks.covers(packed)


def test_what_cannot_be_locked_stays_pageable(runtime: Runtime) -> None:
    """A read-only map, say; the error it leaves behind is not the next launch's."""
    one, other = torch.zeros(1024), torch.zeros(1024)
    runtime.refused = {one.data_ptr()}
    with PageLocks([one, other]) as locks:
        assert not locks.covers(one)
        assert locks.covers(other)
        assert runtime.cleared == 1
    assert not runtime.locked


def test_nothing_is_asked_of_the_runtime_for_nothing(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", None)
    with PageLocks([torch.zeros(16)]) as locks:
        assert not locks.covers(torch.zeros(16))
    # Nor for what is elsewhere.
    with PageLocks([torch.empty(1 << 30, device="meta")]):
        pass
