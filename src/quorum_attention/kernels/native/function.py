"""The native kernel as a function: one call on one device, with all options of the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from quorum_attention.counts import real_number, switch
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.native.config import Config, Half, config
from quorum_attention.kernels.native.kernel import NativeKernel, runs_of
from quorum_attention.kernels.native.launch import (
    Extras,
    Operands,
    launch_backward,
    launch_forward,
)
from quorum_attention.kernels.native.runs import Runs, runs_of_bits
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.kernels.torch_private import first_derivative, refuse_traces, uncompiled

_SUMMARY = 64

Bits = tuple[torch.Tensor | None, torch.Tensor | None]


@uncompiled
def native_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_bias: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    query_bits: torch.Tensor | None = None,
    key_bits: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    allow_tf32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the native kernel, with gradients of query, key, value, attn_bias and sinks.

    Args:
        query: (b, h, n, d); key (b, hk, m, d); value (b, hk, m, dv), h a multiple of hk: fp16,
            bf16 or fp32.
        attn_bias: added to the scores, broadcastable to (b, h, n, m); or boolean, True where a pair
            is kept. It has a gradient only if it broadcasts over rows, (..., 1, m).
        is_causal: keep only keys at or before the query, top-left aligned.
        scale: factor of the scores, default d ** -0.5.
        window: tokens to each side, or (left, right); -1 is no limit.
        softcap: ``softcap * tanh(score / softcap)``, before anything is added.
        alibi_slopes: (h,): ``slope * |i - j|`` is subtracted from the scores.
        sinks: (h,): one more logit in the softmax of every row, for a key whose value is 0.
        query_bits, key_bits: (n,), (m,) int64 group bits: a pair is kept where they have no bit in
            common (paper, section 3.3). Both or neither.
        out_dtype: of the output; default the query's.
        allow_tf32: for fp32 inputs, faster and less exact products.

    Returns:
        (out, lse): (b, h, n, dv) and (b, h, n) fp32, natural log, the sink included; 0 and -inf in
        rows without keys.

    Raises:
        NotImplementedError: the kernel cannot run the call; says why.
        TypeError, ValueError: an argument that is wrong or does not fit the others, by name.
    """
    refuse_traces("native_attention", query=query, key=key, value=value)
    kernel = NativeKernel(
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, allow_tf32=allow_tf32
    )
    tensors = [query, key, value]
    _check(kernel, query, key, value, sinks, query_bits, key_bits)
    bias = attn_bias
    if bias is not None:
        bias = _additive(bias, query, key)
    call = _Call(
        kernel=kernel,
        is_causal=switch(is_causal, "is_causal"),
        scale=query.shape[-1] ** -0.5 if scale is None else real_number(scale, "scale"),
        out_dtype=out_dtype or query.dtype,
    )
    bits = (query_bits, key_bits)
    out, lse = _Function.apply(*tensors, bias, sinks, *bits, call)  # type: ignore[no-untyped-call]
    return out, lse


@dataclass(frozen=True)
class _Call:
    """The arguments that have no gradient."""

    kernel: NativeKernel
    is_causal: bool
    scale: float
    out_dtype: torch.dtype

    def runs(
        self, half: Half, query: torch.Tensor, key: torch.Tensor, bits: Bits, chosen: Config
    ) -> Runs:
        """The run table of one kernel of the call."""
        axis: Literal["query", "key"] = "key" if half == "key" else "query"
        block = chosen.block_n if axis == "key" else chosen.block_m
        n, m = query.shape[2], key.shape[2]
        if bits[0] is not None and bits[1] is not None:
            return runs_of_bits(bits[0], bits[1], self.is_causal, block, _SUMMARY, axis)
        found = _rectangles(n, m, self.is_causal)
        return runs_of(self.kernel, found, None, m if axis == "key" else n, block, axis,
                       query.device)  # fmt: skip

    def extras(self, query: torch.Tensor, bias: torch.Tensor | None, bits: Bits) -> Extras:
        """The changes to the scores."""
        options = self.kernel.options
        slopes = None if options.slopes is None else options.slopes.to(query.device)
        return Extras(options, slopes, bias, 0, 0, *bits, tf32=self.kernel.allow_tf32)


