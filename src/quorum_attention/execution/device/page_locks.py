"""Page-locks host memory ahead of the copies from and to it.

The driver faults in memory that nobody has touched page by page, on one core: 0.3 s a gibibyte on
the hosts measured. So what a call makes for its results is touched by many threads first, which
takes 0.05 s, and locking it another 0.05. Both are done piece by piece by a thread of its own,
while the first tasks compute; a copy waits for the piece that it needs, and that comes first.

No copy may reach from one locked piece into another: results are cut between heads, where that is
between pages too (``Residency.result``), and other tensors not at all.
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

# Registering costs about 0.1 s/GiB and saves eight times the copy time: not worth it below this.
WORTH_LOCKING_BYTES = 16 << 20
PAGE_BYTES = 4096


@dataclass(slots=True, eq=False)
class _Piece:
    """Neighbouring bytes that are locked together.

    Attributes:
        share: where it begins in its tensor, from 0 to 1: copies get there about that far into a
            pass.
        fresh: nobody has written to it, nor will until it is settled.
        settled: it is locked, or will not be.
    """

    start: int
    stop: int
    share: float
    fresh: bool
    settled: bool = False
    locked: bool = False


class PageLocks:
    """Page-locks pageable host tensors for the length of a ``with`` block, one after the other.

    What cannot be locked (a read-only file mapping, a system limit) is left pageable: copies
    from it are slower, never wrong. Everything locked here is unlocked on the way out.

    Args:
        tensors: those that are copied from or to.
        made: of these the ones that hold nothing yet: whoever writes to one asks ``covers`` first.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], made: Iterable[torch.Tensor] = ()) -> None:
        # Of results (*batch, heads, ...), dense: the bytes of a head.
        steps = {id(t): math.prod(t.shape[-2:]) * t.element_size() for t in made}
        extents = sorted(
            (*_extent(t), steps.get(id(t), 0))
            for t in tensors
            if t.device.type == "cpu" and t.nbytes >= WORTH_LOCKING_BYTES and not t.is_pinned()
        )
        self._pieces = [piece for extent in _apart(extents) for piece in _cut(*extent)]
        self._starts = [piece.start for piece in self._pieces]
        self._turns = deque(sorted(self._pieces, key=lambda piece: piece.share))
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PageLocks:
        if self._pieces:
            runtime, device = torch.cuda.cudart(), torch.cuda.current_device()
            self._thread = threading.Thread(
                target=self._work, args=(runtime, device), name="page locks", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        with self._changed:
            self._turns.clear()
        self._thread.join()
        runtime: Any = torch.cuda.cudart()
        for piece in self._pieces:
            if piece.locked:
                runtime.cudaHostUnregister(piece.start)
                piece.locked = False
        if self._failure is not None and error is None:
            raise self._failure

    @property
    def settled(self) -> bool:
        """Whether whatever can be locked is."""
        return self._thread is None or not self._thread.is_alive()

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (on the host) is page-locked, by this object or by its owner; waits
        until that is known."""
        start, stop = _extent(tensor)
        found = self._pieces_of(start, stop)
        if not found or found[0].start > start or found[-1].stop < stop:
            return bool(tensor.is_pinned())
        if not all(piece.settled for piece in found):
            self._await(found)
        return all(piece.locked for piece in found)

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether any of ``tensor`` (on the host) is to be locked here."""
        return bool(self._pieces_of(*_extent(tensor)))

    def _pieces_of(self, start: int, stop: int) -> list[_Piece]:
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, stop)
        return [piece for piece in self._pieces[first:last] if piece.stop > start]

    def _await(self, pieces: list[_Piece]) -> None:
        """Have ``pieces`` settled before all others."""
        with self._changed:
            waiting = [piece for piece in pieces if piece in self._turns]
            for piece in waiting:
                self._turns.remove(piece)
            self._turns.extendleft(reversed(waiting))
            self._changed.wait_for(lambda: all(piece.settled for piece in pieces))

    def _work(self, runtime: Any, device: int) -> None:
        """Settle piece after piece; the thread's own."""
        try:
            torch.cuda.set_device(device)
            while True:
                with self._changed:
                    if not self._turns:
                        break
                    piece = self._turns.popleft()
                if piece.fresh:
                    _touch(piece)
                # A refusal leaves an error behind for this thread alone, which launches nothing.
                status = int(runtime.cudaHostRegister(piece.start, piece.stop - piece.start, 0))
                with self._changed:
                    piece.locked, piece.settled = status == 0, True
                    self._changed.notify_all()
        except BaseException as error:
            self._failure = error
        finally:
            # Nobody waits for what nobody does.
            with self._changed:
                self._turns.clear()
                for piece in self._pieces:
                    piece.settled = True
                self._changed.notify_all()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _apart(extents: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Those that overlap as one, in one piece and not fresh."""
    found = list(extents)
    return [
        next((e for e in found if e[:2] == (start, stop)), (start, stop, 0))
        for start, stop in union((e[:2] for e in found), gap=0)
    ]


def _cut(start: int, stop: int, step: int) -> list[_Piece]:
    """Pieces worth it, of whole steps; ``step`` 0: one piece, that holds something."""
    fresh = step > 0
    if not fresh or start % PAGE_BYTES or step % PAGE_BYTES:
        return [_Piece(start, stop, 0.0, fresh)]
    size = -(-WORTH_LOCKING_BYTES // step) * step
    return [
        _Piece(low, min(low + size, stop), (low - start) / (stop - start), fresh)
        for low in range(start, stop, size)
    ]


def _touch(piece: _Piece) -> None:
    """Write to all of it, by as many threads as torch has."""
    count = piece.stop - piece.start
    memory = (ctypes.c_char * count).from_address(piece.start)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
