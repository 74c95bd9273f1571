"""Rectangles on FlashAttention-4 (``flash-attn-4``, CuTe DSL), the fastest kernel on Hopper GPUs.

It is compiled on the GPU's machine, some seconds for each kind of call, and keeps what it compiled
in a folder of this user's. Nothing of it is imported until a call wants it.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition.bands import Band
from quorum_attention.extras import install_hint
from quorum_attention.kernels.cache import cache_folder, private_folder
from quorum_attention.kernels.limits import GRID_BLOCKS, INT32, CallLimits
from quorum_attention.kernels.operator_inputs import operator_refusal
from quorum_attention.kernels.operator_sizes import UNSPLIT_BYTES, OperatorSizes
from quorum_attention.kernels.protocol import Call, CallShape, Extent, Saved, Three
from quorum_attention.kernels.rectangles import RectangleKernel

_on = torch.cuda.device
_PACKAGE = "flash-attn-4"
_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_DSL_FOLDERS = ("CUTE_DSL_CACHE_DIR", "CUTE_EXPERIMENTAL_DSL_CACHE_DIR", "QUACK_CACHE_DIR")
# The largest tile of queries, and of keys, to which its backward rounds up (4.0.0b36, Hopper).
_TILE = 128


class Fa4Kernel(RectangleKernel):
    """FlashAttention-4: 16-bit inputs; takes grouped heads, windows and soft caps directly.

    Attributes:
        softcap: bound of the scores, ``softcap * tanh(score / softcap)``; 0 is none. The package
            compiles its code anew for each.
    """

    name = "fa4"
    softcap = 0.0
    grouped = True
    bands = True
    row_unit = _TILE
    accepts_inf_lse = True
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
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        reason = operator_refusal(shape, "cuda", (torch.float16, torch.bfloat16), 256)
        if reason is not None:
            return reason
        if shape.bias is not None:
            return "it takes no attention mask"
        dims = shape.head_dim, shape.value_dim
        if dims[0] != dims[1] and dims != (192, 128):
            return f"it takes equal head dimensions, or 192 and 128, not {dims[0]} and {dims[1]}"
        if shape.needs_grad:
            if shape.head_dim <= 128 and round_up(shape.head_dim, 16) % 32:
                # Its parts disagree about the padded width (4.0.0b36).
                return f"its gradient of query is wrong for head dimension {shape.head_dim}"
            if dims[0] != dims[1] and shape.heads != shape.kv_heads:
                return "its backward takes equal head dimensions where heads are grouped"
        if version() is None:
            return f"it needs {_PACKAGE}, which is not installed: {install_hint('fa4')}"
        # Plans are made for a Hopper GPU where there is none.
        capable = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
        if capable[0] < 9:
            return f"it needs compute capability 9.0 or higher, and this GPU has {capable}"
        return None

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        with _on(call.query.device):
            out, lse = _functions()[0](
                *_by_token(*call.inputs),
                softmax_scale=call.scale,
                return_lse=True,
                **self._options(call),
            )[:2]
        out = out.transpose(1, 2)
        # A row with a score of NaN or +inf has an lse of -inf, as one without keys, whose output is
        # 0. The merge would take it for that, and a backward would make finite gradients of it.
        lse.masked_fill_(torch.isneginf(lse) & out[..., 0].isnan(), torch.nan)
        return out, lse

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        options = self._options(call)
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        with _on(call.query.device):
            gradients = _functions()[1](
                *_by_token(*call.inputs, saved.out, saved.grad_out), saved.lse.contiguous(),
                softmax_scale=call.scale, **options,
            )  # fmt: skip
        grad_query, grad_key, grad_value = _by_token(*gradients[:3])
        return grad_query, grad_key, grad_value

    def _options(self, call: Call) -> dict[str, Any]:
        """How its functions are told what is kept of a rectangle, and of the soft cap."""
        cap = {"softcap": self.softcap} if self.softcap else {}
        kept = call.causal
        if not isinstance(kept, Band):
            return {"causal": kept, **cap}
        # It counts keys from the last query's.
        apart = call.key.shape[2] - call.query.shape[2]
        return {
            "window_size_left": None if kept.low is None else apart - kept.low,
            "window_size_right": None if kept.high is None else kept.high - apart,
            **cap,
        }

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = OperatorSizes(shape, extent, limits=self.forward_limits)
        # What finds the rows that are not finite.
        return sizes.forward_bytes(shape.value_dim, 0) + _held(*[sizes.rows] * 3)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = OperatorSizes(shape, extent, limits=self.backward_limits)
        # dQ is summed in fp32 over padded rows, beside delta and a copy of lse; so are the
        # gradients of keys that query heads share.
        unit = 64 if shape.head_dim > 128 else 32
        width, value_width = round_up(shape.head_dim, unit), round_up(shape.value_dim, unit)
        rows = sizes.lanes * round_up(sizes.extent.max_queries, _TILE)
        key_lanes = sizes.extent.batch * sizes.extent.key_heads
        keys = key_lanes * round_up(sizes.extent.max_keys, _TILE)
        inside = _held(4 * rows * width, 4 * rows, 4 * rows, rows // 8)
        if sizes.group > 1:
            inside += _held(4 * keys * width, 4 * keys * value_width, keys // 4, keys // 4)
        if extent.direct:
            # Copies of an output and of its gradient that do not lie as its loads ask for.
            inside += 2 * sizes.rows * shape.value_dim * sizes.itemsize
        return sizes.backward_bytes(inside)


def _by_token(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(b, h, n, d) as (b, n, h, d), or the other way round."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def _held(*sizes: int) -> int:
    """Bytes of tensors of these sizes, of which the allocator may leave some blocks unsplit."""
    return sum(size + min(size, UNSPLIT_BYTES) for size in sizes)


# --- The package ------------------------------------------------------------------------------


@functools.cache
def version() -> str | None:
    """The version that is installed; None if there is none. Nothing is imported."""
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Its forward, and its backward for an lse from outside."""
    if "flash_attn.cute" not in sys.modules:
        _keep_compiled_code()
        # CuTe DSL warns of FlashAttention's own code where it compiles.
        warnings.filterwarnings("ignore", category=UserWarning, module=r".*(flash_attn|cutlass)")
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def _keep_compiled_code() -> None:
    """Before it is imported, name a folder for what it compiles, if the user has named none. Its
    own choice is none, and for CuTe DSL a folder that other users may write to."""
    with suppress(OSError):  # no folder to trust: it compiles in each process
        private_folder(cache_folder())
        folder = os.fspath(private_folder(cache_folder() / "fa4"))
        for name in (_FOLDER, *_DSL_FOLDERS):
            os.environ.setdefault(name, folder)
        os.environ.setdefault(_SWITCH, "1")
