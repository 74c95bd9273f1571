"""What is checked of a call on a rank before rows are sent: an error here leaves the
group usable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.call.block import WholeCall
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.transformations import needs_gradient, results_for_few_pairs
from quorum_attention.call.validation import Tensors
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.kernels.protocol import InnerKernel, check_mask_gradient
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.select import select_kernel
from quorum_attention.kernels.torch_private import has_transforms, stands_for_several
from quorum_attention.mask import Mask


def checked_shard(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    report: Any,
) -> tuple[Tensors, Request]:
    """Return the tensors of this rank as a call of their own, with the kernel of that
    name.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument makes no sense, by name.
    """
    if report is not None and not isinstance(report, ShardedReport):
        raise TypeError(
            f"report must be a distributed.ShardedReport, got {shown(report)}"
        )
    tensors, request = request_of("attention", query, key, value, arguments)
    refuse_transforms(tensors.query)
    shape = request.shape
    if shape.n_queries != shape.n_keys or not shape.heads:
        raise ValueError(
            "key must have the query's rows, and there must be heads, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)}; for cross attention over ranks "
            "gather the keys and give them to quorum_attention.attention with this "
            "rank's queries"
        )
    _check_ignores_positions(request.options.kernel)
    return tensors, request


def refuse_transforms(tensor: torch.Tensor) -> None:
    """Check before anything is sent that ``tensor`` has numbers that can be sent.

    Raises:
        NotImplementedError: a transformation of torch.func's is active, or one gradient
            stands for several.
    """
    if has_transforms() or stands_for_several(tensor):
        raise NotImplementedError(
            "distributed.attention takes no part in torch.func transformations, nor in "
            "torch.autograd.grad(..., is_grads_batched=True): ranks cannot send such "
            "tensors; take one gradient after the other by torch.autograd"
        )


def _check_ignores_positions(kernel: str | InnerKernel) -> None:
    """Check that a kernel can compute parts of a call.

    Raises:
        NotImplementedError: the kernel computes another attention, by positions in the
            whole call.
    """
    if kernel == "auto":
        return
    kernel = get_kernel(kernel)
    needs_positions = kernel.own_attention and not kernel.position_free
    if needs_positions or kernel.plain_variant is not None:
        raise NotImplementedError(
            f"kernel {kernel.name!r} computes another attention, of positions in the "
            "whole call; ranks have parts of it: give attn_mask, or a function that "
            "takes no positions"
        )


def is_recorded(request: Request, tensors: Tensors, mask: Mask | None) -> bool:
    """Return whether there may be a backward.

    Raises:
        RuntimeError: there may be one, and an input, a bias or sinks are tensors of
            inference mode. Autograd could not tell whether they change. On one device
            torch itself raises the error.
    """
    records = request.records
    if mask is not None:
        records = records or needs_gradient(mask.bias, mask.sinks)
    if not records:
        return False
    named = {"query": tensors.query, "key": tensors.key, "value": tensors.value}
    if mask is not None and mask.bias is not None:
        named["attn_mask"] = mask.bias
    if mask is not None and mask.sinks is not None:
        named["Mask.sinks"] = mask.sinks
    for name, tensor in named.items():
        if tensor.is_inference():
            raise RuntimeError(
                f"{name} is a tensor of inference mode, which cannot be saved for "
                f"backward: give {name}.clone(), made outside of that mode"
            )
    return True


def check_kernel(
    whole_call: WholeCall,
    options: CallOptions,
    tensors: Tensors,
    dtype: torch.dtype,
    records: bool,
) -> None:
    """Ask a kernel about the whole call, before parts of the call are sent.

    Args:
        dtype: of parts.
        records: whether there may be a backward.

    Raises:
        NotImplementedError: the kernel that was asked for cannot run the call.
        TypeError: a function of the mask returns no bools.
    """
    shape = whole_call.shape
    mask = whole_call.mask
    if (mask is None and options.kernel == "auto") or not shape.n_queries:
        return
    sizes = (
        (shape.heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.value_dim),
    )
    number = tensors.query.new_empty((), dtype=dtype)
    query, key, value = (
        number.expand(shape.batch, n_heads, shape.n_queries, width)
        for n_heads, width in sizes
    )
    dropout = whole_call.dropout
    arguments = Arguments(
        mask,
        0.0 if dropout is None else dropout.p,
        None if dropout is None else dropout.seed,
        shape.is_causal,
        whole_call.scale,
        enable_gqa=True,
        options=options,
    )
    function = "attention_backward" if records else "attention"
    _, request = request_of(function, query, key, value, arguments)
    if request.options.kernel == "auto":
        return
    device = request.options.device
    asked_shape = replace(request.shape, needs_grad=records)
    kernel = select_kernel(request.options.kernel, asked_shape, device)
    if request.mask_grad:
        check_mask_gradient(kernel)
    if not torch.is_grad_enabled():  # otherwise they were called for the request
        results_for_few_pairs(kernel, query, key, value, device)
