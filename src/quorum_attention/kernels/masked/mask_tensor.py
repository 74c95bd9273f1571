"""The mask of a short call as a tensor, made on the device from ids, lengths and padding there.

A call with such a tensor is one like any other with ``attn_mask``: the host reads no ids, resolves
no mask and makes no kernel for it. That would take longer than many calls take a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked import ways
from quorum_attention.kernels.masked.costs import cost_of_bias
from quorum_attention.kernels.masked.mask_fields import POSITIONS, is_of_tokens, relative_band
from quorum_attention.kernels.masked.token_rules import PlaceRule, TokenRules
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.mask import Mask

_ALL = slice(None)
_WORD_BYTES = 16


@dataclass(frozen=True)
class MaskTensor:
    """The additive mask that a call is given instead of a ``Mask``.

    Attributes:
        bias: 0 where a pair is kept, else -inf, (batch or 1, 1, n_queries or 1, n_keys).
        is_causal: whether keys after a query's own number are masked as well.
    """

    bias: torch.Tensor
    is_causal: bool


def short_mask_tensor(mask: Mask, query: torch.Tensor, key: torch.Tensor) -> MaskTensor | None:
    """The tensor of a mask; None where the mask has other fields or tensors elsewhere, where one
    does not fit, or where the call is too long.

    Args:
        query, key: (batch, heads, n, head_dim), on one device.
    """
    if query.device.type not in ways.DEVICES_FOR_BIAS or not _is_of_tokens_alone(mask):
        return None
    batch, heads, n_queries, _ = query.shape
    n_keys = key.shape[2]
    shape = CallShape(
        query.device.type,
        query.dtype,
        heads,
        heads,
        1,
        1,
        batch_shape=(batch,),
        n_queries=n_queries,
        n_keys=n_keys,
    )
    if not _fits(mask, shape, query.device):
        return None
    band = relative_band(mask)
    offset = mask.offset if isinstance(mask.offset, int) else 0
    places = PlaceRule(band, (np.arange(n_queries) + offset)[None], mask.chunk)
    is_causal = places.is_plain_causal and n_queries == n_keys
    has_places = not (is_causal or places.keeps_all)
    has_rows = has_places or mask.documents is not None
    n_pairs = batch * (n_queries if has_rows else 1) * n_keys
    if n_pairs * query.element_size() > ways.MOST_BYTES:
        return None
    if cost_of_bias(1, shape) > ways.LITTLE:
        return None
    rules = TokenRules(mask, n_keys, places)
    rules.place_on(query.device)
    is_kept = rules.kept(_ALL, _ALL, _ALL, query.device, by_places=has_places)
    return MaskTensor(_as_bias(is_kept.unsqueeze(1), query.dtype), is_causal)


def _as_bias(is_kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a pair is kept, else -inf, in rows that begin at whole words.

    Kernels read it as it is, in both passes.
    """
    *shape, n_keys = is_kept.shape
    width = round_up(n_keys, _WORD_BYTES // dtype.itemsize)
    device = is_kept.device
    words = torch.empty(*shape, width, dtype=dtype, device=device)
    bias = words[..., :n_keys]
    zero, masked = _bias_values(dtype, device)
    return torch.where(is_kept, zero, masked, out=bias)


@lru_cache(maxsize=64)
def _bias_values(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """0 and -inf on a device."""
    with no_torch_modes():
        zero = torch.zeros((), dtype=dtype, device=device)
        return zero, torch.full_like(zero, -torch.inf)


def _is_of_tokens_alone(mask: Mask) -> bool:
    """Whether a mask has ids, lengths or padding, and no more than simple positions beside them."""
    if isinstance(mask.offset, torch.Tensor) or mask.counts_from_last:
        return False
    return is_of_tokens(mask, allowed=POSITIONS)


def _tensors(mask: Mask) -> Iterator[torch.Tensor]:
    """The ids, lengths and padding of a mask."""
    documents = mask.documents if isinstance(mask.documents, tuple) else (mask.documents,)
    for tensor in (*documents, mask.key_lengths, mask.key_padding):
        if tensor is not None:
            yield tensor


def _fits(mask: Mask, shape: CallShape, device: torch.device) -> bool:
    """Whether the tensors of a mask are on a device, of the right sizes, and in range."""
    if 0 in (shape.batch, shape.heads, shape.n_queries, shape.n_keys):
        return False
    for tensor in _tensors(mask):
        if type(tensor) is not torch.Tensor or tensor.device != device:
            return False
    padding = mask.key_padding
    if padding is not None and not _spans(padding, shape.batch, shape.n_keys):
        return False
    return _documents_fit(mask, shape) and _lengths_fit(mask, shape)


def _documents_fit(mask: Mask, shape: CallShape) -> bool:
    """Whether each query and each key has an id, if any has."""
    documents = mask.documents
    if documents is None:
        return True
    if not isinstance(documents, tuple):
        is_square = shape.n_queries == shape.n_keys
        return is_square and _spans(documents, shape.batch, shape.n_keys)
    of_query, of_key = documents
    if not _spans(of_query, shape.batch, shape.n_queries):
        return False
    return _spans(of_key, shape.batch, shape.n_keys)


def _lengths_fit(mask: Mask, shape: CallShape) -> bool:
    """Whether each batch entry has a length, and as many keys. The host waits for the device."""
    lengths = mask.key_lengths
    if lengths is None:
        return True
    if lengths.shape != (shape.batch,):
        return False
    shortest, longest = torch.stack(lengths.to(torch.int64).aminmax()).tolist()
    is_in_range: bool = shortest >= 0 and longest <= shape.n_keys
    return is_in_range


def _spans(tensor: torch.Tensor, batch: int, n_tokens: int) -> bool:
    """Whether a tensor has a number for each token."""
    return tensor.shape in ((n_tokens,), (1, n_tokens), (batch, n_tokens))
