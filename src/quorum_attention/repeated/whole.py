"""Calls that are one kernel call: made again without asking how much memory is free.

A call on a GPU that is not small is planned each time, because what is free may have changed.
Asking takes longer than many calls, and may wait for the device. One that was made whole before is
made so again as it is; where memory runs out, it is planned as any other, by what is free then.

On a CPU these are small calls whose gradients are ours: of 16 bits and in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from quorum_attention.autograd import Quick, gradients
from quorum_attention.call.gradients import Given
from quorum_attention.call.request import Request, Tensors
from quorum_attention.call.transforms import refuse_batched
from quorum_attention.execution.call import MaskView, operand
from quorum_attention.execution.case import corrected_bytes
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.memory import is_out_of_memory
from quorum_attention.execution.routes.whole import Whole as WholeRoute
from quorum_attention.execution.routes.whole import (
    materialised,
    materialises,
    widened,
    widens,
    without_empty_rows,
)
from quorum_attention.execution.scaling import all_finite, scales
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel, kernels, registrations
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.kernels.traits import traits_of, whole_calls
from quorum_attention.passes import (
    as_own,
    decide_backward,
    decide_forward,
    is_trivial,
)
from quorum_attention.planner.decide import Decision
from quorum_attention.repeated.likeness import is_transformed

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_NOT_DECIDED: Any = object()


class _Way(NamedTuple):
    """How gradients are made that are one kernel call.

    Attributes:
        materialised: they come from materialised scores.
        widened: they come from the operator in fp32.
        scaled: where they are not finite, they are made anew by a scaled backward.
    """

    materialised: bool
    widened: bool
    scaled: bool


@dataclass(slots=True, eq=False)
class Whole:
    """A call that is one kernel call.

    Attributes:
        request: the call, without its tensors.
        kernel: what computes: a registered kernel by its name, or one of ours under a mask.
        at_backward: how its gradients are made if they are one kernel call too, by what that
            depends on.
    """

    request: Request
    kernel: str | InnerKernel
    at_backward: dict[tuple[object, ...], _Way | None] = field(default_factory=dict)

    def output(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The output; None where memory ran out."""
        try:
            if self.request.records:
                made: torch.Tensor = _Whole.apply(query, key, value, mask, self)
                return made
            return self.forward(query, key, value, mask)[0]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""
        request = self.request
        calls = whole_calls(get_kernel(self.kernel))
        assert calls is not None, "another kernel of that name would be another call"
        out, lse = calls.whole_forward(
            query, key, value, request.work.is_causal, request.scale, self._bias(mask),
            request.out_dtype,
        )  # fmt: skip
        return as_own(out), lse

    def _bias(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        request = self.request
        if mask is None:
            return None
        return MaskView(mask, 1).whole(request.work.dtype, request.options.device)

    def backward(
        self,
        grad_out: torch.Tensor,
        three: _Three,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """The gradients of query, key and value; None where they are not one kernel call."""
        work = self.request.work
        kind = out.device.type
        usual = type(grad_out) is torch.Tensor and grad_out.layout is torch.strided
        if not usual or grad_out.dtype != work.dtype or grad_out.device != out.device:
            return None
        if torch.is_grad_enabled() or is_transformed() or torch.is_autocast_enabled(kind):
            return None
        way = None if grad_out.is_neg() else self._way(grad_out, three, out, lse, mask)
        if way is None:
            return None
        kernel, scale = get_kernel(self.kernel), self.request.scale
        try:
            bias = self._bias(mask)
            if way.materialised and bias is None:
                made = materialised(work, scale, grad_out, three, out, lse, own=True)
                if made is None:
                    return None
                if lse.dtype != work.dtype:
                    return tuple([g.to(work.dtype) for g in made])
                return tuple([as_own(g) for g in made])
            if not traits_of(kernel).empty_rows:
                lse = without_empty_rows(lse)
            if way.materialised:
                made = materialised(work, scale, grad_out, three, out, lse, bias)
                return None if made is None else tuple([as_own(g.to(work.dtype)) for g in made])
            if way.widened:
                made = widened(work, kernel, scale, grad_out, three, out, lse, bias)
                return None if made is None else tuple([as_own(g) for g in made])
            calls = whole_calls(kernel)
            assert calls is not None
            found = calls.whole_backward(
                operand(grad_out, work.dtype), *three, operand(out, work.dtype), lse,
                work.is_causal, scale, bias, work.dtype,
            )  # fmt: skip
            return found if not way.scaled or all_finite(found) else None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The next one is decided anew, by what is free then.
            self.at_backward.clear()
        return None

    def _way(
        self,
        grad_out: torch.Tensor,
        three: _Three,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> _Way | None:
        """How the gradients are made; None if they are not one kernel call."""
        # How many heads are widened together is decided by how many threads there are.
        state = (
            torch.are_deterministic_algorithms_enabled(), registrations(), torch.get_num_threads()
        )  # fmt: skip
        # Not asked for by its name again: another thread's backward may have run out of memory.
        way: _Way | None = self.at_backward.get(state, _NOT_DECIDED)
        if way is _NOT_DECIDED:
            tensors = Tensors(*three, mask)
            _, decision = decide_backward(tensors, self.request, Given(grad_out, out, lse))
            same = decision.kernel is get_kernel(self.kernel)
            one = same and _is_one_call(decision, self.request)
            way = self.at_backward[state] = self._way_of(decision) if one else None
        return way

    def _way_of(self, decision: Decision) -> _Way | None:
        work, kernel = self.request.work, decision.kernel
        way = _Way(materialises(work, kernel), widens(work, kernel), scales(kernel, work))
        if backend_of(self.request.options.device).own_memory:
            # Such gradients are looked at afterwards, or need another output.
            return None if way.scaled or corrected_bytes(work, kernel) else way
        # Another output is what delta would be computed from.
        return way if way.materialised or not corrected_bytes(work, kernel) else None


class _Whole(Quick):
    """``Whole`` as a function of autograd's."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        known: Whole,
    ) -> torch.Tensor:
        out, lse = known.forward(query, key, value, mask)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.known = known
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        (grad_out,) = grad_outputs
        if grad_out is None:
            return None, None, None, None, None
        refuse_batched(grad_out)
        query, key, value, mask, out, lse = ctx.saved_tensors
        known: Whole = ctx.known
        grads = known.backward(grad_out, (query, key, value), out, lse, mask)
        if grads is None:
            grads = gradients(grad_out, query, key, value, out, lse, mask, known.request)
        needed = ctx.needs_input_grad
        return (*[g if n else None for g, n in zip(grads, needed, strict=False)], None, None)


def gradients_are_ours(request: Request) -> bool:
    """Whether a small call on a CPU records gradients that are not those of torch's operator."""
    return request.records and request.work.dtype != torch.float32


def whole(tensors: Tensors, request: Request) -> Whole | None:
    """How a call is run that is one kernel call; None if it is not, or is not to be remembered."""
    work = request.work
    if is_trivial(tensors) or len(work.batch_shape) != 1 or request.runner is not None:
        return None
    _, decision = decide_forward(tensors, request)
    if not _is_one_call(decision, request):
        return None
    kernel = decision.kernel
    if kernels().get(kernel.name) is kernel:
        return Whole(request, kernel.name)
    # One of ours under a mask: a call that names a kernel of its own is not remembered.
    return Whole(request, kernel) if traits_of(kernel).empty_rows else None


def _is_one_call(decision: Decision, request: Request) -> bool:
    plan = decision.plan
    if plan is None:
        return True
    if not backend_of(request.options.device).own_memory:
        return False
    return isinstance(plan.schedule.route, WholeRoute) and plan.schedule.is_all(request.work)
