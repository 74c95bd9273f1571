"""Chooses the kernel of a call under a ``Mask``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial

import torch

from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.kernel import MaskedKernel
from quorum_attention.kernels.masked.packed_calls import PackedKernel
from quorum_attention.kernels.masked.pair_bias import BiasedKernel
from quorum_attention.kernels.masked.resolve import ResolvedMask, resolve
from quorum_attention.kernels.masked.user_functions import capped
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import DenseKernel, TiledKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.select import select_kernel
from quorum_attention.mask import Mask


def kernel_for_mask(
    mask: Mask,
    requested: str | Kernel,
    shape: CallShape,
    device: torch.device,
    *,
    needs_grad: bool,
    tried: bool = True,
) -> tuple[CallShape, str | Kernel]:
    """How a call under ``mask`` is computed, its bias and its sinks left aside.

    Args:
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
    resolved = resolve(mask, shape)
    if resolved.keeps_all and mask.softcap is None:
        return replace(shape, is_causal=resolved.is_causal), requested
    choose_base = partial(
        _base,
        requested=requested,
        shape=replace(shape, needs_grad=needs_grad),
        device=device,
        tried=tried,
    )
    if resolved.pair_bias is not None:
        biased = _kernel_with_bias(resolved, requested, choose_base)
        if biased is not None:
            return replace(shape, is_causal=False), biased
        resolved = resolved.without_bias()
    base = choose_base(resolved)
    packs = _takes_packed_calls(base, resolved, shape, needs_grad=needs_grad)
    # The kernel holds its base, so that the id stays the base's own. All else that the
    # kernel depends on is in the mask.
    key = (id(base), packs)
    if key not in resolved.kernels:
        resolved.kernels[key] = _kernel_of(resolved, base, packs=packs)
    return replace(shape, is_causal=resolved.is_causal), resolved.kernels[key]


def _kernel_with_bias(
    mask: ResolvedMask, requested: str | Kernel, choose_base: partial[Kernel]
) -> Kernel | None:
    """The kernel of a mask that becomes a bias; None where no vendor's kernel takes
    that.

    Args:
        choose_base: ``_base`` of the call, of a mask.
    """
    pair_bias, shape = mask.pair_bias, choose_base.keywords["shape"]
    if pair_bias is None or shape.dropout:
        return None
    biased = replace(
        shape, bias=pair_bias.shape(shape.bias), is_causal=pair_bias.is_causal
    )
    select = partial(select_kernel, **{**choose_base.keywords, "shape": biased})
    try:
        kernel = select()
    except NotImplementedError:
        return None
    base = _with_softcap(kernel, mask.softcap) if _runs_parts(kernel) else None
    if not isinstance(base, RectangleKernel):
        return None
    if not base.takes_whole(biased, biased.n_tokens, all_heads=True):
        return None
    if shape.dtype in base.scaled_backward:
        # Tasks are scaled if whole calls are.
        choose_base = partial(choose_base, requested=base)
    # The kernel by blocks is chosen for this call's sizes, and one mask serves calls of
    # many.
    sizes = (
        shape.dtype,
        shape.head_dim,
        shape.value_dim,
        shape.kv_heads,
        shape.needs_grad,
    )
    key = (
        id(base),
        requested if isinstance(requested, str) else id(requested),
        sizes,
        shape.bias,
    )
    if key not in mask.kernels:
        by_blocks = cache(partial(_kernel_by_blocks, mask.by_blocks, choose_base))
        biased_kernel = BiasedKernel(
            pair_bias,
            shape=mask.shape,
            base=base,
            by_blocks=by_blocks,
            scores=capped(mask.softcap),
        )
        biased_kernel.remember_prices()
        mask.kernels[key] = biased_kernel
    return mask.kernels[key]


def _takes_packed_calls(
    base: Kernel, mask: ResolvedMask, shape: CallShape, *, needs_grad: bool
) -> bool:
    """Tell whether a mask has packed calls, and ``base`` takes their biases in such a
    call: one mask serves calls of many dtypes and widths."""
    if mask.packing is None:
        return False
    for bias in mask.packing.bias_shapes:
        if base.refusal(replace(shape, bias=bias, needs_grad=needs_grad)) is not None:
            return False
    return True


def _kernel_of(mask: ResolvedMask, base: Kernel, *, packs: bool) -> Kernel:
    """The kernel of a mask whose parts ``base`` computes.

    Args:
        packs: whether whole calls are packed.
    """
    if mask.packing is None or mask.rules is None:
        return MaskedKernel(mask, base)
    # Not the mask itself, which holds its kernels.
    by_blocks = cache(partial(_kernel_by_blocks, mask.by_blocks, lambda _: base))
    if not packs:
        return by_blocks()
    shape = mask.shape
    return PackedKernel(
        mask.packing,
        rules=mask.rules,
        shape=shape,
        base=base,
        by_blocks=by_blocks,
        scores=capped(mask.softcap),
        share=mask.packing.pairs / (shape.batch * shape.n_queries * shape.n_keys),
    )


def _kernel_by_blocks(
    resolve_blocks: Callable[[], ResolvedMask],
    choose_base: Callable[[ResolvedMask], Kernel],
) -> Kernel:
    mask = resolve_blocks()
    return MaskedKernel(mask, choose_base(mask))


def _base(
    mask: ResolvedMask,
    *,
    requested: str | Kernel,
    shape: CallShape,
    device: torch.device,
    tried: bool,
) -> Kernel:
    """Choose the kernel for the parts of a mask, with the mask's soft cap.

    Raises:
        NotImplementedError: the kernel asked for cannot run them.
    """
    select = partial(select_kernel, shape=shape, device=device, tried=tried)
    if requested == "auto":
        return _preferred_base(mask, shape, device, select)
    if requested == "tiles" or isinstance(get_kernel(requested), DenseKernel):
        return _tiles(mask.softcap)
    kernel = select(requested)
    if not _runs_parts(kernel):
        raise NotImplementedError(
            f"kernel {kernel.name!r} cannot run a call under a Mask: only kernels of "
            "plain attention that can be called by rectangles do (native without "
            "options of its own, cudnn, flash, efficient, cpu and dense)"
        )
    capped = _with_softcap(kernel, mask.softcap)
    if capped is None:
        raise NotImplementedError(
            f"kernel {kernel.name!r} has no soft cap; fa4, native, dense and auto have"
        )
    return capped


def _preferred_base(
    mask: ResolvedMask,
    shape: CallShape,
    device: torch.device,
    select: Callable[..., Kernel],
) -> Kernel:
    """Choose the kernel for a call that asked for none: the first that can run the
    parts."""
    if mask.few_bands:
        # The preferred kernel of a call that keeps so many pairs, if it takes bands.
        pairs = mask.kept_pairs * shape.batch * shape.heads
        with suppress(NotImplementedError):
            kernel = select("auto", flops=2.0 * shape.kv_width * pairs)
            capped = _with_softcap(kernel, mask.softcap)
            if isinstance(capped, RectangleKernel) and capped.bands:
                return capped
    # On a GPU the native kernel runs a task in one launch, whatever its mask.
    for name in ("native", "auto") if device.type == "cuda" else ("auto",):
        with suppress(NotImplementedError):
            kernel = select(name)
            capped = (
                _with_softcap(kernel, mask.softcap) if _runs_parts(kernel) else None
            )
            if capped is not None:
                return capped
    return _tiles(mask.softcap)


def _runs_parts(kernel: Kernel) -> bool:
    """Tell whether a kernel computes plain attention and can be called by
    rectangles."""
    return kernel.operator and kernel.plain_variant is None


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
