"""Query, key and value as torch's own function sees them: cast by autocast, and
broadcast.

Only views and casts are made, by functions that autograd knows: gradients have the
inputs' own shapes and dtypes. Autocast casts before dtypes are checked.
"""

from __future__ import annotations

import torch

from quorum_attention.execution.device.lookup import BACKENDS


def broadcast_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool, bool, int]:
    """Return the inputs cast by autocast and broadcast, for ``shape_of_inputs``.

    Returns:
        query, key and value of at least three dimensions and the same batch dimensions;
        ``enable_gqa``, or True where all query heads share one key/value head; whether
        the inputs were (tokens, head_dim); bytes of the casts, on the inputs' device.

    Raises:
        ValueError: batch dimensions that do not broadcast.
    """
    cast_bytes = 0
    dtype = _autocast_dtype(query.device.type)
    if dtype is not None:
        originals = (query, key, value)
        query, key, value = (cast_by_autocast(tensor, dtype) for tensor in originals)
        for tensor, original in zip((query, key, value), originals, strict=True):
            if tensor is not original:
                # Not ``nbytes``, which torch's compiler cannot read of lengths that may
                # vary.
                cast_bytes += tensor.numel() * tensor.element_size()
    n_dims = (query.dim(), key.dim(), value.dim())
    if min(n_dims) < 2:
        return query, key, value, enable_gqa, False, cast_bytes
    rank = max(3, *n_dims)
    query = _with_dims(query, rank)
    key = _with_dims(key, rank)
    value = _with_dims(value, rank)
    heads, kv_heads, shares_heads = _broadcast_heads(
        query.shape[-3], key.shape[-3], value.shape[-3], enable_gqa
    )
    batch = _broadcast_batch(query, key, value)
    query = _expand(query, batch, heads)
    key = _expand_kv(key, batch, kv_heads)
    value = _expand_kv(value, batch, kv_heads)
    without_heads = max(n_dims) == 2
    return query, key, value, shares_heads, without_heads, cast_bytes


def _with_dims(tensor: torch.Tensor, n_dims: int) -> torch.Tensor:
    """Return a view with ``n_dims`` dimensions: new ones come first."""
    n_missing = n_dims - tensor.dim()
    if n_missing == 0:
        return tensor
    return tensor[(None,) * n_missing]


def _broadcast_heads(
    heads: int, key_heads: int, value_heads: int, enable_gqa: bool
) -> tuple[int, int, bool]:
    """Return (query heads, key/value heads, enable_gqa) after broadcasting.

    Heads broadcast as torch's do, but a single key/value head is shared instead of
    expanded.
    """
    kv_heads = value_heads if key_heads == 1 else key_heads
    if enable_gqa or heads == kv_heads:
        return heads, kv_heads, enable_gqa
    if heads == 1:
        return kv_heads, kv_heads, False
    return heads, kv_heads, kv_heads == 1


def _broadcast_batch(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the batch dimensions to which those of all tensors (*batch, heads, n, d)
    broadcast."""
    batches = [t.shape[:-3] for t in tensors]
    if all(batch == batches[0] for batch in batches):
        return batches[0]  # torch's function imports sympy, which takes a second
    try:
        return tuple(torch.broadcast_shapes(*batches))
    except RuntimeError:
        shapes = [tuple(batch) for batch in batches]
        raise ValueError(
            "query, key and value must have batch dimensions that broadcast, got "
            f"{shapes}"
        ) from None


def _expand(tensor: torch.Tensor, batch: tuple[int, ...], heads: int) -> torch.Tensor:
    """Expand a tensor to batch dimensions and heads, if it does not have them."""
    leading = (*batch, heads)
    if tensor.shape[:-2] == leading:
        return tensor
    return tensor.expand(*leading, *tensor.shape[-2:])


def _expand_kv(
    tensor: torch.Tensor, batch: tuple[int, ...], kv_heads: int
) -> torch.Tensor:
    """Expand key or value to batch dimensions, and a single head to ``kv_heads``."""
    heads = tensor.shape[-3]
    return _expand(tensor, batch, kv_heads if heads == 1 else heads)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast casts to on such a device; None where it is
    off."""
    if device_type not in BACKENDS or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_by_autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor as autocast does: only floating dtypes, and not float64."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
