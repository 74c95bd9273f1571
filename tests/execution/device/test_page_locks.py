"""Page locks, with a made-up runtime: what is locked when, and that nothing stays
locked."""

from __future__ import annotations

import mmap
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.late_cuda import Driver
from helpers.processes import until

from quorum_attention.execution.device import page_locks
from quorum_attention.execution.device.page_locks import PAGE_BYTES, Copied, PageLocks
from quorum_attention.execution.device.pinned_pool import Locker, PinnedPool

PIECE = WORTH = 1 << 16


def locking(  # type: ignore[no-untyped-def]
    tensors, *, made=(), given=(), by_address=(), only_read=(), late=False
) -> PageLocks:
    """Page locks of tensors, some of which are named."""

    kinds = ([*made, *given], made, by_address, only_read)
    copied = [
        Copied(t, *(any(t is one for one in some) for some in kinds)) for t in tensors
    ]
    return PageLocks(copied, late=late)


class Runtime(Driver):
    """Registers and unregisters; ``hold`` keeps it from beginning, ``begun`` says that
    it would."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []
        self.only_read: set[int] = set()
        self.hold = threading.Event()
        self.hold.set()
        self.begun = threading.Event()

    def cudaHostRegister(self, start: int, n_bytes: int, flags: int) -> int:
        self.begun.set()
        assert self.hold.wait(20)
        if start in self.only_read and flags != 8:
            return 1
        self.order.append(start)
        return super().cudaHostRegister(start, n_bytes, flags)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(page_locks, "WORTH_LOCKING_BYTES", WORTH)
    monkeypatch.setattr(page_locks, "PIECE_BYTES", PIECE)
    yield found
    assert not found.locked, "left locked"


def made(n_bytes: int, value: int = 7) -> torch.Tensor:
    """Some memory that holds something."""
    return torch.full((n_bytes,), value, dtype=torch.uint8)


def result(heads: int, rows: int, width: int = 64) -> torch.Tensor:
    """A result as a call makes it: of bytes, at the beginning of a page."""
    room = made(heads * rows * width + PAGE_BYTES)
    at = -room.data_ptr() % PAGE_BYTES
    return room[at : at + heads * rows * width].view(1, heads, rows, width)


@pytest.mark.parametrize("rows", [1, 63, 64, 100, 1024, 1025, 4096])
def test_no_copy_of_a_head_reaches_from_one_piece_into_another(
    runtime: Runtime, rows: int
) -> None:
    """The driver refuses such a copy."""
    tensor = result(200_000 // rows + 3, rows)
    with locking([tensor], made=[tensor]) as locks:
        assert locks.covers(tensor)
        pieces = sorted(runtime.locked.items())
        assert runtime.locked_bytes() == tensor.nbytes
        for head in tensor[0]:
            first, last = head.data_ptr(), head.data_ptr() + head.nbytes
            assert any(start <= first and last <= stop for start, stop in pieces)
    if rows % 64 == 0:
        assert len(pieces) > 5


@pytest.mark.parametrize("rows", [1024, 4096, 1000])
def test_what_is_left_is_unlocked_once_its_copies_are_made(
    runtime: Runtime, rows: int
) -> None:
    """Piece by piece: a piece that other heads lie in as well waits for those."""
    output, query = result(12, rows), made(12 * rows * 64).view(1, 12, rows, 64)
    with locking([query, output], made=[output], by_address=[query]) as locks:
        assert locks.covers(query)
        assert locks.covers(output)
        happened = threading.Event()
        locks.release([query[0, :7], output[0, :7]], happened.is_set)
        time.sleep(5e-3)
        assert (
            runtime.locked_bytes(query) == runtime.locked_bytes(output) == query.nbytes
        )
        happened.set()
        if rows % 64 == 0:
            until(lambda: runtime.locked_bytes(query) < query.nbytes)
            until(lambda: runtime.locked_bytes(output) < output.nbytes)
        for tensor in (query, output):
            assert runtime.locked_bytes(tensor[:, 7:]) == tensor[:, 7:].nbytes
            assert locks.covers(tensor[:, 7:])
        locks.release([query[0, 7:], output[0, 7:]], happened.is_set)
        until(lambda: not runtime.locked)


def test_what_several_tensors_share_is_locked_to_the_end(runtime: Runtime) -> None:
    packed, wide = result(12, 1024), made(4 * PIECE)
    query, key = packed[:, :8], packed[:, 4:]
    shared = wide.expand(3, 4 * PIECE).view(1, 3, -1, 64)
    with locking([query, key, shared], by_address=[query, key, shared]) as locks:
        assert locks.covers(shared[0, 0])
        assert locks.covers(packed)
        locks.release([query[0, :4], shared[0, :1]], lambda: True)
        time.sleep(5e-3)
        assert runtime.locked_bytes() == packed.nbytes + wide.nbytes
    # A result that shares memory with an input is not written to.
    with locking([packed, query], made=[query]) as locks:
        assert locks.covers(query)
    assert bool((packed == 7).all())


@pytest.mark.parametrize("rows", [1024, 1000])
def test_memory_that_holds_nothing_is_written_to_before_it_is_handed_out(
    runtime: Runtime, rows: int
) -> None:
    tensor, other = result(12, rows), made(3 * PIECE)
    with locking([tensor, other], made=[tensor]) as locks:
        for number, head in enumerate(tensor[0]):
            assert locks.covers(head)
            assert bool((head == 0).all())
            head.fill_(number + 1)
        for number, head in enumerate(tensor[0]):
            assert bool((head == number + 1).all())
    assert bool((other == 7).all())


def test_what_is_only_read_is_locked_as_that(runtime: Runtime) -> None:
    """A file that is mapped to be read: the driver refuses to lock it in the usual way.
    What is written to as well is not locked for reading."""
    tensor, both = made(3 * PIECE), made(3 * PIECE)
    runtime.only_read = {
        t.data_ptr() + at for t in (tensor, both) for at in range(t.nbytes)
    }
    given = [tensor, both, both[100:]]
    with locking(given, by_address=given, only_read=[tensor, both]) as locks:
        assert locks.covers(tensor)
        assert not locks.covers(both)


def test_a_private_mapping_of_a_file_is_left_pageable(
    runtime: Runtime, tmp_path: Path
) -> None:
    """The system would copy it. A shared one is locked."""
    path = tmp_path / "file"
    path.write_bytes(b"7" * (4 * PIECE))
    with open(path, "r+b") as file:
        mappings = [
            mmap.mmap(file.fileno(), 0, access=a)
            for a in (mmap.ACCESS_COPY, mmap.ACCESS_WRITE)
        ]
    private, shared = (
        torch.frombuffer(mapping, dtype=torch.uint8) for mapping in mappings
    )
    with locking([private, shared], by_address=[private, shared]) as locks:
        assert not locks.covers(private)
        assert locks.covers(shared)


def test_interrupts_on_the_way_out_wait_until_all_is_let_go(runtime: Runtime) -> None:
    """The memory is freed next: nothing may lock it, or write to it, after that."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        if len(interrupts) == 3:
            signal.setitimer(signal.ITIMER_REAL, 0)
            runtime.hold.set()
        raise KeyboardInterrupt

    def release(tensor: torch.Tensor) -> None:
        with locking([tensor], made=[tensor]):
            assert runtime.begun.wait(20)
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            raise ValueError("mine")

    before = signal.signal(signal.SIGALRM, interrupt)
    runtime.hold.clear()
    try:
        with pytest.raises(KeyboardInterrupt):
            release(result(50, 1024))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(interrupts) == 3
    assert len(runtime.order) == 1
    assert not runtime.locked


