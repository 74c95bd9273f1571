"""Which kernel a call gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.probing import probe
from quorum_attention.kernels.protocol import InnerKernel, Kernel, refusal
from quorum_attention.kernels.registry import REFERENCE, get_kernel, kernels
from quorum_attention.kernels.torch_private import allows_tf32
from quorum_attention.kernels.triton_launch import warm_up

_UNROUNDED = "native"
_FOR_LONG_CALLS = "fa4"
_FOR_FEW_KEYS = "efficient"
_FEW_KEYS = 64
_FOR_FEW_PAIRS = "unfused"
# Pairs of a head in calls of many heads, all batch entries together: query heads of a
# call with gradients, else key heads. (In a forward alone, fused kernels take the query
# heads of a group as rows of one tile.)
_FEW_PAIRS = 256
_MANY_HEADS = 8192
_MANY_KEY_HEADS = 16_384
# In a call of any heads, if the bias gets a gradient: fused kernels do not return that.
_FEW_PAIRS_WITH_GRADIENT = 1024
LONG_FLOPS = 1e12
"""Operations of a forward from which on "auto" takes FlashAttention-4: 2 ms of an
H200."""
LONG_BACKWARD_FLOPS = 2.5e11
"""Operations of a forward from which on "auto" takes FlashAttention-4 for the backward:
there it is faster than cuDNN in short calls too, by 0.06 to 0.7 ms from here on."""


def why_not(
    kernel: Kernel, shape: CallShape, device: torch.device | None = None
) -> str | None:
    """Return why a kernel cannot run a call, or None: its own refusal, or a failed test
    on ``device``."""
    reason = refusal(kernel, shape)
    # The reference cannot be tested against itself, nor a kernel that computes other
    # attention (check_kernel is for those).
    if reason is not None or kernel.name == REFERENCE or kernel.own_attention:
        return reason
    # A kernel whose options change the scores is tested without them.
    return probe(kernel.plain_variant or kernel, shape, device)


def select_kernel(
    requested: str | InnerKernel,
    shape: CallShape,
    device: torch.device,
    *,
    tried: bool = True,
    flops: float = 0.0,
    backward: bool = False,
) -> InnerKernel:
    """Return the kernel for a call on ``device``.

    A kernel asked for by name is never replaced by another. "auto" takes the first in
    order of preference that can run the call.

    Args:
        requested: the name of a kernel, a kernel, or "auto".
        tried: a kernel also has to pass a small test on the device; planning does
            without, because it may plan for a device that is not here.
        flops: operations of a forward. FlashAttention-4 takes the host longer to launch
            than others, and is compiled first: "auto" takes it for long calls alone.
        backward: whether the kernel is for the backward.

    Raises:
        NotImplementedError: no kernel, or not the one asked for, can run the call; says
            why.
        ValueError, TypeError: there is no such kernel.
    """
    is_on_gpu = device.type == "cuda"
    is_tested = tried and (not is_on_gpu or torch.cuda.is_available())
    is_long = _is_long(flops, backward=backward)
    if is_tested and is_on_gpu and is_long:
        warm_up()

    def reason_against(kernel: Kernel) -> str | None:
        return why_not(kernel, shape, device) if is_tested else refusal(kernel, shape)

    if requested != "auto":
        kernel = get_kernel(requested)
        reason = reason_against(kernel)
        if reason is not None:
            raise NotImplementedError(
                f"kernel {kernel.name!r} cannot run this call: {reason}"
            )
        return _unrounded_if_wide(kernel, shape)
    kernel = _first_able(shape, device, is_long and _is_hopper(device), reason_against)
    return _unrounded_if_wide(kernel, shape)


def _is_long(flops: float, *, backward: bool) -> bool:
    """Tell whether a pass is so long that FlashAttention-4 saves more than it costs."""
    return flops >= (LONG_BACKWARD_FLOPS if backward else LONG_FLOPS)


def _unrounded_if_wide(kernel: Kernel, shape: CallShape) -> Kernel:
    """Return the kernel, or the one that does not round outputs, if the call needs
    that."""
    unrounded = kernel.as_unrounded() if shape.wide_out else None
    return unrounded or kernel


def _first_able(
    shape: CallShape,
    device: torch.device,
    is_long: bool,
    reason_against: Callable[[Kernel], str | None],
) -> Kernel:
    """Return the first kernel in order of preference that nothing speaks against.

    Args:
        is_long: whether kernels for long calls alone are among them.
        reason_against: why a kernel cannot run the call, or None; a test may have to
            build the kernel, so kernels are asked one after the other.
    """
    reasons = []
    for name, kernel in _by_preference(shape, device).items():
        if kernel.name == _FOR_LONG_CALLS and not is_long:
            reasons.append(
                f"{name}: {refusal(kernel, shape) or 'it is for longer calls'}"
            )
            continue
        reason = reason_against(kernel)
        if reason is None:
            return kernel
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"no kernel can run this call ({'; '.join(reasons)})")


def _by_preference(shape: CallShape, device: torch.device) -> dict[str, Kernel]:
    """Return the kernels by name, the preferred ones for such a call first."""
    by_name = kernels()
    for_few_pairs = by_name.pop(_FOR_FEW_PAIRS)
    if device.type == "cuda" and _has_few_pairs(shape):
        return {_FOR_FEW_PAIRS: for_few_pairs, **by_name}
    if device.type != "cuda" or not 0 < shape.n_keys <= _FEW_KEYS:
        return by_name
    if shape.heads != shape.kv_heads:
        return by_name  # it would be called for one query head of each group
    # cuDNN gets longer copies of so few keys. FlashAttention-2 fills tiles of 128 rows
    # with them.
    return {_FOR_FEW_KEYS: by_name[_FOR_FEW_KEYS], **by_name}


def _has_few_pairs(shape: CallShape) -> bool:
    """Tell whether a call's heads have so few pairs that fused kernels would fill
    little but empty tiles.

    The limits were measured on an H200 (docs/kernels.md). In calls of 16 bits other
    kernels are as fast.
    """
    if shape.dtype.itemsize == 2 or allows_tf32():
        return False
    n_pairs = shape.n_queries * shape.n_keys
    if shape.bias is not None and shape.bias.needs_grad:
        return 0 < n_pairs <= _FEW_PAIRS_WITH_GRADIENT
    if not 0 < n_pairs <= _FEW_PAIRS:
        return False
    if shape.needs_grad:
        return shape.lanes >= _MANY_HEADS
    return shape.batch * shape.kv_heads >= _MANY_KEY_HEADS


def unrounded_kernel(
    requested: str | InnerKernel,
    shape: CallShape,
    device: torch.device,
    result: torch.dtype,
    *,
    backward: bool = False,
    flops: float = 0.0,
) -> str | InnerKernel:
    """Return the kernel to ask for if a result may be wider than its 16-bit inputs.

    For "auto" and a wider result that is the kernel that does not round results to 16
    bits, if it can run the call; in all other cases it is ``requested``.

    Args:
        backward: whether the pass is a backward, which reads that result. A long one
            goes to FlashAttention-4.
        flops: operations of a forward.
    """
    is_wider = (
        result.itemsize > shape.dtype.itemsize and shape.head_dim == shape.value_dim
    )
    if requested != "auto" or not is_wider or device.type != "cuda":
        return requested
    names = [_UNROUNDED]
    if backward and _is_long(flops, backward=True) and _is_hopper(device):
        names.insert(0, _FOR_LONG_CALLS)
    for name in names:
        if why_not(get_kernel(name), shape, device) is None:
            return name
    return requested


def rivals(
    preferred: InnerKernel, shape: CallShape, device: torch.device
) -> tuple[InnerKernel, ...]:
    """Return the kernels that a planner may choose for "auto" instead of ``preferred``.

    That is the native one, if its rates for such calls have been measured.
    """
    if (
        device.type != "cuda"
        or not _has_measured_rates(shape)
        or not _is_hopper(device)
    ):
        return ()
    native = get_kernel(_UNROUNDED)
    if native is preferred or native.plain_variant is not None:
        return ()
    return (native,) if refusal(native, shape) is None else ()


def _has_measured_rates(shape: CallShape) -> bool:
    """Whether the native kernel's rates for such calls have been measured."""
    if shape.bias is not None or shape.dropout or shape.dtype.itemsize != 2:
        return False
    return shape.head_dim == shape.value_dim and shape.head_dim in (64, 128)


def _is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU; without a GPU, plans are made for one."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) == (9, 0)
