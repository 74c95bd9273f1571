"""Pages of memory are made by many threads, before something slower would make them one
by one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.execution.device.host_memory import PAGE_BYTES
from quorum_attention.execution.device.memory_advice import make_pages
from quorum_attention.partition import split_at_multiples
from quorum_attention.threads import NO_THREAD

_PIECE_BYTES = 8 << 20
_MIN_BYTES = 8 << 20
_MAX_THREADS = 8


@contextmanager
def prefaulting(
    tensors: Iterable[torch.Tensor], *, wait: bool = False
) -> Iterator[None]:
    """Make the pages of tensors in threads, beside the ``with`` block.

    Memory that nobody has written to has no pages yet, and a process that maps memory
    of another one has none of its pages in its tables. Locking such memory takes one
    core 0.2 to 0.5 s a gibibyte; many threads do that part in a tenth of the time.
    Nothing is written: others may be writing there. All goes on without it where a
    system does not offer it, or grants no thread.

    Args:
        tensors: in shared memory; those with gaps are left alone.
        wait: wait for all pages at the end of the block; else pages that are not begun
            are left.
    """
    pieces: list[Interval] = []
    for tensor in tensors:
        if tensor.nbytes >= _MIN_BYTES and tensor.is_contiguous():
            pieces += split_at_multiples(_pages_of(tensor), _PIECE_BYTES)
    n_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(n_threads) as threads:
        with suppress(*NO_THREAD):
            for piece in pieces:
                threads.submit(make_pages, piece.start, piece.length)
        try:
            yield
        finally:
            threads.shutdown(cancel_futures=not wait)


def _pages_of(tensor: torch.Tensor) -> Interval:
    """Return the addresses of the whole pages that a tensor covers."""
    start = tensor.data_ptr()
    stop = start + tensor.nbytes
    return Interval(round_up(start, PAGE_BYTES), stop // PAGE_BYTES * PAGE_BYTES)
