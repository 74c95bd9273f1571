"""The numbers in a mask's tensors, checked, on the host: ids, lengths, padding and
offsets."""

from __future__ import annotations

import operator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.alignment import offsets_from_last
from quorum_attention.kernels.masked.cells import NO_KEY
from quorum_attention.kernels.masked.mask_fields import document_tensors
from quorum_attention.kernels.masked.token_rules import Ids
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.mask import FAR, Mask
from quorum_attention.plain_types import Keywords
from quorum_attention.units import counted

# A query that no key has.
_NO_QUERY = NO_KEY + 1


def document_ids(mask: Mask, shape: CallShape) -> tuple[Ids, Ids]:
    """The ids of queries and keys, (1 or batch, n) each; 0 without documents.

    Raises:
        ValueError: they do not fit the call.
    """
    batch = shape.batch
    n_queries = shape.n_queries
    n_keys = shape.n_keys
    of_query, of_key = document_tensors(mask)
    if of_query is None or of_key is None:
        return np.zeros((1, n_queries), np.int64), np.zeros((1, n_keys), np.int64)
    if not isinstance(mask.documents, tuple) and n_queries != n_keys:
        raise ValueError(
            "Mask.documents must be two tensors, of "
            f"{counted(n_queries, 'query', 'queries')} and of "
            f"{counted(n_keys, 'key')}, where these differ, got one"
        )
    by_query = _token_rows(of_query, "Mask.documents", batch, n_queries, "queries")
    by_key = by_query
    if of_key is not of_query or n_queries != n_keys:
        by_key = _token_rows(of_key, "Mask.documents", batch, n_keys, "keys")
    for ids in (by_query, by_key):
        if ids.size and int(ids.min()) <= _NO_QUERY:
            raise ValueError(
                f"Mask.documents must be above {_NO_QUERY}, got {int(ids.min())}"
            )
    return by_query, by_key


def kept_key_ids(mask: Mask, shape: CallShape, by_key: Ids) -> Ids:
    """The ids of keys; ``NO_KEY`` of those that padding and lengths leave out.

    Raises:
        ValueError: padding or lengths do not fit the call.
    """
    return np.where(kept_keys(mask, shape), by_key, NO_KEY)


def kept_keys(mask: Mask, shape: CallShape) -> NDArray[np.bool_]:
    """Which keys padding and lengths keep, (1 or batch, n_keys).

    Raises:
        ValueError: they do not fit the call.
    """
    columns = np.arange(shape.n_keys)
    lengths = key_lengths(mask, shape)
    is_kept: NDArray[np.bool_] = columns < lengths[:, None]
    if mask.key_padding is None:
        return is_kept
    padding = _token_rows(
        mask.key_padding,
        "Mask.key_padding",
        shape.batch,
        shape.n_keys,
        "keys",
    )
    is_there: NDArray[np.bool_] = padding != 0
    return np.logical_and(is_kept, is_there)


def key_lengths(mask: Mask, shape: CallShape) -> Ids:
    """How many keys there are, (1 or batch,).

    Raises:
        ValueError: the lengths do not fit the call.
    """
    if mask.key_lengths is None:
        return np.full(1, shape.n_keys, np.int64)
    lengths = _on_host(mask.key_lengths)
    if lengths.shape != (shape.batch,):
        raise ValueError(
            f"Mask.key_lengths must have shape {(shape.batch,)}, got {lengths.shape}"
        )
    if shape.batch and (lengths.min() < 0 or lengths.max() > shape.n_keys):
        raise ValueError(
            f"Mask.key_lengths must be from 0 to the {counted(shape.n_keys, 'key')}, "
            f"got {int(lengths.min())} to {int(lengths.max())}"
        )
    return lengths


