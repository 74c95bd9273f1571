"""What Transformers asks for masks, under this integration: a description, never N x N."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from quorum_attention.integrations.transformers.comparison import agrees
from quorum_attention.integrations.transformers.described import DescribedMask
from quorum_attention.integrations.transformers.in_graph import described_in_graph
from quorum_attention.integrations.transformers.recognition import (
    Parts,
    Sizes,
    mask_of,
    parts_of,
)
from quorum_attention.kernels.torch_private import uncompiled


def quorum_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | DescribedMask | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> DescribedMask | torch.Tensor | None:
    """A description of a mask: how Transformers' ``AttentionMaskInterface`` calls it.

    Args:
        batch_size, q_length, kv_length: sizes of the call.
        q_offset, kv_offset: positions of its first query and its first key.
        mask_function: (batch, head, query position, key position) -> keep; None is causal.
        attention_mask: (batch, tokens) bool, True where a token is no padding.
        device: of the description's tensors: ids of packed documents and padding, if there are any.
        others: what other kinds of masks need (dtype, config, ...).

    Returns:
        A ``DescribedMask``; for one query what SDPA has: a tensor (batch, 1, 1, kv_length) or None.

    Raises:
        ValueError: a mask of padding that is not of two dimensions.
    """
    if attention_mask is not None and attention_mask.ndim not in (2, 4):
        raise ValueError(
            "attention_mask must be (batch, tokens), or (batch, heads, queries, keys), got shape "
            f"{tuple(attention_mask.shape)}"
        )
    if torch.compiler.is_compiling() and q_length != 1:
        found = _in_graph(
            (batch_size, q_length, kv_length), q_offset, kv_offset, mask_function, attention_mask
        )
        if found is not None:
            return found
    return _read(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device,
        **others,
    )  # fmt: skip


def _in_graph(
    sizes: tuple[int, int, int],
    q_offset: int | torch.Tensor,
    kv_offset: int,
    mask_function: Callable[..., torch.Tensor] | None,
    attention_mask: torch.Tensor | DescribedMask | None,
) -> DescribedMask | None:
    """The description, where a graph need not be left for it."""
    from transformers import masking_utils

    if isinstance(attention_mask, DescribedMask):
        return attention_mask
    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    padding = None
    if attention_mask is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, sizes[2], kv_offset)
        stop = kv_offset + sizes[2]
        if padding.shape[0] < sizes[0] or padding.shape[1] < stop:
            return None
        padding = padding[: sizes[0], kv_offset:stop].bool()
    elif mask_function is not masking_utils.causal_mask_function:
        return None  # packed documents, for all that is known: of those a tensor is asked
    return described_in_graph(sizes, q_offset - kv_offset, mask_function, padding)


@uncompiled
def _read(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    mask_function: Callable[..., torch.Tensor] | None,
    attention_mask: torch.Tensor | DescribedMask | None,
    device: torch.device | str,
    **others: Any,
) -> DescribedMask | torch.Tensor | None:
    """See ``quorum_mask``; outside of graphs."""
    from transformers import masking_utils

    if isinstance(attention_mask, DescribedMask):
        return attention_mask  # made before, by ``generate`` for a static cache
    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    if q_length == 1:
        one: torch.Tensor | None = masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=1, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            device=device, **others,
        )  # fmt: skip
        return one
    q_offset = int(q_offset)
    sizes = Sizes(batch_size, q_length, kv_length, q_offset, kv_offset, torch.device(device))
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    whole = mask_function
    if padding is not None:
        padded = masking_utils.padding_mask_function(padding.to(device))
        whole = masking_utils.and_masks(mask_function, padded)
    parts = parts_of(whole, sizes)
    mask = mask_of(parts, sizes)
    if not agrees(mask, whole, sizes):
        warnings.warn(
            f"quorum attention took {mask_function!r} for {mask}, and it is not: this mask is "
            "tried pair by pair, which is slow; please report it with the version of Transformers",
            stacklevel=2,
        )
        parts = Parts(others=[whole])
        mask = mask_of(parts, sizes)
    seen = min(kv_length, q_length + sizes.offset) if parts.causal else kv_length
    return DescribedMask(mask, (batch_size, 1, q_length, kv_length), max(seen, 0))


__all__ = ["quorum_mask"]
