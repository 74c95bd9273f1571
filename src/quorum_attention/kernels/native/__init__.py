"""The native kernel: attention in Triton (docs/native.md)."""

from quorum_attention.kernels.native.kernel import NativeKernel, native_attention

__all__ = ["NativeKernel", "native_attention"]
