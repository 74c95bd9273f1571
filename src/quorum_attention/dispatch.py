"""Calls like an earlier one, made again without being checked.

To check a call and to decide how it runs takes the host longer than many calls take the device. So
a call that asks for attention and nothing more is looked up first, by all that its checks and its
decision depend on (``cache_key``). Its request is kept, which keeps decisions for one kernel call
(``passes``), and neither a tensor nor a kernel that its user may let go.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.options import Arguments, names_several
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.settings import current_settings, with_current_settings
from quorum_attention.call.validation import Tensors
from quorum_attention.execution.device.lookup import BACKENDS, best_device
from quorum_attention.kernels.masked.mask_tensor import short_mask_tensor
from quorum_attention.kernels.registry import registrations
from quorum_attention.kernels.torch_private import (
    PLAIN,
    capturing,
    has_modes,
    has_transforms,
    is_traced,
    refuse_traces,
    restores_grad_and_autocast,
    uncompiled,
)  # fmt: skip
from quorum_attention.mask import Mask
from quorum_attention.operator import as_operator
from quorum_attention.planner.calibration import rates_known

# By names of this file: to look them up in torch would take longer than the shortest calls.
_forward_ad, _autocast = torch.autograd.forward_ad, torch.is_autocast_enabled
_deterministic, _strided = torch._C._get_deterministic_algorithms, torch.strided
_tracing, _records = torch._C._is_tracing, torch.is_grad_enabled
_NUMBERS = (bool, int, float, str)
_WORD = 16
# When there are more requests, all are forgotten. (Under a mask each keeps its kernel's tables in
# page-locked memory, 0.4 MB for 262,144 tokens.)
_MAX_CACHED = 128
_CACHE: dict[Hashable, Request] = {}


@uncompiled
def cache_key(query: Any, key: Any, value: Any, arguments: Arguments) -> Hashable | None:
    """What a call is looked up by; None if it is none that is remembered, as one with options.
    Calls of one key differ in their numbers only, and on a CPU in how many keys they have where no
    gradients are recorded: a model that decodes has one more in every call."""
    attn_mask, dropout_p, seed, is_causal, scale, enable_gqa, out, out_dtype, options = arguments
    if not (
        type(dropout_p) is float and dropout_p == 0.0 and options.is_default
        and out is None and out_dtype is None and seed is None
        and type(is_causal) is bool and type(enable_gqa) is bool
        and (scale is None or type(scale) is float)
    ):  # fmt: skip
        return None
    three = query, key, value
    for tensor in three:
        if not _is_plain(tensor) or tensor.dim() != 4:
            return None
    kind = query.device.type
    # Before sizes are looked at: under a trace they may be tensors.
    if kind not in BACKENDS or _has_settings_or_modes(kind):
        return None
    mask = () if attn_mask is None else _mask_key(attn_mask, query.device)
    if mask is None:
        return None
    try:
        # To a multiple of a word, at which a GPU's operators want rows to begin.
        starts = [tensor.data_ptr() % _WORD for tensor in three]
    except RuntimeError:
        # It has no memory of its own: it belongs to a transformation, even to one that is over.
        return None
    records = _records() and (query.requires_grad or key.requires_grad or value.requires_grad)
    best = query.device if BACKENDS[kind].own_memory else best_device()
    if best.type != kind and capturing(best):
        return None  # it is refused
    grows = not (best.type != "cpu" or records or is_causal or mask)
    grows = grows and 0 < key.shape[2] == value.shape[2]
    return (
        _layout_key(query), _layout_key(key, grows), _layout_key(value, grows), *starts,
        mask, is_causal, scale, enable_gqa, records, BACKENDS[kind], best,
        _deterministic(), registrations(), rates_known(),
    )  # fmt: skip


def _layout_key(tensor: torch.Tensor, grows: bool = False) -> Hashable:
    """Sizes, steps and kind of a tensor; of one that ``grows`` with the calls, its rows rounded
    up, as decisions do (``planner/decide.py``)."""
    if not grows:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    batch, heads, rows, dim = tensor.shape
    # That of a batch of one says nothing, and grows where rows lie before heads.
    steps = tensor.is_contiguous() or tensor.stride()[batch == 1 :]
    return batch, heads, (rows - 1).bit_length(), dim, steps, tensor.dtype, tensor.device


def _is_plain(tensor: Any) -> bool:
    """Whether it is a dense tensor of torch's own classes. (Another may not even have sizes.)"""
    if type(tensor) not in PLAIN or tensor.layout is not _strided:
        return False
    return not (tensor.is_nested or tensor.is_neg())


