"""A mask of a sharded call: made whole from what each rank holds.

The mask is that of the whole sequence, the same on all ranks. Ids of documents and paddings may be
of a rank's own rows: they are gathered, a number for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.call.validation import as_mask
from quorum_attention.counts import shown
from quorum_attention.execution.problem import Workload
from quorum_attention.mask import Mask, map_tensors

# Fields with a number for each token.
_PER_TOKEN = ("documents", "key_padding")


def checked_mask(attn_mask: Any, query: Any = None, key: Any = None) -> Mask | None:
    """The argument ``attn_mask`` as a ``Mask``.

    Args:
        query, key: as of ``as_mask``.

    Raises:
        TypeError: it is none.
    """
    attn_mask = as_mask(attn_mask, query, key)
    if attn_mask is None or isinstance(attn_mask, Mask):
        return attn_mask
    if isinstance(attn_mask, torch.Tensor):
        return Mask(bias=attn_mask)
    raise TypeError(f"attn_mask must be a Mask, a tensor or None, got {shown(attn_mask)}")


def whole_mask(
    mask: Mask,
    group: dist.ProcessGroup,
    lengths: Sequence[int],
    shard: Workload,
    device: torch.device,
) -> Mask:
    """The mask of the whole sequence: ids and paddings of this rank's rows gathered.

    Args:
        lengths: rows of every rank.
        shard: this rank's part of the call.
        device: of the call's tensors.

    Raises:
        ValueError: a field fits neither the whole call nor this rank's rows, by name.
    """
    batch, heads, rows = shard.batch, shard.heads, shard.n_queries
    tokens, most = sum(lengths), max(lengths)

    def gathered(mine: torch.Tensor, name: str) -> torch.Tensor:
        columns = mine.shape[-1]
        # Where one rank has all rows the two cannot be told apart there, so all of them gather.
        if name not in _PER_TOKEN or len(lengths) == 1 or columns == tokens > most:
            return mine
        if columns not in (rows, tokens) or (mine.dim() == 2 and len(mine) not in (1, batch)):
            raise ValueError(
                f"attn_mask.{name} must be for the {rows} rows of this rank or all {tokens}, and a "
                f"batch of {batch}, got shape {tuple(mine.shape)}"
            )
        padded = torch.zeros((batch, most), dtype=torch.int64, device=device)
        padded[:, :rows] = (mine if mine.dim() == 2 else mine[None])[:, :rows]
        every = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(every, padded, group=group)
        parts = [t[:, :n] for t, n in zip(every, lengths, strict=True)]
        return torch.cat(parts, dim=1).to(mine.dtype)

    mask = map_tensors(mask, gathered)
    if mask.sinks is not None and mask.sinks.shape != (heads,):
        raise ValueError(
            f"attn_mask.sinks must be one for each of the {heads} query heads, got "
            f"{tuple(mask.sinks.shape)}"
        )
    bias = mask.bias
    if bias is None:
        return mask
    if any(
        n not in (1, m) for n, m in zip(bias.shape[::-1], (tokens, tokens, heads), strict=False)
    ):
        raise ValueError(
            f"attn_mask as a tensor (or its bias) must broadcast to (..., {heads}, {tokens}, "
            f"{tokens}), the heads, queries and keys of the whole call, got {tuple(bias.shape)}"
        )
    if bias.dim() > 3 and len(shard.batch_shape) > 1:
        bias = bias.expand(*shard.batch_shape, *bias.shape[-3:]).flatten(0, -4)
    return replace(mask, bias=bias)


def signature_of(value: Any, name: str = "") -> Any:
    """What must be the same on all ranks; of tensors for each token all but how many they have."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape[:-1] if name in _PER_TOKEN else value.shape)
    if isinstance(value, Mask):
        return [(f.name, signature_of(getattr(value, f.name), f.name)) for f in fields(value)]
    if isinstance(value, tuple):
        return tuple(signature_of(one, name) for one in value)
    return "a function" if callable(value) else value


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a mask, by the names of their fields."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for one in value:
            yield from tensors_of(one, name)
    elif isinstance(value, Mask):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name), field.name)


def columns_of(mask: Mask) -> list[int]:
    """For each tensor with a number for each token, how many those are."""
    return [tensor.shape[-1] for name, tensor in tensors_of(mask) if name in _PER_TOKEN]


__all__ = ["checked_mask", "columns_of", "signature_of", "tensors_of", "whole_mask"]
