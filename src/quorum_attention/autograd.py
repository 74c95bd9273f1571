"""The gradient of ``attention`` for autograd: thin, everything happens in ``passes``.

Everything that the backward reads is a saved tensor: inputs, mask, results, and what the kernel
says it reads besides. So one that is written to in between is torch's own error, and hooks on saved
tensors see them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import Any

import torch

from quorum_attention.call.arranged import beside
from quorum_attention.call.options import Options
from quorum_attention.call.validation import check_inputs
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.traits import captures
from quorum_attention.kernels.uncompiled import uncompiled
from quorum_attention.passes import run_backward, run_forward

_SECOND = (
    "second derivatives of quorum_attention.attention are not supported; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
)
_FORWARD_MODE = (
    "forward-mode derivatives of quorum_attention.attention (torch.func.jvp, jacfwd and hessian, "
    "dual tensors) are not supported; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What of a recorded call is not a tensor that autograd sees.

    Attributes:
        options: without the mask, which is an argument of its own.
        out: the caller's tensor for the result. Hidden in here: autograd would take it for an
            input, and an input that is returned for a view of itself.
        cast_bytes: see ``Arranged``; in the forward, for the backward finds them there.
    """

    work: Workload
    options: Options
    out: torch.Tensor | None
    out_dtype: torch.dtype
    cast_bytes: int

    def mapped(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> _Recorded:
        """The same for inputs with one more batch dimension."""
        if self.options.plan is not None:
            raise NotImplementedError(
                "plan cannot be given under torch.vmap, which adds a dimension that it was not "
                "made for"
            )
        options = self.options
        work = check_inputs(
            query, key, value, mask, is_causal=options.is_causal, enable_gqa=options.enable_gqa
        )
        return replace(self, work=work)


def _without_defaults(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A signature that says at once that there are none: torch asks that of a ``forward`` without
    ctx at every call, which takes longer than all else here."""
    forward.__signature__ = _ANY  # type: ignore[attr-defined]
    return forward


_ANY = Signature([Parameter("args", Parameter.VAR_POSITIONAL)])


class _Attention(torch.autograd.Function):
    @staticmethod
    @_without_defaults
    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        call: _Recorded,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with beside(call.cast_bytes, replace(call.options, attn_mask=mask)) as options:
            result, lse = run_forward(
                query, key, value, call.work, options, call.out, call.out_dtype, needs_grad=True
            )
        # The caller's tensor stays as it is, to be given again; what is returned, and saved, is
        # another of the same memory and the same version.
        return result if call.out is None else result.detach(), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *tensors, call = inputs
        result, lse = output
        ctx.save_for_backward(*tensors, result, lse, *_captured(call.options))
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        if grad_outputs[0] is None:
            return (None,) * 5
        query, key, value, mask, out, lse = ctx.saved_tensors[:6]
        grads = _Gradients.apply(  # type: ignore[no-untyped-call]
            grad_outputs[0], query, key, value, out, lse, mask, ctx.call
        )
        needed = ctx.needs_input_grad[:3]
        return (*(g if n else None for g, n in zip(grads, needed, strict=True)), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        *tensors, mask, call = args
        query, key, value = _in_front(info.batch_size, in_dims, tensors)
        mask = _mask_in_front(mask, in_dims[3], query.dim())
        mapped = call.mapped(query, key, value, mask)
        return _Attention.apply(query, key, value, mask, mapped), (0, 0)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
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
        call: _Recorded,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        options = replace(call.options, attn_mask=mask)
        return run_backward(grad_out, query, key, value, out, lse, call.work, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        raise NotImplementedError(_SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        *tensors, mask, call = args
        tensors = _in_front(info.batch_size, in_dims, tensors)
        mask = _mask_in_front(mask, in_dims[6], tensors[1].dim())
        mapped = call.mapped(*tensors[1:4], mask)
        return _Gradients.apply(*tensors, mask, mapped), (0, 0, 0)  # type: ignore[no-untyped-call]


def _captured(options: Options) -> list[torch.Tensor]:
    """What the kernel reads besides; tensors of inference mode have no version to watch."""
    if options.kernel == "auto":
        return []
    kernel = captures(get_kernel(options.kernel))
    found = () if kernel is None else kernel.captured()
    return [tensor for tensor in found if not tensor.is_inference()]


def _in_front(size: int, dims: tuple[Any, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The mapped dimension as the first; tensors that are not mapped are expanded."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=False)
    ]


def _mask_in_front(mask: torch.Tensor | None, dim: int | None, rank: int) -> torch.Tensor | None:
    """A mapped mask with all the dimensions of the query; others broadcast as they are."""
    if mask is None or dim is None:
        return mask
    mask = mask.movedim(dim, 0)
    return mask.reshape(mask.shape[0], *(1,) * (rank - mask.dim()), *mask.shape[1:])


def records(*inputs: torch.Tensor) -> bool:
    """Whether autograd has to see the call: for gradients, or for a transformation, which asks here
    for what it may not have."""
    return (
        (torch.is_grad_enabled() and any(t.requires_grad for t in inputs))
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def refuse_out_of_transforms() -> None:
    """A result of the caller's has no room for dimensions that a transformation adds.

    Raises:
        NotImplementedError: under torch.func.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("out cannot be given under torch.func transformations")


def refuse_transforms(*inputs: torch.Tensor) -> None:
    """What is no function of autograd's would lose what a transformation wants of it.

    Raises:
        NotImplementedError: under torch.func, or for dual tensors.
    """
    duals = torch.autograd.forward_ad
    if torch._C._are_functorch_transforms_active() or (
        duals._current_level >= 0 and any(duals.unpack_dual(t).tangent is not None for t in inputs)
    ):
        raise NotImplementedError(
            "attention_backward takes no part in torch.func transformations, nor in forward-mode "
            "derivatives: take the gradients of attention instead"
        )


def differentiable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    work: Workload,
    options: Options,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    cast_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with a gradient with respect to query, key and value."""
    call = _Recorded(work, replace(options, attn_mask=None), out, out_dtype, cast_bytes)
    result: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, options.attn_mask, call
    )
    return result
