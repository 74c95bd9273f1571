"""Small calls on a CPU, and calls like one before: what was found out is remembered, all at once.

A small call is torch's own operator, which torch's own autograd records: that takes half the time
of ours. But to check a call and to decide how it runs takes some sixty functions of Python. That is
little while a processor's caches hold them; between two layers of a model they do not, and it is
0.3 milliseconds (docs/planner.md). So a call that asks for attention and nothing more is looked up
first, by everything that its checks and its decision depend on (``like``).

Nothing is remembered that holds a tensor, or a kernel that has been replaced.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch

from quorum_attention.autograd import attend, named_derivative
from quorum_attention.call.request import Request, Tensors
from quorum_attention.call.settings import current
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.masks import MaskView
from quorum_attention.kernels.protocol import Recorded
from quorum_attention.kernels.registry import registrations
from quorum_attention.passes import recording_kernel, run_recorded
from quorum_attention.planner.calibration import rates_known

# Calls that are remembered; when there are more, all are forgotten.
_MOST = 512
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Small(NamedTuple):
    """How a small call is run: the operator's kernel, and the factor of the scores."""

    kernel: Recorded
    scale: float


_KNOWN: dict[Hashable, _Small] = {}


def like(
    query: Any, key: Any, value: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> Hashable | None:
    """What a call without other options is looked up by; None if it is not to be remembered.

    It is all that the checks and the decision of such a call look at. Where the number of keys is
    free, it is rounded up as decisions are (``planner/small.py``): a model that decodes has another
    at every call.
    """
    for tensor in (query, key, value):
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        if tensor.device.type != "cpu" or tensor.dim() != 4 or tensor.is_neg():
            return None
        if tensor.stride(3) != 1:
            return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool or _is_unusual():
        return None
    if scale is not None and type(scale) is not float:
        return None
    n_keys = key.shape[2]
    if n_keys == 0 or value.shape[2] != n_keys:
        return None
    records = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    return (
        query.shape, *key.shape[:2], key.shape[3], *value.shape[:2], value.shape[3],
        n_keys if is_causal else (n_keys - 1).bit_length(), query.dtype, key.dtype, value.dtype,
        is_causal, scale, enable_gqa, records, BACKENDS["cpu"], BACKENDS["cuda"].is_here(),
        torch.are_deterministic_algorithms_enabled(), registrations(), rates_known(),
    )  # fmt: skip


def _is_unusual() -> bool:
    """Whether anything is active under which a call is not what its arguments say: settings, a
    trace or a mode, a transformation, forward-mode, autocast."""
    return (
        current() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or _len_torch_dispatch_stack_pre_dispatch() > 0
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
    )


def again(
    name: Hashable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> torch.Tensor | None:
    """The output of a call like one that was remembered as ``name``; None: there was none, or there
    is more to this one."""
    known = _KNOWN.get(name)
    if known is None:
        return None
    found = run_recorded(known.kernel, query, key, value, is_causal, known.scale)
    return None if found is None else named_derivative(found)


def output(
    tensors: Tensors,
    request: Request,
    out: torch.Tensor | None,
    name: Hashable | None = None,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``attend`` without the log-sum-exp, for which a small call takes less.

    Args:
        name: what the call is remembered as; None: it is not.
        given: query, key and value as they were given.
    """
    if request.records and (
        torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    ):
        return attend(tensors, request, out)[0]
    kernel = recording_kernel(tensors, request)
    if kernel is None:
        return attend(tensors, request, out)[0]
    query, key, value, mask, _ = tensors
    work = request.work
    bias = None
    if mask is not None:
        bias = partial(MaskView(mask, 1).whole, work.dtype, request.options.device)
    found = run_recorded(kernel, query, key, value, work.is_causal, request.scale, bias)
    if found is None:
        return attend(tensors, request, out)[0]
    as_given = given is not None and query is given[0] and key is given[1] and value is given[2]
    if name is not None and mask is None and as_given:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[name] = _Small(kernel, request.scale)
    return request.back(named_derivative(found))


__all__ = ["again", "like", "output"]
