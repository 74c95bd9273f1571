"""The native kernel: attention in Triton (docs/native.md)."""

from quorum_attention.kernels.native.kernel import NativeKernel

__all__ = ["NativeKernel"]
