"""A mask of a sharded call: made whole from what each rank holds.

The mask is that of the whole sequence, the same on all ranks. Ids of documents and paddings may be
of a rank's own rows: they are gathered, a number for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from quorum_attention.call.options import Arguments
from quorum_attention.call.validation import Tensors, as_mask, check_tensors
from quorum_attention.counts import shown
from quorum_attention.decomposition.intervals import cut
from quorum_attention.distributed.agreement import told
from quorum_attention.distributed.partition import step_of
from quorum_attention.kernels.masked.resolve import ResolvedMask, Sizes, described, resolve
from quorum_attention.mask import Mask, map_tensors

# Fields with a number for each token.
PER_TOKEN = ("documents", "key_padding")
_KEPT: WeakKeyDictionary[ResolvedMask, tuple[int, ...]] = WeakKeyDictionary()


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
        ValueError: a bias or sinks do not fit the whole call, by name.
    """
    rows, tokens, most = shard.query.shape[-2], sum(lengths), max(lengths)

    def gathered(mine: torch.Tensor, name: str) -> torch.Tensor:
        # Where one rank has all rows the two cannot be told apart there, so all of them gather.
        if name not in PER_TOKEN or len(lengths) == 1 or mine.shape[-1] == tokens > most:
            return mine
        own = torch.atleast_2d(mine)[:, :rows].cpu()
        return torch.cat(told(group, own), dim=1).to(mine.device)

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
    resolved, n = resolve(mask, sizes, is_causal), sizes.n_queries
    if resolved not in _KEPT:
        edges = range(0, n + step_of(n), step_of(n))
        kept = [0] * len(edges)
        for geometry in resolved.geometries:
            blocks = [(0, n, 0, n)] if geometry.blocks is None else geometry.blocks.tolist()
            for start, stop, *keys in blocks:
                for rows in cut((start, stop), edges):
                    kept[rows.start // edges.step + 1] += geometry.band.count(*rows, *keys)
        _KEPT[resolved] = tuple(accumulate(kept))
    return _KEPT[resolved]


def signature_of(mask: Mask | None) -> Any:
    """What must be the same on all ranks; of tensors for each token all but how many they have."""
    tensors = tensors_of(mask)
    shapes = [(n, tuple(t.shape[: -1 if n in PER_TOKEN else None])) for n, t in tensors]
    return mask and (described(mask), shapes)


def tensors_of(mask: Mask | None) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a mask, by the names of their fields."""
    found: list[tuple[str, torch.Tensor]] = []

    def seen(tensor: torch.Tensor, name: str) -> torch.Tensor:
        found.append((name, tensor))
        return tensor

    if mask is not None:
        map_tensors(mask, seen)
        own = {"bias": mask.bias, "sinks": mask.sinks}
        found += [(name, tensor) for name, tensor in own.items() if tensor is not None]
    return found
