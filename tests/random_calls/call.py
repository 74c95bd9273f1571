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
from random_calls.tensors import DTYPES, CallInputs, Memory, target

# Where no calibration is, and never one of whoever runs this.
if "QUORUM_ATTENTION_CACHE" not in os.environ:
    os.environ["QUORUM_ATTENTION_CACHE"] = tempfile.mkdtemp(prefix="random-calls-")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

GRADIENTS = ("grad_query", "grad_key", "grad_value")


@dataclass
class CallResults:
    """What a call returned, as far as it came.

    Attributes:
        results: "out", "lse", "grad_query", ...
        targets: the tensors that were preallocated for results.
        report: the report of the call, if the case asks for one.
        misplaced: names of results that came back in other memory than was handed over
            as ``out=`` or ``grads=``.
    """

    results: dict[str, torch.Tensor] = field(default_factory=dict)
    targets: list[Memory] = field(default_factory=list)
    report: qa.Report | None = None
    misplaced: list[str] = field(default_factory=list)

    def allocate(
        self, name: str, like: torch.Tensor, dtype: str | None, case: Case
    ) -> Any:
        """A preallocated result of the shape and on the device of ``like``."""
        result_dtype = DTYPES[dtype or case.dtype]
        memory = target(
            name, tuple(like.shape), result_dtype, case.results.layout, like.device
        )
        self.targets.append(memory)
        return memory.view

    def note_if_misplaced(self, name: str, result: torch.Tensor, target: Any) -> None:
        if result.data_ptr() != target.data_ptr():
            self.misplaced.append(name)


def perform(
    case: Case, inputs: CallInputs, device: torch.device, results: CallResults
) -> None:
    """Make the call; ``results`` is filled as it goes, so that an error leaves what
    came before."""
    results.report = qa.Report() if case.reported else None
    _Performance(case, inputs, device, results).run()


