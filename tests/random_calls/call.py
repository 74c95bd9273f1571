"""Makes the call that a case describes."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from helpers.memory import FailingAllocations
from helpers.plans import passing, unpinned

import quorum_attention as qa
from random_calls.case import Case, Orders
from random_calls.kernels import kernel_of
from random_calls.tensors import DTYPES, Made, Memory, target

# Where no calibration is, and never one of whoever runs this.
if "QUORUM_ATTENTION_CACHE" not in os.environ:
    os.environ["QUORUM_ATTENTION_CACHE"] = tempfile.mkdtemp(prefix="random-calls-")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

GRADIENTS = ("grad_query", "grad_key", "grad_value")


@dataclass
class Done:
    """What a call returned.

    Attributes:
        results: "out", "lse", "grad_query", ...; ``targets``: the preallocated ones.
        untaken: what came back that is not what was handed over as ``out=`` or ``grads=``.
    """

    results: dict[str, torch.Tensor] = field(default_factory=dict)
    targets: list[Memory] = field(default_factory=list)
    report: qa.Report | None = None
    untaken: list[str] = field(default_factory=list)

    def target(self, name: str, like: torch.Tensor, dtype: str | None, case: Case) -> Any:
        """A preallocated result of the shape and on the device of ``like``."""
        dtype_, layout = DTYPES[dtype or case.dtype], case.results.layout
        self.targets.append(target(name, tuple(like.shape), dtype_, layout, like.device))
        return self.targets[-1].view

    def take(self, name: str, result: torch.Tensor, target: Any) -> None:
        if result.data_ptr() != target.data_ptr():
            self.untaken.append(name)


def perform(case: Case, made: Made, device: torch.device, done: Done) -> None:
    """Make the call; ``done`` is filled as it goes, so that it can be looked at after an error."""
    kernel = kernel_of(case, made.query.device)
    done.report = qa.Report() if case.reported else None
    call: dict[str, Any] = {
        "attn_mask": made.attn_mask(made.mask), "is_causal": case.is_causal, "scale": case.scale,
        "enable_gqa": case.heads != case.kv_heads, "kernel": kernel, "report": done.report,
    }  # fmt: skip
    if case.dropout:
        call |= {"dropout_p": case.dropout, "dropout_seed": case.seed}
    forward, backward = dict(call), dict(call)
    if case.results.given:
        # As large as grad_out, whatever that is a view of.
        like = made.query.new_empty(made.grad_out.shape)
        forward["out"] = done.target("out", like, case.results.out, case)
    elif case.results.out is not None:
        forward["out_dtype"] = DTYPES[case.results.out]
    inputs = (made.query, made.key, made.value)
    three: list[Any] = [_handed(t, how) for t, how in zip(inputs, case.layouts, strict=False)]
    if case.route == "autograd":
        three = [t.detach().requires_grad_(w) for t, w in zip(inputs, case.wanted, strict=True)]
        learned = _learned(case, made)
        forward["attn_mask"] = made.attn_mask(learned.get("grad_mask", made.mask))
        if "grad_sinks" in learned:
            forward["attn_mask"] = replace(forward["attn_mask"], sinks=learned["grad_sinks"])
    alone = case.without_lse and case.route != "pair"

    def attend(**orders: Any) -> tuple[torch.Tensor, ...]:
        if alone:
            return (qa.attention(*three, **forward, **orders),)
        return qa.attention_with_lse(*three, **forward, **orders)

    orders = _orders(case, case.orders, made, device, kernel, backward=False)
    results = _within_budget(case.orders, case, orders, "forward", attend)
    done.results |= dict(zip(("out", "lse"), results, strict=False))
    if case.results.given:
        done.take("out", results[0], forward["out"])
    if case.route == "forward":
        return
    if case.route == "autograd":
        asked = {n: t for n, t in zip(GRADIENTS, three, strict=True) if t.requires_grad}
        asked |= learned
        upstream = [made.grad_out.to(results[0].device)]
        if made.grad_lse is not None:
            upstream.append(made.grad_lse.to(results[1].device))
        grads = torch.autograd.grad(results[: len(upstream)], [*asked.values()], upstream)
        done.results |= dict(zip(asked, grads, strict=True))
        return
    names = GRADIENTS
    if case.results.given:
        backward["grads"] = tuple(
            done.target(n, t, case.results.grads, case) for n, t in zip(names, inputs, strict=True)
        )
    if case.mask_grad:
        names, backward["grad_mask"] = (*names, "grad_mask"), True
        if case.results.given:
            # As large as ``grads``, in another order of dimensions.
            of_mask = torch.empty_like(made.mask.mT, memory_format=torch.contiguous_format).mT
            backward["grad_mask"] = of_mask
    if case.rules is not None and case.rules.sinks:
        names, backward["grad_sinks"] = (*names, "grad_sinks"), True
    if made.grad_lse is not None:
        backward["grad_lse"] = made.grad_lse

    def differentiate(**orders: Any) -> tuple[torch.Tensor, ...]:
        return qa.attention_backward(made.grad_out, *three, *results, **backward, **orders)

    said = case.orders if case.backward_orders is None else case.backward_orders
    orders = _orders(case, said, made, device, kernel, backward=True)
    grads = _within_budget(said, case, orders, "backward", differentiate)
    done.results |= dict(zip(names, grads, strict=True))
    if case.results.given:
        of_mask = [backward["grad_mask"]] if case.mask_grad else []
        for name, grad, given in zip(names, grads, (*backward["grads"], *of_mask), strict=False):
            done.take(name, grad, given)


def _learned(case: Case, made: Made) -> dict[str, torch.Tensor]:
    """The leaves of the mask that get gradients, by the names of these."""
    leaves: dict[str, torch.Tensor] = {}
    if case.mask_grad and made.mask is not None:
        leaves["grad_mask"] = made.mask.detach().requires_grad_()
    if made.rules is not None and made.rules.sinks is not None:
        leaves["grad_sinks"] = made.rules.sinks.detach().requires_grad_()
    return leaves


def _handed(tensor: torch.Tensor, layout: str) -> Any:
    """A NumPy array where a case says so."""
    if layout == "array" and not tensor.is_cuda and tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor


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
        backward=backward, dropout_p=case.dropout, attn_mask=made.rules, **more,
    )  # fmt: skip
    if orders.passing is not None:
        heads, own = (group or case.heads) // shared, None if isinstance(kernel, str) else kernel
        rows, n_cap = orders.passing, orders.n_cap or 2
        return {"plan": passing(plan, *rows, group=heads, n_cap=n_cap, kernel=own)}
    return {"plan": plan if orders.pinned else unpinned(plan)}


def _within_budget(
    said: Orders, case: Case, orders: dict[str, Any], which: str, call: Callable[..., Any]
) -> Any:
    """The call's result, some of its allocations made to fail; with a budget some times the
    smallest that it says works."""
    if said.how == "budget":
        try:
            return call(**orders, budget=1)
        except qa.BudgetError as error:
            orders["budget"] = int(error.smallest_bytes * said.room)
    if case.failure is None or case.failure[0] != which:
        return call(**orders)
    with FailingAllocations(*case.failure[1:]):
        return call(**orders)
