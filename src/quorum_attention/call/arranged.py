"""Casts of autocast, broadcasting and inputs of two dimensions, as torch's own function has them.

Only views and, under autocast, casts are made, by functions that autograd knows: gradients have the
inputs' own shapes and dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quorum_attention.execution.device.lookup import BACKENDS


class Arranged(NamedTuple):
    """Inputs of one dtype, with at least three dimensions and the same batch dimensions.

    Attributes:
        enable_gqa: as given, or True where all query heads share one key/value head.
        without_heads: the inputs were (tokens, head_dim).
        cast_bytes: bytes of the casts of autocast, on the inputs' device.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    enable_gqa: bool
    without_heads: bool = False
    cast_bytes: int = 0


def arranged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> Arranged:
    """The inputs cast and broadcast, for ``validation.sizes_of``.

    Raises:
        ValueError: batch dimensions that do not broadcast.
    """
    cast_bytes = 0
    dtype = _autocast_dtype(query.device.type)
    if dtype is not None:
        given = (query, key, value)
        query, key, value = (_cast(tensor, dtype) for tensor in given)
        made = zip((query, key, value), given, strict=True)
        # Not ``nbytes``, which torch's compiler cannot read of lengths that may vary.
        cast_bytes = sum(n.numel() * n.element_size() for n, old in made if n is not old)
    dims = (query.dim(), key.dim(), value.dim())
    if _fit(query, key, value, enable_gqa) or min(dims) < 2:
        return Arranged(query, key, value, enable_gqa, False, cast_bytes)
    rank = max(3, *dims)
    query, key, value = (t[(None,) * (rank - t.dim())] for t in (query, key, value))
    heads, shared, grouped = _heads(query.shape[-3], key.shape[-3], value.shape[-3], enable_gqa)
    batch = query.shape[:-3]
    for name, tensor in (("key", key), ("value", value)):
        batch = _broadcast(batch, tensor.shape[:-3], name)
    query = query.expand(*batch, heads, *query.shape[-2:])
    key, value = (
        t.expand(*batch, shared if t.shape[-3] == 1 else t.shape[-3], *t.shape[-2:])
        for t in (key, value)
    )
    return Arranged(query, key, value, grouped, max(dims) == 2, cast_bytes)


def _broadcast(batch: torch.Size, other: torch.Size, name: str) -> torch.Size:
    try:
        found: torch.Size = torch.broadcast_shapes(batch, other)
        return found
    except RuntimeError:
        raise ValueError(
            f"{name} must have batch dimensions that broadcast with {tuple(batch)}, got "
            f"{tuple(other)}"
        ) from None


def _fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    """Whether nothing has to be broadcast: equal batch dimensions, and heads equal or grouped."""
    if query.dim() < 3 or query.dim() != key.dim():
        return False
    shape, shared = query.shape[:-2], key.shape[:-2]
    if shared != value.shape[:-2]:
        return False
    return shape == shared or (bool(enable_gqa) and shape[:-1] == shared[:-1])


def _heads(query: int, key: int, value: int, enable_gqa: bool) -> tuple[int, int, bool]:
    """(query heads, key/value heads, enable_gqa) after broadcasting.

    As torch broadcasts, except that a single key/value head is shared instead of expanded.
    """
    shared = value if key == 1 else key
    if enable_gqa or query == shared:
        return query, shared, enable_gqa
    if query == 1:
        return shared, shared, False
    return query, shared, shared == 1


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on such a device; None where it is off."""
    if device_type not in BACKENDS or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` as autocast casts it: only floating dtypes, and not float64."""
    spared = not tensor.is_floating_point() or tensor.dtype == torch.float64
    return tensor if spared else tensor.to(dtype)
