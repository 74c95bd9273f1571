"""Errors that callers may want to catch by type."""

from __future__ import annotations

import torch

# Where torch has no type of its own (very old builds), a RuntimeError is the nearest base.
_TorchOutOfMemory: type[RuntimeError] = getattr(torch, "OutOfMemoryError", RuntimeError)


class OutOfMemoryError(_TorchOutOfMemory):  # type: ignore[misc, valid-type]
    """The call ran out of memory and no finer plan was left (or the plan was pinned)."""


class CalibrationError(RuntimeError):
    """Measurements of a device disagree with each other; nothing was stored."""


class BudgetError(OutOfMemoryError):
    """The budget is too small to work in; raised before any work.

    Attributes:
        smallest_bytes: the smallest budget, in bytes, that would do; None where none is known.

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
