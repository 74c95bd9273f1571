"""Rectangles on torch's FlashAttention-2."""

from __future__ import annotations

import torch

from quorum_attention.kernels.protocol import Call, CallShape, Extent, Saved, Three
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.torch_private import flash_implementation, operator_reason
from quorum_attention.kernels.workspace import (
    RectangleSizes,
    backward_bytes,
    forward_bytes,
    multiprocessors,
    round_up,
)

_FORWARD = "_scaled_dot_product_flash_attention"
_BACKWARD = "_scaled_dot_product_flash_attention_backward"
_INTERNAL_BYTES = 256 * 1024


class FlashKernel(RectangleKernel):
    """torch's FlashAttention-2: 16-bit inputs, no mask; takes grouped heads directly."""

    name = "flash"
    plain_softmax = True
    grouped = True
    row_unit = 128

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.device_type != "cuda":
            return f"it runs on NVIDIA GPUs, not on {call.device_type}"
        if call.dtype not in (torch.float16, torch.bfloat16):
            return f"it takes float16 and bfloat16, not {call.dtype}"
        if call.mask is not None:
            return "it takes no attention mask"
        if call.value_dim != call.head_dim:
            return f"it takes equal head dimensions, not {call.head_dim} and {call.value_dim}"
        if call.head_dim % 8 or not 8 <= call.head_dim <= 256:
            return (
                f"it takes head dimensions that are multiples of 8 up to 256, not {call.head_dim}"
            )
        instead = flash_implementation()
        if instead is not None:
            # Other bounds, other refusals, and gradients that may differ from run to run.
            return f"torch's flash operators have been replaced by {instead}"
        return operator_reason(_FORWARD, *([_BACKWARD] if call.needs_grad else []))

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *call.inputs, 0.0, call.is_causal, False, scale=call.scale
        )[:2]
        # It returns lse +inf for a row whose sum is NaN: with that, a backward would compute 0 for
        # all of its probabilities that are not NaN themselves.
        lse.nan_to_num_(nan=torch.nan, posinf=torch.nan, neginf=-torch.inf)
        return out, lse

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        # Random state and its offset: read only with dropout.
        state = torch.zeros(2, dtype=torch.int64, device=call.query.device).view(torch.uint64)
        # The operator reads lse as if it were contiguous.
        gradients: Three = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            saved.grad_out, *call.inputs, saved.out, saved.lse.contiguous(), None, None,
            call.query.shape[2], call.key.shape[2], 0.0, call.is_causal, state, state[0],
            scale=call.scale,
        )  # fmt: skip
        return gradients

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = RectangleSizes.of(call, extent, self.grouped)
        # If the query tiles are too few to fill the GPU, the keys are split, and each split has its
        # own fp32 statistics. There are at most about two waves of 128-row tiles.
        split_rows = 2 * 2 * multiprocessors() * 128
        inside = split_rows * (_padded_dim(call.head_dim) + 1) * 4
        return forward_bytes(sizes, call.value_dim, inside)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = RectangleSizes.of(call, extent, self.grouped)
        dim = call.head_dim
        gradients = (sizes.rows + 2 * sizes.key_rows) * dim * sizes.item
        # Token-major copies of grad_out and out; dQ summed in fp32 over padded rows, and delta; the
        # gradients of grouped keys for every query head.
        inside = 2 * sizes.rows * dim * sizes.item
        padded_rows = sizes.batch * sizes.heads * round_up(sizes.queries, 128)
        copies = 1
        if torch.are_deterministic_algorithms_enabled():
            copies = -(-multiprocessors() // max(1, sizes.batch * sizes.heads))
        # A few blocks hold a second copy of the row statistics.
        inside += padded_rows * (copies * _padded_dim(dim) + 4) * 4 + _INTERNAL_BYTES
        if sizes.heads != sizes.key_heads:
            inside += 2 * sizes.shared_key_rows * dim * sizes.item
        return backward_bytes(sizes, gradients, inside)


def _padded_dim(head_dim: int) -> int:
    return round_up(head_dim, 32) if head_dim <= 192 else 256
