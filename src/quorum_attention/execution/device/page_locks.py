"""Page-locks host memory ahead of the copies from and to it.

Locking memory that was never written to is slow: the driver faults in its pages on one core, which
takes 0.3 s a gibibyte on the hosts measured. So the memory that a call makes for its results is
written to by many threads first (0.05 s a gibibyte), and then locked (another 0.05). A thread does
both piece by piece while the first tasks compute. A copy waits for the piece that it needs, and
that piece is then locked next.

The driver refuses a copy that reaches from one locked piece into another. So results are cut into
pieces only between heads that begin at pages (``empty_result``). Tensors that were there before are
cut at any page if they are copied by address: such a copy is cut there too (``parts``).

While the driver locks memory, every other call to it waits, and not for its turn. So the thread may
begin late, when the device has something to do (``begin``), and rests between pieces unless
a copy waits for one. Until a piece is locked its copies go through buffers (cuda_mover.py).

A call of 0.1 s cannot hide that. So the memory of results is kept for the next call when they are
freed, touched and locked as one piece, up to a limit (``PinnedPool``).
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.threads import started

# Locking takes about 0.05 s/GiB and makes copies eight times as fast. A copy of memory that is not
# locked also makes the host wait for all that the device has to do before it.
WORTH_LOCKING_BYTES = 1 << 20
# How often it is looked whether copies have been made.
_POLL_SECONDS = 5e-4
# What is locked at a time, at least: a copy may have to wait for so much.
PIECE_BYTES = 16 << 20
# After a piece the thread rests for so many times as long as that took.
_REST = 2.0
# cudaHostRegisterReadOnly: memory that the device only reads, such as a file mapped to be read.
_ONLY_READ = 8
PAGE_BYTES = 4096
_TABLE = "/proc/self/maps"
# Of Linux on x86-64; elsewhere asking for them may do nothing.
HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor (..., rows, width) that is copied from or to.

    Attributes:
        is_result: the results of the call are copied to it. It is (*batch, heads, ...).
        fresh: it holds nothing yet. Ask ``PageLocks`` before writing to it.
        by_address: it is copied by address, and never across a cut (``PageLocks.parts``).
        only_read: nothing is copied to it.
    """

    tensor: torch.Tensor
    is_result: bool = False
    fresh: bool = False
    by_address: bool = False
    only_read: bool = False


@dataclass(slots=True, eq=False)
class _LockedPiece:
    """Consecutive bytes of host memory that are locked together.

    Attributes:
        start, stop: addresses, [start, stop).
        share: where it begins in its tensor, from 0 to 1. Pieces are locked in this order, because
            copies reach them about that far into a pass; of equals, those that are read first.
        fresh: it has not been written to, and will not be before it is settled.
        only_read: the device writes nothing to it.
        needed: bytes that copies may still touch; ``start`` to ``stop`` at first. None: it belongs
            to several tensors, or to one whose heads share memory, and is locked to the end.
        settled: it is decided whether it is locked.
        locked: it is locked.
        urgent: a copy waits for it.
    """

    start: int
    stop: int
    share: float
    fresh: bool
    only_read: bool
    needed: int | None
    settled: bool = False
    locked: bool = False
    urgent: bool = False


