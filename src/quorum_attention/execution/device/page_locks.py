"""Page-locks host memory ahead of the copies from and to it.

Locking memory that was never written to is slow: the driver faults in its pages on one core, which
takes 0.3 s a gibibyte on the hosts measured. So the memory that a call makes for its results is
written to by many threads first (0.05 s a gibibyte), and then locked (another 0.05). A thread does
both piece by piece while the first tasks compute. A copy waits for the piece that it needs, and
that piece is then locked next.

No copy may reach from one locked piece into another. So results are cut into pieces only between
heads that begin at pages (``Residency.result``), and other tensors not at all.
"""

from __future__ import annotations

import ctypes
import math
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from quorum_attention.decomposition.intervals import union

# Locking takes about 0.1 s/GiB and makes copies eight times as fast: it is not worth it below this.
WORTH_LOCKING_BYTES = 16 << 20
PAGE_BYTES = 4096


@dataclass(slots=True, eq=False)
class _Piece:
    """Consecutive bytes of host memory that are locked together.

    Attributes:
        start, stop: addresses, [start, stop).
        share: where it begins in its tensor, from 0 to 1. Pieces are locked in this order, because
            copies reach them about that far into a pass.
        fresh: nobody has written to it, and nobody will before it is settled.
        settled: it is decided whether it is locked.
        locked: it is locked.
    """

    start: int
    stop: int
    share: float
    fresh: bool
    settled: bool = False
    locked: bool = False


class PageLocks:
    """Page-locks host tensors for the length of a ``with`` block, one piece after the other.

    What cannot be locked (a read-only file mapping, a system limit) is left pageable: copies
    from it are slower, never wrong. Everything locked here is unlocked at the end of the block.

    Args:
        tensors: what is copied from or to. Only those in host memory, large and not locked yet are
            locked.
        made: those of them that hold nothing yet. Whoever writes to one must ask ``covers`` first.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], made: Iterable[torch.Tensor] = ()) -> None:
        # Bytes of a head of each result; those are (*batch, heads, ...) without gaps.
        steps = {id(t): math.prod(t.shape[-2:]) * t.element_size() for t in made}
        ranges = sorted(
            (*_addresses(t), steps.get(id(t), 0))
            for t in tensors
            if t.device.type == "cpu" and t.nbytes >= WORTH_LOCKING_BYTES and not t.is_pinned()
        )
        self._pieces = [piece for found in _apart(ranges) for piece in _cut(*found)]
        self._starts = [piece.start for piece in self._pieces]
        self._turns = deque(sorted(self._pieces, key=lambda piece: piece.share))
        self._changed = threading.Condition()
        # Whether the thread is at a piece; together with what is left, under the lock.
        self._at_work = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PageLocks:
        if self._pieces:
            runtime, device = torch.cuda.cudart(), torch.cuda.current_device()
            self._thread = threading.Thread(
                target=self._work, args=(runtime, device), name="page locks", daemon=True
            )
            try:
                self._thread.start()
            except BaseException:
                # An interrupt, maybe: the thread may be at a piece already.
                self._let_go()
                raise
        return self

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
                    self._turns.clear()
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

    @property
    def settled(self) -> bool:
        """Whether all that can be locked is locked."""
        return self._thread is None or not self._thread.is_alive()

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (on the host) is page-locked, here or by its owner.

        It waits until that is decided.
        """
        start, stop = _addresses(tensor)
        found = self._pieces_of(start, stop)
        if not found or found[0].start > start or found[-1].stop < stop:
            return bool(tensor.is_pinned())
        if not all(piece.settled for piece in found):
            self._await(found)
        return all(piece.locked for piece in found)

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether any part of ``tensor`` (on the host) is among what is to be locked here."""
        return bool(self._pieces_of(*_addresses(tensor)))

    def _pieces_of(self, start: int, stop: int) -> list[_Piece]:
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, stop)
        return [piece for piece in self._pieces[first:last] if piece.stop > start]

    def _await(self, pieces: list[_Piece]) -> None:
        """Have ``pieces`` locked before all others, and wait until they are settled."""
        with self._changed:
            waiting = [piece for piece in pieces if piece in self._turns]
            for piece in waiting:
                self._turns.remove(piece)
            self._turns.extendleft(reversed(waiting))
            self._changed.wait_for(lambda: all(piece.settled for piece in pieces))

    def _work(self, runtime: Any, device: int) -> None:
        """Settle piece after piece; run by the thread."""
        try:
            torch.cuda.set_device(device)
            while True:
                with self._changed:
                    if not self._turns:
                        break
                    piece = self._turns.popleft()
                    self._at_work = True
                if piece.fresh:
                    _touch(piece)
                # A refusal sets CUDA's last error, but only for this thread, which runs no kernel.
                status = int(runtime.cudaHostRegister(piece.start, piece.stop - piece.start, 0))
                with self._changed:
                    piece.locked, piece.settled = status == 0, True
                    self._at_work = False
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
        finally:
            # After an error nothing more is locked, so nobody may wait for it.
            with self._changed:
                self._turns.clear()
                self._at_work = False
                for piece in self._pieces:
                    piece.settled = True
                self._changed.notify_all()


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses [start, stop) that ``tensor`` spans."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _apart(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """``ranges`` (start, stop, step) with overlapping ones joined into one of step 0."""
    found = list(ranges)
    return [
        next((e for e in found if e[:2] == (start, stop)), (start, stop, 0))
        for start, stop in union((e[:2] for e in found), gap=0)
    ]


def _cut(start: int, stop: int, step: int) -> list[_Piece]:
    """[start, stop) as pieces that are large enough to be worth locking.

    Args:
        step: bytes of a head, if it is fresh memory: it is cut at multiples of this, if those are
            between pages. 0: it is not fresh, and stays one piece.
    """
    fresh = step > 0
    if not fresh or start % PAGE_BYTES or step % PAGE_BYTES:
        return [_Piece(start, stop, 0.0, fresh)]
    size = -(-WORTH_LOCKING_BYTES // step) * step
    return [
        _Piece(low, min(low + size, stop), (low - start) / (stop - start), fresh)
        for low in range(start, stop, size)
    ]


def _touch(piece: _Piece) -> None:
    """Write to all bytes of ``piece``, with as many threads as torch has."""
    count = piece.stop - piece.start
    memory = (ctypes.c_char * count).from_address(piece.start)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
