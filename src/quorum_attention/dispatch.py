"""Calls like an earlier one, made again without being checked.

To check a call and to decide how it runs takes the host longer than many calls take the
device. So a call that asks for attention and nothing more is looked up first, by
everything on which its checks and its decision depend (``cache_key``). Its request is
cached, which in turn caches which of its passes are one kernel call
(``passes/one_call.py``). A cached request holds no tensor, and no kernel that its user
may let go.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.options import DEFAULT_OPTIONS, Arguments, names_several
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.settings import current_settings, with_current_settings
from quorum_attention.call.validation import Tensors
from quorum_attention.execution.device.lookup import (
    BACKENDS,
    HOST,
    backend_of,
    best_device,
    type_of,
)
from quorum_attention.kernels.masked.mask_tensor import short_mask_tensor
from quorum_attention.kernels.operator_call import OutLse
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
)
from quorum_attention.mask import Mask
from quorum_attention.operator import as_operator
from quorum_attention.passes.one_call import run_cached_call, strides_key
from quorum_attention.planner.calibration import rates_known

# By names of this file: to look them up in torch would take longer than the shortest
# calls.
_forward_ad = torch.autograd.forward_ad
_is_autocast_enabled = torch.is_autocast_enabled
_is_deterministic = torch._C._get_deterministic_algorithms
_strided = torch.strided
_is_tracing = torch._C._is_tracing
_is_grad_enabled = torch.is_grad_enabled

_NUMBERS = (bool, int, float, str)
_WORD_BYTES = 16
# When there are more requests, all are forgotten. (Under a mask each keeps its kernel's
# tables in page-locked memory, 0.4 MB for 262,144 tokens.)
_MAX_CACHED = 128
_CACHE: dict[Hashable, Request] = {}


def attention_results(query: Any, key: Any, value: Any, arguments: Arguments) -> OutLse:
    """Compute (out, lse) of a call.

    The request of an earlier call is used if there is one. A traced call becomes an
    operator where one can make it. All other calls are checked, and get a request of
    their own.
    """
    if not torch.compiler.is_dynamo_compiling():
        return _uncompiled_results(query, key, value, arguments)
    results = as_operator(query, key, value, arguments)
    if results is not None:
        return results
    return dispatch_uncached(query, key, value, arguments, None)


@uncompiled
def _uncompiled_results(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> OutLse:
    """Compute (out, lse) of a call that torch's compiler does not trace."""
    call_key = None
    if is_plain_call(query, key, value, arguments):
        if type(arguments.attn_mask) is Mask:
            arguments = _with_mask_tensor(query, key, arguments)
        call_key = cache_key(query, key, value, arguments)
    request = None if call_key is None else _CACHE.get(call_key)
    if request is not None:  # the call has four dimensions, and no ``out``
        attn_mask = arguments.attn_mask
        bias = attn_mask if isinstance(attn_mask, torch.Tensor) else None
        tensors = Tensors(query, key, value, bias)
        results = None if request.records else run_cached_call(tensors, request)
        if results is None:
            return attend(tensors, request, None)
        out, lse = results
        return out, lse
    if is_traced(query, key, value):
        results = as_operator(query, key, value, arguments)
        if results is not None:
            return results
    return dispatch_uncached(query, key, value, arguments, call_key)


def cached_request(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Arguments
) -> Request | None:
    """Return the request of a plain call without a mask, checked at the first one like
    it; None: the call is none that is cached."""
    if not is_plain_call(query, key, value, arguments):
        return None
    call_key = cache_key(query, key, value, arguments)
    if call_key is None:
        return None
    request = _CACHE.get(call_key)
    if request is None:
        _, request = _checked_and_cached(query, key, value, arguments, call_key)
    return None if request.decisions is None else request


@uncompiled
def dispatch_uncached(
    query: Any, key: Any, value: Any, arguments: Arguments, call_key: Hashable | None
) -> OutLse:
    """Check a call, cache its request under ``call_key`` if it has one, and compute
    (out, lse)."""
    tensors, request = _checked_and_cached(query, key, value, arguments, call_key)
    return attend(tensors, request, arguments.out)


def _checked_and_cached(
    query: Any, key: Any, value: Any, arguments: Arguments, call_key: Hashable | None
) -> tuple[Tensors, Request]:
    """Check a call, and cache its request under ``call_key`` if it has one."""
    tensors, request = checked_request("attention", query, key, value, arguments)
    # If tensors were broadcast, tensors like the given ones are not those of the
    # request.
    is_unchanged = (
        tensors.query is query and tensors.key is key and tensors.value is value
    )
    if call_key is not None and is_unchanged:
        if len(_CACHE) >= _MAX_CACHED:
            _CACHE.clear()
        request = replace(request, decisions={})
        _CACHE[call_key] = request
    return tensors, request


@restores_grad_and_autocast
def checked_request(
    function: str, query: Any, key: Any, value: Any, arguments: Arguments
) -> tuple[Tensors, Request]:
    """Check a call as ``request_of`` does, with the current settings; it may name
    several devices.

    Raises:
        NotImplementedError: a trace is active, or made one of the tensors.
        Errors as of ``request_of``.
    """
    refuse_traces(function, query, key, value)
    arguments = arguments._replace(options=with_current_settings(arguments.options))
    if names_several(arguments.options.devices):
        from quorum_attention.devices.request import (
            request_on_devices,  # processes, only where they are used
        )

        return request_on_devices(function, query, key, value, arguments)
    return request_of(function, query, key, value, arguments)


