"""The native kernel: attention in Triton (docs/native.md)."""

from quorum_attention.kernels.native.function import native_attention
from quorum_attention.kernels.native.kernel import NativeKernel

__all__ = ["NativeKernel", "native_attention"]