class PageLocks:
    """Page-locks host tensors for the length of a ``with`` block, one piece after the other.

    What cannot be locked (a file that is mapped to be written to, a system limit) is left pageable.
    So are files of which the process has a private mapping: to lock that copies it, at 2 GB/s.
    Everything locked here is unlocked at the end of the block, and what is not needed any more
    before that (``release``), so that leaving the block need not wait for it.

    Args:
        tensors: what is copied from or to. Only those in host memory, large and not locked yet are
            locked.
        late: nothing is locked before ``begin``, but what a copy waits for.
    """

    def __init__(self, tensors: Iterable[Copied], *, late: bool = False) -> None:
        self._pieces = _pieces(tensors)
        self._starts = [piece.start for piece in self._pieces]
        self._turns = deque(sorted(self._pieces, key=lambda piece: (piece.share, piece.fresh)))
        self._changed = threading.Condition()
        # What is not needed any more once something has happened.
        self._leaving: deque[tuple[Callable[[], bool], _LockedPiece]] = deque()
        # Whether the thread is at a piece; together with what is left, under the lock.
        self._at_work = False
        self._closed, self._begun = False, not late
        # Until when the thread rests.
        self._rests_until = 0.0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PageLocks:
        if self._pieces:
            runtime, device = torch.cuda.cudart(), torch.cuda.current_device()
            self._thread = threading.Thread(
                target=self._work, args=(runtime, device), name="page locks", daemon=True
            )
            try:
                if not started(self._thread):
                    self._lock_nothing()
            except BaseException:
                # An interrupt, maybe: the thread may be at a piece already.
                self._let_go()
                raise
        return self

    def _lock_nothing(self) -> None:
        """Leave everything pageable: there is no thread that could lock it."""
        self._thread = None
        self._pieces.clear()
        self._starts.clear()
        self._turns.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        self._let_go()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _let_go(self) -> None:
        """Wait for the piece that the thread is at, then unlock everything.

        The caller frees the memory next, so an interrupt (Ctrl-C) is raised only after that.
        """
        runtime: Any = torch.cuda.cudart()
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._closed = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._at_work)
                for piece in self._pieces:
                    if piece.locked:
                        piece.locked = False
                        runtime.cudaHostUnregister(piece.start)
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def begin(self) -> None:
        """Lock one piece after the other from now on."""
        if not self._begun:
            with self._changed:
                self._begun = True
                self._changed.notify_all()

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (on the host) is page-locked, here or by its owner.

        It waits until that is decided.
        """
        start, stop = address_range(tensor)
        if not self._pieces_of(start, stop):
            return is_locked(tensor)
        return all(locked for _, _, locked in self.parts(start, stop - start, wait=True))

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether any part of ``tensor`` (on the host) is among what is to be locked here."""
        return bool(self._pieces_of(*address_range(tensor)))

    def release(self, tensors: Iterable[torch.Tensor], happened: Callable[[], bool]) -> None:
        """Unlock what only belongs to ``tensors``, which no copy will touch from now on.

        Args:
            tensors: heads of what is locked, (heads, n, width); each head is named once.
            happened: whether the copies that were given before have been made.
        """
        free: list[_LockedPiece] = []
        for tensor in tensors:
            start, stop = address_range(tensor)
            for piece in self._pieces_of(start, stop) if tensor.device.type == "cpu" else ():
                if piece.needed is not None:
                    piece.needed -= min(stop, piece.stop) - max(start, piece.start)
                    if piece.needed == 0:
                        free.append(piece)
        if free:
            with self._changed:
                for piece in [piece for piece in free if piece in self._turns]:
                    self._turns.remove(piece)
                    piece.settled = True
                self._leaving.extend((happened, piece) for piece in free)
                self._changed.notify_all()

    def parts(self, start: int, n_bytes: int, *, wait: bool = False) -> list[tuple[int, int, bool]]:
        """The memory from address ``start`` on, cut where two pieces meet.

        It waits until it is decided whether what holds nothing yet is locked; with ``wait`` of
        everything.

        Returns:
            (address, bytes, whether it is locked here) of each part.
        """
        found, stop = [], start + n_bytes
        pieces = self._pieces_of(start, stop)
        unsettled = [p for p in pieces if not p.settled and (wait or p.fresh)]
        if unsettled:
            self._await(unsettled)
        for piece in pieces:
            if piece.start > start:  # before the piece
                found.append((start, piece.start - start, False))
                start = piece.start
            end = min(piece.stop, stop)
            found.append((start, end - start, piece.locked))
            start = end
        if start < stop:
            found.append((start, stop - start, False))
        return found

    def _pieces_of(self, start: int, stop: int) -> list[_LockedPiece]:
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, stop)
        return [piece for piece in self._pieces[first:last] if piece.stop > start]

    def _await(self, pieces: list[_LockedPiece]) -> None:
        """Have ``pieces`` locked before all others, and wait until they are settled."""
        with self._changed:
            waiting = [piece for piece in pieces if piece in self._turns]
            for piece in waiting:
                self._turns.remove(piece)
                piece.urgent = True
            self._turns.extendleft(reversed(waiting))
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(piece.settled for piece in pieces))

    def _work(self, runtime: Any, device: int) -> None:
        """Lock piece after piece, and unlock what is left; run by the thread."""
        try:
            torch.cuda.set_device(device)
            private: list[tuple[int, int]] | None = None
            while (found := self._next()) is not None:
                piece, lock = found
                began, locked = time.monotonic(), False
                if not lock:
                    runtime.cudaHostUnregister(piece.start)
                else:
                    if piece.fresh:
                        _touch(piece)
                    elif private is None:
                        private = private_files()
                    if not any(a < piece.stop and piece.start < b for a, b in private or ()):
                        locked = _lock(runtime, piece)
                with self._changed:
                    piece.locked, piece.settled = locked, True
                    self._at_work = False
                    now = time.monotonic()
                    self._rests_until = now + _REST * (now - began)
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
        finally:
            # After an error nothing more is locked, so waiting for it would not end.
            with self._changed:
                self._turns.clear()
                self._at_work = False
                for piece in self._pieces:
                    piece.settled = True
                self._changed.notify_all()

    def _next(self) -> tuple[_LockedPiece, bool] | None:
        """The next piece, and whether to lock or to unlock it; waits for one. None at the end."""
        with self._changed:
            while not self._closed:
                rest = self._rests_until - time.monotonic()
                if self._turns and (self._turns[0].urgent or (self._begun and rest <= 0)):
                    self._at_work = True
                    return self._turns.popleft(), True
                if self._leaving and self._leaving[0][0]():
                    piece = self._leaving.popleft()[1]
                    if piece.locked:
                        piece.locked = False
                        self._at_work = True
                        return piece, False
                else:
                    until = [_POLL_SECONDS] if self._leaving else []
                    until += [rest] if self._turns and self._begun else []
                    self._changed.wait(min(until, default=None))
            return None


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses [start, stop) that ``tensor`` spans."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def is_locked(tensor: torch.Tensor) -> bool:
    """Whether a host tensor is page-locked at both ends.

    torch's ``is_pinned`` asks about the first byte of the storage, which need not be the tensor's:
    of memory that several processes share, each locks its own part.
    """
    if not tensor.nbytes:
        return bool(tensor.is_pinned())
    start, stop = address_range(tensor)
    return all(
        torch.frombuffer((ctypes.c_char * 1).from_address(at), dtype=torch.uint8).is_pinned()
        for at in (start, stop - 1)
    )


