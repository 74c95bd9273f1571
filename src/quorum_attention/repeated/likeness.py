"""What a call is remembered as: all that its checks and its decision look at."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from quorum_attention.call.settings import current
from quorum_attention.execution.call import results_are_dense, rows_overlap
from quorum_attention.execution.device.lookup import BACKENDS, GPU, best_device
from quorum_attention.kernels.registry import registrations
from quorum_attention.mask import Mask
from quorum_attention.planner.calibration import rates_known

# By names of this file: looked up in torch, what a processor's caches no longer hold of its tables
# would take longer than the calls.
_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing
_transforms, _forward_ad = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad
# Included while there is a mode before dispatch.
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_included = torch._C._dispatch_tls_is_dispatch_key_included
_autocast, _records = torch.is_autocast_enabled, torch.is_grad_enabled
_deterministic, _strided = torch._C._get_deterministic_algorithms, torch.strided
# The dtype whose small gradients are torch's own on a CPU.
_RECORDED = torch.float32
PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORD = 16
# Whether this torch could find a GPU, which then computes what lies in host memory.
ANY_GPU = torch.version.cuda is not None


def like(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> Hashable | None:
    """What a call without other options is looked up by; None if it is none that is remembered.

    Calls of one name differ in their numbers only, and on a CPU in how many keys they have where
    gradients of ours are not recorded: a model that decodes has another number at every call, and
    decisions round it up (``planner/small.py``).
    """
    for tensor in (query, key, value):
        # A tensor of another kind may not even have sizes.
        if type(tensor) not in PLAIN or tensor.layout is not _strided or tensor.is_nested:
            return None
        if tensor.dim() != 4 or tensor.is_neg():
            return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        return None
    if scale is not None and type(scale) is not float:
        return None
    kind = query.device.type
    backend = BACKENDS.get(kind)
    # Before sizes are looked at: under a trace they may be tensors.
    if backend is None or _is_unusual(kind):
        return None
    records = _records() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if backend.own_memory:
        own = _on_a_gpu(query, key, value, attn_mask)
    else:
        mask = None if attn_mask is None else _plain_mask(attn_mask, query.device)
        if attn_mask is not None and mask is None:
            return None
        # Gradients that are ours are remembered with their lengths, and so is whatever has a mask.
        exact = is_causal or mask is not None or (records and query.dtype is not _RECORDED)
        own = _on_a_cpu(query, key, value, mask, exact)
    if own is None:
        return None
    return (
        own, query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        is_causal, scale, enable_gqa, records, backend,
        _deterministic(), registrations(), rates_known(),
    )  # fmt: skip


def _plain_mask(mask: Any, device: torch.device) -> Hashable | None:
    """A mask that is a tensor on ``device`` without a gradient, by what is looked at of it."""
    if type(mask) not in PLAIN or mask.layout is not _strided or mask.is_nested:
        return None
    if mask.device != device or mask.requires_grad or mask.is_neg():
        return None
    return (mask.shape, mask.dtype)


def _on_a_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Hashable | None,
    exact: bool,
) -> Hashable | None:
    n_keys = key.shape[2]
    if n_keys == 0 or value.shape[2] != n_keys or (ANY_GPU and BACKENDS[GPU].is_here()):
        return None
    steps = query.stride()
    if steps[3] != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return None
    if steps.count(1) > 1 and not results_are_dense(query):
        return None
    if query.dtype.itemsize == 2 and any(rows_overlap(t) for t in (query, key, value)):
        return None
    keys = n_keys if exact else (n_keys - 1).bit_length()
    others = (*key.shape[:2], key.shape[3], *value.shape[:2], value.shape[3])
    return (query.shape, others, keys, mask)


def _on_a_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any
) -> Hashable | None:
    mask = () if attn_mask is None else _described(attn_mask)
    if mask is None:
        return None
    try:
        places = query.data_ptr() % _WORD, key.data_ptr() % _WORD, value.data_ptr() % _WORD
    except RuntimeError:
        # It has no memory of its own: it belongs to a transformation, even to one that is over.
        return None
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        places, best_device(), mask,
    )  # fmt: skip


def _described(mask: Any) -> Hashable | None:
    """A ``Mask`` without tensors, functions and other masks, in numbers; None for others."""
    if type(mask) is not Mask or mask.either or mask.every:
        return None
    tensors = (mask.documents, mask.key_lengths, mask.key_padding, mask.bias, mask.sinks)
    if mask.keeps is not None or any(tensor is not None for tensor in tensors):
        return None
    for number in (mask.offset, mask.chunk):
        if number is not None and type(number) is not int:
            return None
    if mask.softcap is not None and type(mask.softcap) is not float:
        return None
    return (mask.causal, mask.offset, mask.sides, mask.chunk, mask.softcap)


def _is_unusual(kind: str) -> bool:
    """Whether anything is active under which a call is not what its arguments say: settings, a
    trace or a mode, a transformation, forward-mode, autocast."""
    return (
        current() is not None
        or _modes() > 0
        or _included(_PRE_DISPATCH)
        or _tracing()
        or _transforms()
        or _forward_ad._current_level >= 0
        or _autocast(kind)
    )


def is_transformed() -> bool:
    """Whether a transformation of torch.func or forward-mode is active."""
    return bool(_transforms() or _forward_ad._current_level >= 0)
