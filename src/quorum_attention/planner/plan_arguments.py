"""The arguments of ``plan()``, checked."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quorum_attention.argument_checks import dropout_chance, shown, switch, whole_number
from quorum_attention.execution.device.lookup import (
    available_device,
    backend_of,
    best_device,
    named_device,
)
from quorum_attention.execution.dtypes import check_dtype
from quorum_attention.execution.head_groups import GroupSize
from quorum_attention.kernels.call_shape import CallShape, scale_is_exact
from quorum_attention.quorums import quorum_size

# The largest size of anything: torch counts in 64 bits.
_MAX_SIZE = 2**63 - 1


def checked_device(device: str | torch.device | None) -> torch.device:
    """Return the device that computes; a plan can also be made for one that is not
    available."""
    if device is None:
        return best_device()
    named = named_device(device, "device")
    if backend_of(named).is_here():
        return available_device(named, "device")
    return named


def checked_shape(
    device: torch.device,
    dtype: torch.dtype,
    *,
    n_tokens: int,
    n_keys: int | None,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    value_dim: int | None,
    batch: int,
    is_causal: bool,
    dropout_p: float,
) -> CallShape:
    """Return the sizes of a call.

    Raises:
        ValueError, TypeError: a size that no call has, by name.
    """
    n_queries = whole_number(n_tokens, "n_tokens", 0, _MAX_SIZE)
    n_keys = whole_number(
        n_tokens if n_keys is None else n_keys, "n_keys", 0, _MAX_SIZE
    )
    heads = whole_number(heads, "heads", 1, _MAX_SIZE)
    kv_heads = whole_number(
        heads if kv_heads is None else kv_heads, "kv_heads", 1, _MAX_SIZE
    )
    head_dim = whole_number(head_dim, "head_dim", 1, _MAX_SIZE)
    if value_dim is None:
        value_dim = head_dim
    value_dim = whole_number(value_dim, "value_dim", 1, _MAX_SIZE)
    batch = whole_number(batch, "batch", 1, _MAX_SIZE)
    if heads % kv_heads:
        raise ValueError(
            f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}"
        )
    check_dtype(dtype, "dtype")
    return CallShape(
        device.type,
        dtype,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        switch(is_causal, "is_causal"),
        batch_shape=(batch,),
        n_queries=n_queries,
        n_keys=n_keys,
        dropout=dropout_chance(dropout_p) > 0.0,
        exact_scale=scale_is_exact(head_dim**-0.5, dtype),
    )


def checked_levels(
    levels: Iterable[int] | None, depth: int | None
) -> tuple[tuple[int, ...] | None, int | None]:
    """Return chunk counts and number of levels; None leaves them to the planner.

    Raises:
        ValueError, TypeError: no such chunk counts or depth, or they contradict each
            other.
    """
    chunk_counts = None if levels is None else _checked_chunk_counts(levels)
    depth = optional_number(depth, "depth", 0)
    if chunk_counts is not None and depth is not None and depth != len(chunk_counts):
        raise ValueError(
            f"depth is {depth} but levels {chunk_counts} has {len(chunk_counts)}"
        )
    return chunk_counts, depth


def _checked_chunk_counts(levels: Iterable[int]) -> tuple[int, ...]:
    if isinstance(levels, str) or not isinstance(levels, Iterable):
        raise TypeError(
            f"levels must be chunk counts such as (7, 7) or None, got {shown(levels)}"
        )
    chunk_counts = tuple(whole_number(c, "levels", 1) for c in levels)
    for c in chunk_counts:
        quorum_size(c)
    return chunk_counts


def checked_group(shape: CallShape, heads_per_group: int | None) -> GroupSize | None:
    """Return the head group asked for; None leaves it to the planner.

    Raises:
        ValueError: query heads that share a key/value head would be in two groups.
    """
    if heads_per_group is None:
        return None
    shared = shape.queries_per_key_head
    heads_per_group = whole_number(heads_per_group, "heads_per_group", 1)
    if (
        heads_per_group < shared
        or heads_per_group > shape.heads
        or heads_per_group % shared
    ):
        raise ValueError(
            f"heads_per_group must be a multiple of {shared} (query heads that share a "
            f"key/value head) up to {shape.heads}, got {heads_per_group}"
        )
    return GroupSize(1, heads_per_group // shared)


def optional_number(
    value: int | None, name: str, minimum: int, maximum: int | None = None
) -> int | None:
    """Return ``value`` as ``whole_number`` does, or None."""
    return None if value is None else whole_number(value, name, minimum, maximum)
