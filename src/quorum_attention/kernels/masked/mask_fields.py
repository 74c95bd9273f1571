"""The fields of a mask and of the masks that it holds: their tensors, and what is not a
tensor."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch

from quorum_attention.decomposition.bands import Band
from quorum_attention.mask import Mask


def masks_in(mask: Mask) -> Iterator[Mask]:
    """A mask, and the masks that it holds."""
    yield mask
    for inner in (*mask.every, *mask.either):
        yield from masks_in(inner)


_TENSOR_FIELDS = ("key_lengths", "key_padding", "offset")


def tensors_of(mask: Mask) -> list[tuple[str, torch.Tensor]]:
    """The tensors that say which pairs are kept, by the names of their fields."""
    named: list[tuple[str, torch.Tensor]] = []
    for inner in masks_in(mask):
        documents = inner.documents
        of_documents = documents if isinstance(documents, tuple) else (documents,)
        values = [("documents", ids) for ids in of_documents]
        values += [(name, getattr(inner, name)) for name in _TENSOR_FIELDS]
        for name, value in values:
            if isinstance(value, torch.Tensor):
                named.append((name, value))
    return named


def document_tensors(mask: Mask) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The ids of queries and of keys; None without documents."""
    documents = mask.documents
    if not isinstance(documents, tuple):
        return documents, documents
    of_query, of_key = documents
    return of_query, of_key


TOKENS = frozenset({"documents", "key_lengths", "key_padding"})
POSITIONS = frozenset({"causal", "offset", "window", "chunk"})
SCORES = frozenset({"bias", "softcap", "sinks"})


def fields_key(mask: Mask) -> Hashable:
    """All of a mask but its tensors and functions."""
    n_documents = 2 if isinstance(mask.documents, tuple) else mask.documents is not None
    offset = "tensor" if isinstance(mask.offset, torch.Tensor) else mask.offset
    return (
        mask.causal,
        offset,
        mask.sides,
        mask.chunk,
        n_documents,
        mask.key_lengths is not None,
        mask.key_padding is not None,
        mask.keeps is not None,
        mask.softcap,
        tuple(map(fields_key, mask.every)),
        tuple(map(fields_key, mask.either)),
    )


def is_of_tokens(mask: Mask, allowed: frozenset[str] = POSITIONS | SCORES) -> bool:
    """Whether a mask has ids, lengths or padding, and no other fields than those
    ``allowed``.

    The fields that are understood are listed, so that a new one is not ignored.
    """
    names = mask.set_fields().keys()
    return not names.isdisjoint(TOKENS) and names <= TOKENS | allowed


def relative_band(mask: Mask) -> Band:
    """The band of a mask's own causal rule and window, around the place of a query."""
    before, after = mask.sides
    low = -before if before >= 0 else None
    high = after if after >= 0 else None
    if mask.causal:
        high = 0 if high is None else min(high, 0)
    return Band(low, high)
