"""Whether a description keeps the pairs that the mask function keeps: asked at some hundred pairs.

What is recognised by its code could mean something else in another version of Transformers. So a
description is tried where masks have their edges before it is believed; where it differs, the
function itself is evaluated, tile by tile, and nothing is described.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from quorum_attention.integrations.transformers.recognition import MaskFunction, Sizes
from quorum_attention.kernels.torch_private import outside
from quorum_attention.mask import Mask

ANYWHERE = 128  # random pairs
NEAR = 32  # random queries, each with keys at every edge
# Numbers of its own: those of the caller's generators must be the same with and without.
_random = torch.Generator().manual_seed(0)


def pairs_to_try(mask: Mask, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, query, key), each (pairs,) int64 on the host: random ones, and ones beside edges."""
    queries = _some(sizes.queries, NEAR)
    ends = torch.tensor([0, sizes.queries - 1], device="cpu")
    queries = torch.cat((queries, ends))
    keys = [(queries + sizes.offset + apart) for apart in sorted(set(_edges(mask)))]
    keys += [torch.zeros_like(queries), torch.full_like(queries, sizes.keys - 1)]
    near = torch.cat(keys).clamp(0, sizes.keys - 1)
    q = torch.cat((_some(sizes.queries, ANYWHERE), queries.repeat(len(keys))))
    k = torch.cat((_some(sizes.keys, ANYWHERE), near))
    return _some(sizes.batch, len(q)), q, k


def _some(limit: int, count: int) -> torch.Tensor:
    """(count,) random whole numbers from 0 to below ``limit``."""
    return torch.randint(limit, (count,), generator=_random, device="cpu")


def _edges(mask: Mask) -> Iterator[int]:
    """Distances from query to key at which a mask may change its mind."""
    yield from (-1, 0, 1)
    left, right = mask.sides
    for edge in (-left, right):
        yield from (edge - 1, edge, edge + 1)
    if mask.chunk is not None:
        yield from (-mask.chunk, 1 - mask.chunk, mask.chunk - 1, mask.chunk)
    for one in (*mask.either, *mask.every):
        yield from _edges(one)


def kept_at(
    mask: Mask, b: torch.Tensor, q: torch.Tensor, k: torch.Tensor, sizes: Sizes
) -> torch.Tensor:
    """Bool: whether the description keeps these pairs of the call; indices that broadcast."""
    kept = torch.ones_like(b + q + k, dtype=torch.bool)
    position = q + (mask.offset or 0)
    left, right = mask.sides
    if mask.causal:
        kept &= k <= position
    if left >= 0:
        kept &= position - k <= left
    if right >= 0:
        kept &= k - position <= right
    if mask.chunk is not None:
        kept &= k // mask.chunk == position // mask.chunk
    if mask.documents is not None:
        queries, keys = mask.documents
        kept &= queries.expand(sizes.batch, -1)[b, q] == keys.expand(sizes.batch, -1)[b, k]
    if mask.key_padding is not None:
        kept &= mask.key_padding.expand(sizes.batch, -1)[b, k]
    if mask.keeps is not None:
        kept &= asked(mask.keeps, b, q, k)
    if mask.either:
        kept &= torch.stack([kept_at(one, b, q, k, sizes) for one in mask.either]).any(0)
    for one in mask.every:
        kept &= kept_at(one, b, q, k, sizes)
    return kept


def asked(
    function: MaskFunction, b: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """Bool: what a mask function says of these pairs of head 0, one at a time."""
    shape = torch.broadcast_shapes(b.shape, q.shape, k.shape)
    pairs = [each.expand(shape).reshape(-1) for each in (b, q, k)]
    with TransformGetItemToIndex():
        kept = torch.vmap(lambda b, q, k: function(b, torch.zeros_like(b), q, k))(*pairs)
    return kept.to(torch.bool).expand(pairs[0].shape).reshape(shape)


def dense(mask: Mask, sizes: Sizes) -> torch.Tensor:
    """(batch, 1, queries, keys) bool: all of a description, where there is such a tensor anyway."""
    b = torch.arange(sizes.batch, device=sizes.device)[:, None, None, None]
    q = torch.arange(sizes.queries, device=sizes.device)[:, None]
    return kept_at(mask, b, q, torch.arange(sizes.keys, device=sizes.device), sizes)


def agrees(mask: Mask, function: MaskFunction, sizes: Sizes) -> bool:
    """Whether ``mask`` keeps what ``function`` keeps, at ``pairs_to_try``.

    Args:
        function: of positions in the whole sequence, padding included.
    """
    if not (sizes.batch and sizes.queries and sizes.keys):
        return True
    # A model may be mapped (torch.func). Where all there is are numbers, so are the pairs to try;
    # tensors belong to the transformation.
    held = (mask.documents, mask.key_padding, mask.keeps)
    only_numbers = all(one is None for one in held) and not (mask.either or mask.every)
    with outside() if only_numbers else nullcontext():
        b, q, k = (each.to(sizes.device) for each in pairs_to_try(mask, sizes))
        described = kept_at(mask, b, q, k, sizes)
        asked_for = asked(function, b, q + sizes.query_offset, k + sizes.key_offset)
        return torch.equal(described, asked_for)


__all__ = ["agrees", "asked", "dense", "kept_at", "pairs_to_try"]
