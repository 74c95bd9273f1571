"""Page-locks host memory ahead of the copies from and to it.

Locking memory that was never written to is slow: the driver faults in its pages on one
core, which takes 0.3 s a gibibyte on the hosts measured. So the memory that a call
makes for its results is written to by many threads first (0.05 s a gibibyte), and then
locked (another 0.05). A thread does both piece by piece while the first tasks compute.
A copy waits for the piece that it needs, and that piece is then locked next.

The driver refuses a copy that reaches from one locked piece into another. So results
are cut into pieces only between heads that begin at pages (``empty_result``). Tensors
that were there before are cut at any page if they are copied by address: such a copy is
cut there too (``parts``).

While the driver locks memory, every other call to it waits, and not for its turn. So
the thread may begin late, when the device has something to do (``begin``), and rests
between pieces unless a copy waits for one. Until a piece is locked its copies go
through buffers (staging.py).

A call of 0.1 s cannot hide that. So the memory of results is kept for the next call
when they are freed, touched and locked as one piece, up to a limit (pinned_pool.py).
That piece is locked when the memory is used for the second time, while the first tasks
compute, and stays locked.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.execution.device.host_memory import (
    PAGE_BYTES,
    address_range,
    is_locked,
    mapped_ranges,
    touch,
)
from quorum_attention.execution.device.pinned_pool import PinnedPool, ResultMemory
from quorum_attention.threads import in_spite_of_interrupts, try_start

# Locking takes about 0.05 s/GiB and makes copies eight times as fast. A copy of memory
# that is not locked also makes the host wait for all that the device has to do before
# it.
WORTH_LOCKING_BYTES = 1 << 20
# The thread looks this often whether copies have been made.
_POLL_SECONDS = 5e-4
# The least that is locked at a time: a copy may have to wait for so much.
PIECE_BYTES = 16 << 20
# After a piece the thread rests for so many times as long as the piece took.
_REST = 2.0
# cudaHostRegisterReadOnly: memory that the device only reads, such as a file mapped to
# be read.
_ONLY_READ = 8


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor (..., rows, width) that is copied from or to.

    Attributes:
        is_result: the results of the call are copied to it. It is (*batch, heads, ...).
        fresh: it holds nothing yet. Ask ``PageLocks`` before writing to it.
        by_address: it is copied by address, and never across a cut
            (``PageLocks.parts``).
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
        share: where it begins in its tensor, from 0 to 1. Pieces are locked in this
            order, because copies reach them about that far into a pass; of equals,
            those that are read first.
        fresh: it has not been written to, and will not be before it is settled.
        only_read: the device writes nothing to it.
        needed: bytes that copies may still touch; ``start`` to ``stop`` at first. None:
            it belongs to several tensors, or to one whose heads share memory, and is
            locked to the end.
        settled: it is decided whether it is locked.
        locked: it is locked.
        urgent: a copy waits for it.
        owner: memory of a ``PinnedPool`` that stays locked; None: it is unlocked at the
            end.
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
    owner: ResultMemory | None = None

    @property
    def n_bytes(self) -> int:
        """Its size."""
        return self.stop - self.start


class _LockJob(NamedTuple):
    """A piece, and whether the thread is to lock it or to unlock it."""

    piece: _LockedPiece
    lock: bool


class PageLocks:
    """Page-locks host tensors for the length of a ``with`` block, one piece after the
    other.

    What cannot be locked (a file that is mapped to be written to, a system limit) is
    left pageable. So are files of which the process has a private mapping: to lock that
    copies it, at 2 GB/s. Everything locked here is unlocked at the end of the block,
    and what is not needed any more before that (``release``), so that leaving the block
    need not wait for it.

    Args:
        tensors: what is copied from or to. Only those in host memory, large and not
            locked yet are locked.
        late: nothing is locked before ``begin``, but what a copy waits for.
        pool: its memory among the tensors stays locked.
    """

    def __init__(
        self,
        tensors: Iterable[Copied],
        *,
        late: bool = False,
        pool: PinnedPool | None = None,
    ) -> None:
        self._pieces = _pieces_worth_locking(tensors, pool)
        self._starts = [piece.start for piece in self._pieces]
        # Copies reach pieces in this order.
        by_share = sorted(self._pieces, key=lambda piece: (piece.share, piece.fresh))
        self._to_lock = deque(by_share)
        self._changed = threading.Condition()
        # Pieces that are not needed any more once something has happened.
        self._to_unlock: deque[tuple[Callable[[], bool], _LockedPiece]] = deque()
        # Whether the thread is at a piece; changed together with the queues, under the
        # lock.
        self._at_work = False
        self._closed = False
        self._begun = not late
        # Until when the thread rests.
        self._rests_until = 0.0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PageLocks:
        if not self._pieces:
            return self
        runtime = torch.cuda.cudart()
        device = torch.cuda.current_device()
        self._thread = threading.Thread(
            target=self._work, args=(runtime, device), name="page locks", daemon=True
        )
        try:
            if not try_start(self._thread):
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
        self._to_lock.clear()

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
        """Wait for the piece that the thread is at, then unlock everything."""
        runtime: Any = torch.cuda.cudart()
        in_spite_of_interrupts(partial(self._close, runtime))

    def _close(self, runtime: Any) -> None:
        """Stop the thread after its piece, and unlock everything; may be called
        again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._at_work)
        for piece in self._pieces:
            if piece.locked and piece.owner is None:
                piece.locked = False
                runtime.cudaHostUnregister(piece.start)

    def begin(self) -> None:
        """Lock one piece after the other from now on."""
        if self._begun:
            return
        with self._changed:
            self._begun = True
            self._changed.notify_all()

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (on the host) is page-locked, here or by its owner.

        It waits until that is decided.
        """
        start, stop = address_range(tensor)
        if not self._pieces_in(start, stop):
            return is_locked(tensor)
        parts = self.parts(start, stop - start, wait=True)
        return all(locked for _, _, locked in parts)

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether any part of ``tensor`` (on the host) is among what is to be locked
        here."""
        return bool(self._pieces_in(*address_range(tensor)))

    def release(
        self, tensors: Iterable[torch.Tensor], happened: Callable[[], bool]
    ) -> None:
        """Unlock what only belongs to ``tensors``, which no copy will touch from now
        on.

        Args:
            tensors: parts of what is locked, (*entries, heads, n, width); each head is
                named once.
            happened: whether the copies that were given before have been made.
        """
        unneeded: list[_LockedPiece] = []
        for tensor in tensors:
            if tensor.device.type == "cpu":
                unneeded += self._pieces_freed_by(tensor)
        if not unneeded:
            return
        with self._changed:
            for piece in unneeded:
                if piece in self._to_lock:
                    self._to_lock.remove(piece)
                    piece.settled = True
            self._to_unlock.extend((happened, piece) for piece in unneeded)
            self._changed.notify_all()

    def _pieces_freed_by(self, tensor: torch.Tensor) -> list[_LockedPiece]:
        """Count down what is needed of the pieces of ``tensor``; returns those that no
        copy needs any more."""
        start, stop = address_range(tensor)
        freed: list[_LockedPiece] = []
        for piece in self._pieces_in(start, stop):
            if piece.needed is None:
                continue
            low = max(start, piece.start)
            high = min(stop, piece.stop)
            piece.needed -= high - low
            if piece.needed == 0:
                freed.append(piece)
        return freed

    def parts(
        self, start: int, n_bytes: int, *, wait: bool = False
    ) -> list[tuple[int, int, bool]]:
        """The memory from address ``start`` on, cut where two pieces meet.

        It waits until it is decided whether what holds nothing yet is locked; with
        ``wait`` of everything.

        Returns:
            (address, bytes, whether it is locked here) of each part.
        """
        stop = start + n_bytes
        pieces = self._pieces_in(start, stop)
        awaited = pieces if wait else [piece for piece in pieces if piece.fresh]
        unsettled = [piece for piece in awaited if not piece.settled]
        if unsettled:
            self._await(unsettled)
        parts: list[tuple[int, int, bool]] = []
        for piece in pieces:
            if piece.start > start:
                parts.append((start, piece.start - start, False))
                start = piece.start
            end = min(piece.stop, stop)
            parts.append((start, end - start, piece.locked))
            start = end
        if start < stop:
            parts.append((start, stop - start, False))
        return parts

    def _pieces_in(self, start: int, stop: int) -> list[_LockedPiece]:
        """The pieces that have any address of [start, stop)."""
        n_before = bisect_right(self._starts, start)
        first = max(0, n_before - 1)
        last = bisect_left(self._starts, stop)
        pieces = self._pieces[first:last]
        return [piece for piece in pieces if piece.stop > start]

    def _await(self, pieces: list[_LockedPiece]) -> None:
        """Have ``pieces`` locked before all others, and wait until they are settled."""
        with self._changed:
            waiting = [piece for piece in pieces if piece in self._to_lock]
            for piece in waiting:
                self._to_lock.remove(piece)
                piece.urgent = True
            self._to_lock.extendleft(reversed(waiting))
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(piece.settled for piece in pieces))

    def _work(self, runtime: Any, device: int) -> None:
        """Lock piece after piece, and unlock those that are not needed; run by the
        thread."""
        try:
            torch.cuda.set_device(device)
            private_files: list[tuple[int, int]] | None = None
            while (job := self._next_job()) is not None:
                piece = job.piece
                started_at = time.monotonic()
                locked = False
                if not job.lock:
                    runtime.cudaHostUnregister(piece.start)
                elif piece.owner is not None:
                    locked = _lock(runtime, piece)
                    piece.owner.locked = locked
                elif piece.fresh:
                    touch(piece.start, piece.n_bytes)
                    locked = _lock(runtime, piece)
                else:
                    if private_files is None:
                        private_files = _privately_mapped_files()
                    locked = not _overlaps(piece, private_files) and _lock(
                        runtime, piece
                    )
                self._finish_job(piece, locked, time.monotonic() - started_at)
        except BaseException as error:
            self._failure = error
        finally:
            # After an error nothing more is locked, so waiting for it would not end.
            with self._changed:
                self._to_lock.clear()
                self._at_work = False
                for piece in self._pieces:
                    piece.settled = True
                self._changed.notify_all()

    def _finish_job(self, piece: _LockedPiece, locked: bool, seconds: float) -> None:
        """Note what became of a piece, and begin to rest."""
        with self._changed:
            piece.locked = locked
            piece.settled = True
            self._at_work = False
            self._rests_until = time.monotonic() + _REST * seconds
            self._changed.notify_all()

    def _next_job(self) -> _LockJob | None:
        """The next piece to lock or to unlock; waits for one. None at the end."""
        with self._changed:
            while not self._closed:
                job = self._job_now()
                if job is not None:
                    self._at_work = True
                    return job
                self._changed.wait(self._seconds_to_wait())
            return None

    def _job_now(self) -> _LockJob | None:
        """A piece that can be locked or unlocked now; None if there is none."""
        may_lock = self._begun and time.monotonic() >= self._rests_until
        if self._to_lock and (may_lock or self._to_lock[0].urgent):
            return _LockJob(self._to_lock.popleft(), lock=True)
        while self._to_unlock:
            happened, piece = self._to_unlock[0]
            if not happened():
                return None
            self._to_unlock.popleft()
            if piece.locked:
                piece.locked = False
                return _LockJob(piece, lock=False)
        return None

    def _seconds_to_wait(self) -> float | None:
        """How long until there may be something to do; None: until something
        changes."""
        seconds: list[float] = []
        if self._to_unlock:
            seconds.append(_POLL_SECONDS)
        if self._to_lock and self._begun:
            seconds.append(self._rests_until - time.monotonic())
        return min(seconds, default=None)


