"""All kernels by name, and the order in which "auto" prefers them."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeGuard
from weakref import WeakKeyDictionary

import torch

from quorum_attention.counts import shown
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.cudnn import CudnnKernel
from quorum_attention.kernels.dense import DenseKernel
from quorum_attention.kernels.efficient import EfficientKernel
from quorum_attention.kernels.fa4 import Fa4Kernel
from quorum_attention.kernels.flash import FlashKernel
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.probe import probe
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.kernels.torch_private import flash_implementation
from quorum_attention.kernels.traits import Traits, contradiction, refusal, traits_of

_KERNELS: dict[str, InnerKernel] = {}
_registered = 0
# Kernels whose traits have been checked, with those traits: a check takes as long as a small call.
_CHECKED: WeakKeyDictionary[InnerKernel, Traits] = WeakKeyDictionary()

# Fastest first (measured on an H200). Kernels registered by users come after these, in the order of
# registration; the reference comes last.
_PREFERENCE = ("fa4", "cudnn", "flash", "efficient", "cpu", "native")
_LAST = "dense"


def register_kernel(kernel: InnerKernel) -> None:
    """Make a kernel known under its name, replacing one of the same name.

    Raises:
        TypeError: it lacks a part of the ``InnerKernel`` protocol, or its traits contradict its
            methods.
        ValueError: its name is empty or "auto".

    Examples:
        >>> def mine(query, key, value, *, is_causal, scale):
        ...     scores = scale * (query @ key.mT)
        ...     if is_causal:
        ...         scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        ...     lse = torch.logsumexp(scores, -1)
        ...     return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse
        >>> qa.register_kernel(qa.from_lse_function(mine, name="mine"))
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel="mine", depth=1)
    """
    if isinstance(kernel, type):
        raise TypeError(f"a kernel is an object, not a class: make a {kernel.__name__} first")
    if not is_kernel(kernel):
        raise TypeError(f"{kernel!r} is no inner kernel: it lacks {_lacking(kernel)}")
    if not isinstance(kernel.name, str):
        raise TypeError(f"a kernel's name must be a str, got {shown(kernel.name)}")
    if not kernel.name or kernel.name == "auto":
        raise ValueError(f"a kernel cannot be named {kernel.name!r}")
    _check_traits(kernel)
    global _registered
    _registered += 1
    _KERNELS[kernel.name] = kernel


def registrations() -> tuple[int, ...]:
    """A key that changes whenever a kernel is registered, or torch's operators are replaced."""
    return (_registered, hash(flash_implementation()), *map(id, _KERNELS.values()))


def is_kernel(thing: object) -> TypeGuard[InnerKernel]:
    """Whether ``thing`` has all parts of ``InnerKernel`` (a kernel class has them, too)."""
    return isinstance(thing, InnerKernel)


def _lacking(thing: object) -> str:
    """What ``InnerKernel`` asks for and ``thing`` does not have."""
    parts = ("name", "refusal", "forward_workspace_bytes", "backward_workspace_bytes")
    missing = [part for part in (*parts, "forward", "backward") if not hasattr(thing, part)]
    if thing.__hash__ is None:
        missing.append("__hash__ (a dataclass keeps it with eq=False)")
    return ", ".join(missing)


def kernels() -> dict[str, InnerKernel]:
    """Every registered kernel by name, the preferred ones first (a copy).

    Examples:
        >>> "dense" in qa.kernels()
        True
    """
    return {kernel.name: kernel for kernel in _in_order()}


def get_kernel(kernel: str | InnerKernel) -> InnerKernel:
    """The kernel of that name, or the kernel given.

    Raises:
        ValueError: no kernel has that name.
        TypeError: neither a name nor a kernel, or one whose traits contradict its methods.
    """
    if isinstance(kernel, str):
        if kernel not in _KERNELS:
            known = ", ".join(kernels())
            raise ValueError(f"no kernel is named {kernel!r}; there are: {known}")
        return _KERNELS[kernel]
    if _is_checked(kernel):
        return kernel
    if is_kernel(kernel) and not isinstance(kernel, type):
        _check_traits(kernel)
        return kernel
    if isinstance(kernel, type):
        raise TypeError(f"kernel must be a name or an InnerKernel, not the class {kernel.__name__}")
    raise TypeError(
        f"kernel must be a name or an InnerKernel, not {type(kernel).__name__}, which lacks "
        f"{_lacking(kernel)}"
    )


def why_not(kernel: InnerKernel, call: CallShape, device: torch.device | None = None) -> str | None:
    """Why a kernel cannot run the call: its own refusal or a failed test on ``device``; or None."""
    reason, traits = refusal(kernel, call), traits_of(kernel)
    # The reference cannot be tested against itself, nor a kernel that computes other attention
    # (check_kernel is for those).
    if reason is not None or kernel.name == _LAST or traits.own_attention:
        return reason
    # A kernel whose options change the scores is tested without them.
    return probe(traits.probed_as or kernel, call, device)


def _is_checked(kernel: InnerKernel) -> bool:
    """Whether ``kernel`` has been checked before, and still has the same traits."""
    try:
        return _CHECKED.get(kernel) is traits_of(kernel)
    except TypeError:  # it takes no weak reference: checked every time
        return False


def _check_traits(kernel: InnerKernel) -> None:
    reason = contradiction(kernel)
    if reason is not None:
        raise TypeError(f"kernel {kernel.name!r} contradicts itself: {reason}")
    with suppress(TypeError):
        _CHECKED[kernel] = traits_of(kernel)


def _in_order() -> list[InnerKernel]:
    def rank(name: str) -> int:
        if name in _PREFERENCE:
            return _PREFERENCE.index(name)
        return len(_PREFERENCE) + (name == _LAST)

    return [_KERNELS[name] for name in sorted(_KERNELS, key=rank)]


for _kernel in (
    Fa4Kernel(), CudnnKernel(), FlashKernel(), EfficientKernel(), NativeKernel(), CpuKernel(),
    DenseKernel(),
):  # fmt: skip
    register_kernel(_kernel)
