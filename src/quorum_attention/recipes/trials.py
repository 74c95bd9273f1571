"""Trials of modules on a few drawn tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module in evaluation; afterwards each part has its own mode again.

    Modes are set part by part: some modules' ``eval`` does more (it merges adapters).
    """
    trained = [part for part in module.modules() if part.training]
    try:
        for part in trained:
            part.training = False
        yield
    finally:
        for part in trained:
            part.training = True


def result_like(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return what a module returns of ``x`` in evaluation, or None if it takes no such
    tensor, or returns no tensor of the same shape and dtype."""
    try:
        with torch.no_grad(), evaluating(module):
            result = module(x)
    except Exception:  # whatever it is
        return None
    if not isinstance(result, torch.Tensor):
        return None
    is_like = result.shape == x.shape and result.dtype == x.dtype
    return result if is_like else None


def drawn(*sizes: int) -> torch.Tensor:
    """Return normal numbers in float64, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sizes, generator=generator, device="cpu", dtype=torch.float64)
