"""A ``Mask`` among a call's arguments: checked, and turned into a kernel."""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.call.transforms import unwrapped
from quorum_attention.call.validation import Sizes as CallSizes
from quorum_attention.call.validation import check_kind
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.execution.problem import Workload
from quorum_attention.kernels.masked.kernel import kernel_for_mask
from quorum_attention.kernels.masked.resolve import Sizes
from quorum_attention.kernels.protocol import MaskShape
from quorum_attention.mask import Mask, map_tensors
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
    mask = map_tensors(mask, _readable)
    work = Workload(*sizes, is_causal, shape, dropout=dropout)
    seen = Sizes(work.batch, sizes.heads, sizes.n_queries, sizes.n_keys)
    call = work.call_shape(options.device.type, needs_grad)
    causal, kernel = kernel_for_mask(mask, seen, is_causal, options.kernel, call, options.device)
    return causal, options if kernel is options.kernel else replace(options, kernel=kernel)


def _readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor of a mask as one that can be read, also under a transformation of torch.func's.

    Raises:
        NotImplementedError: it has no dense memory of its own, or torch.vmap maps over it, by name.
    """
    check_kind(tensor, f"Mask.{name}")
    return unwrapped(tensor, f"Mask.{name}")


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