def _pieces_worth_locking(
    tensors: Iterable[Copied], pool: PinnedPool | None
) -> list[_LockedPiece]:
    """The pieces of the memory of ``tensors`` that is worth locking, by address.
    Tensors that overlap are one range."""
    pieces: list[_LockedPiece] = []
    for addresses in _unlocked_ranges(tensors):
        owner = None if pool is None else pool.unlocked_at(addresses.start)
        if owner is not None:
            pieces.append(_piece_of_pool(owner))
        elif addresses.stop - addresses.start >= WORTH_LOCKING_BYTES:
            pieces += _cut(addresses.start, addresses.stop, addresses.tensors)
    return pieces


def _unlocked_ranges(tensors: Iterable[Copied]) -> list[_Range]:
    """The ranges of those of ``tensors`` in host memory that are not locked, by
    address."""
    # Small tensors are asked as well: they may be parts of large ones.
    on_host = [copied for copied in tensors if copied.tensor.device.type == "cpu"]
    on_host = [copied for copied in on_host if copied.tensor.nbytes]
    on_host.sort(key=lambda copied: address_range(copied.tensor))
    ranges: list[_Range] = []
    for copied in on_host:
        if is_locked(copied.tensor):
            continue
        start, stop = address_range(copied.tensor)
        if ranges and start < ranges[-1].stop:
            ranges[-1].stop = max(ranges[-1].stop, stop)
            ranges[-1].tensors.append(copied)
        else:
            ranges.append(_Range(start, stop, [copied]))
    return ranges


