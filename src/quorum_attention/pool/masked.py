"""What a part of a call masks: the call's mask, cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quorum_attention.mask import Keeps, Mask
from quorum_attention.pool.parts import Part, Sizes


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
    if bias is not None:
        bias = bias[bias_at(bias.shape, sizes, part)]
    if sinks is not None:
        sinks = sinks[part.heads.start : part.heads.stop]
    found = None if described is None else _cut(described, sizes, part)
    causal = sizes.is_causal
    if causal and part.rows.start:
        # Its first query does not stand at the first key.
        later = Mask(causal=True, offset=part.rows.start)
        found = later if found is None else found & later
        causal = False
    if found is None and sinks is None:
        return bias, causal
    return replace(found or Mask(), bias=bias, sinks=sinks), causal


def bias_at(shape: Sequence[int], sizes: Sizes, part: Part) -> tuple[slice, ...]:
    """Where a part's bias is in that of the whole call, of ``shape`` (batch or 1, heads or 1,
    n_queries or 1, n_keys or 1)."""
    spans = ((part.entry, part.entry + 1), part.heads, part.rows, (0, part.n_keys(sizes)))
    return tuple(
        slice(None) if n == 1 else slice(*span) for n, span in zip(shape, spans, strict=True)
    )


def _cut(mask: Mask, sizes: Sizes, part: Part) -> Mask:
    changes: dict[str, Any] = {}
    if part.rows.start or mask.causal == "lower_right":
        offset = mask.offset
        if offset is None:
            offset = sizes.n_keys - sizes.n_queries if mask.causal == "lower_right" else 0
        changes["offset"] = offset + part.rows.start
    if mask.documents is not None:
        both = mask.documents if isinstance(mask.documents, tuple) else (mask.documents,) * 2
        queries, keys = (_entry(ids, part, 2) for ids in both)
        changes["documents"] = (queries[..., part.rows.start : part.rows.stop], keys)
    if mask.key_lengths is not None:
        changes["key_lengths"] = _entry(mask.key_lengths, part, 1)
    if mask.key_padding is not None:
        changes["key_padding"] = _entry(mask.key_padding, part, 2)
    if mask.keeps is not None and (part.entry, part.heads.start, part.rows.start) != (0, 0, 0):
        changes["keeps"] = _From(mask.keeps, part.entry, part.heads.start, part.rows.start)
    for name in ("either", "every"):
        changes[name] = tuple(_cut(one, sizes, part) for one in getattr(mask, name))
    return replace(mask, **changes)


def _entry(tensor: torch.Tensor, part: Part, dims: int) -> torch.Tensor:
    """The part of a tensor whose first dimension is batch entries, if it has ``dims``."""
    if tensor.dim() < dims or len(tensor) == 1:
        return tensor
    return tensor[part.entry : part.entry + 1]


@dataclass(frozen=True)
class _From:
    """A rule of positions in the whole call, for positions in a part."""

    keeps: Keeps
    entry: int
    head: int
    row: int

    def __call__(self, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return self.keeps(batch + self.entry, head + self.head, query + self.row, key)


def sendable(mask: Mask) -> Mask:
    """The mask with tensors in host memory of their own: what is sent becomes shared memory, and a
    caller's tensor must stay what it is."""
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


__all__ = ["bias_at", "masked", "sendable"]
