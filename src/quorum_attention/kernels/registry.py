"""All kernels by name, and which one a call gets: the one asked for, or the first that can."""

from __future__ import annotations

from functools import partial
from typing import TypeGuard

import torch

from quorum_attention.counts import shown
from quorum_attention.kernels.fa4 import Fa4Kernel
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.probe import probe
from quorum_attention.kernels.protocol import CallShape, InnerKernel, Kernel, refusal
from quorum_attention.kernels.reference import DenseKernel
from quorum_attention.kernels.torch_private import flash_implementation
from quorum_attention.kernels.vendors import CpuKernel, CudnnKernel, EfficientKernel, FlashKernel

_KERNELS: dict[str, Kernel] = {}
_registered = 0

# The reference: it comes after all others.
_LAST = "dense"


def register_kernel(kernel: Kernel) -> None:
    """Make a kernel known under its name, replacing one of the same name.

    Raises:
        TypeError: it is no ``InnerKernel``, or has no hash.
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
    _check(kernel)
    if not isinstance(kernel.name, str):
        raise TypeError(f"a kernel's name must be a str, got {shown(kernel.name)}")
    if not kernel.name or kernel.name == "auto":
        raise ValueError(f"a kernel cannot be named {kernel.name!r}")
    global _registered
    _registered += 1
    _KERNELS[kernel.name] = kernel


def registrations() -> tuple[int, ...]:
    """A key that changes whenever a kernel is registered, or torch's operators are replaced."""
    return (_registered, hash(flash_implementation()), *map(id, _KERNELS.values()))


def is_kernel(thing: object) -> TypeGuard[Kernel]:
    """Whether ``thing`` is an ``InnerKernel``, or a class of them."""
    return issubclass(thing if isinstance(thing, type) else type(thing), Kernel)


def _check(kernel: object) -> None:
    """Raises TypeError for what is no kernel."""
    if isinstance(kernel, type):
        raise TypeError(
            f"kernel must be a name or an InnerKernel, not the class {kernel.__name__}: make one"
        )
    if not isinstance(kernel, Kernel):
        raise TypeError(
            f"kernel must be a name or an InnerKernel, not {type(kernel).__name__}: derive it from "
            "quorum_attention.InnerKernel, or pass a function to from_lse_function"
        )
    if type(kernel).__hash__ is None:
        raise TypeError(
            f"kernel {kernel.name!r} lacks __hash__ (a dataclass keeps it with eq=False)"
        )


def kernels() -> dict[str, Kernel]:
    """Every registered kernel by name, the preferred ones first (a copy).

    Examples:
        >>> "dense" in qa.kernels()
        True
    """
    return {**{name: k for name, k in _KERNELS.items() if name != _LAST}, _LAST: _KERNELS[_LAST]}


def get_kernel(kernel: str | Kernel) -> Kernel:
    """The kernel of that name, or the kernel given.

    Raises:
        ValueError: no kernel has that name.
        TypeError: neither a name nor a kernel.
    """
    if isinstance(kernel, str):
        if kernel not in _KERNELS:
            known = ", ".join(kernels())
            raise ValueError(f"no kernel is named {kernel!r}; there are: {known}")
        return _KERNELS[kernel]
    _check(kernel)
    return kernel


def why_not(kernel: Kernel, call: CallShape, device: torch.device | None = None) -> str | None:
    """Why a kernel cannot run the call: its own refusal or a failed test on ``device``; or None."""
    reason = refusal(kernel, call)
    # The reference cannot be tested against itself, nor a kernel that computes other attention
    # (check_kernel is for those).
    if reason is not None or kernel.name == _LAST or kernel.own_attention:
        return reason
    # A kernel whose options change the scores is tested without them.
    return probe(kernel.probed_as or kernel, call, device)


# Fastest first (measured on an H200). Kernels that users register come after these, in order.
for _kernel in (
    Fa4Kernel(), CudnnKernel(), FlashKernel(), EfficientKernel(), CpuKernel(), NativeKernel(),
    DenseKernel(),
):  # fmt: skip
    register_kernel(_kernel)


# --- The kernel of a call -----------------------------------------------------------------------

_UNROUNDED, _LONG = "native", "fa4"
LONG_FLOPS = 1e12
"""Operations of a forward from which on "auto" takes FlashAttention-4: 2 ms of an H200."""


def select_kernel(
    wanted: str | InnerKernel,
    call: CallShape,
    device: torch.device,
    *,
    tried: bool = True,
    flops: float = 0.0,
) -> InnerKernel:
    """The kernel for ``call`` on ``device``.

    A kernel asked for by name is never replaced by another. "auto" takes the first in order of
    preference that can run the call.

    Args:
        tried: a kernel also has to pass a small test on the device; planning does without, because
            it may plan for a device that is not here.
        flops: operations of a forward. FlashAttention-4 takes the host longer to launch than
            others, and is compiled first: "auto" takes it for long calls alone.

    Raises:
        NotImplementedError: no kernel, or not the one asked for, can run the call; says why.
        ValueError, TypeError: there is no such kernel.
    """
    present = tried and (device.type != "cuda" or torch.cuda.is_available())
    why = partial(why_not, call=call, device=device) if present else partial(refusal, call=call)
    if wanted != "auto":
        kernel = get_kernel(wanted)
        if (reason := why(kernel)) is not None:
            raise NotImplementedError(f"kernel {kernel.name!r} cannot run this call: {reason}")
        return kernel
    found = []
    for kernel in kernels().values():
        if kernel.name == _LONG and not (flops >= LONG_FLOPS and _is_hopper(device)):
            found.append(f"{kernel.name}: {refusal(kernel, call) or 'it is for longer calls'}")
            continue
        # One after the other: a test may have to build the kernel.
        if (reason := why(kernel)) is None:
            return kernel
        found.append(f"{kernel.name}: {reason}")
    raise NotImplementedError(f"no kernel can run this call ({'; '.join(found)})")


def unrounded_kernel(
    wanted: str | InnerKernel, call: CallShape, device: torch.device, result: torch.dtype
) -> str | InnerKernel:
    """The kernel for a result that is wider than its 16-bit inputs.

    For "auto" that is the kernel that does not round results to 16 bits, if it can run the call;
    otherwise, and in all other cases, ``wanted``.
    """
    wider = result.itemsize > call.dtype.itemsize and call.head_dim == call.value_dim
    if wanted != "auto" or not wider or device.type != "cuda":
        return wanted
    return _UNROUNDED if why_not(get_kernel(_UNROUNDED), call, device) is None else wanted


def rivals(
    preferred: InnerKernel, call: CallShape, device: torch.device
) -> tuple[InnerKernel, ...]:
    """Kernels that a planner may choose for "auto" instead of ``preferred``.

    Their rates on such a device have been measured, and they do not refuse the call.
    """
    if device.type != "cuda" or not _is_hopper(device):
        return ()
    return tuple(
        kernel
        for kernel in kernels().values()
        if kernel is not preferred and kernel.keeps_pace(call) and refusal(kernel, call) is None
    )


def _is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU; without a GPU, plans are made for one."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) == (9, 0)