def query_offsets(mask: Mask, shape: CallShape) -> Ids:
    """The place of queries among the keys, less their own numbers, (1 or batch, 1 or
    n_queries).

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    if isinstance(mask.offset, torch.Tensor):
        return _offset_rows(mask.offset, shape)
    if not mask.counts_from_last:
        offset = mask.offset or 0
        return np.full((1, 1), offset, np.int64)
    lengths = key_lengths(mask, shape)
    if mask.documents is None:
        offsets = lengths - shape.n_queries
        return offsets[:, None]
    by_query, by_key = document_ids(mask, shape)
    if mask.key_lengths is None and by_query is by_key:
        return np.zeros((1, 1), np.int64)
    rows: list[Ids] = []
    n_entries = max(len(by_query), len(by_key), len(lengths))
    for entry in range(n_entries):
        query_ids = by_query[entry % len(by_query)]
        key_ids = by_key[entry % len(by_key)]
        n_keys = lengths[entry % len(lengths)]
        rows.append(offsets_from_last(query_ids, key_ids[:n_keys]))
    if not rows:
        return np.zeros((0, 1), np.int64)
    return np.stack(rows)


def with_offsets(mask: Mask, shape: CallShape) -> Mask:
    """The mask with numbers in place of each "lower_right", also in the masks that it
    holds.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    changes: Keywords = {}
    for name in ("either", "every"):
        inner_masks = getattr(mask, name)
        numbered = tuple(with_offsets(inner, shape) for inner in inner_masks)
        has_changed = map(operator.is_not, numbered, inner_masks)
        if any(has_changed):
            changes[name] = numbered
    if mask.counts_from_last:
        changes["offset"] = _offset_field(mask, shape)
    return replace(mask, **changes) if changes else mask


def _offset_field(mask: Mask, shape: CallShape) -> int | torch.Tensor:
    """The offsets of a mask as its field ``offset``."""
    with no_torch_modes():
        offsets = query_offsets(mask, shape)
        if offsets.size == 1:
            return int(offsets[0, 0])
        return torch.from_numpy(offsets)


def _offset_rows(tensor: torch.Tensor, shape: CallShape) -> Ids:
    """``Mask.offset`` as a tensor, (1 or batch, 1 or n_queries)."""
    offsets = np.atleast_2d(_on_host(tensor))
    batch = shape.batch
    n_queries = shape.n_queries
    n_rows, n_columns = offsets.shape
    if n_rows not in (1, batch) or n_columns not in (1, n_queries):
        raise ValueError(
            f"Mask.offset must have shape ({n_queries},), ({batch}, {n_queries}) or "
            f"({batch}, 1) for {counted(batch, 'batch entry', 'batch entries')} of "
            f"{counted(n_queries, 'query', 'queries')}, got {tuple(tensor.shape)}"
        )
    if not offsets.size:
        return offsets
    smallest = int(offsets.min())
    largest = int(offsets.max())
    if max(-smallest, largest) > FAR:
        raise ValueError(
            f"Mask.offset must be from {-FAR} to {FAR}, got {smallest} to {largest}"
        )
    return offsets


def spans_tokens(tensor: torch.Tensor, batch: int, n_tokens: int) -> bool:
    """Whether a tensor has a number for each token, of each batch entry or of all."""
    return tensor.shape in ((n_tokens,), (1, n_tokens), (batch, n_tokens))


def _token_rows(
    tensor: torch.Tensor, name: str, batch: int, n_tokens: int, tokens: str
) -> Ids:
    """A tensor with a number for each token, (1 or batch, n_tokens)."""
    if not spans_tokens(tensor, batch, n_tokens):
        raise ValueError(
            f"{name} must have shape ({n_tokens},) or ({batch}, {n_tokens}) for "
            f"{batch} batch entries (all batch dimensions as one) of {n_tokens} "
            f"{tokens}, got {tuple(tensor.shape)}"
        )
    return np.atleast_2d(_on_host(tensor))


def _on_host(tensor: torch.Tensor) -> Ids:
    """The numbers of a tensor, as whole numbers of 64 bits."""
    numbers: Ids = tensor.detach().cpu().numpy().astype(np.int64)
    return numbers
