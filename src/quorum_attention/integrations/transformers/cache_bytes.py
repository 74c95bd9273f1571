"""The bytes that one layer of a cache of Transformers holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class CachedBytes(NamedTuple):
    """The bytes that a layer of a cache holds of the tokens that it was given.

    Attributes:
        rows: bytes of keys and values.
        further: bytes of all other tensors.
        window: how many tokens have keys and values at most; None: all.
    """

    rows: int
    further: int
    window: int | None


def cached_bytes(layer: Any) -> CachedBytes:
    """Return what a layer of any kind of cache holds."""
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        # The next token attends itself and all but one of the window's tokens.
        window = max(1, window - 1)
    keys = getattr(layer, "keys", None)
    values = getattr(layer, "values", None)
    row_bytes = n_bytes_in((keys, values))
    return CachedBytes(row_bytes, n_bytes_in(vars(layer)) - row_bytes, window)


def n_bytes_in(value: Any) -> int:
    """The bytes of all tensors in a container."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.dim() else 0
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return 0
    return sum(n_bytes_in(item) for item in value)
