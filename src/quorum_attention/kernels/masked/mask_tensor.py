"""The mask of a short call as a tensor, made on the device from ids, lengths and
padding there.

A call with such a tensor is one like any other with ``attn_mask``: the host reads no
ids, resolves no mask and makes no kernel for it. That would take longer than many calls
take a GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.kernels.masked import ways
from quorum_attention.kernels.masked.costs import cost_of_bias
from quorum_attention.kernels.masked.mask_fields import (
    POSITIONS,
    document_tensors,
    is_of_tokens,
    relative_band,
)
from quorum_attention.kernels.masked.mask_numbers import spans_tokens
from quorum_attention.kernels.masked.token_rules import PlaceRule, tables_on
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.mask import Mask

_ALL = slice(None)
_WORD_BYTES = 16


class MaskTensor(NamedTuple):
    """The additive mask that a call is given instead of a ``Mask``.

    Attributes:
        bias: 0 where a pair is kept, else -inf, (batch or 1, 1, n_queries or 1,
            n_keys).
        is_causal: whether keys after a query's own number are masked as well.
    """

    bias: torch.Tensor
    is_causal: bool


class _Sizes(NamedTuple):
    """The sizes of a call: batch entries, queries and keys."""

    batch: int
    n_queries: int
    n_keys: int


def short_mask_tensor(
    mask: Mask, query: torch.Tensor, key: torch.Tensor
) -> MaskTensor | None:
    """The tensor of a mask; None where the mask has other fields or tensors elsewhere,
    where one does not fit, or where the call is too long.

    Args:
        query, key: (batch, heads, n, head_dim), on one device. No mode of torch is
            active.
    """
    device = query.device
    if device.type not in ways.DEVICES_FOR_BIAS or not _is_of_tokens_alone(mask):
        return None
    batch, heads, n_queries, _ = query.shape
    sizes = _Sizes(batch, n_queries, key.shape[2])
    n_pairs = batch * n_queries * sizes.n_keys
    if n_pairs * heads == 0 or cost_of_bias(1, n_pairs * heads) > ways.LITTLE:
        return None
    if not _fits(mask, sizes, device):
        return None
    places = _place_rule(mask, n_queries)
    is_causal = places is not None and places.is_causal_call(sizes.n_keys)
    if is_causal:
        places = None
    has_rows = places is not None or mask.documents is not None
    n_numbers = n_pairs if has_rows else batch * sizes.n_keys
    if n_numbers * query.element_size() > ways.MOST_BYTES:
        return None
    is_kept = _kept_pairs(mask, places, sizes, device).unsqueeze(1)
    bias = _as_bias(is_kept, query.dtype)
    return MaskTensor(bias, is_causal)


def _kept_pairs(
    mask: Mask, places: PlaceRule | None, sizes: _Sizes, device: torch.device
) -> torch.Tensor:
    """Which pairs ids, lengths, padding and ``places`` keep, (batch or 1, queries or 1,
    keys)."""
    is_kept = tables_on(device, mask, sizes.n_keys).kept_pairs()
    if places is None:
        return is_kept
    queries = torch.arange(sizes.n_queries, device=device)
    keys = torch.arange(sizes.n_keys, device=device)
    kept_by_places = places.keeps(_ALL, queries.unsqueeze(0), keys.unsqueeze(0))
    return is_kept & kept_by_places


def _place_rule(mask: Mask, n_queries: int) -> PlaceRule | None:
    """Which pairs a mask keeps by their positions; None: all."""
    band = relative_band(mask)
    if band.keeps_all and mask.chunk is None:
        return None
    offset = mask.offset if isinstance(mask.offset, int) else 0
    places = np.arange(n_queries) + offset
    return PlaceRule(band, places[None], mask.chunk)


def _as_bias(is_kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a pair is kept, else -inf, in rows that begin at whole words.

    Kernels read it as it is, in both passes.
    """
    *shape, n_keys = is_kept.shape
    width = round_up(n_keys, _WORD_BYTES // dtype.itemsize)
    device = is_kept.device
    words = torch.empty(
        *shape,
        width,
        dtype=dtype,
        device=device,
    )
    bias = words[..., :n_keys]
    zero, masked = _bias_values(dtype, device)
    return torch.where(is_kept, zero, masked, out=bias)


@lru_cache(maxsize=64)
def _bias_values(
    dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """0 and -inf on a device."""
    with no_torch_modes():
        zero = torch.zeros((), dtype=dtype, device=device)
        return zero, torch.full_like(zero, -torch.inf)


def _is_of_tokens_alone(mask: Mask) -> bool:
    """Whether a mask has ids, lengths or padding, and no more than simple positions
    beside them."""
    if isinstance(mask.offset, torch.Tensor) or mask.counts_from_last:
        return False
    return is_of_tokens(mask, allowed=POSITIONS)


def _fits(mask: Mask, sizes: _Sizes, device: torch.device) -> bool:
    """Whether the tensors of a mask are on a device, of the right sizes, and in
    range."""
    of_query, of_key = document_tensors(mask)
    tensors_of_tokens = (
        (of_query, sizes.n_queries),
        # One tensor is of queries and of keys.
        (of_key, sizes.n_keys),
        (mask.key_padding, sizes.n_keys),
    )
    for tensor, n_tokens in tensors_of_tokens:
        if tensor is None:
            continue
        if not _is_plain_on(tensor, device):
            return False
        if not spans_tokens(tensor, sizes.batch, n_tokens):
            return False
    lengths = mask.key_lengths
    if lengths is None:
        return True
    return _is_plain_on(lengths, device) and _lengths_fit(lengths, sizes)


def _is_plain_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is of torch's own class, on a device."""
    return type(tensor) is torch.Tensor and tensor.device == device


def _lengths_fit(lengths: torch.Tensor, sizes: _Sizes) -> bool:
    """Whether each batch entry has a length, and as many keys. The host waits for the
    device."""
    if lengths.shape != (sizes.batch,):
        return False
    shortest, longest = torch.stack(lengths.to(torch.int64).aminmax()).tolist()
    is_in_range: bool = shortest >= 0 and longest <= sizes.n_keys
    return is_in_range
