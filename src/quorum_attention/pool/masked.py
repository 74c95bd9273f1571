"""What a part of a call masks: the call's mask, cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.mask import Keeps, Mask
from quorum_attention.pool.parts import Part, Sizes


class Block(NamedTuple):
    """Some query rows of some heads of a batch entry, and some keys; all numbered in the call."""

    entry: int
    heads: Interval
    rows: Interval
    keys: Interval


def masked(
    sizes: Sizes,
    part: Part,
    described: Mask | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[Mask | torch.Tensor | None, bool]:
    """``attn_mask`` and ``is_causal`` of a part's own call.

    Args:
        described: what else the whole call masks.
        bias: (batch or 1, heads or 1, n_queries or 1, n_keys or 1) of the whole call.
        sinks: (heads,) of the whole call.
    """
    block = Block(part.entry, part.heads, part.rows, Interval(0, part.n_keys(sizes)))
    if bias is not None:
        bias = bias[bias_at(bias.shape, sizes, part)]
    if sinks is not None:
        sinks = sinks[part.heads.start : part.heads.stop]
    return together(*of_block(sizes, block, described), bias, sinks)


def of_block(sizes: Sizes, block: Block, described: Mask | None) -> tuple[Mask | None, bool]:
    """What a block's own call masks beside a bias, and whether it is causal."""
    found = None if described is None else _cut(described, sizes, block)
    rows, keys = block.rows, block.keys
    if not sizes.is_causal or keys.stop <= rows.start + 1:
        return found, False  # no key is later than any query
    if rows.start == keys.start:
        return found, True
    # Its first query does not stand at its first key.
    later = Mask(causal=True, offset=rows.start - keys.start)
    return later if found is None else found & later, False


def together(
    found: Mask | None, causal: bool, bias: torch.Tensor | None, sinks: torch.Tensor | None
) -> tuple[Mask | torch.Tensor | None, bool]:
    """``attn_mask`` and ``is_causal`` of a block's own call, with its bias and its sinks."""
    if found is None and sinks is None:
        return bias, causal
    if found is not None and bias is None and sinks is None:
        return found, causal
    return replace(found or Mask(), bias=bias, sinks=sinks), causal


def bias_at(shape: Sequence[int], sizes: Sizes, part: Part) -> tuple[slice, ...]:
    """Where a part's bias is in that of the whole call, of ``shape`` (batch or 1, heads or 1,
    n_queries or 1, n_keys or 1)."""
    spans = ((part.entry, part.entry + 1), part.heads, part.rows, (0, part.n_keys(sizes)))
    return tuple(
        slice(None) if n == 1 else slice(*span) for n, span in zip(shape, spans, strict=True)
    )


def _cut(mask: Mask, sizes: Sizes, block: Block) -> Mask:
    (entry, heads, rows, keys), changes = block, dict[str, Any]()
    if rows.start or keys.start or mask.causal == "lower_right":
        offset = mask.offset
        if offset is None:
            offset = sizes.n_keys - sizes.n_queries if mask.causal == "lower_right" else 0
        changes["offset"] = offset + rows.start - keys.start
    if mask.documents is not None:
        both = mask.documents if isinstance(mask.documents, tuple) else (mask.documents,) * 2
        of_queries, of_keys = (_entry(ids, entry, 2) for ids in both)
        changes["documents"] = (of_queries[..., slice(*rows)], of_keys[..., slice(*keys)])
    if mask.key_lengths is not None:
        changes["key_lengths"] = (_entry(mask.key_lengths, entry, 1) - keys.start).clamp(
            0, keys.length
        )
    if mask.key_padding is not None:
        changes["key_padding"] = _entry(mask.key_padding, entry, 2)[..., slice(*keys)]
    if mask.keeps is not None and (entry, heads.start, rows.start, keys.start) != (0, 0, 0, 0):
        changes["keeps"] = _From(mask.keeps, entry, heads.start, rows.start, keys.start)
    for name in ("either", "every"):
        changes[name] = tuple(_cut(one, sizes, block) for one in getattr(mask, name))
    if mask.chunk is None or keys.start % mask.chunk == 0:
        return replace(mask, **changes)
    # Its chunks are not counted from the block's first key.
    found = replace(mask, **changes, chunk=None)
    first = changes["offset"] + keys.start
    of_queries = torch.arange(first, first + rows.length, device="cpu") // mask.chunk
    of_keys = torch.arange(*keys, device="cpu") // mask.chunk
    return found & Mask(documents=(of_queries, of_keys))


def _entry(tensor: torch.Tensor, entry: int, dims: int) -> torch.Tensor:
    """A batch entry of a tensor whose first dimension is batch entries, if it has ``dims``."""
    if tensor.dim() < dims or len(tensor) == 1:
        return tensor
    return tensor[entry : entry + 1]


@dataclass(frozen=True)
class _From:
    """A rule of positions in the whole call, for positions in a block."""

    keeps: Keeps
    entry: int
    head: int
    row: int
    key: int

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return self.keeps(batch + self.entry, head + self.head, query + self.row, key + self.key)


def sendable(mask: Mask) -> Mask:
    """The mask with tensors in host memory of their own: a caller's may be written to."""
    changes: dict[str, Any] = {}
    for name in ("documents", "key_lengths", "key_padding"):
        value = getattr(mask, name)
        if isinstance(value, tuple):
            changes[name] = tuple(_copied(one) for one in value)
        elif value is not None:
            changes[name] = _copied(value)
    for name in ("either", "every"):
        changes[name] = tuple(sendable(one) for one in getattr(mask, name))
    return replace(mask, **changes)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


__all__ = ["Block", "bias_at", "masked", "of_block", "sendable", "together"]
