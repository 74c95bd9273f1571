"""Out-of-memory failures: recognised, and told to the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quorum_attention.errors import OutOfMemoryError, is_out_of_memory


def first_line(error: BaseException) -> str:
    """The first line of an allocator's message."""
    return next((line.strip() for line in str(error).split("\n") if line.strip()), repr(error))


@contextmanager
def named_out_of_memory() -> Iterator[None]:
    """Turn an allocator's error that leaves the block into our ``OutOfMemoryError``.

    The allocator's error is not chained: its traceback would hold the failed call's tensors.
    """
    said = None
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        said = first_line(error)
    if said is not None:
        raise OutOfMemoryError(
            "out of memory: it was the memory of results or accumulators, which a finer plan needs "
            f"as well. The allocator said: {said}"
        )


__all__ = ["first_line", "is_out_of_memory", "named_out_of_memory"]
