"""A mask of a sharded call: made whole from what each rank holds.

The mask is that of the whole sequence, the same on all ranks. Ids of documents and paddings may be
of a rank's own rows: they are gathered, a number for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from quorum_attention.call.options import Arguments
from quorum_attention.call.validation import Tensors, as_mask, check_tensors
from quorum_attention.counts import shown
from quorum_attention.distributed.agreement import told
from quorum_attention.distributed.partition import step_of
from quorum_attention.kernels.masked.resolve import Sizes, described, resolve
from quorum_attention.mask import Mask, map_tensors

_Ints = NDArray[np.int64]
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
    shard: Tensors,
) -> Mask:
    """The mask of the whole sequence: ids and paddings of this rank's rows gathered.

    Args:
        lengths: rows of every rank.
        shard: this rank's part of the call.

    Raises:
        ValueError: a field fits neither the whole call nor this rank's rows, by name.
    """
    rows, batch = shard.query.shape[-2], shard.query.shape[:-3].numel()
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
        own = (mine if mine.dim() == 2 else mine[None])[:, :rows].expand(batch, rows)
        return torch.cat(told(group, own.cpu()), dim=1).to(mine.device)

    mask = map_tensors(mask, gathered)
    # Bias and sinks have to fit the whole call.
    query, key, value = (
        t.new_empty(()).expand(*t.shape[:-2], tokens, t.shape[-1]) for t in shard[:3]
    )
    check_tensors(query, key, value, Arguments(mask, enable_gqa=True))
    bias, batch_shape = mask.bias, shard.query.shape[:-3]
    if bias is None or bias.dim() <= 3 or len(batch_shape) <= 1:
        return mask
    return replace(mask, bias=bias.expand(*batch_shape, *bias.shape[-3:]).flatten(0, -4))


def pairs_above(mask: Mask, sizes: Sizes, is_causal: bool) -> tuple[int, ...]:
    """Pairs of a head's rows that the mask keeps, as ``Sequences.kept``; those that rules of single
    pairs leave out are counted as well."""
    n, step = sizes.n_queries, step_of(sizes.n_queries)
    kept = np.zeros(-(-n // step) + 1, np.int64)
    for geometry in resolve(mask, sizes, is_causal).geometries:
        blocks = np.array([[0, n, 0, n]]) if geometry.blocks is None else geometry.blocks
        # Cut at all steps.
        first = blocks[:, 0] // step
        counts = -(-blocks[:, 1] // step) - first
        q0, q1, k0, k1 = np.repeat(blocks, counts, axis=0).T
        at = np.arange(len(q0)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        part = np.maximum(q0, at * step), np.minimum(q1, at * step + step), k0, k1
        low, high = geometry.band.low, geometry.band.high
        pairs = _count_upto(part, n if high is None else high)
        pairs -= 0 if low is None else _count_upto(part, low - 1)
        np.add.at(kept, at + 1, np.maximum(pairs, 0))
    return tuple(kept.cumsum().tolist())


def _count_upto(blocks: tuple[_Ints, _Ints, _Ints, _Ints], most: int) -> _Ints:
    """How many pairs of each block have ``key - query <= most``."""
    q0, q1, k0, k1 = blocks

    def below(x: _Ints) -> _Ints:
        """The sum of min(t, width) for t from 1 to x."""
        x = np.maximum(x, 0)
        square = np.minimum(x, k1 - k0)
        found: _Ints = square * (square + 1) // 2 + (x - square) * (k1 - k0)
        return found

    return below(q1 + most - k0) - below(q0 + most - k0)


def signature_of(mask: Mask) -> Any:
    """What must be the same on all ranks; of tensors for each token all but how many they have."""
    shapes = [(n, tuple(t.shape[: -1 if n in _PER_TOKEN else None])) for n, t in tensors_of(mask)]
    return described(mask), shapes


def tensors_of(mask: Mask) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a mask, by the names of their fields."""
    own = [
        (name, tensor) for name in ("bias", "sinks") if (tensor := getattr(mask, name)) is not None
    ]

    def seen(tensor: torch.Tensor, name: str) -> torch.Tensor:
        own.append((name, tensor))
        return tensor

    map_tensors(mask, seen)
    return own


def columns_of(mask: Mask) -> list[int]:
    """For each tensor with a number for each token, how many those are."""
    return [tensor.shape[-1] for name, tensor in tensors_of(mask) if name in _PER_TOKEN]
