"""The native kernel as a function: one call on one device, with group bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quorum_attention.counts import real_number, switch
from quorum_attention.kernels.native.kernel import NativeKernel, Tilings, _Part
from quorum_attention.kernels.native.launch import Launch
from quorum_attention.kernels.native.runs import runs_of_bits
from quorum_attention.kernels.protocol import Call, CallShape, Saved
from quorum_attention.kernels.torch_private import first_derivative, refuse_traces, uncompiled


@uncompiled
def native_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    query_bits: torch.Tensor | None = None,
    key_bits: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the native kernel, with gradients of query, key and value.

    For masks, windows, soft caps, sinks, a gradient of the log-sum-exp and a budget call
    ``attention_with_lse`` with ``kernel="native"`` and a ``Mask``.

    Args:
        query: (b, h, n, d); key (b, hk, m, d); value (b, hk, m, dv), h a multiple of hk: fp16,
            bf16 or fp32.
        is_causal: keep only keys at or before the query, top-left aligned.
        scale: factor of the scores, default d ** -0.5.
        query_bits, key_bits: (n,), (m,) int64 group bits: a pair is kept where they have no bit in
            common (paper, section 3.3). Both or neither.
        out_dtype: of the output; default the query's.
        allow_tf32: for fp32 inputs, faster and less exact products.

    Returns:
        (out, lse): (b, h, n, dv) and (b, h, n) fp32, natural log; 0 and -inf in rows without keys.

    Raises:
        NotImplementedError: the kernel cannot run the call; says why.
        TypeError, ValueError: an argument that is wrong or does not fit the others, by name.
    """
    refuse_traces("native_attention", query, key, value)
    kernel = _WithBits(allow_tf32=allow_tf32)
    if query_bits is not None and key_bits is not None:
        kernel.bits = query_bits, key_bits
    elif query_bits is not None or key_bits is not None:
        raise ValueError("query_bits and key_bits go together: one is missing")
    _check(kernel, query, key, value)
    call = Call(
        query, key, value, switch(is_causal, "is_causal"),
        query.shape[-1] ** -0.5 if scale is None else real_number(scale, "scale"),
        stored=out_dtype or query.dtype,
    )  # fmt: skip
    tensors = (query, key, value, *(kernel.bits or ()))
    out, lse = _Function.apply(call, kernel, *tensors)  # type: ignore[no-untyped-call]
    return out, lse


class _WithBits(NativeKernel):
    """The kernel under group bits, for whole calls."""

    bits: tuple[torch.Tensor, torch.Tensor] | None = None

    def _whole_launch(self, call: Call, tilings: Tilings) -> Launch:
        if self.bits is None:
            return super()._whole_launch(call, tilings)
        tables = (runs_of_bits(*self.bits, call.is_causal, how, axis) for axis, how in tilings)
        return replace(self._launch(call, _Part(tuple(tables))), bits=self.bits)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, kernel: _WithBits, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = kernel.whole_forward(call)
        ctx.save_for_backward(*tensors, out, lse)
        # Not the call, whose tensors would stay as long as the output.
        ctx.how, ctx.kernel = (call.causal, call.scale), kernel
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_derivative("native_attention")
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> Any:
        query, key, value, *bits, out, lse = ctx.saved_tensors
        call = Call(query, key, value, *ctx.how)
        saved = Saved(grad_out.to(query.dtype).contiguous(), out, lse)
        return None, None, *ctx.kernel.whole_backward(call, saved), *(None for _ in bits)


def _check(kernel: _WithBits, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises what ``native_attention`` says."""
    three = query, key, value
    fits = {(t.ndim, t.dtype, t.device) for t in three} == {(4, query.dtype, query.device)}
    if fits:
        (batch, heads, _, d), key_heads = query.shape, key.shape[1]
        fits = key.shape[::3] == (batch, d) and value.shape[:3] == key.shape[:3]
        fits = fits and key_heads > 0 and heads % key_heads == 0
    if not fits:
        raise ValueError(
            "query, key and value must be (b, h, n, d), (b, hk, m, d) and (b, hk, m, dv) of one "
            "dtype and one device, h a multiple of hk, got "
            + ", ".join(f"{t.dtype} {tuple(t.shape)} on {t.device}" for t in three)
        )
    names = "query_bits", "key_bits"
    for name, bits, near in zip(names, kernel.bits or (), three, strict=False):
        if bits.shape != near.shape[2:3] or bits.dtype != torch.int64:
            raise ValueError(
                f"{name} must be int64 of shape {tuple(near.shape[2:3])}, got {bits.dtype} of "
                f"shape {tuple(bits.shape)}"
            )
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in three)
    shape = CallShape(
        query.device.type, query.dtype, heads, key_heads, d, value.shape[-1], needs_grad=needs_grad
    )
    if (reason := kernel.refusal(shape)) is not None:
        raise NotImplementedError(f"native_attention: {reason}")
