"""Memory of results that is kept between calls: who may use it when, and that it is
given back; where accumulators and results live."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers.fake_device import FakeDevice
from helpers.late_cuda import Driver

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.device import allocate
from quorum_attention.execution.device.allocate import empty, empty_accumulator
from quorum_attention.execution.device.cuda import Cuda
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.device.page_locks import WORTH_LOCKING_BYTES
from quorum_attention.execution.device.pinned_pool import Locker, PinnedPool

MIB = 1 << 20


class Pooled(Driver):
    """``waits``: how often the host waited for the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.now = 0, 0.0

    def wait(self) -> None:
        self.waits += 1

    def kept(self, most_bytes: int = 64 * MIB) -> PinnedPool:
        locker = Locker(self.lock, self.cudaHostUnregister, self.wait)
        return PinnedPool(locker, most_bytes, lambda: self.now)


@pytest.fixture
def driver() -> Iterator[Pooled]:
    yield Pooled()
    gc.collect()


def fresh(n_bytes: int) -> torch.Tensor:
    return torch.zeros(n_bytes, dtype=torch.uint8)


def test_what_is_free_is_locked_once_and_used_again(driver: Pooled) -> None:
    kept = driver.kept()
    assert kept.take(MIB) is None
    lent = kept.lend(fresh(MIB))
    address = lent.data_ptr()
    assert not driver.locked
    del lent
    for round_ in range(3):
        again = kept.take(MIB - 4096 * round_)
        assert again is not None
        assert again.data_ptr() == address
        assert again.nbytes == MIB - 4096 * round_
        assert driver.locked == {address: address + MIB}
        # Memory that was never locked has no copies under way.
        assert driver.waits == round_
        del again
    kept.give_back()
    assert not driver.locked
    assert kept.take(MIB) is None


def test_what_is_used_is_never_lent_again_nor_given_back(driver: Pooled) -> None:
    kept = driver.kept()
    lent = kept.lend(fresh(MIB)).fill_(3)
    others = [
        lent.numpy(),
        lent.view(torch.float16),
        torch.utils.dlpack.from_dlpack(lent),
    ]
    del lent
    while others:
        gc.collect()
        kept.give_back()
        assert kept.take(MIB) is None
        assert int(np.asarray(others[-1]).reshape(-1).view(np.uint8)[MIB // 2]) == 3
        others.pop()
    assert kept.take(MIB) is not None
    gc.collect()
    kept.give_back()


def test_it_is_given_back_when_unused_or_too_much(driver: Pooled) -> None:
    kept = driver.kept(16 * MIB)
    large = fresh(17 * MIB)
    assert kept.lend(large) is large, "more than is kept"
    for _ in range(2):
        held = []
        for _ in range(10):
            found = kept.take(MIB)
            held.append(kept.lend(fresh(MIB)) if found is None else found)
        del held, found
    assert len(driver.locked) == 10
    driver.now = 9.0
    again = kept.take(MIB)
    driver.now = 12.0
    assert kept.take(30 * MIB) is None, "only to look for what is old"
    assert len(driver.locked) == 1
    del again
    held = [kept.lend(fresh(4 * MIB)) for _ in range(10)]
    del held
    assert sum(room.memory.nbytes for room in kept._free) <= 16 * MIB
    used: list[torch.Tensor | None] = []
    while len(used) < 8:  # more than is kept, all of it locked
        held = [kept.lend(fresh(4 * MIB)) for _ in range(4)]
        del held
        used += [kept.take(4 * MIB) for _ in range(4)]
    assert driver.locked_bytes() >= 24 * MIB
    used.clear()
    assert kept.take(30 * MIB) is None, "only to look for what is too much"
    assert driver.locked_bytes() <= 16 * MIB
    kept.give_back()
    assert not driver.locked


def test_threads_never_share_memory(driver: Pooled) -> None:
    """Random sizes by several threads; each writes its own number, and reads it."""
    kept, wrong = driver.kept(4 * MIB), []

    def work(number: int) -> None:
        draw, held = random.Random(number), []
        for _ in range(300):
            size = draw.choice((4096, 8192, 65536, 1 << 18))
            found = kept.take(size)
            held.append(
                (kept.lend(fresh(size)) if found is None else found).fill_(number)
            )
            del found
            if len(held) > draw.randrange(8):
                wrong.extend(held.pop(draw.randrange(len(held))).ne(number).nonzero())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    kept.give_back()
    assert not wrong
    assert not driver.locked


def test_results_beside_a_gpu_lie_in_it(
    driver: Pooled, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Cuda()
    backend.pinned = driver.kept()
    monkeypatch.setitem(BACKENDS, "cuda", backend)

    def result(rows: int) -> torch.Tensor:
        return allocate.empty_result((1, 2, rows, 64), torch.float16, HOST, "it", GPU)

    rows = WORTH_LOCKING_BYTES // 128
    first = result(rows)
    address = first.data_ptr()
    assert address % 4096 == 0
    assert first.is_contiguous()
    del first
    second = result(rows)
    assert second.data_ptr() == address
    assert not driver.locked, "it is locked while the first tasks compute"
    left = backend.pinned.unlocked_at(address)
    assert left is not None
    assert left.n_bytes == second.nbytes
    left.locked = backend.pinned.locker.lock(address, second.nbytes)
    # Where host memory is short, what is kept is given back first.
    del second
    tried: list[int] = []

    def short(*given):  # type: ignore[no-untyped-def]
        tried.append(len(driver.locked))
        if len(tried) == 1:
            raise OutOfMemoryError("missing")
        return empty(*given)

    monkeypatch.setattr(allocate, "empty", short)
    assert result(4 * rows) is not None
    assert tried == [1, 0]


# --- Where accumulators and results live, whatever device they are on --------------------------

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_host_memory_that_is_not_there_is_refused_with_what_is_missing() -> None:
    with FakeDevice(memory_bytes=1000):
        assert empty((10, 25), torch.float32, HOST, "the output").shape == (10, 25)
        with pytest.raises(OutOfMemoryError) as raised:
            empty((251,), torch.float32, HOST, "the output")
    said = str(raised.value)
    assert said.startswith(
        "the output takes 1004 B of host memory and 4 B of that is missing"
    )


def test_accumulators_that_cannot_be_page_locked_are_pageable(monkeypatch) -> None:
    """torch's own failure, beside a GPU: slower, and no failure of the call."""
    asked = []
    make = torch.empty

    def refusing(*sizes, pin_memory=False, **more):  # type: ignore[no-untyped-def]
        asked.append(pin_memory)
        if pin_memory:
            raise torch.OutOfMemoryError("no more page-locked memory")
        return make(*sizes, **more)

    monkeypatch.setattr(torch, "empty", refusing)
    made = empty_accumulator((3, 4), torch.float32, HOST, GPU)
    assert asked == [True, False]
    assert made.shape == (3, 4)
    assert empty_accumulator((2,), torch.float64, HOST, HOST).dtype == torch.float64
    assert asked == [True, False, False]
