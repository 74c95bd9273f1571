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
from quorum_attention.call.transforms import refuse_batched, refuse_mapped
from quorum_attention.call.validation import Tensors, as_tensor
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.passes import run_backward, run_forward

_REFUSED = (
    "{} derivatives of quorum_attention.attention are not supported; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
)

# What a backward reads: grad_out, query, key, value, out, lse, mask, sinks and grad_lse.
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
        result, lse = computed_once(partial(run_forward, tensors, self.request))
        # ``out`` gets no graph, so it can be given again. What is returned and saved is another
        # tensor over the same memory, with the same version counter.
        return result if self.request.out is None else result.detach(), lse

    def gradients(self, read: Read, learned: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, then of mask and sinks where ``learned``."""
        refuse_batched(read[0], read[8])
        grads: tuple[torch.Tensor, ...] = Gradients.apply(*read, self.request, learned)
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


class Attention(_Quick):
    """The output and the log-sum-exp, of query, key, value, mask, sinks and an ``EagerCall``."""

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
        query, key, value, mask, sinks, out, lse = ctx.saved_tensors[:7]
        grad_out, grad_lse = upstream_of(out, *upstream)
        read = grad_out, query, key, value, out, lse, mask, sinks, grad_lse
        return (*needed_of(ctx.call.gradients(read, needed[3:5]), needed), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """One more batch dimension."""
        *three, mask, sinks, call = args
        refuse_mapped("Mask.sinks", in_dims[4])
        three = list(map(partial(_in_front, info.batch_size), three, in_dims))
        mask = _mask_in_front(mask, in_dims[3], three[0].dim())
        same = info.randomness == "same"
        mapped = EagerCall(call.request.mapped(info.batch_size, mask, same=same))
        return Attention.apply(*three, mask, sinks, mapped), (0, 0)


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
        *read, request, learned = args
        grad_out, query, key, value, out, lse, mask, sinks, grad_lse = read
        given = BackwardInputs(grad_out, out, lse, None, learned[0], learned[1], grad_lse)
        return run_backward(Tensors(query, key, value, mask, sinks), request, given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Nothing is saved: there is no derivative."""
        return

    backward = staticmethod(refuse_second)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """One more batch dimension."""
        *six, mask, sinks, grad_lse, request, (of_mask, of_sinks) = args
        # Its gradient would have the mapped dimension, whether or not it has.
        refuse_mapped("Mask.sinks, nor over their gradient", 0 if of_sinks else in_dims[7])
        six = list(map(partial(_in_front, info.batch_size), six, in_dims))
        if grad_lse is not None:
            grad_lse = _in_front(info.batch_size, grad_lse, in_dims[8])
        dim = in_dims[6]
        if of_mask and dim is None:
            mask, dim = mask.expand(info.batch_size, *mask.shape), 0
        wide = _mask_in_front(mask, dim, six[1].dim())
        # Where the forward was made once, all gradients are of the same dropped pairs.
        same = info.randomness == "same" or in_dims[5] is None
        mapped = request.mapped(info.batch_size, wide, same=same)
        grads = list(Gradients.apply(*six, wide, sinks, grad_lse, mapped, (of_mask, of_sinks)))
        if of_mask:
            grads[3] = grads[3].reshape(mask.movedim(dim, 0).shape)
        return tuple(grads), (0,) * len(grads)


def _in_front(size: int, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """``tensor`` with the mapped dimension first; expanded, if it is not mapped."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _mask_in_front(mask: torch.Tensor | None, dim: int | None, rank: int) -> torch.Tensor | None:
    """The mask with the mapped dimension first, and then as many as broadcasting needs; one that
    is not mapped as it is."""
    if mask is None or dim is None:
        return mask
    mask = mask.movedim(dim, 0)
    return mask.reshape(mask.shape[0], *(1,) * (rank - mask.dim()), *mask.shape[1:])


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
