"""Rectangles on torch's FlashAttention-2, for NVIDIA GPUs."""

from __future__ import annotations

import torch

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.limits import GRID_BLOCKS, INT32, CallLimits
from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three
from quorum_attention.kernels.operator_inputs import HALF_DTYPES, operator_refusal
from quorum_attention.kernels.operator_sizes import OperatorSizes, multiprocessors
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.torch_private import flash_implementation

_TILE_ROWS = 128
_WIDEST = 256
# A few blocks of the backward hold a second copy of the row statistics.
_SECOND_COPIES_BYTES = 256 * 1024
_FP32_BYTES = 4


class FlashKernel(RectangleKernel):
    """torch's FlashAttention-2: 16-bit inputs, no mask; takes grouped heads
    directly."""

    name = "flash"
    grouped = True
    row_unit = _TILE_ROWS
    forward_limits = CallLimits(entries=GRID_BLOCKS, heads=GRID_BLOCKS)
    # With several batch entries it read and wrote outside its memory.
    backward_limits = CallLimits(
        entries=GRID_BLOCKS,
        heads=GRID_BLOCKS,
        query_elements=INT32,
        key_elements=INT32,
        scope="several entries",
        padded=True,
    )

    def refusal(self, shape: CallShape) -> str | None:
        """Return why this kernel cannot run such a call, in words for the user, or
        None."""
        reason = operator_refusal(shape, "cuda", HALF_DTYPES, _WIDEST)
        if reason is not None:
            return reason
        if shape.bias is not None:
            return "it takes no attention mask"
        if shape.value_dim != shape.head_dim:
            return (
                f"it takes equal head dimensions, not {shape.head_dim} and "
                f"{shape.value_dim}"
            )
        replacement = flash_implementation()
        if replacement is not None:
            # Other bounds, other refusals, and gradients that may differ from run to
            # run.
            return f"torch's flash operators have been replaced by {replacement}"
        return None

    def rectangle_forward(self, call: Call) -> OutLse:
        """See ``RectangleKernel.rectangle_forward``."""
        results = torch.ops.aten._scaled_dot_product_flash_attention(
            *call.inputs,
            0.0,  # dropout
            call.is_causal,
            False,  # no debug mask
            scale=call.scale,
        )
        out, lse = results[:2]
        # The lse of a row whose sum is NaN is +inf. With that, a backward would compute
        # 0 for all probabilities of the row that are not NaN themselves.
        lse.nan_to_num_(
            nan=torch.nan,
            posinf=torch.nan,
            neginf=-torch.inf,
        )
        return out, lse

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        # The random state and its offset are read only with dropout.
        state = torch.zeros(2, dtype=torch.int64, device=call.query.device).view(
            torch.uint64
        )
        gradients: Three = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            saved.grad_out,
            *call.inputs,
            saved.out,
            saved.lse.contiguous(),  # it is read as if it were contiguous
            None,
            None,
            call.query.shape[2],
            call.key.shape[2],
            0.0,  # dropout
            call.is_causal,
            state,
            state[0],
            scale=call.scale,
        )
        return gradients

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = OperatorSizes(shape, extent, limits=self.forward_limits)
        # If the query tiles are too few to fill the GPU, the keys are split, and each
        # split has its own fp32 statistics. There are at most about two waves of tiles.
        split_rows = 2 * 2 * multiprocessors() * _TILE_ROWS
        inside = split_rows * (_padded_dim(shape.head_dim) + 1) * _FP32_BYTES
        return sizes.forward_bytes(shape.value_dim, inside)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = OperatorSizes(shape, extent, limits=self.backward_limits)
        row_bytes = shape.head_dim * sizes.itemsize
        token_major_copies = 2 * sizes.rows * row_bytes  # grad_out and out
        inside = (
            token_major_copies + self._fp32_sums_bytes(sizes) + _SECOND_COPIES_BYTES
        )
        if sizes.group > 1:
            # The gradients of grouped keys and values, for every query head.
            inside += 2 * sizes.expanded_key_rows * row_bytes
        return sizes.backward_bytes(inside)

    def _fp32_sums_bytes(self, sizes: OperatorSizes) -> int:
        """Return the bytes of the gradient of queries summed in fp32, and of delta."""
        copies = 1
        if torch.are_deterministic_algorithms_enabled():
            copies = ceil_div(multiprocessors(), sizes.lanes)
        padded_rows = sizes.lanes * round_up(sizes.extent.max_queries, _TILE_ROWS)
        row_numbers = copies * _padded_dim(sizes.shape.head_dim) + 4
        return padded_rows * row_numbers * _FP32_BYTES


def _padded_dim(head_dim: int) -> int:
    return round_up(head_dim, 32) if head_dim <= 192 else _WIDEST
