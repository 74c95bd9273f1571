"""Chooses the kernel of a call under a ``Mask``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch

from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.kernel import MaskedKernel
from quorum_attention.kernels.masked.packing import Packing
from quorum_attention.kernels.masked.pair_bias import PairBias, priced_kernel
from quorum_attention.kernels.masked.resolve import (
    ResolvedMask,
    many_with_more_keys,
    resolve,
)
from quorum_attention.kernels.masked.user_functions import capped
from quorum_attention.kernels.masked.whole_calls import WholeCallKernel, WholeCallWay
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import DenseKernel, TiledKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.select import select_kernel
from quorum_attention.mask import Mask


def kernel_for_mask(
    mask: Mask | None,
    requested: str | Kernel,
    shape: CallShape,
    device: torch.device,
    *,
    needs_grad: bool,
    tried: bool = True,
) -> tuple[CallShape, str | Kernel]:
    """How a call under ``mask`` is computed, its bias and its sinks left aside.

    Args:
        mask: None where the call has none of its own.
        requested: the kernel that the caller asked for.
        needs_grad: whether it has to have gradients.
        tried: whether kernels have to pass their test on the device.

    Returns:
        The call, causal or not, and its kernel: ``requested`` where nothing else is
            masked.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
        NotImplementedError: the kernel asked for cannot run it.
    """
    if mask is None:
        if not (shape.is_causal and many_with_more_keys(shape)):
            return shape, requested
        mask = Mask()
    resolved = resolve(mask, shape)
    is_causal = resolved.is_causal
    is_plain = resolved.keeps_all and mask.softcap is None
    if is_causal and many_with_more_keys(shape) and _takes_masks(requested):
        # Its tasks are not those of a causal call.
        is_causal = False
        is_plain = False
    if is_plain:
        return replace(shape, is_causal=is_causal), requested
    recorded = replace(shape, needs_grad=needs_grad)
    choice = _BaseChoice(requested, recorded, device, tried)
    if isinstance(resolved.way, PairBias):
        biased = _kernel_with_bias(resolved, resolved.way, choice)
        if biased is not None:
            return replace(shape, is_causal=False), biased
        resolved = resolved.without_bias()
    base = choice.base_of(resolved)
    packs = _takes_packed_calls(base, resolved, recorded)
    # The kernel holds its base, so that the id stays the base's own. All else that the
    # kernel depends on is in the mask.
    key = (id(base), packs)
    if key not in resolved.kernels:
        resolved.kernels[key] = _kernel_of(resolved, base, packs=packs)
    return replace(shape, is_causal=is_causal), resolved.kernels[key]


def _takes_masks(requested: str | Kernel) -> bool:
    """Tell whether calls under a ``Mask`` can be run by the kernel that the caller
    asked for."""
    if requested in ("auto", "tiles"):
        return True
    kernel = get_kernel(requested)
    return isinstance(kernel, DenseKernel) or _runs_parts(kernel)


@dataclass(frozen=True)
class _BaseChoice:
    """Chooses the kernel for the parts of masks, for one call.

    Attributes:
        requested: the kernel that the caller asked for.
        tried: whether kernels have to pass their test on the device.
    """

    requested: str | Kernel
    shape: CallShape
    device: torch.device
    tried: bool

    def select(self, name: str | Kernel, flops: float = 0.0) -> Kernel:
        """Return a kernel for the call; see ``select_kernel``."""
        return select_kernel(
            name,
            self.shape,
            self.device,
            tried=self.tried,
            flops=flops,
        )

    def base_of(self, mask: ResolvedMask) -> Kernel:
        """Choose the kernel for the parts of a mask, with the mask's soft cap.

        Raises:
            NotImplementedError: the kernel asked for cannot run them.
        """
        requested = self.requested
        if requested == "auto":
            return self._preferred_base(mask)
        if requested == "tiles" or isinstance(get_kernel(requested), DenseKernel):
            return _tiles(mask.softcap)
        kernel = self.select(requested)
        if not _runs_parts(kernel):
            raise NotImplementedError(
                f"kernel {kernel.name!r} cannot run a call under a Mask: only kernels "
                "of plain attention that can be called by rectangles do (native "
                "without options of its own, cudnn, flash, efficient, cpu, unfused and "
                "dense)"
            )
        capped_kernel = _with_softcap(kernel, mask.softcap)
        if capped_kernel is None:
            raise NotImplementedError(
                f"kernel {kernel.name!r} has no soft cap; fa4, native, dense and auto "
                "have"
            )
        return capped_kernel

    def _preferred_base(self, mask: ResolvedMask) -> Kernel:
        """Choose the kernel for a call that asked for none: the first that can run the
        parts."""
        if mask.few_bands:
            # The preferred kernel of a call that keeps so many pairs, if it takes
            # bands.
            n_pairs = mask.kept_pairs * self.shape.batch * self.shape.heads
            flops = 2.0 * self.shape.kv_width * n_pairs
            with suppress(NotImplementedError):
                kernel = self.select("auto", flops)
                capped_kernel = _with_softcap(kernel, mask.softcap)
                if isinstance(capped_kernel, RectangleKernel) and capped_kernel.bands:
                    return capped_kernel
        # On a GPU the native kernel runs a task in one launch, whatever its mask.
        names = ("native", "auto") if self.device.type == "cuda" else ("auto",)
        for name in names:
            with suppress(NotImplementedError):
                part_kernel = _part_kernel(self.select(name), mask.softcap)
                if part_kernel is not None:
                    return part_kernel
        return _tiles(mask.softcap)


def _kernel_with_bias(
    mask: ResolvedMask, pair_bias: PairBias, choice: _BaseChoice
) -> Kernel | None:
    """The kernel of a mask that becomes a bias; None where no vendor's kernel takes
    that."""
    shape = choice.shape
    if shape.dropout:
        return None
    biased = replace(
        shape,
        bias=pair_bias.shape(shape.bias),
        is_causal=pair_bias.is_causal,
    )
    try:
        kernel = replace(choice, shape=biased).select(choice.requested)
    except NotImplementedError:
        return None
    base = _part_kernel(kernel, mask.softcap)
    if not isinstance(base, RectangleKernel):
        return None
    if not base.takes_whole(biased, biased.n_tokens, all_heads=True):
        return None
    # The kernel by blocks is chosen for this call's sizes, and one mask serves calls of
    # many.
    requested = choice.requested
    key = (
        id(base),
        requested if isinstance(requested, str) else id(requested),
        shape.dtype,
        shape.head_dim,
        shape.value_dim,
        shape.kv_heads,
        shape.needs_grad,
        shape.bias,
    )
    if key not in mask.kernels:
        if shape.dtype in base.scaled_backward:
            # Tasks are scaled if whole calls are.
            choice = replace(choice, requested=base)
        biased_kernel = _kernel_by_way(mask, pair_bias, base, choice.base_of)
        biased_kernel.priced_as = priced_kernel(
            base,
            mask.shape,
            pair_bias.is_causal,
            pair_bias.has_rows,
            pair_bias.has_entries,
        )
        mask.kernels[key] = biased_kernel
    return mask.kernels[key]


def _takes_packed_calls(base: Kernel, mask: ResolvedMask, shape: CallShape) -> bool:
    """Tell whether a mask has packed calls, and ``base`` takes their heads and biases
    in such a call: one mask serves calls of many dtypes and widths."""
    if not isinstance(mask.way, Packing):
        return False
    # A packed call is handed to an operator as it is, with grouped heads too.
    if isinstance(base, RectangleKernel) and not base.takes_whole(shape, 1, True):
        return False
    for bias in mask.way.bias_shapes:
        if base.refusal(replace(shape, bias=bias)) is not None:
            return False
    return True


def _kernel_of(mask: ResolvedMask, base: Kernel, *, packs: bool) -> Kernel:
    """The kernel of a mask whose parts ``base`` computes.

    Args:
        packs: whether whole calls are packed.
    """
    if mask.way is None:
        return MaskedKernel(mask, base)
    if not packs:
        return MaskedKernel(mask.by_blocks(), base)
    return _kernel_by_way(mask, mask.way, base, lambda _: base)


def _kernel_by_way(
    mask: ResolvedMask,
    way: WholeCallWay,
    base: Kernel,
    choose_base: Callable[[ResolvedMask], Kernel],
) -> WholeCallKernel:
    """The kernel of a mask whose whole calls ``base`` computes.

    Args:
        choose_base: chooses the kernel for the parts of what is no whole call.
    """
    assert mask.rules is not None
    # Not the mask itself, which holds its kernels.
    by_blocks = partial(_kernel_by_blocks, mask.by_blocks, choose_base)
    return WholeCallKernel(
        way,
        mask.rules,
        mask.shape,
        base,
        by_blocks=cache(by_blocks),
        scores=capped(mask.softcap),
    )


def _kernel_by_blocks(
    resolve_blocks: Callable[[], ResolvedMask],
    choose_base: Callable[[ResolvedMask], Kernel],
) -> Kernel:
    mask = resolve_blocks()
    return MaskedKernel(mask, choose_base(mask))


def _runs_parts(kernel: Kernel) -> bool:
    """Tell whether a kernel computes plain attention and can be called by
    rectangles."""
    return kernel.operator and kernel.plain_variant is None


def _part_kernel(kernel: Kernel, softcap: float | None) -> Kernel | None:
    """Return a kernel for parts under a soft cap; None if it runs no parts, or has
    none."""
    return _with_softcap(kernel, softcap) if _runs_parts(kernel) else None


@lru_cache(maxsize=16)
def _with_softcap(kernel: Kernel, softcap: float | None) -> Kernel | None:
    """Return a kernel under a soft cap: one object for each; None if the kernel has
    none."""
    return kernel if softcap is None else kernel.with_softcap(softcap)


@lru_cache(maxsize=16)
def _tiles(softcap: float | None) -> Kernel:
    """Return the kernel that runs any call tile by tile: one object for each soft
    cap."""
    return TiledKernel(capped(softcap))