def _pieces(tensors: Iterable[Copied]) -> list[_LockedPiece]:
    """What is worth locking of ``tensors``, by address. Where some overlap they are one range."""
    ranges: list[tuple[int, int, list[Copied]]] = []
    # Small tensors are asked as well: they may be parts of large ones.
    host = [c for c in tensors if c.tensor.device.type == "cpu" and c.tensor.nbytes]
    for one in sorted(host, key=lambda copied: address_range(copied.tensor)):
        if is_locked(one.tensor):
            continue
        start, stop = address_range(one.tensor)
        if ranges and start < ranges[-1][1]:
            first, last, others = ranges.pop()
            ranges.append((first, max(last, stop), [*others, one]))
        else:
            ranges.append((start, stop, [one]))
    large = [found for found in ranges if found[1] - found[0] >= WORTH_LOCKING_BYTES]
    return [piece for found in large for piece in _cut(*found)]


def _cut(start: int, stop: int, tensors: Sequence[Copied]) -> list[_LockedPiece]:
    """The range of ``tensors`` as pieces that are large enough to be worth locking.

    A result that shares no memory is cut at multiples of a head, if those are between pages: no
    copy reaches across. One that is locked as a whole, or head by head, is not needed before the
    inputs of these heads.
    """
    one, alone = tensors[0], len(tensors) == 1
    fresh, dense = alone and one.fresh, alone and one.tensor.is_contiguous()
    head = 0
    if fresh or (dense and one.is_result):
        head = math.prod(one.tensor.shape[-2:]) * one.tensor.element_size()
    cuts = range(0)
    if head > 0 and start % PAGE_BYTES == 0 and head % PAGE_BYTES == 0:
        size = round_up(PIECE_BYTES, head)
        cuts = range(start + size, stop, size)
    elif head == 0 and all(tensor.by_address for tensor in tensors):
        # The last piece takes what is left: nothing shorter than a piece.
        cuts = range(start - start % PAGE_BYTES + PIECE_BYTES, stop - PIECE_BYTES + 1, PIECE_BYTES)
    only_read = all(tensor.only_read for tensor in tensors)
    return [
        _LockedPiece(
            low,
            high,
            ((high if head > 0 and not fresh else low) - start) / (stop - start),
            fresh,
            only_read,
            high - low if dense else None,
        )
        for low, high in pairwise([start, *cuts, stop])
    ]