class _Performance:
    """One call of a case: forward, and the backward by the case's route.

    Attributes:
        kernel: what is handed over as ``kernel=``.
        qkv: query, key and value as they are handed over.
        arguments: keywords that forward and backward have in common.
        leaves: tensors that autograd differentiates with respect to, by names of their
            gradients.
    """

    def __init__(
        self, case: Case, inputs: CallInputs, device: torch.device, results: CallResults
    ) -> None:
        self.case = case
        self.inputs = inputs
        self.device = device
        self.results = results
        self.kernel = kernel_of(case, inputs.query.device)
        self.arguments = self._common_arguments()
        self.leaves: dict[str, torch.Tensor] = {}
        self.qkv: list[Any] = [
            _as_handed_over(tensor, layout)
            for tensor, layout in zip(inputs.qkv, case.layouts, strict=False)
        ]

    def run(self) -> None:
        outputs = self._forward()
        if self.case.route == "autograd":
            self._differentiate(outputs)
        if self.case.route == "pair":
            self._backward(outputs)

    def _common_arguments(self) -> dict[str, Any]:
        case = self.case
        arguments: dict[str, Any] = {
            "attn_mask": self.inputs.attn_mask(self.inputs.mask),
            "is_causal": case.is_causal,
            "scale": case.scale,
            "enable_gqa": case.heads != case.kv_heads,
            "kernel": self.kernel,
            "report": self.results.report,
        }
        if case.dropout:
            arguments["dropout_p"] = case.dropout
            arguments["dropout_seed"] = case.seed
        return arguments

    def _forward(self) -> tuple[torch.Tensor, ...]:
        """(out, lse), or (out,) if the case asks for no lse."""
        case = self.case
        arguments = dict(self.arguments)
        if case.results.given:
            # As large as grad_out, whatever that is a view of.
            like = self.inputs.query.new_empty(self.inputs.grad_out.shape)
            arguments["out"] = self.results.allocate(
                "out", like, case.results.out, case
            )
        elif case.results.out is not None:
            arguments["out_dtype"] = DTYPES[case.results.out]
        if case.route == "autograd":
            self._make_leaves()
            arguments["attn_mask"] = self._mask_of_leaves()
        without_lse = case.without_lse and case.route != "pair"

        def attend(**settings: Any) -> tuple[torch.Tensor, ...]:
            if without_lse:
                return (qa.attention(*self.qkv, **arguments, **settings),)
            return qa.attention_with_lse(*self.qkv, **arguments, **settings)

        settings = self._settings(case.orders, backward=False)
        outputs = _within_budget(case.orders, case, settings, "forward", attend)
        self.results.results |= dict(zip(("out", "lse"), outputs, strict=False))
        if case.results.given:
            self.results.note_if_misplaced("out", outputs[0], arguments["out"])
        return outputs

    def _make_leaves(self) -> None:
        """Replace query, key, value, mask and sinks by leaves that ask for gradients,
        as far as the case wants gradients."""
        case = self.case
        inputs = self.inputs
        self.qkv = [
            tensor.detach().requires_grad_(is_wanted)
            for tensor, is_wanted in zip(inputs.qkv, case.requires_grad, strict=True)
        ]
        for name, tensor in zip(GRADIENTS, self.qkv, strict=True):
            if tensor.requires_grad:
                self.leaves[name] = tensor
        if case.mask_grad and inputs.mask is not None:
            self.leaves["grad_mask"] = inputs.mask.detach().requires_grad_()
        if inputs.rules is not None and inputs.rules.sinks is not None:
            self.leaves["grad_sinks"] = inputs.rules.sinks.detach().requires_grad_()

    def _mask_of_leaves(self) -> torch.Tensor | qa.Mask | None:
        attn_mask = self.inputs.attn_mask(
            self.leaves.get("grad_mask", self.inputs.mask)
        )
        if "grad_sinks" not in self.leaves:
            return attn_mask
        return replace(attn_mask, sinks=self.leaves["grad_sinks"])

    def _differentiate(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """The backward by autograd."""
        upstream = [self.inputs.grad_out.to(outputs[0].device)]
        if self.inputs.grad_lse is not None:
            upstream.append(self.inputs.grad_lse.to(outputs[1].device))
        differentiated = outputs[: len(upstream)]
        gradients = torch.autograd.grad(
            differentiated, [*self.leaves.values()], upstream
        )
        self.results.results |= dict(zip(self.leaves, gradients, strict=True))

    def _backward(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """The backward by ``attention_backward``."""
        case = self.case
        names, targets, arguments = self._backward_arguments()

        def differentiate(**settings: Any) -> tuple[torch.Tensor, ...]:
            upstream = self.inputs.grad_out
            return qa.attention_backward(
                upstream, *self.qkv, *outputs, **arguments, **settings
            )

        orders = case.orders if case.backward_orders is None else case.backward_orders
        settings = self._settings(orders, backward=True)
        gradients = _within_budget(orders, case, settings, "backward", differentiate)
        self.results.results |= dict(zip(names, gradients, strict=True))
        for name, gradient in zip(names, gradients, strict=True):
            if name in targets:
                self.results.note_if_misplaced(name, gradient, targets[name])

    def _backward_arguments(self) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
        """(names of the gradients in their order, preallocated gradients by name,
        keywords)."""
        case = self.case
        inputs = self.inputs
        names = list(GRADIENTS)
        targets: dict[str, Any] = {}
        arguments = dict(self.arguments)
        if case.results.given:
            for name, tensor in zip(GRADIENTS, inputs.qkv, strict=True):
                targets[name] = self.results.allocate(
                    name, tensor, case.results.grads, case
                )
            arguments["grads"] = tuple(targets.values())
        if case.mask_grad:
            names.append("grad_mask")
            arguments["grad_mask"] = True
        if case.mask_grad and case.results.given:
            # As large as ``grads``, in another order of dimensions.
            transposed = torch.empty_like(
                inputs.mask.mT, memory_format=torch.contiguous_format
            )
            targets["grad_mask"] = transposed.mT
            arguments["grad_mask"] = targets["grad_mask"]
        if case.rules is not None and case.rules.sinks:
            names.append("grad_sinks")
            arguments["grad_sinks"] = True
        if inputs.grad_lse is not None:
            arguments["grad_lse"] = inputs.grad_lse
        return names, targets, arguments

    def _settings(self, orders: Orders, *, backward: bool) -> dict[str, Any]:
        """Keywords of how a pass is cut: its depth, its plan, or none."""
        case = self.case
        if orders.how == "depth":
            return {"depth": orders.depth}
        is_trivial = 0 in (*case.batch, case.heads, case.n_queries, case.n_keys)
        if orders.how != "plan" or is_trivial:
            return {}
        n_shared = case.heads // case.kv_heads
        heads_per_group = orders.one_group_of
        if heads_per_group is not None:
            whole_groups = min(case.heads, heads_per_group) // n_shared * n_shared
            heads_per_group = max(n_shared, whole_groups)
        plan = self._plan(orders, heads_per_group, backward=backward)
        if orders.passing is None:
            return {"plan": plan if orders.pinned else unpinned(plan)}
        kernel = None if isinstance(self.kernel, str) else self.kernel
        kv_heads = (heads_per_group or case.heads) // n_shared
        n_cap = orders.n_cap or 2
        made = passing(
            plan,
            *orders.passing,
            group=kv_heads,
            n_cap=n_cap,
            chunk_slots=1 + sum(orders.passing) % 2,  # one or two, as often
            kernel=kernel,
        )
        return {"plan": made}

    def _plan(
        self, orders: Orders, heads_per_group: int | None, *, backward: bool
    ) -> qa.Plan:
        case = self.case
        placement: dict[str, Any] = {}
        if self.device.type == "cuda":
            placement["device"] = "cuda"
            placement["inputs"] = "device" if self.inputs.query.is_cuda else "host"
        return qa.plan(
            case.n_queries,
            n_keys=case.n_keys,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            value_dim=case.value_dim,
            batch=math.prod(case.batch),
            dtype=DTYPES[case.dtype],
            is_causal=case.is_causal,
            levels=orders.levels,
            layout=orders.layout,
            tile=orders.tile,
            n_cap=orders.n_cap,
            accumulator=orders.accumulator,
            heads_per_group=heads_per_group,
            over_inputs=orders.over_inputs,
            streams=orders.streams,
            kernel=self.kernel,
            backward=backward,
            dropout_p=case.dropout,
            attn_mask=self.inputs.rules,
            **placement,
        )


def _as_handed_over(tensor: torch.Tensor, layout: str) -> Any:
    """A NumPy array if the layout says so and NumPy has the dtype."""
    if layout == "array" and not tensor.is_cuda and tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor


def _within_budget(
    orders: Orders,
    case: Case,
    settings: dict[str, Any],
    pass_name: str,
    attend: Callable[..., Any],
) -> Any:
    """The call's result, with some allocations made to fail if the case says so.

    The budget of a case that has one is a multiple of the smallest that the call itself
    names.
    """
    if orders.how == "budget":
        try:
            return attend(**settings, budget=1)
        except qa.BudgetError as error:
            settings["budget"] = int(error.smallest_bytes * orders.room)
    if case.failure is None or case.failure[0] != pass_name:
        return attend(**settings)
    with FailingAllocations(*case.failure[1:]):
        return attend(**settings)
