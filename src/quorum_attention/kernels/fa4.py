"""Rectangles on FlashAttention-4 (``flash-attn-4``, CuTe DSL), the fastest kernel on
Hopper GPUs.

It is compiled on the GPU's machine, some seconds for each kind of call, and keeps what
it compiled in a folder of this user's. Nothing of it is imported until a call wants it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition.bands import Band
from quorum_attention.extras import install_hint, installed_version
from quorum_attention.kernels.cache_files import cache_folder, private_folder
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.delta import rounding_gap
from quorum_attention.kernels.limits import GRID_BLOCKS, INT32, CallLimits
from quorum_attention.kernels.merge import mend_
from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three
from quorum_attention.kernels.operator_inputs import (
    HALF_DTYPES,
    as_operator_readable,
    operator_refusal,
)
from quorum_attention.kernels.operator_sizes import UNSPLIT_BYTES, OperatorSizes
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.result_layout import empty_like_input
from quorum_attention.kernels.speed import KernelSpeed
from quorum_attention.kernels.torch_private import without_loading_compiler
from quorum_attention.plain_types import Keywords

_on_device = torch.cuda.device
_PACKAGE = "flash-attn-4"
_COMPILERS = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_DSL_FOLDERS = (
    "CUTE_DSL_CACHE_DIR",
    "CUTE_EXPERIMENTAL_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
)
# The largest tile of queries, and of keys, to which its backward rounds up (4.0.0b36,
# Hopper).
_TILE = 128
# FlashAttention-4 begins a causal call with the longest rows, walks keys in an order
# that suits the cache, and has nothing to prepare for a new shape. Tiles of narrow
# heads are taller.
_H200_SPEED = KernelSpeed(
    over_cudnn={
        64: (1.16, 1.17),
        96: (1.36, 1.30),
        128: (1.12, 1.16),
        192: (1.12, 1.60),
        256: (1.10, 1.0),
    },
    tile_rows={96: 192},
    filling_causal=4_000,
)


class Fa4Kernel(RectangleKernel):
    """FlashAttention-4: 16-bit inputs; takes grouped heads, windows and soft caps
    directly.

    Attributes:
        softcap: bound of the scores, ``softcap * tanh(score / softcap)``; 0 is none.
            The package compiles its code anew for each soft cap.
    """

    name = "fa4"
    softcap = 0.0
    grouped = True
    bands = True
    row_unit = _TILE
    speed = _H200_SPEED
    accepts_inf_lse = True
    reads_wide_out = True
    forward_limits = CallLimits(entries=GRID_BLOCKS, heads=GRID_BLOCKS)
    # Its fp32 sums of a head have no more elements: it refuses larger ones.
    backward_limits = CallLimits(
        entries=GRID_BLOCKS,
        heads=GRID_BLOCKS,
        query_elements=INT32,
        key_elements=INT32,
        scope="head",
        padded=True,
    )

    def with_softcap(self, softcap: float) -> Fa4Kernel:
        """See ``Kernel``."""
        capped = copy.copy(self)
        capped.softcap = float(softcap)
        capped.plain_variant = self
        return capped

    def refusal(self, shape: CallShape) -> str | None:
        """Return why this kernel cannot run such a call, in words for the user, or
        None."""
        reason = operator_refusal(shape, "cuda", HALF_DTYPES, 256)
        if reason is not None:
            return reason
        if shape.bias is not None:
            return "it takes no attention mask"
        return _width_refusal(shape) or _machine_refusal()

    def rectangle_forward(self, call: Call) -> OutLse:
        """See ``RectangleKernel.rectangle_forward``."""
        forward, _ = _functions()
        query = call.query
        out_shape = (*query.shape[:3], call.value.shape[-1])
        # Results lie as the query does. The package's own lie token after token, and
        # would be copied.
        out = empty_like_input(query, out_shape, query.dtype)
        (out_by_token,) = _by_token(out)
        with _on_device(query.device):
            results = forward(
                *_by_token(*call.inputs),
                softmax_scale=call.scale,
                return_lse=True,
                out=out_by_token,
                **self._options(call),
            )
        lse = results[1]
        # A row with a score of NaN or +inf has an lse of -inf, as one without keys,
        # whose output is 0. The merge would take it for that, and a backward would make
        # finite gradients of it.
        mend_(out, lse)
        return out, lse

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        _, backward = _functions()
        out = saved.out
        options = self._options(call)
        with _on_device(call.query.device):
            if out.dtype != call.query.dtype:
                # The package's own name of the gradient of the log-sum-exp.
                options["dlse"] = rounding_gap(out, saved.grad_out)
                out = as_operator_readable(out, call.query.dtype)
            gradients = backward(
                *_by_token(*call.inputs, out, saved.grad_out),
                saved.lse.contiguous(),
                softmax_scale=call.scale,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                **options,
            )
        grad_query, grad_key, grad_value = _by_token(*gradients[:3])
        return grad_query, grad_key, grad_value

    def _options(self, call: Call) -> Keywords:
        """Return the options that say which pairs of a rectangle are kept, and the soft
        cap."""
        options: Keywords = {}
        if self.softcap:
            options["softcap"] = self.softcap
        band = call.causal
        if not isinstance(band, Band):
            options["causal"] = band
            return options
        # The package counts keys from the last query's.
        offset = call.key.shape[2] - call.query.shape[2]
        options["window_size_left"] = None if band.low is None else offset - band.low
        options["window_size_right"] = None if band.high is None else band.high - offset
        return options

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = OperatorSizes(shape, extent, limits=self.forward_limits)
        flags = _held_bytes(sizes.rows) * 3  # to find the rows that are not finite
        return sizes.forward_bytes(shape.value_dim, inside=0) + flags

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = OperatorSizes(shape, extent, limits=self.backward_limits)
        inside = _fp32_sums_bytes(sizes)
        if extent.direct:
            # Copies of an output and of its gradient that do not lie as its loads ask
            # for.
            inside += 2 * sizes.rows * shape.value_dim * sizes.itemsize
        if shape.wide_out:
            # The output in 16 bits, and the correction of delta.
            inside += _held_bytes(sizes.rows * shape.value_dim * sizes.itemsize)
            inside += _held_bytes(4 * sizes.rows)
        return sizes.backward_bytes(inside)


def _width_refusal(shape: CallShape) -> str | None:
    """Return why the package cannot run calls of these head and value dimensions, or
    None."""
    head_dim = shape.head_dim
    value_dim = shape.value_dim
    is_equal = head_dim == value_dim
    if not is_equal and (head_dim, value_dim) != (192, 128):
        return (
            f"it takes equal head dimensions, or 192 and 128, not {head_dim} and "
            f"{value_dim}"
        )
    if not shape.needs_grad:
        return None
    if head_dim <= 128 and round_up(head_dim, 16) % 32:
        # Its parts disagree about the padded width (4.0.0b36).
        return f"its gradient of query is wrong for head dimension {head_dim}"
    if not is_equal and shape.heads != shape.kv_heads:
        return "its backward takes equal head dimensions where heads are grouped"
    return None


def _machine_refusal() -> str | None:
    """Return why the package cannot run on this machine, or None."""
    if version() is None:
        return f"it needs {_PACKAGE}, which is not installed: {install_hint('fa4')}"
    if not torch.cuda.is_available():
        return None  # plans are made for a Hopper GPU where there is none
    capability = torch.cuda.get_device_capability()
    if capability[0] < 9:
        return (
            f"it needs compute capability 9.0 or higher, and this GPU has {capability}"
        )
    return None


def _fp32_sums_bytes(sizes: OperatorSizes) -> int:
    """Return the bytes of gradients that a backward sums in fp32, over padded rows."""
    shape = sizes.shape
    unit = 64 if shape.head_dim > 128 else 32
    width = round_up(shape.head_dim, unit)
    value_width = round_up(shape.value_dim, unit)
    rows = sizes.lanes * round_up(sizes.extent.max_queries, _TILE)
    nbytes = _held_bytes(4 * rows * width)
    nbytes += _held_bytes(4 * rows)  # delta
    nbytes += _held_bytes(4 * rows)  # a copy of lse
    nbytes += _held_bytes(rows // 8)  # semaphores
    if sizes.group == 1:
        return nbytes
    # The gradients of keys and values that query heads share.
    key_rows = sizes.extent.key_lanes * round_up(sizes.extent.max_keys, _TILE)
    nbytes += _held_bytes(4 * key_rows * width)
    nbytes += _held_bytes(4 * key_rows * value_width)
    return nbytes + 2 * _held_bytes(key_rows // 4)  # semaphores


def _by_token(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return (b, h, n, d) as (b, n, h, d), or the other way round."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def _held_bytes(size: int) -> int:
    """Return the bytes of a tensor of ``size`` bytes, whose block the allocator may
    leave unsplit."""
    return size + min(size, UNSPLIT_BYTES)


@functools.cache
def version() -> str | None:
    """Return the version that is installed; None if there is none. Nothing is
    imported."""
    return installed_version(_PACKAGE)


@functools.cache
def versions() -> tuple[str | None, ...]:
    """Return the versions of the package and of what compiles it; None for those that
    are not installed."""
    return (version(), *map(installed_version, _COMPILERS))


def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the package's forward, and its backward for an lse from outside."""
    if "flash_attn.cute" not in sys.modules:
        _keep_compiled_code()
        # CuTe DSL warns of FlashAttention's own code where it compiles.
        warnings.filterwarnings(
            "ignore", category=UserWarning, module=r".*(flash_attn|cutlass)"
        )
        with without_loading_compiler():
            importlib.import_module("flash_attn.cute.interface")
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def _keep_compiled_code() -> None:
    """Name a folder for what the package compiles, before it is imported.

    A folder that the user has named stays. The package's own choice is none, and CuTe
    DSL's is a folder that other users may write to.
    """
    with suppress(OSError):  # no folder to trust: it compiles in each process
        private_folder(cache_folder())
        folder = os.fspath(private_folder(cache_folder() / "fa4"))
        for name in (_FOLDER, *_DSL_FOLDERS):
            os.environ.setdefault(name, folder)
        os.environ.setdefault(_SWITCH, "1")
