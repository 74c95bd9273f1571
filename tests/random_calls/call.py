"""Makes the call that a case describes."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

import torch
from helpers_memory import FailingAllocations, usage
from helpers_plans import passing, unpinned

import quorum_attention as qa
from random_calls.case import Case, Orders
from random_calls.kernels import kernel_of
from random_calls.tensors import DTYPES, Made, Target, target

# Where no calibration is, and never one of whoever runs this.
if "QUORUM_ATTENTION_CACHE" not in os.environ:
    os.environ["QUORUM_ATTENTION_CACHE"] = tempfile.mkdtemp(prefix="random-calls-")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass
class Done:
    """What a call returned.

    Attributes:
        results: "out", "lse", "grad_query", ...; ``targets``: the preallocated ones.
        untaken: what came back that is not what was handed over as ``out=`` or ``grads=``.
        peaks: bytes allocated at most by each pass, where that was measured.
    """

    results: dict[str, torch.Tensor] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    report: qa.Report | None = None
    untaken: list[str] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)


def perform(case: Case, made: Made, device: torch.device, done: Done) -> None:
    """Make the call; ``done`` is filled as it goes, so that it can be looked at after an error."""
    with calibrated(case.calibrated):
        _perform(case, made, device, done)


def _perform(case: Case, made: Made, device: torch.device, done: Done) -> None:
    kernel = kernel_of(case, made.slopes)
    done.report = qa.Report() if case.reported else None
    call: dict[str, Any] = {
        "attn_mask": made.mask, "is_causal": case.is_causal, "scale": case.scale,
        "enable_gqa": case.heads != case.kv_heads, "kernel": kernel, "report": done.report,
    }  # fmt: skip
    if case.dropout:
        call |= {"dropout_p": case.dropout, "dropout_seed": case.seed}
    lead = (*case.batch, case.heads, case.n_queries)
    out = None
    if case.results.given:
        out = _target(done, "out", (*lead, case.value_dim), case.results.out, case, made.query)
    forward = dict(call)
    if out is not None:
        forward["out"] = out
    elif case.results.out is not None:
        forward["out_dtype"] = DTYPES[case.results.out]
    three = [_handed(t, layout) for t, layout in
             zip((made.query, made.key, made.value), case.layouts, strict=False)]  # fmt: skip
    if case.route == "autograd":
        three = [
            t.detach().requires_grad_(wanted)
            for t, wanted in zip((made.query, made.key, made.value), case.wanted, strict=True)
        ]
        if case.mask_grad:
            forward["attn_mask"] = made.mask.detach().requires_grad_()
    orders = _orders(case, case.orders, made, device, kernel, backward=False)
    function = _alone if case.without_lse and case.route != "pair" else qa.attention_with_lse
    results = _within_budget(
        case.orders, case, orders, "forward", done, lambda: function(*three, **forward, **orders)
    )
    done.results |= dict(zip(("out", "lse"), results, strict=False))
    if out is not None and results[0].data_ptr() != done.targets[0].view.data_ptr():
        done.untaken.append("out")
    if case.route == "forward":
        return
    names = ("grad_query", "grad_key", "grad_value")
    if case.route == "autograd":
        asked = [(n, t) for n, t in zip(names, three, strict=True) if t.requires_grad]
        if case.mask_grad:
            asked.append(("grad_mask", forward["attn_mask"]))
        upstream = [made.grad_out.to(results[0].device)]
        if made.grad_lse is not None:
            upstream.append(made.grad_lse.to(results[1].device))
        grads = torch.autograd.grad(results[: len(upstream)], [t for _, t in asked], upstream)
        done.results |= dict(zip((n for n, _ in asked), grads, strict=True))
        return
    backward = dict(call)
    given = None
    if case.results.given:
        given = tuple(
            _target(done, f"grads[{i}]", tuple(t.shape), case.results.grads, case, made.query)
            for i, t in enumerate((made.query, made.key, made.value))
        )
        backward["grads"] = given
    if case.mask_grad:
        backward["grad_mask"] = True
        if case.results.given:
            # As large as ``grads``, in another order of dimensions.
            of_mask = torch.empty_like(made.mask.mT, memory_format=torch.contiguous_format).mT
            backward["grad_mask"] = of_mask
    if made.grad_lse is not None:
        backward["grad_lse"] = made.grad_lse
    said = case.orders if case.backward_orders is None else case.backward_orders
    orders = _orders(case, said, made, device, kernel, backward=True)
    grads = _within_budget(
        said, case, orders, "backward", done,
        lambda: qa.attention_backward(made.grad_out, *three, *results, **backward, **orders),
    )  # fmt: skip
    done.results |= dict(zip((*names, "grad_mask"), grads, strict=False))
    if given is not None:
        if case.mask_grad and grads[3] is not backward["grad_mask"]:
            done.untaken.append("grad_mask")
        for index, target_ in enumerate(done.targets[-3:]):
            if grads[index].data_ptr() != target_.view.data_ptr():
                done.untaken.append(f"grads[{index}]")


def _alone(*three: Any, **call: Any) -> tuple[torch.Tensor]:
    return (qa.attention(*three, **call),)


def _handed(tensor: torch.Tensor, layout: str) -> Any:
    """A NumPy array where a case says so."""
    if layout == "array" and not tensor.is_cuda and tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor


def _target(
    done: Done, name: str, shape: tuple[int, ...], dtype: str | None, case: Case, like: torch.Tensor
) -> Any:
    found = target(name, shape, DTYPES[dtype or case.dtype], case.results.layout, like.device)
    done.targets.append(found)
    return found.given


def _orders(
    case: Case, orders: Orders, made: Made, device: torch.device, kernel: Any, *, backward: bool
) -> dict[str, Any]:
    if orders.how == "depth":
        return {"depth": orders.depth}
    trivial = 0 in (*case.batch, case.heads, case.n_queries, case.n_keys)
    if orders.how != "plan" or trivial:
        return {}
    more: dict[str, Any] = {}
    if device.type == "cuda":
        more = {"device": "cuda", "inputs": "device" if made.query.is_cuda else "host"}
    group = orders.one_group_of
    shared = case.heads // case.kv_heads
    if group is not None:
        group = max(shared, min(case.heads, group // shared * shared))
    batch = math.prod(case.batch)
    plan = qa.plan(
        case.n_queries, n_keys=case.n_keys, heads=case.heads, kv_heads=case.kv_heads,
        head_dim=case.head_dim, value_dim=case.value_dim, batch=batch, dtype=DTYPES[case.dtype],
        is_causal=case.is_causal, levels=orders.levels, layout=orders.layout, tile=orders.tile,
        n_cap=orders.n_cap, accumulator=orders.accumulator, heads_per_group=group,
        over_inputs=orders.over_inputs, streams=orders.streams, kernel=kernel,
        backward=backward, dropout_p=case.dropout, **more,
    )  # fmt: skip
    if orders.passing is not None:
        heads, own = (group or case.heads) // shared, None if isinstance(kernel, str) else kernel
        rows, n_cap = orders.passing, orders.n_cap or 2
        return {"plan": passing(plan, *rows, group=heads, n_cap=n_cap, kernel=own)}
    return {"plan": plan if orders.pinned else unpinned(plan)}


def _within_budget(
    said: Orders, case: Case, orders: dict[str, Any], which: str, done: Done, call: Any
) -> Any:
    """The call's result, some of its allocations made to fail; with a budget some times the
    smallest that it says works."""
    if said.how == "budget":
        orders["budget"] = 1
        try:
            result = call()
        except qa.BudgetError as error:
            orders["budget"] = int(error.smallest_bytes * said.room)
        else:
            return result
    measured = case.measured and case.reported and case.route != "autograd"
    if measured and not torch.cuda.is_available():
        done.peaks[which] = usage(call).peak
    if case.failure is None or case.failure[0] != which:
        return call()
    with FailingAllocations(*case.failure[1:]):
        return call()


@contextlib.contextmanager
def calibrated(factor: float | None) -> Iterator[None]:
    """The machine as if it had been measured, its rates ``factor`` times the assumed ones."""
    if factor is None:
        yield
        return
    from quorum_attention.planner import calibration

    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("quorum_attention") and (
                getattr(module, "hardware_of", None) is calibration.hardware_of
                and module is not calibration
            ):
                stack.enter_context(mock.patch.object(module, "hardware_of", _measured(factor)))
        yield


@cache
def _measured(factor: float) -> Any:
    from quorum_attention.planner.calibration import hardware_of

    def measured(*args: Any) -> Any:
        found = hardware_of(*args)
        return replace(
            found, flops=found.flops * factor, backward_flops=found.backward_flops * factor,
            measured=True,
        )  # fmt: skip

    return measured
