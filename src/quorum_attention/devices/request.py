"""A call on several devices, checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.call.options import Arguments, Budget, CallOptions
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.validation import Tensors, as_mask, as_tensor
from quorum_attention.devices.device_names import device_names
from quorum_attention.devices.mask_transport import pickle_mask
from quorum_attention.devices.runner import PoolRunner
from quorum_attention.devices.worker_pool import WorkerPool
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.resolve import resolve
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import capturing
from quorum_attention.mask import Mask, map_tensors
from quorum_attention.units import counted, parse_bytes


def request_on_devices(
    function: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
) -> tuple[Tensors, Request]:
    """Check a call as ``request_of`` does; ``devices`` may be several or a pool.

    Raises:
        Errors as of ``request_of``; NotImplementedError: what several devices cannot
        do, by name.
    """
    options = arguments.options
    devices: Any = options.devices
    pool = devices if isinstance(devices, WorkerPool) else tuple(device_names(devices))
    if isinstance(pool, tuple) and len(pool) == 1:
        arguments = arguments._replace(options=options._replace(devices=pool[0]))
        return request_of(function, query, key, value, arguments)
    n_devices = len(pool) if isinstance(pool, tuple) else len(pool.workers)
    budgets = _budgets(options.budget, n_devices)
    check_options(options)
    _refuse_capture(query)
    query = as_tensor(query, "query")
    key = as_tensor(key, "key")
    home = query.device
    attn_mask = as_mask(arguments.attn_mask, query, key)
    mask = attn_mask if isinstance(attn_mask, Mask) else None
    if mask is not None:
        # Bias and sinks are tensors of the request; the rest is sent as it is.
        attn_mask = Mask(bias=mask.bias, sinks=mask.sinks)
    # This process computes nothing: its own request is for the device of the inputs.
    home_options = options._replace(budget=None, kernel="auto", devices=home)
    home_arguments = arguments._replace(attn_mask=attn_mask, options=home_options)
    tensors, request = request_of(function, query, key, value, home_arguments)
    runner = PoolRunner(
        pool,
        budgets,
        CallOptions(
            depth=options.depth,
            kernel=options.kernel,
            accumulator=options.accumulator,
            exact_delta=options.exact_delta,
        ),
        None if mask is None else _sent_mask(mask, request.shape, home),
        is_uniform=mask is None or not mask.is_structured,
    )
    return tensors, replace(request, runner=runner)


def _sent_mask(mask: Mask, shape: CallShape, home: torch.device) -> bytes:
    """Return a mask without bias and sinks as workers get it.

    Its tensors are copied now: the caller may write to them before the backward.
    """
    mask = replace(mask, bias=None, sinks=None)
    resolve(mask, shape)
    mask = map_tensors(mask, lambda tensor, name: tensor.detach().cpu())
    return pickle_mask(mask, shape, home.type)


def _refuse_capture(query: Any) -> None:
    """Raise NotImplementedError while a CUDA graph is captured."""
    if isinstance(query, torch.Tensor) and capturing(query.device):
        raise NotImplementedError(
            "devices cannot be several while a CUDA graph is captured: every replay "
            "would give the results of now, because other processes compute them; "
            "name one device"
        )


def check_options(options: CallOptions) -> None:
    """Raise NotImplementedError for options that several devices cannot have."""
    if options.plan is not None:
        raise NotImplementedError(
            "plan is for one device; several plan their parts by themselves: give "
            "budget, depth or kernel"
        )
    kernel = options.kernel
    if not isinstance(kernel, str):
        raise NotImplementedError(
            "kernel must be a name where several devices compute, got "
            f"{shown(kernel)}: other processes do not have the object"
        )
    if kernel == "auto":
        return
    if not get_kernel(kernel).is_exact:
        raise NotImplementedError(
            f"kernel {kernel!r} computes another attention, of positions in the whole "
            "call; several devices have parts of it: name one device"
        )


def _budgets(budget: Budget | None, n_devices: int) -> tuple[int | None, ...]:
    """Return a budget in bytes for each device.

    Raises:
        ValueError, TypeError: it makes no sense.
    """
    if not isinstance(budget, (list, tuple)):
        return (None if budget is None else parse_bytes(budget),) * n_devices
    if len(budget) != n_devices:
        raise ValueError(
            f"budget must be one number of bytes or one for each of the "
            f"{counted(n_devices, 'device')}, got {len(budget)}"
        )
    return tuple(
        None if one_budget is None else parse_bytes(one_budget) for one_budget in budget
    )