def is_plain_call(query: Any, key: Any, value: Any, arguments: Arguments) -> bool:
    """Tell whether a call of plain tensors asks for attention and nothing more, and
    nothing is active that would make it another call."""
    if not _is_cacheable(arguments):
        return False
    for tensor in (query, key, value):
        if not _is_plain(tensor) or tensor.dim() != 4:
            return False
    device_type = type_of(query.device)
    # Before sizes are looked at: under a trace they may be tensors.
    return device_type in BACKENDS and not _has_settings_or_modes(device_type)


def cache_key(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Arguments
) -> Hashable | None:
    """Return the cache key of a plain call, or None if it is not cached (for its mask).

    Calls of one key differ in their numbers only, and on a CPU in how many keys they
    have where no gradients are recorded: a model that decodes has one more in every
    call.
    """
    device = query.device
    mask_key = _mask_key(arguments.attn_mask, device)
    if mask_key is None:
        return None
    try:
        # Operators of a GPU want rows to begin at a multiple of a word.
        starts = [tensor.data_ptr() % _WORD_BYTES for tensor in (query, key, value)]
    except RuntimeError:
        # A tensor of a transformation, even of one that is over, has no memory of its
        # own.
        return None
    backend = backend_of(device)
    compute_device = device if backend.own_memory else best_device()
    if compute_device != device and capturing(compute_device):
        return None  # it is refused
    recorded = _is_grad_enabled() and _needs_grad(
        query, key, value, arguments.attn_mask
    )
    n_keys_vary = False
    if compute_device == HOST and not (recorded or arguments.is_causal or mask_key):
        n_keys_vary = 0 < key.shape[2] == value.shape[2]
    return (
        _layout_key(query),
        _layout_key(key, rows_vary=n_keys_vary),
        _layout_key(value, rows_vary=n_keys_vary),
        *starts,
        mask_key,
        arguments.is_causal,
        arguments.scale,
        arguments.enable_gqa,
        recorded,
        backend,
        compute_device,
        _is_deterministic(),
        registrations(compute_device),
        rates_known(),
    )


def _needs_grad(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any
) -> bool:
    """Tell whether one of the inputs, or a mask that is a tensor, requires a
    gradient."""
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return True
    return isinstance(mask, torch.Tensor) and mask.requires_grad


def _is_cacheable(arguments: Arguments) -> bool:
    """Tell whether the arguments beside the tensors ask for attention and nothing
    more."""
    if type(arguments.dropout_p) is not float or arguments.dropout_p != 0.0:
        return False
    if arguments.out is not None or arguments.out_dtype is not None:
        return False
    if arguments.dropout_seed is not None or arguments.options is not DEFAULT_OPTIONS:
        return False
    if type(arguments.is_causal) is not bool or type(arguments.enable_gqa) is not bool:
        return False
    return arguments.scale is None or type(arguments.scale) is float


def _is_plain(tensor: Any) -> bool:
    """Tell whether this is a dense tensor of torch's own classes.

    A tensor of another class may not even have sizes.
    """
    if type(tensor) not in PLAIN or tensor.layout is not _strided:
        return False
    return not (tensor.is_nested or tensor.is_neg())


def _has_settings_or_modes(device_type: str) -> bool:
    """Tell whether anything is active under which a call is not what its arguments say.

    There are settings, traces and modes, transformations, forward-mode and autocast.
    """
    return (
        current_settings() is not None
        or has_modes()
        or _is_tracing()
        or has_transforms()
        or bool(_forward_ad._current_level >= 0)
        or _is_autocast_enabled(device_type)
    )


def _layout_key(tensor: torch.Tensor, *, rows_vary: bool = False) -> Hashable:
    """Return sizes, strides, dtype and device of a tensor.

    Args:
        rows_vary: whether calls with other numbers of rows share the key. The number is
            then rounded up, as decisions round it up (``planner/decide.py``).
    """
    if not rows_vary:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    batch, heads, rows, dim = tensor.shape
    rounded_rows = (rows - 1).bit_length()
    strides = strides_key(tensor)
    return batch, heads, rounded_rows, dim, strides, tensor.dtype, tensor.device


def _mask_key(mask: Any, device: torch.device) -> Hashable | None:
    """Return the key of a mask, or None if a call with it is not cached.

    The key of a tensor is its layout. On a GPU a ``Mask`` without tensors, functions
    and other masks has a key too: its fields, as numbers. The key of no mask is empty.
    """
    if mask is None:
        return ()
    if _is_plain(mask):
        if mask.device != device:
            return None
        return mask.shape, mask.stride(), mask.dtype, mask.requires_grad
    if type(mask) is not Mask or not backend_of(device).own_memory:
        return None
    fields = mask.set_fields()
    fields.pop("window", None)
    if not all(type(value) in _NUMBERS for value in fields.values()):
        return None
    return (mask.sides, *fields.items())


def _with_mask_tensor(
    query: torch.Tensor, key: torch.Tensor, arguments: Arguments
) -> Arguments:
    """Return the arguments of a plain call with a tensor in place of a ``Mask``.

    A mask of nothing but a bias is that tensor. Masks of tokens are replaced in short
    calls on a GPU.
    """
    mask = arguments.attn_mask
    if not isinstance(mask, Mask):
        return arguments
    if tuple(mask.set_fields()) == ("bias",) and _is_plain(mask.bias):
        return arguments._replace(attn_mask=mask.bias)
    device = query.device
    if key.device != device or capturing(device):
        return arguments
    short_mask = short_mask_tensor(mask, query, key)
    if short_mask is None:
        return arguments
    is_causal = arguments.is_causal or short_mask.is_causal
    return arguments._replace(attn_mask=short_mask.bias, is_causal=is_causal)