def _mask_key(mask: Any, device: torch.device) -> Hashable | None:
    """A mask: a tensor, by how it lies; on a GPU also a ``Mask`` without tensors, functions and
    other masks, in numbers. None for others."""
    if _is_plain(mask):
        if mask.device != device or mask.requires_grad:
            return None
        return mask.shape, mask.stride(), mask.dtype
    if type(mask) is not Mask or not BACKENDS[device.type].own_memory:
        return None
    said = mask.set_fields()
    said.pop("window", None)
    plain = all(type(value) in _NUMBERS for value in said.values())
    return (mask.sides, *said.items()) if plain else None


def _has_settings_or_modes(kind: str) -> bool:
    """Whether anything is active under which a call is not what its arguments say: settings, a
    trace or a mode, a transformation, forward-mode, autocast."""
    return (
        current_settings() is not None
        or has_modes()
        or _tracing()
        or has_transforms()
        or bool(_forward_ad._current_level >= 0)
        or _autocast(kind)
    )


def attention_results(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): by the request of an earlier call if there is one, by an operator where the call
    is traced and one can make it, else by a request of its own."""
    name = None
    if not torch.compiler.is_dynamo_compiling():
        if type(arguments.attn_mask) is Mask:
            arguments = _with_mask_tensor(query, key, value, arguments)
        name = cache_key(query, key, value, arguments)
    known = None if name is None else _CACHE.get(name)
    if known is not None:  # of a call without ``out``
        mask = arguments.attn_mask if isinstance(arguments.attn_mask, torch.Tensor) else None
        return attend(Tensors(query, key, value, mask), known, None)
    if is_traced(query, key, value):
        results = as_operator(query, key, value, arguments)
        if results is not None:
            return results
    return dispatch_uncached(query, key, value, arguments, name)


@uncompiled
def _with_mask_tensor(query: Any, key: Any, value: Any, arguments: Arguments) -> Arguments:
    """The arguments with a tensor in place of a ``Mask`` of tokens, in short calls on a GPU that
    ask for attention and nothing more."""
    mask = arguments.attn_mask
    if not isinstance(mask, Mask) or not arguments.options.is_default:
        return arguments
    if arguments.out is not None or arguments.dropout_p != 0.0:
        return arguments
    if type(arguments.is_causal) is not bool:
        return arguments  # it is refused
    if not all(_is_plain(tensor) and tensor.dim() == 4 for tensor in (query, key, value)):
        return arguments
    device = query.device
    if device.type not in BACKENDS or key.device != device:
        return arguments
    if _has_settings_or_modes(device.type) or capturing(device):
        return arguments
    made = short_mask_tensor(mask, query, key)
    if made is None:
        return arguments
    is_causal = arguments.is_causal or made.is_causal
    return arguments._replace(attn_mask=made.kept, is_causal=is_causal)


@uncompiled
def dispatch_uncached(
    query: Any, key: Any, value: Any, arguments: Arguments, name: Hashable | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by a request of the call's own, which is kept under ``name``, if it has one."""
    tensors, request = checked_request("attention", query, key, value, arguments)
    # Of tensors that were broadcast, others like the given ones are not.
    same = tensors.query is query and tensors.key is key and tensors.value is value
    if name is not None and same:
        if len(_CACHE) >= _MAX_CACHED:
            _CACHE.clear()
        _CACHE[name] = request = replace(request, decisions={})
    return attend(tensors, request, arguments.out)


@restores_grad_and_autocast
def checked_request(
    function: str, query: Any, key: Any, value: Any, arguments: Arguments
) -> tuple[Tensors, Request]:
    """``request_of`` with the settings here, of a call for which several devices may be named.

    Raises:
        NotImplementedError: a trace is active, or made one of the tensors.
        Errors as of ``request_of``.
    """
    refuse_traces(function, query, key, value)
    arguments = arguments._replace(options=with_current_settings(arguments.options))
    if names_several(arguments.options.devices):
        from quorum_attention.devices import pool  # processes, only where they are used

        return pool.request_on_devices(function, query, key, value, arguments)
    return request_of(function, query, key, value, arguments)
