"""Which kernel computes a call under a ``Mask``."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

import torch

from quorum_attention.kernels.fa4 import Fa4Kernel
from quorum_attention.kernels.masked.kernel import MaskedKernel
from quorum_attention.kernels.masked.parts import Tiles
from quorum_attention.kernels.masked.resolve import Sizes, resolve
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.protocol import CallShape, InnerKernel
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.registry import get_kernel, select_kernel, why_not
from quorum_attention.mask import Mask


def kernel_for_mask(
    mask: Mask,
    sizes: Sizes,
    is_causal: bool,
    wanted: str | InnerKernel,
    call: CallShape,
    device: torch.device,
    *,
    tried: bool = True,
) -> tuple[bool, str | InnerKernel]:
    """How a call under ``mask`` is computed, its bias and its sinks left aside.

    Args:
        is_causal: of the call.
        wanted: the kernel that the caller asked for.
        call: what kernels are asked about.
        tried: whether kernels have to pass their test on the device.

    Returns:
        Whether the call is causal, and its kernel: ``wanted`` where nothing else is masked.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
        NotImplementedError: the kernel asked for cannot run it.
    """
    found = resolve(mask, sizes, is_causal)
    if found.keeps_all and mask.softcap is None:
        return found.is_causal, wanted
    base = None
    if wanted == "auto" and found.few_bands:
        pairs = found.kept_pairs * sizes.batch * sizes.heads
        base = _by_bands(pairs, call, device, mask.softcap, tried=tried)
    if base is None:
        base = _base(wanted, call, device, mask.softcap, tried=tried)
    if id(base) not in found.kernels:
        found.kernels[id(base)] = MaskedKernel(found, base)
    return found.is_causal, found.kernels[id(base)]


def _by_bands(
    pairs: float, call: CallShape, device: torch.device, softcap: float | None, *, tried: bool
) -> InnerKernel | None:
    """The preferred kernel of a call that keeps so many pairs in all heads, if it takes bands."""
    flops = 2.0 * (call.head_dim + call.value_dim) * pairs
    with suppress(NotImplementedError):
        kernel = select_kernel("auto", call, device, tried=tried, flops=flops)
        if isinstance(kernel, RectangleKernel) and kernel.bands:
            return kernel if softcap is None else _capped(kernel.name, softcap)
    return None


def _base(
    wanted: str | InnerKernel,
    call: CallShape,
    device: torch.device,
    softcap: float | None,
    *,
    tried: bool,
) -> InnerKernel:
    """The kernel for the parts of a mask.

    Raises:
        NotImplementedError: the kernel asked for cannot run them.
    """
    present = tried and (device.type != "cuda" or torch.cuda.is_available())
    if wanted == "auto":
        native = get_kernel("native")
        # On a GPU it runs a task in one launch, whatever its mask.
        here = device.type == "cuda" and native.refusal(call) is None
        if here and (not present or why_not(native, call, device) is None):
            return native if softcap is None else _capped("native", softcap)
        if softcap is not None:
            return _capped("tiles", softcap)
        kernel = select_kernel("auto", call, device, tried=tried)
        return kernel if _by_rectangles(kernel) else _capped("tiles", None)
    if wanted in ("dense", "tiles") or wanted is get_kernel("dense"):
        return _capped("tiles", softcap)
    kernel = select_kernel(wanted, call, device, tried=tried)
    if not _by_rectangles(kernel):
        raise NotImplementedError(
            f"kernel {kernel.name!r} cannot run a call under a Mask: only kernels of plain "
            "attention that can be called by rectangles do (native without options of its own, "
            "cudnn, flash, efficient, cpu and dense)"
        )
    if softcap is None:
        return kernel
    if kernel.name not in ("fa4", "native"):
        raise NotImplementedError(
            f"kernel {kernel.name!r} has no soft cap; fa4, native, dense and auto have"
        )
    return _capped(kernel.name, softcap)


def _by_rectangles(kernel: InnerKernel) -> bool:
    return kernel.operator and kernel.probed_as is None


@lru_cache(maxsize=16)
def _capped(name: str, softcap: float | None) -> InnerKernel:
    """A kernel with a soft cap: one object for each. ``tiles`` runs anything."""
    if name == "tiles":
        return Tiles(softcap)
    return Fa4Kernel(softcap) if name == "fa4" else NativeKernel(softcap=softcap)
