"""torch's operator for CPUs on 16-bit inputs as fp32, so that it rounds no output.

The operator returns outputs in the inputs' dtype. Its calls get copies of the inputs in
fp32. Inputs in 16 bits are exact in fp32, and so are delta and the gradients, which are
rounded once.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three
from quorum_attention.kernels.operator_sizes import bias_bytes

_FP32_BYTES = 4


class UnroundedCpuKernel(CpuKernel):
    """The kernel ``cpu`` with 16-bit inputs as fp32."""

    scaled_backward = frozenset()
    fp32_products = True
    wide_out = True
    reads_wide_out = True

    def as_unrounded(self) -> UnroundedCpuKernel:
        """Return this kernel."""
        return self

    def whole_forward(self, call: Call) -> OutLse:
        """See ``Kernel.whole_forward``; the output is in fp32."""
        return super().whole_forward(_in_fp32(call))

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel.whole_backward``; gradients are in fp32."""
        saved_in_fp32 = Saved(
            saved.grad_out.float(),
            saved.out.float(),
            saved.lse,
        )
        return super().whole_backward(_in_fp32(call), saved_in_fp32)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        computing = super().forward_workspace_bytes(_as_fp32(shape), extent)
        return computing + _copied_bytes(shape, extent)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        computing = super().backward_workspace_bytes(_as_fp32(shape), extent)
        copies = _copied_bytes(shape, extent)
        upstream = extent.rows * shape.value_dim * _FP32_BYTES
        return computing + copies + 2 * upstream


def _in_fp32(call: Call) -> Call:
    """Return a call with copies of its 16-bit tensors in fp32."""
    bias = call.bias
    if bias is not None:
        bias = bias.float()
    as_fp32 = torch.Tensor.float
    return call.mapped(as_fp32, as_fp32, bias=bias)


def _as_fp32(shape: CallShape) -> CallShape:
    """Return the shape of the copied call."""
    return replace(shape, dtype=torch.float32)


def _copied_bytes(shape: CallShape, extent: Extent) -> int:
    """Return the bytes of the copies of query, key, value and bias."""
    key_width = shape.head_dim + shape.value_dim
    numbers = extent.rows * shape.head_dim
    numbers += extent.key_rows * key_width
    return numbers * _FP32_BYTES + bias_bytes(shape, extent)
