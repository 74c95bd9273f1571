"""Old names for questions to a kernel, whose attributes answer them (``protocol.Kernel``)."""

from __future__ import annotations

from quorum_attention.kernels.protocol import Kernel, check_mask_gradient, is_bare, refusal


def traits_of(kernel: Kernel) -> Kernel:
    """The kernel: what it declares are its attributes."""
    return kernel


def whole_calls(kernel: Kernel) -> Kernel | None:
    """``kernel``, if it takes monolithic calls."""
    return kernel if kernel.whole_calls else None


def task_calls(kernel: Kernel) -> Kernel | None:
    """``kernel``, if it takes tasks on the inputs as they lie."""
    return kernel if kernel.task_calls else None


def operator(kernel: Kernel) -> Kernel | None:
    """``kernel``, if it can be called for a single rectangle."""
    return kernel if kernel.operator else None


__all__ = [
    "check_mask_gradient", "is_bare", "operator", "refusal", "task_calls", "traits_of",
    "whole_calls",
]  # fmt: skip
