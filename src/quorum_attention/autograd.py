"""``attention`` as a function of autograd's. The work is done in ``passes``.

All that the backward reads is saved as tensors: inputs, mask, results, and those that the kernel
captures. So torch itself reports one that has been written to since, and hooks on saved tensors see
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from inspect import Parameter, Signature
from typing import Any

import torch

from quorum_attention.call.gradients import Given
from quorum_attention.call.request import Request, Tensors
from quorum_attention.call.transforms import records, refuse_batched
from quorum_attention.call.validation import as_tensor
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.passes import beside_casts, run_backward, run_forward
from quorum_attention.planner.plan import Options

SECOND = (
    "second derivatives of quorum_attention.attention are not supported; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
)
FORWARD_MODE = (
    "forward-mode derivatives of quorum_attention.attention (torch.func.jvp, jacfwd and hessian, "
    "dual tensors) are not supported; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
)

# Who is asked for (out, lse) of a recorded call, with what computes them: a checkpoint that keeps
# them, or None.
RESULTS: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("RESULTS", default=None)


def _without_defaults(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with a signature at hand that has no defaults.

    torch inspects the signature of a ``forward`` without ctx at every call, which would take longer
    than everything else in this file.
    """
    forward.__signature__ = _ANY  # type: ignore[attr-defined]
    return forward


_ANY = Signature([Parameter("args", Parameter.VAR_POSITIONAL)])


