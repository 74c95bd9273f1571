"""Errors that callers may want to catch by type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Texts of plain RuntimeErrors: of torch's allocator for the CPU, of NVIDIA's libraries,
# which take memory for themselves when they are first used, and of Triton, which takes
# some for each kernel.
_ALLOCATORS_SAY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_NOTHING_ELSE_SAID = ("std::bad_alloc", "Triton Error [CUDA]: out of memory")
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class OutOfMemoryError(torch.OutOfMemoryError):
    """The call ran out of memory, and no finer cut was possible (or plan or depth was
    given)."""


class CalibrationError(RuntimeError):
    """Measurements of a device disagree with each other; nothing was stored."""


class BudgetError(OutOfMemoryError):
    """The budget is too small; raised before any work.

    Attributes:
        smallest_bytes: the smallest budget that works, in bytes; None if unknown.

    Examples:
        >>> q = torch.randn(1, 2, 5000, 16)
        >>> try:
        ...     qa.attention(q, q, q, budget="1KiB")
        ... except qa.BudgetError as error:
        ...     out = qa.attention(q, q, q, budget=error.smallest_bytes)
        >>> out.shape
        torch.Size([1, 2, 5000, 16])
    """

    def __init__(self, message: str, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether ``error`` says that memory ran out.

    It is known by its type: torch.OutOfMemoryError, MemoryError, or an accelerator
    error with the code of a failed allocation. Where allocators raise a plain
    RuntimeError it is known by its text.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY
    if type(error) is RuntimeError:
        text = str(error)
        return text.strip() in _NOTHING_ELSE_SAID or any(
            part in text for part in _ALLOCATORS_SAY
        )
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an allocator's message."""
    for line in str(error).split("\n"):
        if line.strip():
            return line.strip()
    return repr(error)


@contextmanager
def our_out_of_memory() -> Iterator[None]:
    """Turn an allocator's error that leaves the block into our ``OutOfMemoryError``.

    The allocator's error is not chained: its traceback would hold the failed call's
    tensors.
    """
    allocator_text = None
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        allocator_text = first_line(error)
    if allocator_text is not None:
        raise OutOfMemoryError(
            "out of memory: it was the memory of results or accumulators, which a "
            f"finer plan needs as well. The allocator said: {allocator_text}"
        )