def _lock(runtime: Any, piece: _LockedPiece) -> bool:
    """Page-lock ``piece``, if that can be done.

    A refusal sets CUDA's last error, but only for this thread, which runs no kernel.
    """
    ways = (0, _ONLY_READ) if piece.only_read else (0,)
    n_bytes = piece.stop - piece.start
    return any(int(runtime.cudaHostRegister(piece.start, n_bytes, way)) == 0 for way in ways)


class MappedRange(NamedTuple):
    """A run of addresses that are mapped alike.

    Attributes:
        start, stop: first address, and the one after the last.
        writable: whether it may be written.
        shared: whether writes go to the file.
        file: device and inode of the mapped file; None where there is none.
        offset: position of ``start`` in the file, in bytes.
        path: of the file, as it was called when it was mapped; None where there is none.
    """

    start: int
    stop: int
    writable: bool
    shared: bool
    file: tuple[str, int] | None
    offset: int
    path: str | None = None


def mapped_ranges() -> list[MappedRange]:
    """All mappings of this process, by ascending address; none where no table of them is."""
    try:
        with open(_TABLE, encoding="utf-8", errors="replace") as lines:
            return [_parsed(line) for line in lines]
    except OSError:
        return []


def _parsed(line: str) -> MappedRange:
    fields = line.split(maxsplit=5)
    start, stop = (int(part, 16) for part in fields[0].split("-"))
    path = fields[5].strip() if len(fields) > 5 else ""
    # Mappings of device nodes are a driver's memory: their offsets are no positions in a file.
    device_node = path.startswith("/dev/") and not path.startswith("/dev/shm/")
    is_file = path.startswith("/") and not device_node and fields[4] != "0"
    return MappedRange(
        start, stop, fields[1][1] == "w", fields[1][3] == "s",
        (fields[3], int(fields[4])) if is_file else None, int(fields[2], 16),
        path if is_file else None,
    )  # fmt: skip


def private_files() -> list[tuple[int, int]]:
    """The addresses [start, stop) of large files that this process has mapped privately.

    To lock such memory makes the system copy it. Where the system does not say: nothing.
    """
    found = [(m.start, m.stop) for m in mapped_ranges() if m.file is not None and not m.shared]
    return [(start, stop) for start, stop in found if stop - start >= WORTH_LOCKING_BYTES]


def ask_for_huge_pages(memory: torch.Tensor) -> None:
    """Ask the system to back ``memory``, which has not been touched, by huge pages.

    With those a gibibyte is touched in 0.03 s instead of 0.04, locked in 0.02 instead of 0.04, and
    freed in 0.002 instead of 0.04 (one H200's host, 16 threads). It is advice: the system may not
    follow it, and systems without it are not asked.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), _MADV_HUGEPAGE)


def _touch(piece: _LockedPiece) -> None:
    """Write to all bytes of ``piece``, with as many threads as torch has. (Four of Python's threads
    made short calls slower.)"""
    count = piece.stop - piece.start
    memory = (ctypes.c_char * count).from_address(piece.start)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()


# What is kept at most, and of the host's memory.
_MOST_BYTES = 4 << 30
_MOST_OF_HOST = 1 / 32
# What no call has used for so many seconds is given back by the next.
_SECONDS = 10.0
# A result takes memory of at most so many times its size.
_LARGEST_ROOM = 1.25


@dataclass(slots=True, eq=False)
class _ResultMemory:
    """Memory of one result after another.

    Attributes:
        memory: (n_bytes,) uint8, in host memory.
        locked: whether it is page-locked.
        freed: when its last result was freed.
    """

    memory: torch.Tensor
    locked: bool = False
    freed: float = 0.0


@dataclass(frozen=True, slots=True)
class Locker:
    """How memory is page-locked: ``lock`` (address, bytes) says whether it did, ``unlock`` undoes
    it, ``wait`` holds the host until no device copies any more."""

    lock: Callable[[int, int], bool]
    unlock: Callable[[int], object]
    wait: Callable[[], object]


def lock_until_freed(memory: torch.Tensor, locker: Locker) -> torch.Tensor | None:
    """Page-lock ``memory`` for as long as the returned tensor, or a view of it, lives.

    Args:
        memory: (n_bytes,) uint8 in host memory, at least one byte; it begins at a page.

    Returns:
        A tensor over the same memory; None if the system refuses to lock it.
    """
    address = memory.data_ptr()
    if not locker.lock(address, memory.nbytes):
        return None
    buffer = (ctypes.c_char * memory.nbytes).from_address(address)
    # The tensor's storage holds the buffer. The finalizer holds the memory until it is unlocked.
    weakref.finalize(buffer, _unlock_and_free, memory, locker).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _unlock_and_free(memory: torch.Tensor, locker: Locker) -> None:
    # A copy that nobody waited for may still be under way.
    locker.wait()
    locker.unlock(memory.data_ptr())


def of_host(share: float) -> int:
    """Bytes that are such a share of the host's memory; 0 where that is not known."""
    try:
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * share)
    except (AttributeError, ValueError, OSError):  # not Unix
        return 0


