"""What the ranks of a sharded call must agree on, and whether they do."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist

from quorum_attention.call.validation import check_kind
from quorum_attention.counts import one_of, shown, whole_number
from quorum_attention.distributed.masks import signature_of
from quorum_attention.mask import Mask

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What the ranks tell each other, after their rows.
_WORDS = (
    "batch size", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "is_causal", "scale",
    "attn_mask", "dropout_seed",
)  # fmt: skip


def check_shard(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> None:
    """Refuse a rank's tensors that do not fit each other.

    Raises:
        TypeError, ValueError: they do not; the message names the argument.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {shown(tensor)}")
        check_kind(tensor, name)
    _check_sizes(
        query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, enable_gqa,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _check_sizes(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    query_dtype: torch.dtype,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
    query_device: torch.device,
    key_device: torch.device,
    value_device: torch.device,
    enable_gqa: bool,
) -> None:
    """``check_shard``, of what it looks at; those that passed are remembered."""
    for name, shape, dtype, device in (
        ("query", query, query_dtype, query_device),
        ("key", key, key_dtype, key_device),
        ("value", value, value_dtype, value_device),
    ):
        if len(shape) < 3:
            raise ValueError(
                f"{name} must be (..., heads, rows, head_dim), got shape {tuple(shape)}"
            )
        if dtype not in _DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {dtype}")
        if dtype != query_dtype or device != query_device:
            raise ValueError(
                f"{name} must have the query's dtype and device, {query_dtype} on "
                f"{query_device}, got {dtype} on {device}"
            )
        if (*shape[:-3], shape[-2]) != (*query[:-3], query[-2]):
            raise ValueError(
                f"{name} must have the query's batch dimensions and rows, "
                f"{(*query[:-3], query[-2])}, got shape {tuple(shape)}"
            )
    if key[-1] != query[-1] or key[-3] != value[-3]:
        raise ValueError(
            "key must have the query's head_dim and the value's heads, got shapes "
            f"{tuple(query)}, {tuple(key)}, {tuple(value)}"
        )
    heads, kv_heads = query[-3], key[-3]
    if not heads or not kv_heads or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"there are {heads} query heads and {kv_heads} key/value heads, which "
            "enable_gqa=True allows"
        )


def agreed(
    group: dist.ProcessGroup,
    inputs: Sequence[torch.Tensor],
    causal: bool,
    scale: float | None,
    mask: Mask | None,
    seed: int | None,
    lengths: Sequence[int] | str | None,
) -> tuple[int, ...]:
    """Rows of every rank; gathered, unless they are given.

    Raises:
        ValueError: the lengths do not fit, or the ranks do not agree.
    """
    query, key, value = inputs
    rows = query.shape[-2]
    if isinstance(lengths, str):
        one_of(lengths, "lengths", ("equal",))
        return (rows,) * group.size()
    if lengths is not None:
        sizes = tuple(whole_number(n, "lengths", 0) for n in lengths)
        if len(sizes) != group.size() or sizes[group.rank()] != rows:
            raise ValueError(
                f"lengths must have an entry for each of {group.size()} ranks, and {rows} for rank "
                f"{group.rank()}, got {shown(list(sizes))}"
            )
        return sizes
    told = (
        rows, math.prod(query.shape[:-3]), query.shape[-3], key.shape[-3], query.shape[-1],
        value.shape[-1], _DTYPES.index(query.dtype), int(causal), _number(scale),
        _number(None if mask is None else signature_of(mask, rows)), _number(seed),
    )  # fmt: skip
    mine = torch.tensor(told, dtype=torch.int64, device=query.device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    listed = torch.stack(every).tolist()
    for number, word in enumerate(_WORDS, start=1):
        if len({one[number] for one in listed}) > 1:
            raise ValueError(
                f"the ranks do not agree on {word}; rank {group.rank()} has "
                f"query {tuple(query.shape)} {query.dtype}, key {tuple(key.shape)}, "
                f"is_causal={causal}, scale={scale}, attn_mask={mask}, dropout_seed={seed}"
            )
    return tuple(one[0] for one in listed)


def _number(what: object) -> int:
    """The same on all ranks for what is written the same."""
    return -1 if what is None else zlib.crc32(repr(what).encode())


__all__ = ["agreed", "check_shard"]
