"""``attention`` as a function of autograd's. The work is done in ``passes``.

All that the backward reads is saved as tensors: inputs, mask, results, and those that the kernel
captures. So torch itself reports one that has been written to since, and hooks on saved tensors see
all of them. One function records every call: as it is planned (``EagerCall``), or as one kernel
call (``direct.DirectCall``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quorum_attention.call.gradients import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.transforms import refuse_batched
from quorum_attention.call.validation import Tensors, as_tensor
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.passes import run_backward, run_forward

_REFUSED = (
    "{} derivatives of quorum_attention.attention are not supported; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
)

# What a backward reads: grad_out, query, key, value, out, lse, mask, sinks, grad_lse and seed.
Read = Sequence[Any]
# Who is asked for (out, lse) of a recorded call, with what computes them: a checkpoint that keeps
# them, or None.
RESULTS: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("RESULTS", default=None)


def computed_once(compute: Callable[[], Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by ``compute``, or as a checkpoint kept them."""
    results = RESULTS.get()
    out, lse = compute() if results is None else results(compute)
    return out, lse


@dataclass(frozen=True, slots=True, eq=False)
class EagerCall:
    """A checked call, planned and run when it is made."""

    request: Request

    def captured(self) -> list[torch.Tensor]:
        """The tensors that the kernel captures, less those of inference mode, which cannot be
        saved."""
        kernel = self.request.options.kernel
        tensors = [] if kernel == "auto" else get_kernel(kernel).captured()
        return [tensor for tensor in tensors if not tensor.is_inference()]

    def forward(self, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""
        request = self.request.seeded(tensors.seed)
        result, lse = computed_once(partial(run_forward, tensors, request))
        # ``out`` gets no graph, so it can be given again. What is returned and saved is another
        # tensor over the same memory, with the same version counter.
        return result if self.request.out is None else result.detach(), lse

    def gradients(self, read: Read, learned: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, then of mask and sinks where ``learned``."""
        refuse_batched(read[0], read[8])
        grads: tuple[torch.Tensor, ...] = Gradients.apply(*read, self.request, *learned)
        return grads


class _Quick(torch.autograd.Function):
    """torch's ``Function`` with a quicker ``apply``, for a ``forward`` without defaults."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's, which first inspects the signature of ``forward``: 0.1 ms."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        # As torch's does: wrappers of a transformation that is over are replaced by their tensors.
        args = torch._functorch.utils.unwrap_dead_wrappers(args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_REFUSED.format("forward-mode"))

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """A call for each entry: as torch maps its own fused kernels."""
        if info.batch_size == 0:
            raise NotImplementedError("torch.vmap cannot map attention over no entries")
        mapped = [
            [arg] * info.batch_size if dim is None else arg.unbind(dim)
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        results = [cls.apply(*entry) for entry in zip(*mapped, strict=True)]
        stacked = tuple([torch.stack(one) for one in zip(*results, strict=True)])
        return stacked, (0,) * len(stacked)


class Attention(_Quick):
    """The output and the log-sum-exp, of ``Tensors`` and an ``EagerCall``."""

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The call's results."""
        *tensors, call = args
        results: tuple[torch.Tensor, torch.Tensor] = call.forward(Tensors(*tensors))
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save what the backward reads."""
        *tensors, ctx.call = inputs
        ctx.save_for_backward(*tensors, *output, *ctx.call.captured())
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        """The gradients that are needed."""
        needed = ctx.needs_input_grad
        if not any(grad is not None for grad in upstream):
            return (None,) * len(needed)
        query, key, value, mask, sinks, seed, out, lse = ctx.saved_tensors[:8]
        grad_out, grad_lse = upstream_of(out, *upstream)
        read = grad_out, query, key, value, out, lse, mask, sinks, grad_lse, seed
        return (*needed_of(ctx.call.gradients(read, needed[3:5]), needed), None, None)


def upstream_of(
    out: torch.Tensor, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of output and log-sum-exp, the first of them zeros where there is none."""
    if grad_out is None:
        grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
    return grad_out, grad_lse


def needed_of(grads: Sequence[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor | None]:
    """Those gradients of query, key, value, mask and sinks that are needed.

    Args:
        grads: of query, key and value, then of mask and sinks where those are needed.
    """
    learned = iter(grads[3:])
    five = (*grads[:3], *(next(learned) if wanted else None for wanted in needed[3:5]))
    return [grad if wanted else None for grad, wanted in zip(five, needed, strict=False)]


def refuse_second(ctx: Any, *upstream: Any) -> Any:
    """The derivative of the gradients: an error."""
    raise NotImplementedError(_REFUSED.format("second"))


class Gradients(_Quick):
    """The backward as a function of its own, so that a second derivative meets a clear error: of
    what it reads, the request, and whether the gradients of mask and sinks are wanted."""

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, ...]:
        """The gradients."""
        grad_out, query, key, value, out, lse, mask, sinks, grad_lse, seed, request, *learned = args
        given = BackwardInputs(grad_out, out, lse, None, learned[0], learned[1], grad_lse)
        tensors = Tensors(query, key, value, mask, sinks)
        return run_backward(tensors, request.seeded(seed), given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Nothing is saved: there is no derivative."""
        return

    backward = staticmethod(refuse_second)


def attend(
    tensors: Tensors, request: Request, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call that has been checked; ``out`` as its caller gave it."""
    recorded = torch.is_grad_enabled()
    try:
        if request.records:
            # ``out`` is passed inside the request: as an argument, autograd would take it for an
            # input, and the result for a view of that input.
            result, lse = Attention.apply(*tensors, EagerCall(request))
        else:
            result, lse = run_forward(tensors, request)
            if out is not None:
                return as_tensor(out, "out", written=True), request.back(lse)
    finally:
        # An interrupt that comes while ``torch.no_grad`` is entered leaves gradients off.
        if torch.is_grad_enabled() is not recorded:
            torch.set_grad_enabled(recorded)
    return request.back(result), request.back(lse)
