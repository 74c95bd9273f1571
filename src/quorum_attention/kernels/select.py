"""Chooses the kernel of a call: the one asked for, or the first that can run it."""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.kernels.protocol import CallShape, InnerKernel, refusal
from quorum_attention.kernels.registry import get_kernel, kernels, why_not

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
    if wanted != "auto":
        kernel = get_kernel(wanted)
        reason = why_not(kernel, call, device) if present else refusal(kernel, call)
        if reason is not None:
            raise NotImplementedError(f"kernel {kernel.name!r} cannot run this call: {reason}")
        return kernel
    found = []
    for kernel in kernels().values():
        if kernel.name == _LONG and not (flops >= LONG_FLOPS and _is_hopper(device)):
            found.append(f"{kernel.name}: {refusal(kernel, call) or 'it is for longer calls'}")
            continue
        # One after the other: a test may have to build the kernel.
        reason = why_not(kernel, call, device) if present else refusal(kernel, call)
        if reason is None:
            return kernel
        found.append(f"{kernel.name}: {reason}")
    reasons = "; ".join(found)
    raise NotImplementedError(f"no kernel can run this call ({reasons})")


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


def without_dropout(chosen: InnerKernel, call: CallShape) -> list[str]:
    """The kernels that "auto" would take before ``chosen`` if the call had no dropout, by name."""
    plain = replace(call, dropout=False)
    found = []
    for kernel in kernels().values():
        if kernel is chosen:
            break
        if refusal(kernel, call) is not None and refusal(kernel, plain) is None:
            found.append(kernel.name)
    return found


def _is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU; without a GPU, plans are made for one."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) == (9, 0)


_UNROUNDED, _LONG = "native", "fa4"
