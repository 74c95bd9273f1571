"""``attention`` as a function of autograd's. The work is done in ``passes``.

All that the backward reads is saved as tensors: inputs, mask, results, and those that the kernel
captures. So torch itself reports one that has been written to since, and hooks on saved tensors see
all of them. One function records every call: as it is planned (``EagerCall``), as one kernel call
(``direct.DirectCall``), or as an operator of a graph (``operator.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quorum_attention.call.gradients import BackwardInputs
from quorum_attention.call.request import Request, Tensors
from quorum_attention.call.transforms import records, refuse_batched, refuse_mapped
from quorum_attention.call.validation import as_tensor
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

    def forward(self, tensors: Tensors, more: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """(out, lse)."""
        compute = partial(run_forward, tensors, self.request)
        results = RESULTS.get()
        result, lse = compute() if results is None else results(compute)
        # ``out`` gets no graph, so it can be given again. What is returned and saved is another
        # tensor over the same memory, with the same version counter.
        return result if self.request.out is None else result.detach(), lse

    def gradients(
        self, read: Read, learned: Sequence[bool], more: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, then of mask and sinks where ``learned``."""
        refuse_batched(read[0], read[8])
        # A function of autograd's only where a second derivative could be asked for.
        if records(*read):
            grads: tuple[torch.Tensor, ...] = Gradients.apply(*read, self, learned)
            return grads
        return self.backward(read, learned)

    def backward(self, read: Read, learned: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """As ``gradients``, run here and now."""
        grad_out, query, key, value, out, lse, mask, sinks, grad_lse = read
        given = BackwardInputs(grad_out, out, lse, None, learned[0], learned[1], grad_lse)
        return run_backward(Tensors(query, key, value, mask, sinks), self.request, given)

    def mapped(self, size: int, mask: torch.Tensor | None, *, same: bool) -> EagerCall:
        """The call with one more batch dimension in front (``Request.mapped``)."""
        return EagerCall(self.request.mapped(size, mask, same=same))


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
    """The output and the log-sum-exp, of query, key, value, mask, sinks, the call (``EagerCall`` or
    another with its methods) and more tensors of it."""

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, ...]:
        """The call's results."""
        call = args[5]
        results: tuple[torch.Tensor, ...] = call.forward(Tensors(*args[:5]), args[6:])
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save what the backward reads."""
        ctx.call = inputs[5]
        ctx.save_for_backward(*inputs[:5], *output, *inputs[6:], *ctx.call.captured())
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        """The gradients that are needed."""
        grad_out, grad_lse = grad_outputs[:2]
        needed = ctx.needs_input_grad
        if grad_out is None and grad_lse is None:
            return (None,) * len(needed)
        saved = ctx.saved_tensors
        if grad_out is None:
            out = saved[5]
            grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
        query, key, value, mask, sinks, out, lse, *more = saved
        read = grad_out, query, key, value, out, lse, mask, sinks, grad_lse
        grads = ctx.call.gradients(read, needed[3:5], more)
        learned = iter(grads[3:])
        five = (*grads[:3], *(next(learned) if wanted else None for wanted in needed[3:5]))
        wanted = (g if n else None for g, n in zip(five, needed, strict=False))
        return (*wanted, *(None,) * (len(needed) - 5))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """One more batch dimension."""
        *tensors, call = args
        five = mapped_inputs(info.batch_size, in_dims, *tensors)
        mapped = call.mapped(info.batch_size, five[3], same=info.randomness == "same")
        return Attention.apply(*five, mapped), (0, 0)


class Gradients(_Quick):
    """The backward as a function of its own, so that a second derivative meets a clear error: of
    what it reads, the call, and whether the gradients of mask and sinks are wanted."""

    @staticmethod
    def forward(*args: Any) -> tuple[torch.Tensor, ...]:
        """The gradients."""
        *read, call, learned = args
        return tuple(call.backward(read, learned))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Nothing is saved: there is no derivative."""
        return

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Refused in words."""
        raise NotImplementedError(_REFUSED.format("second"))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """One more batch dimension."""
        *read, call, learned = args
        # Where the forward was made once, all gradients are of the same dropped pairs.
        same = info.randomness == "same" or in_dims[5] is None

        def compute(*nine: Any) -> Any:
            mapped = call.mapped(info.batch_size, nine[6], same=same)
            return Gradients.apply(*nine, mapped, learned)

        grads = mapped_gradients(info.batch_size, in_dims, read, learned, compute)
        return tuple(grads), (0,) * len(grads)


def mapped_inputs(
    size: int, dims: tuple[Any, ...], query: Any, key: Any, value: Any, mask: Any, sinks: Any
) -> tuple[Any, ...]:
    """The inputs of a call with the dimension first that torch.vmap maps over.

    Raises:
        NotImplementedError: it maps over the sinks.
    """
    refuse_mapped("Mask.sinks", dims[4])
    query, key, value = map(partial(_in_front, size), (query, key, value), dims)
    return query, key, value, _mask_in_front(mask, dims[3], query.dim()), sinks


def mapped_gradients(
    size: int,
    dims: tuple[Any, ...],
    read: Read,
    learned: Sequence[bool],
    compute: Callable[..., Any],
) -> list[torch.Tensor]:
    """The gradients of a call that torch.vmap maps, as ``compute`` gives them for tensors that have
    the dimension first.

    Args:
        learned: whether the gradients of mask and sinks are wanted.
    """
    *six, mask, sinks, grad_lse = read
    of_mask, of_sinks = learned
    # Its gradient would have the mapped dimension, whether or not it has.
    refuse_mapped("Mask.sinks, nor over their gradient", 0 if of_sinks else dims[7])
    six = list(map(partial(_in_front, size), six, dims))
    grad_lse = None if grad_lse is None else _in_front(size, grad_lse, dims[8])
    dim = dims[6]
    if of_mask and dim is None:
        mask, dim = mask.expand(size, *mask.shape), 0
    grads = list(compute(*six, _mask_in_front(mask, dim, six[1].dim()), sinks, grad_lse))
    if of_mask:
        grads[3] = grads[3].reshape(mask.movedim(dim, 0).shape)
    return grads


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
