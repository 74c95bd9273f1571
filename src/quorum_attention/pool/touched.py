"""Has pages made and mapped by many threads, ahead of whoever page-locks them.

Memory that nobody has written to has no pages yet, and a process that maps memory of another one
has none of its pages in its tables. Locking such memory takes one core 0.2 to 0.5 s a gibibyte;
many threads do that part in a tenth of the time. Nothing is written: others may be writing there.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from threading import Lock, Thread
from types import TracebackType

import torch

from quorum_attention.execution.device.lookup import on_host

# Make the pages of a range as writing would; Linux 5.14 and later.
_MADV_POPULATE_WRITE = 23
_PIECE_BYTES = 2 << 20
_LEAST_BYTES = 8 << 20
_PAGE_BYTES = 4096
_MOST_THREADS = 8


class Touching:
    """A ``with`` block, in which threads make the pages of tensors, of all from the first on.

    Systems that do not offer it are left alone: everything is right without it.

    Args:
        tensors: in shared memory; those with gaps are left alone.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        here = [
            t
            for t in tensors
            if on_host(t.device) and t.nbytes >= _LEAST_BYTES and t.is_contiguous()
        ]
        pieces = [piece for tensor in here for piece in _pieces(tensor)]
        self._pieces = iter([(start, count) for _, start, count in sorted(pieces)])
        self._threads: list[Thread] = []
        self._many = bool(here) and sys.platform.startswith("linux")
        self._lock = Lock()
        self._over = False

    def __enter__(self) -> Touching:
        if self._many:
            count = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
            advise = ctypes.CDLL(None, use_errno=True).madvise
            for _ in range(count):
                thread = Thread(target=self._work, args=(advise,), name="pages", daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def wait(self) -> None:
        """Wait until all pages are made."""
        for thread in self._threads:
            thread.join()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        self.wait()

    def _work(self, advise: Callable[..., int]) -> None:
        while not self._over:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            start, n_bytes = piece
            if advise(ctypes.c_void_p(start), ctypes.c_size_t(n_bytes), _MADV_POPULATE_WRITE):
                self._over = True


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[float, int, int]]:
    """Runs of whole pages within ``tensor``: how far into it, address and length."""
    start = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    for at in range(start, stop, _PIECE_BYTES):
        yield (at - start) / (stop - start), at, min(_PIECE_BYTES, stop - at)


__all__ = ["Touching"]
