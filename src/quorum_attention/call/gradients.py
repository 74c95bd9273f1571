"""The arguments that ``attention_backward`` has beside those of a forward, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quorum_attention.call.request import Request, Tensors
from quorum_attention.call.transforms import refuse_transforms
from quorum_attention.call.validation import as_tensor, check_apart, check_given, check_result
from quorum_attention.counts import shown
from quorum_attention.execution.call import Three

_NAMES = ("grads[0]", "grads[1]", "grads[2]")


class Given(NamedTuple):
    """What a backward is given beside the inputs.

    Attributes:
        grad_out, out: the upstream gradient and the output, (*batch, heads, n_queries, value_dim).
        lse: (*batch, heads, n_queries), natural log.
        grads: preallocated results, like query, key and value.
    """

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grads: Three | None = None


def given_of(
    tensors: Tensors,
    request: Request,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
) -> Given:
    """The arguments checked against the call, with a dimension of heads.

    Args:
        inputs: query, key and value as they were given, before they were broadcast.

    Raises:
        ValueError, TypeError, NotImplementedError: one does not fit, by name.
    """
    grad_out, out = as_tensor(grad_out, "grad_out"), as_tensor(out, "out")
    lse = as_tensor(lse, "lse")
    query, key, value, _ = tensors
    refuse_transforms(grad_out, query, key, value)
    grad_out, out = request.with_heads(grad_out, 2), request.with_heads(out, 2)
    lse = request.with_heads(lse, 1)
    rows, home = tuple(query.shape[:-1]), query.device
    check_given(grad_out, (*rows, value.shape[-1]), "grad_out", home)
    check_given(out, (*rows, value.shape[-1]), "out", home)
    check_given(lse, rows, "lse", home, request.work.state_dtype)
    given = Given(grad_out, out, lse)
    if grads is None:
        return given
    return given._replace(grads=_targets(tensors, given, grads, inputs))


def _targets(
    tensors: Tensors,
    given: Given,
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> Three:
    """``grads`` as tensors, checked: they may be written and share no memory."""
    if not isinstance(grads, (tuple, list)):
        raise TypeError(f"grads must be three tensors, got {shown(grads)}")
    if len(grads) != 3:
        raise ValueError(f"grads must be three tensors, got {len(grads)}")
    if any(i.shape != o.shape for i, o in zip(tensors[:3], inputs, strict=True)):
        raise NotImplementedError(
            "grads cannot be given for inputs that are broadcast, nor without a dimension of "
            "heads: leave them out, and their gradients are returned"
        )
    first, second, third = (
        as_tensor(grad, name, written=True) for grad, name in zip(grads, _NAMES, strict=True)
    )
    for target, name, like in zip((first, second, third), _NAMES, tensors[:3], strict=True):
        check_result(target, tuple(like.shape), name, tensors.query.device, first.dtype)
    query, key, value, mask = tensors
    read = {
        "query": query, "key": key, "value": value, "attn_mask": mask, "out": given.out,
        "grad_out": given.grad_out, "lse": given.lse,
    }  # fmt: skip
    check_apart(dict(zip(_NAMES, (first, second, third), strict=True)), read)
    return first, second, third