def _rectangles(n: int, m: int, is_causal: bool) -> tuple[Rectangle, ...]:
    if not is_causal:
        return (Rectangle(0, n, 0, m),)
    square = min(n, m)
    below = (Rectangle(square, n, 0, m),) if n > square else ()
    return (Rectangle(0, square, 0, square, causal=True), *below)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        query_bits: torch.Tensor | None,
        key_bits: torch.Tensor | None,
        call: _Call,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*query.shape[:3], value.shape[-1])
        bits = (query_bits, key_bits)
        # The state starts with the sink: as if a key of value 0 had been merged already.
        out = torch.zeros(shape, dtype=call.out_dtype, device=query.device)
        lse = torch.full(shape[:3], float("-inf"), dtype=torch.float32, device=query.device)
        if sinks is not None:
            lse.copy_(sinks.float()[None, :, None].expand_as(lse))
        if out.numel() and key.shape[2]:
            chosen = config("forward", query.shape[-1], shape[-1], query.element_size(),
                            query.device)  # fmt: skip
            launch_forward(
                Operands(query, key, value, call.scale), out, lse,
                call.runs("forward", query, key, bits, chosen), chosen,
                call.extras(query, bias, bits),
                resume=True,
            )  # fmt: skip
        ctx.save_for_backward(query, key, value, bias, sinks, *bits, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    @first_derivative("native_attention")
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> Any:
        query, key, value, bias, sinks, *both, out, lse = ctx.saved_tensors
        bits: Bits = (both[0], both[1])
        call: _Call = ctx.call
        grad_out = grad_out.to(query.dtype).contiguous()
        grad_lse = grad_lse.float()
        wants_bias = ctx.needs_input_grad[3]
        if wants_bias and bias.shape[2] != 1:
            raise NotImplementedError(
                "attn_bias: its gradient is computed where it broadcasts over rows, "
                f"(..., 1, m), not for shape {tuple(bias.shape)}"
            )
        grads = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format)
                      for t in (query, key, value))  # fmt: skip
        by_bias = None
        if wants_bias:
            by_bias = torch.zeros((*query.shape[:2], key.shape[2]), dtype=torch.float32,
                                  device=query.device)  # fmt: skip
        if out.numel() and key.shape[2]:
            sizes = (query.shape[-1], value.shape[-1], query.element_size(), query.device)
            by_query, by_key = config("query", *sizes), config("key", *sizes)
            launch_backward(
                Operands(query, key, value, call.scale), (grad_out, out, lse), grads,
                call.runs("query", query, key, bits, by_query),
                call.runs("key", query, key, bits, by_key),
                by_query, by_key, call.extras(query, bias, bits), add=False, grad_lse=grad_lse,
                grad_bias=by_bias,
            )  # fmt: skip
        grad_bias = None if by_bias is None else _summed(by_bias, bias)
        grad_sinks = None
        if ctx.needs_input_grad[4]:
            delta = torch.einsum("bhnd,bhnd->bhn", grad_out.float(), out.float()) - grad_lse
            weight = torch.exp(sinks.float()[None, :, None] - lse)
            grad_sinks = -(weight * delta).sum(dim=(0, 2)).to(sinks.dtype)
        return (*grads, grad_bias, grad_sinks, None, None, None)


def _summed(found: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """(b, h, m) summed to the shape of ``bias`` (b or 1, h or 1, 1, m or 1)."""
    found = found.unsqueeze(2)
    over = [axis for axis in range(4) if bias.shape[axis] == 1 and found.shape[axis] != 1]
    return (found.sum(dim=over, keepdim=True) if over else found).to(bias.dtype)


def _additive(bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``bias`` with four dimensions and a floating dtype."""
    wanted = (*query.shape[:3], key.shape[2])
    sizes = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    fits = len(sizes) == 4 and all(
        size in (1, full) for size, full in zip(sizes, wanted, strict=True)
    )
    if not fits:
        raise ValueError(
            f"attn_bias must be broadcastable to {wanted}, got shape {tuple(bias.shape)}"
        )
    bias = bias.reshape(sizes)
    if bias.dtype != torch.bool:
        return bias
    blank = torch.zeros(sizes, dtype=query.dtype, device=bias.device)
    return blank.masked_fill_(~bias, float("-inf"))


def _check(
    kernel: NativeKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    query_bits: torch.Tensor | None,
    key_bits: torch.Tensor | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have four dimensions, got shape {tuple(tensor.shape)}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must be {query.dtype} on {query.device} like query, got {tensor.dtype} "
                f"on {tensor.device}"
            )
    batch, heads, n, d = query.shape
    key_heads, m = key.shape[1:3]
    if key.shape != (batch, key_heads, m, d) or value.shape[:3] != (batch, key_heads, m):
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit query "
            f"{tuple(query.shape)}"
        )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"query has {heads} heads, no multiple of key's {key_heads}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), got {tuple(sinks.shape)}")
    if (query_bits is None) != (key_bits is None):
        raise ValueError("query_bits and key_bits go together: one is missing")
    for name, bits, length in (("query_bits", query_bits, n), ("key_bits", key_bits, m)):
        if bits is not None and (bits.shape != (length,) or bits.dtype != torch.int64):
            raise ValueError(
                f"{name} must be int64 of shape ({length},), got {bits.dtype} of shape "
                f"{tuple(bits.shape)}"
            )
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    shape = CallShape(
        query.device.type, query.dtype, heads, key_heads, d, value.shape[-1], needs_grad=needs_grad
    )
    reason = kernel.refusal(shape)
    if reason is not None:
        raise NotImplementedError(f"native_attention: {reason}")
