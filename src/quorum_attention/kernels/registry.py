"""All kernels by name."""

from __future__ import annotations

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.cudnn import CudnnKernel
from quorum_attention.kernels.efficient import EfficientKernel
from quorum_attention.kernels.fa4 import Fa4Kernel
from quorum_attention.kernels.flash import FlashKernel
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.reference import DenseKernel
from quorum_attention.kernels.torch_private import flash_implementation
from quorum_attention.kernels.unfused import UnfusedKernel

_KERNELS: dict[str, Kernel] = {}
_n_registrations = 0
_HOST = torch.device("cpu")

REFERENCE = "dense"
"""The name of the kernel that others are compared with. It comes after all others."""


def register_kernel(kernel: Kernel) -> None:
    """Make a kernel known under its name, replacing one of the same name.

    Raises:
        TypeError: ``kernel`` is no ``InnerKernel``, or has no hash.
        ValueError: its name is empty or "auto".

    Examples:
        >>> def mine(query, key, value, *, is_causal, scale):
        ...     scores = scale * (query @ key.mT)
        ...     if is_causal:
        ...         later = torch.ones_like(scores).triu(1).bool()
        ...         scores = scores.masked_fill(later, -torch.inf)
        ...     lse = torch.logsumexp(scores, -1)
        ...     return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse
        >>> qa.register_kernel(qa.from_lse_function(mine, name="mine"))
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel="mine", depth=1)
    """
    _check(kernel)
    if not isinstance(kernel.name, str):
        raise TypeError(f"a kernel's name must be a str, got {shown(kernel.name)}")
    if not kernel.name or kernel.name == "auto":
        raise ValueError(f"a kernel cannot be named {kernel.name!r}")
    global _n_registrations
    _n_registrations += 1
    _KERNELS[kernel.name] = kernel


def registrations(device: torch.device) -> tuple[object, ...]:
    """Return a key that changes whenever a kernel is registered, or torch's operators
    for a GPU are replaced and ``device`` is one."""
    replacement = None if device == _HOST else flash_implementation()
    return _n_registrations, replacement


def _check(kernel: object) -> None:
    """Raise TypeError for what is no kernel."""
    if not isinstance(kernel, Kernel):
        got = (
            f"the class {kernel.__name__}"
            if isinstance(kernel, type)
            else type(kernel).__name__
        )
        raise TypeError(
            f"kernel must be a name or an InnerKernel, not {got}: make one of a class "
            "derived from quorum_attention.InnerKernel, or pass a function to "
            "from_lse_function"
        )
    if type(kernel).__hash__ is None:
        raise TypeError(
            f"kernel {kernel.name!r} lacks __hash__ (a dataclass keeps it with "
            "eq=False)"
        )


def kernels() -> dict[str, Kernel]:
    """Return a copy of the table of kernels by name. Preferred kernels come first.

    Examples:
        >>> "dense" in qa.kernels()
        True
    """
    by_name = dict(_KERNELS)
    reference = by_name.pop(REFERENCE)
    by_name[REFERENCE] = reference
    return by_name


def get_kernel(kernel: str | Kernel) -> Kernel:
    """Return the kernel of that name, or the kernel given.

    Raises:
        ValueError: no kernel has that name.
        TypeError: neither a name nor a kernel.
    """
    if not isinstance(kernel, str):
        _check(kernel)
        return kernel
    if kernel not in _KERNELS:
        names = ", ".join(kernels())
        raise ValueError(f"no kernel is named {kernel!r}; there are: {names}")
    return _KERNELS[kernel]


# Fastest first (measured on an H200). Kernels that users register come after these, in
# order.
for _kernel in (
    Fa4Kernel(),
    CudnnKernel(),
    FlashKernel(),
    EfficientKernel(),
    CpuKernel(),
    NativeKernel(),
    UnfusedKernel(),
    DenseKernel(),
):
    register_kernel(_kernel)
