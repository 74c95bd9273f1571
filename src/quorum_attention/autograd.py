"""The gradient of ``attention`` for autograd: thin, everything happens in ``passes``."""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.options import Options
from quorum_attention.passes import run_backward, run_forward
from quorum_attention.validation import check_inputs


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        given: tuple[torch.Tensor | None],
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # ``given`` hides a preallocated output in a tuple: autograd would take a tensor for an
        # input, and an input that is returned for a view of itself.
        work = _work(query, key, value, options)
        result, lse = run_forward(
            query, key, value, work, options, given[0], out_dtype, needs_grad=True
        )
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        return result, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        grads = _Gradients.apply(  # type: ignore[no-untyped-call]
            grad_outputs[0], query, key, value, out, lse, ctx.options
        )
        needed = ctx.needs_input_grad[:3]
        return (*(g if n else None for g, n in zip(grads, needed, strict=True)), None, None, None)


class _Gradients(torch.autograd.Function):
    """The backward as a function of its own, so that a second derivative meets a clear error."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        work = _work(query, key, value, options)
        return run_backward(grad_out, query, key, value, out, lse, work, options)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        raise NotImplementedError(
            "second derivatives of quorum_attention.attention are not supported; "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) has them where it fits in memory"
        )


def _work(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> Any:
    return check_inputs(
        query,
        key,
        value,
        options.attn_mask,
        is_causal=options.is_causal,
        enable_gqa=options.enable_gqa,
    )


def differentiable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: Options,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with a gradient with respect to query, key and value."""
    result: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, options, (out,), out_dtype
    )
    return result