@dataclass(eq=False)
class PinnedPool:
    """The memory that is kept of results, for as long as later calls use it.

    A result that lies in it is page-locked for as long as it lives. A copy to a device that its
    owner began without waiting for it may still be under way when the result is freed: so before
    memory is used again, or unlocked, the host waits for every device.

    Args:
        locker: how it is page-locked.
        most_bytes: how much is kept at most.
        clock: seconds.
        may_keep: called when memory is freed; returns whether it may be used again.
    """

    locker: Locker
    most_bytes: int = min(_MOST_BYTES, of_host(_MOST_OF_HOST))
    clock: Callable[[], float] = time.monotonic
    may_keep: Callable[[torch.Tensor], bool] = lambda memory: True
    # Appended to by whatever thread frees a result, in the middle of anything: no lock is taken, so
    # it is changed by single operations of the list only.
    _free: list[_ResultMemory] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def lend(self, memory: torch.Tensor) -> torch.Tensor:
        """``memory`` (n_bytes,) uint8 as a tensor whose memory is kept when it is freed, if it is
        not too large for that."""
        return (
            memory
            if memory.nbytes > self.most_bytes
            else self._lent(_ResultMemory(memory), memory.nbytes)
        )

    def take(self, n_bytes: int) -> torch.Tensor | None:
        """(n_bytes,) uint8 that is page-locked and was touched; None if nothing fits.

        What has been free for long is given back, and the oldest of what is too much.
        """
        out: list[_ResultMemory] = []
        with self._lock:
            free = sorted(self._free, key=lambda block: block.freed)
            most = n_bytes * _LARGEST_ROOM
            fitting = [block for block in free if n_bytes <= block.memory.nbytes <= most]
            # The smallest that is large enough, and not too large.
            chosen = min(fitting, key=lambda b: (b.memory.nbytes, not b.locked), default=None)
            if chosen is not None:
                free.remove(chosen)
            too_much = sum(block.memory.nbytes for block in free) - self.most_bytes
            for block in free:
                if too_much > 0 or self.clock() - block.freed > _SECONDS:
                    out.append(block)
                    too_much -= block.memory.nbytes
            for block in out if chosen is None else (*out, chosen):
                self._free.remove(block)
        try:
            if out or (chosen is not None and chosen.locked):
                self.locker.wait()
            self._unlock(out)
            if chosen is None:
                return None
            if not chosen.locked:
                memory = chosen.memory
                chosen.locked = self.locker.lock(memory.data_ptr(), memory.nbytes)
        except BaseException:
            # An interrupt, maybe: what is locked must not be freed as it is.
            self._free.extend(out if chosen is None else (*out, chosen))
            raise
        return self._lent(chosen, n_bytes) if chosen.locked else None

    def give_back(self) -> None:
        """Unlock and free all that is not in use."""
        out: list[_ResultMemory] = []
        with self._lock:
            while self._free:
                out.append(self._free.pop())
        if out:
            self.locker.wait()
            self._unlock(out)

    def _lent(self, block: _ResultMemory, n_bytes: int) -> torch.Tensor:
        held = (ctypes.c_char * n_bytes).from_address(block.memory.data_ptr())
        # The tensor's storage holds this object, and frees it.
        weakref.finalize(held, self._came_back, block).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)

    def _came_back(self, block: _ResultMemory) -> None:
        if not self.may_keep(block.memory):
            return
        free = sum(other.memory.nbytes for other in tuple(self._free))
        if block.locked or free + block.memory.nbytes <= self.most_bytes:
            block.freed = self.clock()
            self._free.append(block)

    def _unlock(self, blocks: Iterable[_ResultMemory]) -> None:
        for block in blocks:
            if block.locked:
                block.locked = False
                self.locker.unlock(block.memory.data_ptr())

    def _forget(self) -> None:
        """In a child, which has the parent's memory, but neither its locks nor its devices."""
        self._free, self._lock = [], threading.Lock()
