"""Attention under a ``Mask``: its geometry, and the kernel that runs it on another one."""

from quorum_attention.kernels.masked.choice import under
from quorum_attention.kernels.masked.kernel import MaskedKernel
from quorum_attention.kernels.masked.reading import Sizes, read

__all__ = ["MaskedKernel", "Sizes", "read", "under"]
