"""Attention under a ``Mask``: its geometry, and the kernel that runs it on another one."""

from quorum_attention.kernels.masked.choice import kernel_for_mask
from quorum_attention.kernels.masked.kernel import MaskedKernel
from quorum_attention.kernels.masked.resolve import Sizes, resolve

__all__ = ["MaskedKernel", "Sizes", "kernel_for_mask", "resolve"]
