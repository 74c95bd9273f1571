"""Recognises out-of-memory failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quorum_attention.errors import OutOfMemoryError

# The CPU allocator's messages: torch raises a plain RuntimeError there.
_CPU_ALLOCATOR_SAYS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_BAD_ALLOC = "std::bad_alloc"
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out.

    It is known by its type: torch.OutOfMemoryError, MemoryError, or an accelerator error with the
    code of a failed allocation. The CPU allocator's plain RuntimeError is known by its text.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY
    if type(error) is RuntimeError:
        text = str(error)
        return text == _BAD_ALLOC or any(said in text for said in _CPU_ALLOCATOR_SAYS)
    return False


def first_line(error: BaseException) -> str:
    """The first line of an allocator's message."""
    return next((line.strip() for line in str(error).split("\n") if line.strip()), repr(error))


@contextmanager
def named_out_of_memory(*, pinned: bool) -> Iterator[None]:
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
        why = "the depth is pinned, so it is reported as it is"
        if not pinned:
            why = "it was the memory of results or accumulators, which a finer plan needs as well"
        raise OutOfMemoryError(f"out of memory: {why}. The allocator said: {said}")
