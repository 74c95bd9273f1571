"""A call on a pool, checked."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from quorum_attention.call.causal_bias import as_mask
from quorum_attention.call.options import Budget, Written
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.call.validation import as_tensor
from quorum_attention.counts import shown
from quorum_attention.devices.call import PoolCall
from quorum_attention.devices.messages import Rule, with_functions
from quorum_attention.devices.report import PoolReport
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.kernels.kit.functions import Sample
from quorum_attention.kernels.masked.resolve import Sizes, resolve
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Keeps, Mask
from quorum_attention.sizes import parse_bytes

if TYPE_CHECKING:
    from quorum_attention.devices.pool import Pool


def request_on_several(
    function: str,
    *call: Any,
    count: int,
    pool_of: Callable[[], Pool],
    pool_report: PoolReport | None = None,
) -> tuple[Tensors, Request]:
    """``request_of``, for several devices.

    Args:
        call: its other arguments.
        count: how many devices there are.
        pool_of: gives their pool, for each pass.
        pool_report: filled with what happened, beside the call's own report.

    Raises:
        Errors as of ``request_of``; NotImplementedError: what several devices cannot do, by name.
    """
    written: Written = call[-1]
    budgets = _budgets(written.budget, count)
    tensors, request, mask = request_of_parts(function, *call)
    if mask is not None:
        work = request.work
        sizes = (work.batch, work.heads, work.n_queries, work.n_keys)
        place = request.options.device
        mask = with_functions(mask, lambda keeps: Rule(keeps, Sample.draw(keeps, sizes, place)))
    options = {name: getattr(written, name) for name in ("depth", "kernel", "accumulator")}
    return tensors, replace(request, runner=PoolCall(pool_of, budgets, options, mask, pool_report))


def request_of_parts(function: str, *call: Any) -> tuple[Tensors, Request, Mask | None]:
    """``request_of``, for a call whose parts other processes compute; its budget is theirs.

    Returns:
        the tensors, the request, and what is masked beside the tensors' bias and sinks, as it is
        sent.

    Raises:
        Errors as of ``request_of``; NotImplementedError: what cannot be sent or cut, by name.
    """
    query, key, value, attn_mask, *numbers, out, out_dtype, written = call
    check_options(written)
    attn_mask = as_mask(attn_mask, as_tensor(query, "query"), as_tensor(key, "key"))
    described = attn_mask if isinstance(attn_mask, Mask) else None
    if described is not None:
        attn_mask = Mask(bias=described.bias, sinks=described.sinks)
        described = replace(described, bias=None, sinks=None)
    # This process computes nothing: its own request is of where the inputs are.
    home = as_tensor(query, "query").device
    here = written._replace(budget=None, kernel="auto", devices="cpu" if on_host(home) else home)
    every: tuple[Any, ...] = (query, key, value, attn_mask, *numbers, out, out_dtype, here)
    tensors, request = request_of(function, *every)
    work = request.work
    if described is not None and not (described.is_structured or described.softcap):
        described = None
    if described is not None:
        sizes = Sizes(work.batch, work.heads, work.n_queries, work.n_keys)
        resolve(described, sizes, work.is_causal)
        with_functions(described, _check_sent)
    return tensors, request, None if described is None else sendable(described)


def check_options(written: Written) -> None:
    """Raise NotImplementedError for options that several devices cannot have."""
    if written.plan is not None:
        raise NotImplementedError(
            "plan is for one device; several plan their parts by themselves: give budget, depth "
            "or kernel"
        )
    kernel = written.kernel
    if not isinstance(kernel, str):
        raise NotImplementedError(
            f"kernel must be a name where several devices compute, got {shown(kernel)}: other "
            "processes do not have the object"
        )
    if kernel != "auto":
        named = get_kernel(kernel)
        if named.own_attention or named.probed_as is not None:
            raise NotImplementedError(
                f"kernel {kernel!r} computes another attention, of positions in the whole call; "
                "several devices have parts of it: name one device"
            )


def _budgets(budget: Budget | None, count: int) -> tuple[int | None, ...]:
    """A budget for each device.

    Raises:
        ValueError, TypeError: it makes no sense.
    """
    if budget is None:
        return (None,) * count
    if isinstance(budget, (list, tuple)):
        if len(budget) != count:
            raise ValueError(
                f"budget must be one number of bytes or one for each of the {count} devices, got "
                f"{len(budget)}"
            )
        return tuple(parse_bytes(one) for one in budget)
    return (parse_bytes(budget),) * count


def _check_sent(keeps: Keeps) -> Keeps:
    try:
        pickle.dumps(keeps)
    except Exception as error:
        raise NotImplementedError(
            f"Mask.keeps must be sent to other processes where several devices compute, and "
            f"{shown(keeps)} cannot be ({type(error).__name__}: {error}): use a function of a "
            "module, not one made inside another function"
        ) from None
    return keeps


def sendable(mask: Mask) -> Mask:
    """The mask with tensors in host memory of their own: a caller's may be written to."""

    def copied(value: Any) -> Any:
        return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    changes: dict[str, Any] = {}
    for name in ("documents", "key_lengths", "key_padding"):
        value = getattr(mask, name)
        changes[name] = tuple(map(copied, value)) if isinstance(value, tuple) else copied(value)
    for name in ("either", "every"):
        changes[name] = tuple(sendable(one) for one in getattr(mask, name))
    return replace(mask, **changes)


__all__ = ["check_options", "request_of_parts", "request_on_several", "sendable"]
