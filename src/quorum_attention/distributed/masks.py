"""A mask of a sharded call: made whole from what each rank holds.

The mask is that of the whole sequence, the same on all ranks. Ids of documents and paddings may be
of a rank's own rows: they are gathered, a number for each token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.call.validation import as_mask
from quorum_attention.counts import shown
from quorum_attention.mask import Mask, map_tensors


class Shards(NamedTuple):
    """Where the rows of a sharded call are.

    Attributes:
        sizes: rows of every rank.
        device: of the call's tensors.
    """

    group: dist.ProcessGroup
    sizes: tuple[int, ...]
    batch_shape: tuple[int, ...]
    heads: int
    device: torch.device

    @property
    def batch(self) -> int:
        """Batch entries."""
        return math.prod(self.batch_shape)

    @property
    def tokens(self) -> int:
        """Rows of all ranks."""
        return sum(self.sizes)

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        return self.sizes[self.group.rank()]


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


def whole_mask(mask: Mask, shards: Shards) -> Mask:
    """The mask of the whole sequence: ids and paddings of this rank's rows gathered.

    Raises:
        ValueError: a field fits neither the whole call nor this rank's rows, by name.
    """
    whole = map_tensors(mask, lambda tensor, name: _gathered(tensor, shards, name))
    if mask.sinks is not None and mask.sinks.shape != (shards.heads,):
        raise ValueError(
            f"attn_mask.sinks must be one for each of the {shards.heads} query heads, got "
            f"{tuple(mask.sinks.shape)}"
        )
    return whole if mask.bias is None else replace(whole, bias=_flat(mask.bias, shards))


def _gathered(mine: torch.Tensor, shards: Shards, name: str) -> torch.Tensor:
    """A tensor with a number for each token of the whole call, from each rank's or as it is."""
    if name == "key_lengths":
        return mine
    columns, most = mine.shape[-1], max(shards.sizes)
    if mine.dim() == 2 and mine.shape[0] not in (1, shards.batch):
        raise ValueError(
            f"attn_mask.{name} must have a batch of {shards.batch}, got {tuple(mine.shape)}"
        )
    # Where one rank has all rows the two cannot be told apart there, so all of them gather.
    if len(shards.sizes) == 1 or (columns == shards.tokens and most < shards.tokens):
        return mine
    if columns not in (shards.rows, shards.tokens):
        raise ValueError(
            f"attn_mask.{name} must be for the {shards.rows} rows of this rank or all "
            f"{shards.tokens}, got shape {tuple(mine.shape)}"
        )
    entries = (mine if mine.dim() == 2 else mine[None])[:, : shards.rows]
    padded = torch.zeros((shards.batch, most), dtype=torch.int64, device=shards.device)
    padded[:, : shards.rows] = entries
    every = [torch.empty_like(padded) for _ in shards.sizes]
    dist.all_gather(every, padded, group=shards.group)
    whole = torch.cat([t[:, :n] for t, n in zip(every, shards.sizes, strict=True)], dim=1)
    return whole.to(mine.dtype)


def _flat(bias: torch.Tensor, shards: Shards) -> torch.Tensor:
    """The bias, with one batch dimension where there are several."""
    most = (shards.heads, shards.tokens, shards.tokens)
    if any(n not in (1, m) for n, m in zip(bias.shape[::-1], most[::-1], strict=False)):
        raise ValueError(
            "attn_mask as a tensor (or its bias) must broadcast to (..., "
            f"{', '.join(map(str, most))}), the heads, queries and keys of the whole call, "
            f"got {tuple(bias.shape)}"
        )
    if bias.dim() < 4 or len(shards.batch_shape) < 2:
        return bias
    every = bias.expand(*shards.batch_shape, *bias.shape[-3:])
    return every.reshape(-1, *bias.shape[-3:])


def signature_of(mask: Mask) -> tuple[Any, ...]:
    """What must be the same on all ranks; of tensors for each token all but how many they have."""

    def shape(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tuple(tensor.shape)

    per_token = tuple(None if t is None else tuple(t.shape[:-1]) for t in _per_token(mask))
    below = tuple(signature_of(one) for one in (*mask.either, *mask.every))
    return (
        mask.causal, mask.offset, mask.sides, mask.chunk, per_token, shape(mask.key_lengths),
        mask.keeps is not None, shape(mask.bias), shape(mask.sinks), mask.softcap,
        len(mask.either), below,
    )  # fmt: skip


def columns_of(mask: Mask) -> list[int]:
    """For each tensor with a number for each token, how many those are."""
    found = [t.shape[-1] for t in _per_token(mask) if t is not None]
    return found + [n for one in (*mask.either, *mask.every) for n in columns_of(one)]


def _per_token(mask: Mask) -> tuple[torch.Tensor | None, ...]:
    both = mask.documents if isinstance(mask.documents, tuple) else (mask.documents,)
    return (*both, mask.key_padding)


def tensors_of(mask: Mask) -> list[torch.Tensor]:
    """Tensors of a mask: changed before the backward, they would give a wrong one."""
    documents = mask.documents if isinstance(mask.documents, tuple) else (mask.documents,)
    every = (*documents, mask.key_padding, mask.key_lengths, mask.bias, mask.sinks)
    found = [t for t in every if t is not None]
    return found + [t for one in (*mask.either, *mask.every) for t in tensors_of(one)]


__all__ = [
    "Shards", "checked_mask", "columns_of", "signature_of", "tensors_of", "whole_mask",
]  # fmt: skip
