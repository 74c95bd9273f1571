"""Torch's operators on a CPU in a single thread, for one thread of the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """In the calling thread operators use no others; all other threads keep theirs."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    _set_here(1, before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set_here(count: int, elsewhere: int) -> None:
    """Set how many threads the operators of the calling thread use."""
    # It is a number of each thread, and one that new threads begin with. The second is put back.
    torch.set_num_threads(count)
    other = threading.Thread(target=torch.set_num_threads, args=(elsewhere,))
    other.start()
    other.join()
