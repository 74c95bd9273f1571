"""A model tried as it is in evaluation, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def evaluated(module: torch.nn.Module) -> Iterator[None]:
    """All of a module in evaluation; then each part in its own mode again: some may differ."""
    trained = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in trained:
            part.training = True


__all__ = ["evaluated"]