def _piece_of_pool(memory: ResultMemory) -> _LockedPiece:
    """All memory of a result, as one piece that copies wait for."""
    start = memory.memory.data_ptr()
    return _LockedPiece(
        start,
        start + memory.n_bytes,
        share=0.0,
        fresh=True,
        only_read=False,
        needed=None,
        owner=memory,
    )


@dataclass(slots=True)
class _Range:
    """The addresses [start, stop) of tensors that overlap, or of one tensor."""

    start: int
    stop: int
    tensors: list[Copied]


def _cut(start: int, stop: int, tensors: Sequence[Copied]) -> list[_LockedPiece]:
    """The range of ``tensors`` as pieces that are large enough to be worth locking.

    A result that shares no memory is cut at multiples of a head, if those are between
    pages: no copy reaches across. One that is locked as a whole, or head by head, is
    not needed before the inputs of these heads.
    """
    if len(tensors) > 1:
        # Tensors that overlap have no heads of their own, and are locked to the end.
        cuts = _cuts_at_pages(start, stop, tensors)
        fresh = is_by_head = is_dense = False
    else:
        (copied,) = tensors
        fresh = copied.fresh
        is_dense = copied.tensor.is_contiguous()
        is_by_head = fresh or (is_dense and copied.is_result)
        if is_by_head:
            cuts = _cuts_between_heads(start, stop, copied.tensor)
        else:
            cuts = _cuts_at_pages(start, stop, tensors)
    only_read = all(copied.only_read for copied in tensors)
    pieces: list[_LockedPiece] = []
    for low, high in pairwise([start, *cuts, stop]):
        reached_at = high if is_by_head and not fresh else low
        share = (reached_at - start) / (stop - start)
        needed = high - low if is_dense else None
        piece = _LockedPiece(low, high, share, fresh, only_read, needed)
        pieces.append(piece)
    return pieces