class Quick(torch.autograd.Function):
    """torch's ``Function`` with a quicker ``apply``, for a ``forward`` without defaults."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's, which first binds the arguments to a signature: that would double the time
        spent here."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        # As torch's does: wrappers of a transformation that is over are replaced by their tensors.
        args = torch._functorch.utils.unwrap_dead_wrappers(args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Attention(Quick):
    @staticmethod
    @_without_defaults
    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        request: Request,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = Tensors(query, key, value, mask, sinks)
        compute = partial(beside_casts, request, lambda left: run_forward(tensors, left))
        results = RESULTS.get()
        result, lse = compute() if results is None else results(compute)
        # ``out`` gets no graph, so it can be given again. What is returned and saved is another
        # tensor over the same memory, with the same version counter.
        return result if request.out is None else result.detach(), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, request = inputs
        result, lse = output
        ctx.save_for_backward(*tensors, result, lse, *_captured(request.options))
        ctx.request = request
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        grad_out, grad_lse = grad_outputs
        if grad_out is None and grad_lse is None:
            return (None,) * 6
        query, key, value, mask, sinks, out, lse = ctx.saved_tensors[:7]
        if grad_out is None:
            grad_out = torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)
        needed = ctx.needs_input_grad
        learned = (needed[3], needed[4])
        grads = _gradients(
            grad_out, query, key, value, out, lse, mask, sinks, grad_lse, ctx.request, learned,
        )  # fmt: skip
        of_others = iter(grads[3:])
        every = (*grads[:3], *(next(of_others) if wanted else None for wanted in learned))
        return (*(g if n else None for g, n in zip(every, needed, strict=False)), None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        *tensors, mask, sinks, request = args
        refuse_mapped(in_dims[4])
        query, key, value = in_front(info.batch_size, in_dims, tensors)
        mask = mask_in_front(mask, in_dims[3], query.dim())
        mapped = request.mapped(info.batch_size, mask, same=info.randomness == "same")
        return _Attention.apply(query, key, value, mask, sinks, mapped), (0, 0)


class _Gradients(Quick):
    """The backward as a function of its own, so that a second derivative meets a clear error."""

    @staticmethod
    @_without_defaults
    def forward(
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        request: Request,
        learned: tuple[bool, bool],
    ) -> tuple[torch.Tensor, ...]:
        of_mask, of_sinks = learned
        given = Given(grad_out, out, lse, of_mask=of_mask, of_sinks=of_sinks, grad_lse=grad_lse)
        return run_backward(Tensors(query, key, value, mask, sinks), request, given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        raise NotImplementedError(SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        *tensors, mask, sinks, grad_lse, request, learned = args
        of_mask, of_sinks = learned
        # Its gradient would have the mapped dimension, whether or not it has.
        refuse_mapped(0 if of_sinks else in_dims[7])
        tensors = in_front(info.batch_size, in_dims, tensors)
        if grad_lse is not None:
            (grad_lse,) = in_front(info.batch_size, in_dims[8:9], [grad_lse])
        mask_dim = in_dims[6]
        if of_mask and mask_dim is None:
            # Its gradient has the mapped dimension, whether or not it has.
            mask, mask_dim = mask.expand(info.batch_size, *mask.shape), 0
        shape = None if mask is None or mask_dim is None else mask.movedim(mask_dim, 0).shape
        mask = mask_in_front(mask, mask_dim, tensors[1].dim())
        # Where the forward was made once, all gradients are of the same dropped pairs.
        same = info.randomness == "same" or in_dims[5] is None
        mapped = request.mapped(info.batch_size, mask, same=same)
        found = _Gradients.apply(*tensors, mask, sinks, grad_lse, mapped, learned)
        if of_mask:
            found = (*found[:3], found[3].reshape(shape))
        return found, (0,) * len(found)


def _gradients(*read: Any) -> tuple[torch.Tensor, ...]:
    """``_Gradients``: as a function of autograd's only where a second derivative could be asked
    for."""
    refuse_batched(read[0], read[8])
    seen = records(*(t for t in read if isinstance(t, torch.Tensor)))
    made: tuple[torch.Tensor, ...] = _Gradients.apply(*read) if seen else _Gradients.forward(*read)
    return made


def refuse_mapped(dim: int | None) -> None:
    """Refuse sinks, or a gradient of them, with a dimension that torch.vmap maps over."""
    if dim is not None:
        raise NotImplementedError(
            "torch.vmap cannot map over Mask.sinks, nor over their gradient: only over query, key, "
            "value and attn_mask"
        )


def _captured(options: Options) -> list[torch.Tensor]:
    """The tensors that the kernel captures, less those of inference mode, which cannot be saved."""
    if options.kernel == "auto":
        return []
    found = get_kernel(options.kernel).captured()
    return [tensor for tensor in found if not tensor.is_inference()]


def in_front(size: int, dims: tuple[Any, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors with the mapped dimension first; those that are not mapped are expanded."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=False)
    ]


def mask_in_front(mask: torch.Tensor | None, dim: int | None, rank: int) -> torch.Tensor | None:
    """The mask with the mapped dimension first, and then as many as broadcasting needs; one that
    is not mapped as it is."""
    if mask is None or dim is None:
        return mask
    mask = mask.movedim(dim, 0)
    return mask.reshape(mask.shape[0], *(1,) * (rank - mask.dim()), *mask.shape[1:])


class _First(Quick):
    """A first derivative, so that a second one meets a clear error."""

    @staticmethod
    @_without_defaults
    def forward(*grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        raise NotImplementedError(SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)


def _in_words(
    grads: tuple[torch.Tensor | None, ...], upstream: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor | None, ...] | None:
    """Replaces the gradients of an operator of torch's where autograd records them."""
    if not torch.is_grad_enabled():
        return None
    made = iter(_First.apply(*(g for g in grads if g is not None)))
    return tuple(None if grad is None else next(made) for grad in grads)


def named_derivative(found: torch.Tensor) -> torch.Tensor:
    """``found``, the output of an operator of torch's; a second derivative of it meets a clear
    error."""
    if found.grad_fn is not None:
        found.grad_fn.register_hook(_in_words)
    return found


def gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    request: Request,
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value of a call, as its backward gives them."""
    return _gradients(
        grad_out, query, key, value, out, lse, mask, None, None, request, (False, False)
    )


def differentiable(tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with a gradient with respect to query, key and value."""
    # ``out`` is passed inside the request: as an argument, autograd would take it for an input, and
    # the result for a view of that input.
    result: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(*tensors, request)
    return result


def attend(
    tensors: Tensors, request: Request, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call that has been checked; ``out`` as its caller gave it."""
    recorded = torch.is_grad_enabled()
    try:
        if request.records:
            result, lse = differentiable(tensors, request)
        else:
            result, lse = beside_casts(request, lambda left: run_forward(tensors, left))
            if out is not None:
                return as_tensor(out, "out", written=True), request.back(lse)
    finally:
        # An interrupt that comes while ``torch.no_grad`` is entered leaves gradients off.
        if torch.is_grad_enabled() is not recorded:
            torch.set_grad_enabled(recorded)
    return request.back(result), request.back(lse)
