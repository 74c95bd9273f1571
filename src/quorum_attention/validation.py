"""Checks at the door: what came in is what an attention call needs, before any work.

Every error names the argument, what came and what is allowed.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from quorum_attention.execution.masks import mask_shape
from quorum_attention.execution.workload import ELEMENT_BYTES, Workload

_DTYPES = ", ".join(str(d).removeprefix("torch.") for d in ELEMENT_BYTES)


def as_tensor(value: Any, name: str) -> torch.Tensor:
    """``value`` as a tensor; a NumPy array (np.memmap too) is shared, not copied."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        with warnings.catch_warnings():
            # A read-only map is only read; torch cannot know.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(value)
    raise TypeError(f"{name} must be a torch.Tensor or a numpy.ndarray, got {type(value).__name__}")


def check_inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
) -> Workload:
    """The sizes of the call.

    Raises:
        ValueError, TypeError: the inputs do not fit each other.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if tensor.dim() < 3:
            raise ValueError(
                f"{name} must have at least 2 dimensions (..., heads, tokens, head_dim), "
                f"got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in ELEMENT_BYTES:
            raise TypeError(f"{name} must be one of {_DTYPES}, got {tensor.dtype}")
    for name in ("key", "value"):
        other = tensors[name]
        if other.dtype != query.dtype:
            raise TypeError(f"{name} must have the query's dtype {query.dtype}, got {other.dtype}")
        if other.device != query.device:
            raise ValueError(
                f"{name} must be on the query's device {query.device}, got {other.device}"
            )
        if other.dim() != query.dim() or other.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} must have the query's batch dimensions {tuple(query.shape[:-3])}, "
                f"got shape {tuple(other.shape)} beside query {tuple(query.shape)}"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have the query's head_dim {query.shape[-1]}, got {key.shape[-1]}"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value must have the key's heads and tokens {tuple(key.shape[-3:-1])}, "
            f"got {tuple(value.shape[-3:-1])}"
        )
    if query.shape[-1] == 0:
        raise ValueError("query must have a head_dim of at least 1, got 0")
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads != kv_heads:
        if not enable_gqa:
            raise ValueError(
                f"key has {kv_heads} heads and query {heads}; they must be equal unless "
                f"enable_gqa=True"
            )
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"with enable_gqa=True the query's heads must be a multiple of the key's, "
                f"got {heads} and {kv_heads}"
            )
    mask = None
    if attn_mask is not None:
        _check_mask(attn_mask, query, key)
        mask = mask_shape(attn_mask, query.dim() - 3)
    return Workload(
        batch_shape=tuple(query.shape[:-3]),
        heads=heads,
        kv_heads=kv_heads,
        n_queries=query.shape[-2],
        n_keys=key.shape[-2],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=query.dtype,
        is_causal=bool(is_causal),
        mask=mask,
    )


def _check_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    if mask.dtype != torch.bool and mask.dtype not in ELEMENT_BYTES:
        raise TypeError(f"attn_mask must be bool or one of {_DTYPES}, got {mask.dtype}")
    if mask.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "attn_mask.requires_grad is not supported: gradients of a bias are not computed; "
            "pass attn_mask.detach()"
        )
    whole = (*query.shape[:-1], key.shape[-2])
    fits = mask.dim() <= len(whole) and all(
        n in (1, m) for n, m in zip(reversed(mask.shape), reversed(whole), strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask must broadcast to (..., heads, queries, keys) = {whole}, "
            f"got {tuple(mask.shape)}"
        )


def check_options(
    dropout_p: float, depth: int | str, accumulator: str, out_dtype: torch.dtype | None
) -> None:
    """The options that need no tensors."""
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p must be 0.0 (dropout inside the attention is not supported), "
            f"got {dropout_p}"
        )
    is_depth = isinstance(depth, int) and not isinstance(depth, bool) and depth >= 0
    if depth != "auto" and not is_depth:
        raise ValueError(f"depth must be 'auto' or a whole number from 0, got {depth!r}")
    if accumulator not in ("auto", "device", "host"):
        raise ValueError(f"accumulator must be 'auto', 'device' or 'host', got {accumulator!r}")
    if out_dtype is not None and out_dtype not in ELEMENT_BYTES:
        raise TypeError(f"out_dtype must be None or one of {_DTYPES}, got {out_dtype}")


def check_apart(result: torch.Tensor, name: str, inputs: dict[str, torch.Tensor]) -> None:
    """A preallocated result must not lie over an input: rows are read again after it is written."""
    for other, tensor in inputs.items():
        same = result.device == tensor.device and result.numel() and tensor.numel()
        if same and _span(result)[0] < _span(tensor)[1] and _span(tensor)[0] < _span(result)[1]:
            raise ValueError(f"{name} must not share memory with {other}")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check_result(
    result: torch.Tensor, shape: tuple[int, ...], name: str, dtype: torch.dtype | None = None
) -> None:
    """A preallocated result: shape, dtype, and that it can be written."""
    if tuple(result.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(result.shape)}")
    if dtype is not None and result.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {result.dtype}")
    if result.dtype not in ELEMENT_BYTES:
        raise TypeError(f"{name} must be one of {_DTYPES}, got {result.dtype}")
    if result.requires_grad:
        raise ValueError(f"{name} must not require a gradient")
    if any(n > 1 and s == 0 for n, s in zip(result.shape, result.stride(), strict=True)):
        raise ValueError(f"{name} must not be an expanded tensor (it is written to)")
