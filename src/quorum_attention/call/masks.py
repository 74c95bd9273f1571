"""A ``Mask`` among a call's arguments: checked, and turned into a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quorum_attention.call.transforms import unwrapped
from quorum_attention.call.validation import Sizes as CallSizes
from quorum_attention.call.validation import check_kind
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.problem import Workload
from quorum_attention.kernels.masked.choice import kernel_for_mask
from quorum_attention.kernels.masked.resolve import Sizes
from quorum_attention.kernels.protocol import MaskShape
from quorum_attention.mask import Mask
from quorum_attention.planner.plan import Options


def under_mask(
    mask: Mask,
    sizes: CallSizes,
    is_causal: bool,
    options: Options,
    shape: MaskShape | None,
    *,
    needs_grad: bool,
    dropout: bool = False,
) -> tuple[bool, Options]:
    """Whether a call under ``mask`` is causal, and its options, with the kernel that knows the mask
    (bias and sinks left aside).

    Args:
        shape: of the mask's bias.

    Raises:
        ValueError, TypeError, NotImplementedError: a part of the mask does not fit, by name.
    """
    _check_kinds(mask)
    if torch._C._are_functorch_transforms_active():
        mask = _unwrapped(mask)
    work = Workload(*sizes, is_causal, shape, dropout=dropout)
    seen = Sizes(work.batch, sizes.heads, sizes.n_queries, sizes.n_keys)
    call = work.call_shape(options.device.type, needs_grad)
    causal, kernel = kernel_for_mask(mask, seen, is_causal, options.kernel, call, options.device)
    return causal, options if kernel is options.kernel else replace(options, kernel=kernel)


def _check_kinds(mask: Mask) -> None:
    """Refuse tensors of a mask, and of those within it, that have no dense memory of their own."""
    documents = mask.documents if isinstance(mask.documents, tuple) else (mask.documents,)
    named = [("key_lengths", mask.key_lengths), ("key_padding", mask.key_padding)]
    for name, tensor in [*named, *(("documents", ids) for ids in documents)]:
        if tensor is not None:
            check_kind(tensor, f"Mask.{name}")
    for inner in (*mask.either, *mask.every):
        _check_kinds(inner)


def _unwrapped(mask: Mask) -> Mask:
    """``mask`` with tensors that can be read under a transformation of torch.func's.

    Raises:
        NotImplementedError: torch.vmap maps over one, by name.
    """

    def plain(tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
        return None if tensor is None else unwrapped(tensor, f"Mask.{name}")

    documents: Any = mask.documents
    if isinstance(documents, tuple):
        documents = tuple(plain(ids, "documents") for ids in documents)
    else:
        documents = plain(documents, "documents")
    lengths, padding = (
        plain(mask.key_lengths, "key_lengths"),
        plain(mask.key_padding, "key_padding"),
    )
    either, every = tuple(map(_unwrapped, mask.either)), tuple(map(_unwrapped, mask.every))
    return replace(
        mask, documents=documents, key_lengths=lengths, key_padding=padding, either=either,
        every=every,
    )  # fmt: skip


def checked_sinks(mask: Mask, heads: int, query: torch.Tensor) -> torch.Tensor | None:
    """The mask's sinks.

    Raises:
        ValueError, NotImplementedError: they do not fit the call.
    """
    sinks = mask.sinks
    if sinks is None:
        return None
    check_kind(sinks, "Mask.sinks")
    if sinks.shape != (heads,):
        raise ValueError(
            f"Mask.sinks must be one for each of the {heads} query heads, got {tuple(sinks.shape)}"
        )
    if not on_host(sinks.device) and sinks.device != query.device:
        raise ValueError(
            f"Mask.sinks must be in host memory or on the query's device {query.device}, got "
            f"{sinks.device}"
        )
    return sinks