def _cuts_at_pages(start: int, stop: int, tensors: Sequence[Copied]) -> range:
    """Addresses within [start, stop) between pages, a piece apart; none if one of the
    tensors is not copied by address."""
    if not all(copied.by_address for copied in tensors):
        return range(0)
    # The last piece takes what is left: nothing shorter than a piece.
    first_cut = start - start % PAGE_BYTES + PIECE_BYTES
    return range(first_cut, stop - PIECE_BYTES + 1, PIECE_BYTES)


def _cuts_between_heads(start: int, stop: int, tensor: torch.Tensor) -> range:
    """Addresses within [start, stop) between whole heads of ``tensor``, at least a
    piece apart; none if heads do not begin at pages."""
    n_numbers = math.prod(tensor.shape[-2:])
    head_bytes = n_numbers * tensor.element_size()
    if start % PAGE_BYTES or head_bytes % PAGE_BYTES:
        return range(0)
    piece_bytes = round_up(PIECE_BYTES, head_bytes)
    return range(start + piece_bytes, stop, piece_bytes)


def _lock(runtime: Any, piece: _LockedPiece) -> bool:
    """Page-lock ``piece``; returns whether that could be done.

    A refusal sets CUDA's last error, but only for this thread, which runs no kernel.
    """
    status = runtime.cudaHostRegister(piece.start, piece.n_bytes, 0)
    if int(status) != 0 and piece.only_read:
        status = runtime.cudaHostRegister(piece.start, piece.n_bytes, _ONLY_READ)
    return int(status) == 0


def _privately_mapped_files() -> list[tuple[int, int]]:
    """The addresses [start, stop) of large files that this process has mapped
    privately.

    To lock such memory makes the system copy it. Where the system does not say:
    nothing.
    """
    ranges: list[tuple[int, int]] = []
    for mapped in mapped_ranges():
        is_private_file = mapped.file is not None and not mapped.shared
        n_bytes = mapped.stop - mapped.start
        if is_private_file and n_bytes >= WORTH_LOCKING_BYTES:
            ranges.append((mapped.start, mapped.stop))
    return ranges


def _overlaps(piece: _LockedPiece, ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether any address of ``piece`` lies in one of ``ranges``."""
    return any(start < piece.stop and piece.start < stop for start, stop in ranges)