@pytest.mark.parametrize("refused", [False, True])
def test_memory_of_the_pool_is_one_piece_that_stays_locked(
    runtime: Runtime, refused: bool
) -> None:
    """A call that used it for the second time waited for its lock before it began:
    0.05 s a gibibyte."""
    locker = Locker(runtime.lock, runtime.cudaHostUnregister, lambda: None)
    pool = PinnedPool(locker, 1 << 30)
    lent = pool.lend(made(64 * PIECE))
    address = lent.data_ptr()
    del lent
    memory = pool.take(63 * PIECE, lock_later=True)
    assert memory is not None
    assert memory.data_ptr() == address
    output = memory.view(1, 63, -1, 64)
    runtime.refused = lambda start: refused
    locks = PageLocks([Copied(output, True, True)], late=True, pool=pool)
    with locks:
        assert not runtime.locked, "it is locked when the device has something to do"
        locks.begin()
        assert locks.covers(output) != refused
        locks.release(output[0], lambda: True)
        time.sleep(5e-3)
    assert bool((output == 7).all()), "it may hold something"
    assert runtime.locked_bytes() == (0 if refused else 64 * PIECE)
    del memory, output, locks
    runtime.refused = lambda start: False
    again = pool.take(64 * PIECE)
    assert again is not None
    assert again.data_ptr() == address
    assert runtime.locked_bytes() == 64 * PIECE
    del again
    pool.give_back()
