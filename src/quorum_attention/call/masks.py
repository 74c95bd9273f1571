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
from quorum_attention.kernels.masked.kernel import kernel_for_mask
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
    mask = _readable(mask)
    work = Workload(*sizes, is_causal, shape, dropout=dropout)
    seen = Sizes(work.batch, sizes.heads, sizes.n_queries, sizes.n_keys)
    call = work.call_shape(options.device.type, needs_grad)
    causal, kernel = kernel_for_mask(mask, seen, is_causal, options.kernel, call, options.device)
    return causal, options if kernel is options.kernel else replace(options, kernel=kernel)


def _readable(mask: Mask) -> Mask:
    """``mask`` with tensors that can be read, also under a transformation of torch.func's.

    Raises:
        NotImplementedError: one has no dense memory of its own, or torch.vmap maps over it, by
            name.
    """

    def plain(tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
        if tensor is None:
            return None
        check_kind(tensor, f"Mask.{name}")
        return unwrapped(tensor, f"Mask.{name}")

    documents: Any = mask.documents
    if isinstance(documents, tuple):
        documents = tuple(plain(ids, "documents") for ids in documents)
    else:
        documents = plain(documents, "documents")
    changes: dict[str, Any] = {
        "documents": documents,
        "key_lengths": plain(mask.key_lengths, "key_lengths"),
        "key_padding": plain(mask.key_padding, "key_padding"),
        "either": tuple(map(_readable, mask.either)),
        "every": tuple(map(_readable, mask.every)),
    }
    return replace(mask, **changes) if torch._C._are_functorch_transforms_active() else mask


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
