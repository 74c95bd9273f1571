"""Rectangles on torch's memory-efficient (CUTLASS) attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.kernels.bias import BASE_TWO_LOWEST, aligned_bias
from quorum_attention.kernels.protocol import Call, CallShape, Extent, Saved, Three
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.tensors import pad_last, token_major, zero_unit_strides
from quorum_attention.kernels.torch_private import operator_reason
from quorum_attention.kernels.workspace import (
    RectangleSizes,
    backward_bytes,
    forward_bytes,
    round_up,
)

_FORWARD = "_scaled_dot_product_efficient_attention"
_BACKWARD = "_scaled_dot_product_efficient_attention_backward"
_LSE_ROWS = 32


class EfficientKernel(RectangleKernel):
    """torch's memory-efficient attention: 16-bit and fp32 inputs, masks, any head dimension.

    Head dimensions that are not a multiple of 16 bytes are padded with zero columns.
    """

    name = "efficient"
    narrow_factor = True
    plain_softmax = True
    lowest_score = BASE_TWO_LOWEST
    # Before mid-2026 it returned wrong results, without an error, for masks longer than 65,536.
    masked_limit: int = 32_768
    row_unit = 32

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.device_type != "cuda":
            return f"it runs on NVIDIA GPUs, not on {call.device_type}"
        if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"it takes float16, bfloat16 and float32, not {call.dtype}"
        if call.head_dim == 0 or call.value_dim == 0:
            return "it takes no head dimension of 0"
        return operator_reason(_FORWARD, *([_BACKWARD] if call.needs_grad else []))

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            *map(_fit, call.inputs), _expanded(call), True, 0.0, call.is_causal, scale=call.scale
        )[:2]
        return out[..., : call.value.shape[-1]], lse[..., : call.query.shape[2]]

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        query, out, lse = call.query, saved.out, saved.lse
        head_dim, value_dim = query.shape[-1], call.value.shape[-1]
        if not (out.device == lse.device == query.device):
            # The operator does not look, and reads what is no memory of the GPU's.
            raise RuntimeError(f"out and lse must be on {query.device}")
        # Rows past the end get lse +inf, as in the operator's forward: exp(s - inf) = 0.
        padded_lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            _fit(saved.grad_out),
            *map(_fit, call.inputs),
            _expanded(call),
            # It computes delta with a row stride of heads x dimension, whatever the real one is.
            token_major(pad_last(out, _aligned(value_dim, out.element_size()))),
            padded_lse.contiguous(),
            seed,
            seed,
            0.0,
            [True, True, True, False],
            call.is_causal,
            scale=call.scale,
        )[:3]
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = RectangleSizes.of(call, self._limited(call, extent), self.grouped)
        value_dim = _aligned(call.value_dim, sizes.item)
        inside = sizes.aligned_bias_bytes + _pad_bytes(call, sizes, backward=False)
        if sizes.item == 2 and value_dim > 64:
            inside += sizes.rows * value_dim * 4  # the output is summed in fp32
        inside += sizes.batch * sizes.heads * _LSE_ROWS * 4
        return forward_bytes(sizes, value_dim, inside)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = RectangleSizes.of(call, self._limited(call, extent), self.grouped)
        head_dim, value_dim = (_aligned(n, sizes.item) for n in (call.head_dim, call.value_dim))
        widths = head_dim + value_dim
        gradients = (sizes.rows * head_dim + sizes.key_rows * widths) * sizes.item
        # grad_out and out token-major; lse padded.
        inside = sizes.aligned_bias_bytes + _pad_bytes(call, sizes, backward=True)
        inside += 2 * sizes.rows * value_dim * sizes.item
        inside += sizes.batch * sizes.heads * round_up(sizes.queries, _LSE_ROWS) * 8
        if sizes.item == 4:
            inside += sizes.rows * (value_dim + 2) * 4  # torch computes delta out of place
        # dQ of all query tiles, in fp32.
        batch_heads = max(1, sizes.batch * sizes.heads)
        workspace = round_up(sizes.queries, 128) * round_up(head_dim, 128)
        if sizes.item == 2 and max(head_dim, value_dim) > 128:
            # dK and dV are too wide for registers: an fp32 copy for each split of the keys.
            splits = max(1, min(-(-sizes.keys // 64), 200 // batch_heads))
            if torch.are_deterministic_algorithms_enabled():
                splits = 1
            padded = round_up(head_dim, 128) + round_up(value_dim, 128)
            workspace += splits * round_up(sizes.keys, 128) * padded
        inside += batch_heads * (workspace + 4096) * 4
        return backward_bytes(sizes, gradients + sizes.lifted_bytes, inside)

    def _limited(self, call: CallShape, extent: Extent) -> Extent:
        if call.mask is None:
            return extent
        return replace(
            extent,
            max_queries=min(extent.max_queries, self.masked_limit),
            max_keys=min(extent.max_keys, self.masked_limit),
        )


def _fit(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, its rows padded to multiples of 16 bytes, stride 0 in dimensions of size 1."""
    padded = pad_last(tensor, _aligned(tensor.shape[-1], tensor.element_size()))
    return zero_unit_strides(padded)


def _aligned(width: int, item: int) -> int:
    return round_up(width, 16 // item)


def _expanded(call: Call) -> torch.Tensor | None:
    if call.bias is None:
        return None
    n_keys = call.key.shape[2]
    aligned = zero_unit_strides(aligned_bias(call.bias, n_keys))
    return aligned.expand(*call.query.shape[:3], n_keys)


def _pad_bytes(call: CallShape, sizes: RectangleSizes, backward: bool) -> int:
    head_dim, value_dim = (_aligned(n, sizes.item) for n in (call.head_dim, call.value_dim))
    padded = 0
    if head_dim != call.head_dim:
        padded += (sizes.rows + sizes.key_rows) * head_dim
    if value_dim != call.value_dim:
        padded += ((2 * sizes.rows if backward else 0) + sizes.key_rows) * value_dim
    return padded * sizes.item
