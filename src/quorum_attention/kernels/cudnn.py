"""Rectangles on torch's cuDNN attention."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.bias import BASE_TWO_LOWEST, aligned_bias
from quorum_attention.kernels.protocol import Call, CallShape, Extent, Saved, Three
from quorum_attention.kernels.rectangles import RectangleKernel, TaskSizes
from quorum_attention.kernels.tensors import bias_for_padding, in_layout_of, pad_rows, repeat_last
from quorum_attention.kernels.torch_private import operator_reason, outside
from quorum_attention.kernels.workspace import (
    RectangleSizes,
    backward_bytes,
    forward_bytes,
    multiprocessors,
    round_up,
)

_FORWARD = "_scaled_dot_product_cudnn_attention"
_BACKWARD = "_scaled_dot_product_cudnn_attention_backward"
# What cuDNN allocates internally, independent of the shape (measured, with a margin).
_INTERNAL_BYTES = 4 * 1024 * 1024
# With very few queries or keys its backward returns wrong results or crashes the process (seen with
# cuDNN 9.19 at lengths of 1 to 7): shorter rectangles are padded to this length.
_SHORTEST = 64
# Its backward works on tiles of this many keys and masks the keys past the end. It does not mask
# them if all real keys lie in the first half of a single tile: the keys past the end then have a
# score of 0, and if 0 is far above a row's lse, the row's gradient becomes NaN (seen with 9.19 on
# 1 to 64 keys, in bf16 below an lse of -88, in fp16 below -11). So few keys are padded to a tile.
_WHOLE_TILE = 128
_TILE_ROWS = 128
# Query rows for each multiprocessor, all heads together, that keep the whole device busy.
_FILLING_ROWS = 1024


class CudnnKernel(RectangleKernel):
    """cuDNN's fused attention: 16-bit inputs; takes grouped heads and broadcast masks directly."""

    name = "cudnn"
    narrow_factor = True
    plain_softmax = True
    lowest_score = BASE_TWO_LOWEST
    grouped = True
    row_unit = 128

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.device_type != "cuda":
            return f"it runs on NVIDIA GPUs, not on {call.device_type}"
        if call.dtype not in (torch.float16, torch.bfloat16):
            return f"it takes float16 and bfloat16; it answers {call.dtype} with NaN"
        limit = 256 if call.needs_grad else 512
        for what, width in (("head", call.head_dim), ("value", call.value_dim)):
            if width % 8 or not 8 <= width <= limit:
                return (
                    f"it takes {what} dimensions that are multiples of 8 up to {limit}, not {width}"
                )
        if torch.cuda.is_available() and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return operator_reason(_FORWARD, *([_BACKWARD] if call.needs_grad else []))

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        query, key, value, bias = *call.inputs, call.bias
        rows = query.shape[2]
        if min(rows, key.shape[2]) < _SHORTEST:
            least = (_SHORTEST, _SHORTEST)
            bias = bias_for_padding(bias, query, key.shape[2], least, call.is_causal)
            query, key = (repeat_last(t, _SHORTEST) for t in (query, key))
            value = pad_rows(value, _SHORTEST)
        mask = None if bias is None else aligned_bias(bias, key.shape[2])
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, True, 0.0, call.is_causal, False, scale=call.scale
        )
        out, lse = results[:2]
        if not _TEMPLATES:
            _TEMPLATES.append((lse.dim(), results[6].dtype))
        return out[:, :, :rows], lse.reshape(query.shape[:3])[:, :, :rows]

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        query, key, value, bias = *call.inputs, call.bias
        grad_out, out, lse, causal = saved.grad_out, saved.out, saved.lse, call.is_causal
        rows, keys = query.shape[2], key.shape[2]
        least = _backward_least(rows, keys, causal)
        if rows < least[0] or keys < least[1]:
            bias = bias_for_padding(bias, query, keys, least, causal)
            query, key = repeat_last(query, least[0]), repeat_last(key, least[1])
            lse = repeat_last(lse, least[0], -1)
            out, grad_out = pad_rows(out, least[0]), pad_rows(grad_out, least[0])
            value = pad_rows(value, least[1])
        lse_dims, seed_dtype = _forward_template(query.device, query.dtype)
        lse = lse.contiguous()
        seed = torch.zeros((), dtype=seed_dtype, device=query.device)
        mask = None if bias is None else aligned_bias(bias, key.shape[2])
        # torch caches cuDNN's plans by the strides of query, key and value alone. A plan made for
        # other strides of grad_out and out would read the wrong elements.
        gradients: Three = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            in_layout_of(grad_out, query), query, key, value, in_layout_of(out, query),
            lse.unsqueeze(-1) if lse_dims == 4 else lse, seed, seed, mask, None, None,
            query.shape[2], key.shape[2], 0.0, causal, scale=call.scale,
        )  # fmt: skip
        grad_query, grad_key, grad_value = gradients
        return grad_query[:, :, :rows], grad_key[:, :, :keys], grad_value[:, :, :keys]

    def preferred_sizes(self, sizes: TaskSizes, r: Rectangle, backward: bool) -> tuple[int, int]:
        """Pieces whose inner loop stays within the L2 cache (docs/kernels.md).

        The forward walks all keys for every tile of queries, the backward all queries for every
        tile of keys: if that is more than a third of the cache, the rate falls by 5 to 8 %. A
        rectangle is cut only if its other side alone fills the device, because each piece has a
        start and an end at which the device is partly idle.
        """
        # Heads run one after another, in a backward two at a time.
        rows = _whole_tiles(_cache_bytes(sizes.device) // 3 // sizes.row_bytes)
        fills = _FILLING_ROWS * multiprocessors()
        if not backward and r.n_queries * sizes.query_lanes >= fills:
            return r.n_queries, min(r.n_keys, rows)
        if backward and r.n_keys * sizes.key_lanes >= fills // 2:
            return min(r.n_queries, _whole_tiles(rows // min(sizes.query_lanes, 2))), r.n_keys
        return r.n_queries, r.n_keys

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = RectangleSizes.of(call, _padded(extent, _SHORTEST), self.grouped)
        return forward_bytes(sizes, call.value_dim, _INTERNAL_BYTES + sizes.aligned_bias_bytes)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = RectangleSizes.of(call, _padded(extent, _WHOLE_TILE), self.grouped)
        widths = call.head_dim + call.value_dim
        gradients = (sizes.rows * call.head_dim + sizes.key_rows * widths) * sizes.item
        copies = 2 * sizes.rows * call.value_dim * sizes.item
        # dQ is summed in fp32 over padded rows, beside delta and a copy of lse. The gradients of
        # grouped keys are first computed for every query head.
        padded_rows = sizes.batch * sizes.heads * round_up(sizes.queries, 128)
        internal = padded_rows * (round_up(call.head_dim, 32) + 2) * 4 + _INTERNAL_BYTES
        if sizes.heads != sizes.key_heads:
            internal += sizes.shared_key_rows * widths * sizes.item
        inside = copies + internal + sizes.aligned_bias_bytes
        return backward_bytes(sizes, gradients + sizes.lifted_bytes, inside)


def _backward_least(queries: int, keys: int, causal: bool) -> tuple[int, int]:
    """The numbers of queries and keys that a rectangle is padded to for a backward, at least."""
    if keys > _SHORTEST:
        return _SHORTEST, keys
    # A causal rectangle is a square and has to stay one.
    return _WHOLE_TILE if causal else _SHORTEST, _WHOLE_TILE


def _padded(extent: Extent, least: int) -> Extent:
    return replace(
        extent,
        max_queries=max(least, extent.max_queries),
        max_keys=max(least, extent.max_keys),
    )


def _whole_tiles(rows: int) -> int:
    return max(_TILE_ROWS, rows // _TILE_ROWS * _TILE_ROWS)


@functools.cache
def _cache_bytes(device: torch.device) -> int:
    """L2 cache of the device."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


_TEMPLATES: list[tuple[int, torch.dtype]] = []


def _forward_template(device: torch.device, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """How many dimensions cuDNN's lse has in this torch, and the dtype of the random state.

    Both changed between releases, and the backward requires what the forward returned. Usually a
    forward has been seen; a call for this alone takes 40 ms.
    """
    if not _TEMPLATES:
        with outside():
            tiny = torch.zeros((1, 1, 64, 64), dtype=dtype, device=device)
            results = torch.ops.aten._scaled_dot_product_cudnn_attention(
                tiny, tiny, tiny, None, True, 0.0, False, False
            )
        _TEMPLATES.append((results[1].dim(), results[6].dtype))
    return _TEMPLATES[0]
