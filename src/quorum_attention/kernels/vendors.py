"""Rectangles on torch's operators for NVIDIA GPUs: FlashAttention-2, CUTLASS and cuDNN."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.protocol import Call, CallShape, Extent, Saved, Three
from quorum_attention.kernels.rectangles import (
    RectangleKernel,
    RectangleSizes,
    TaskSizes,
    multiprocessors,
    operator_refusal,
    round_up,
)
from quorum_attention.kernels.tensors import (
    BASE_TWO_LOWEST,
    aligned_bias,
    bias_for_padding,
    in_layout_of,
    pad_last,
    pad_rows,
    repeat_last,
    token_major,
    zero_unit_strides,
)
from quorum_attention.kernels.torch_private import flash_implementation, operator_reason, outside

_NARROW = (torch.float16, torch.bfloat16)
_FLASH = "_scaled_dot_product_flash_attention"
_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"
_FLASH_BYTES = 256 * 1024


class FlashKernel(RectangleKernel):
    """torch's FlashAttention-2: 16-bit inputs, no mask; takes grouped heads directly."""

    name = "flash"
    plain_softmax = True
    grouped = True
    row_unit = 128

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        reason = operator_refusal(call, "cuda", _NARROW, 256)
        if reason is not None:
            return reason
        if call.mask is not None:
            return "it takes no attention mask"
        if call.value_dim != call.head_dim:
            return f"it takes equal head dimensions, not {call.head_dim} and {call.value_dim}"
        instead = flash_implementation()
        if instead is not None:
            # Other bounds, other refusals, and gradients that may differ from run to run.
            return f"torch's flash operators have been replaced by {instead}"
        return operator_reason(_FLASH, *([_FLASH_BACKWARD] if call.needs_grad else []))

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *call.inputs, 0.0, call.is_causal, False, scale=call.scale
        )[:2]
        # It returns lse +inf for a row whose sum is NaN: with that, a backward would compute 0 for
        # all of its probabilities that are not NaN themselves.
        lse.nan_to_num_(nan=torch.nan, posinf=torch.nan, neginf=-torch.inf)
        return out, lse

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        # Random state and its offset: read only with dropout.
        state = torch.zeros(2, dtype=torch.int64, device=call.query.device).view(torch.uint64)
        # The operator reads lse as if it were contiguous.
        gradients: Three = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            saved.grad_out, *call.inputs, saved.out, saved.lse.contiguous(), None, None,
            call.query.shape[2], call.key.shape[2], 0.0, call.is_causal, state, state[0],
            scale=call.scale,
        )  # fmt: skip
        return gradients

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = RectangleSizes(call, extent)
        # If the query tiles are too few to fill the GPU, the keys are split, and each split has its
        # own fp32 statistics. There are at most about two waves of 128-row tiles.
        split_rows = 2 * 2 * multiprocessors() * 128
        inside = split_rows * (_padded_dim(call.head_dim) + 1) * 4
        return sizes.forward_bytes(call.value_dim, inside)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = RectangleSizes(call, extent)
        dim = call.head_dim
        gradients = (sizes.rows + 2 * sizes.key_rows) * dim * sizes.item
        # Token-major copies of grad_out and out; dQ summed in fp32 over padded rows, and delta; the
        # gradients of grouped keys for every query head.
        inside = 2 * sizes.rows * dim * sizes.item
        padded_rows = sizes.lanes * round_up(sizes.extent.max_queries, 128)
        copies = 1
        if torch.are_deterministic_algorithms_enabled():
            copies = -(-multiprocessors() // max(1, sizes.lanes))
        # A few blocks hold a second copy of the row statistics.
        inside += padded_rows * (copies * _padded_dim(dim) + 4) * 4 + _FLASH_BYTES
        if sizes.shared > 1:
            inside += 2 * sizes.shared_key_rows * dim * sizes.item
        return sizes.backward_bytes(gradients, inside)


def _padded_dim(head_dim: int) -> int:
    return round_up(head_dim, 32) if head_dim <= 192 else 256


def _small_factor(call: CallShape) -> str | None:
    """Why a kernel that multiplies gradients of scores by the factor before it rounds them to fp16
    cannot run a call: nothing would be left of them."""
    if call.needs_grad and call.dtype == torch.float16 and not call.exact_scale:
        return "its float16 gradients lose their digits where scale is below 2**-9"
    return None


_EFFICIENT = "_scaled_dot_product_efficient_attention"
_EFFICIENT_BACKWARD = "_scaled_dot_product_efficient_attention_backward"
_LSE_ROWS = 32


class EfficientKernel(RectangleKernel):
    """torch's memory-efficient attention: 16-bit and fp32 inputs, masks, any head dimension.

    Head dimensions that are not a multiple of 16 bytes are padded with zero columns.
    """

    name = "efficient"
    plain_softmax = True
    lowest_score = BASE_TWO_LOWEST
    # Before mid-2026 it returned wrong results, without an error, for masks longer than 65,536.
    masked_limit: int = 32_768
    row_unit = 32

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        reason = operator_refusal(call, "cuda", (*_NARROW, torch.float32)) or _small_factor(call)
        return reason or operator_reason(
            _EFFICIENT, *([_EFFICIENT_BACKWARD] if call.needs_grad else [])
        )

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            *map(_fit, call.inputs), _expanded(call), True, 0.0, call.is_causal, scale=call.scale
        )[:2]
        return out[..., : call.value.shape[-1]], lse[..., : call.query.shape[2]]

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        query, out, lse = call.query, saved.out, saved.lse
        head_dim, value_dim = query.shape[-1], call.value.shape[-1]
        if not (out.device == lse.device == query.device):
            # The operator does not look, and reads what is no memory of the GPU's.
            raise RuntimeError(f"out and lse must be on {query.device}")
        # Rows past the end get lse +inf, as in the operator's forward: exp(s - inf) = 0.
        padded_lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            _fit(saved.grad_out),
            *map(_fit, call.inputs),
            _expanded(call),
            # It computes delta with a row stride of heads x dimension, whatever the real one is.
            token_major(pad_last(out, _aligned(value_dim, out.element_size()))),
            padded_lse.contiguous(),
            seed,
            seed,
            0.0,
            [True, True, True, False],
            call.is_causal,
            scale=call.scale,
        )[:3]
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = RectangleSizes(call, self._limited(call, extent), grouped=False)
        value_dim = _aligned(call.value_dim, sizes.item)
        inside = sizes.aligned_bias_bytes + _pad_bytes(call, sizes, backward=False)
        if sizes.item == 2 and value_dim > 64:
            inside += sizes.rows * value_dim * 4  # the output is summed in fp32
        inside += sizes.lanes * _LSE_ROWS * 4
        return sizes.forward_bytes(value_dim, inside)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = RectangleSizes(call, self._limited(call, extent), grouped=False)
        head_dim, value_dim = (_aligned(n, sizes.item) for n in (call.head_dim, call.value_dim))
        widths = head_dim + value_dim
        gradients = (sizes.rows * head_dim + sizes.key_rows * widths) * sizes.item
        # grad_out and out token-major; lse padded.
        inside = sizes.aligned_bias_bytes + _pad_bytes(call, sizes, backward=True)
        inside += 2 * sizes.rows * value_dim * sizes.item
        inside += sizes.lanes * round_up(sizes.extent.max_queries, _LSE_ROWS) * 8
        if sizes.item == 4:
            inside += sizes.rows * (value_dim + 2) * 4  # torch computes delta out of place
        # dQ of all query tiles, in fp32.
        batch_heads = max(1, sizes.lanes)
        workspace = round_up(sizes.extent.max_queries, 128) * round_up(head_dim, 128)
        if sizes.item == 2 and max(head_dim, value_dim) > 128:
            # dK and dV are too wide for registers: an fp32 copy for each split of the keys.
            splits = max(1, min(-(-sizes.extent.max_keys // 64), 200 // batch_heads))
            if torch.are_deterministic_algorithms_enabled():
                splits = 1
            padded = round_up(head_dim, 128) + round_up(value_dim, 128)
            workspace += splits * round_up(sizes.extent.max_keys, 128) * padded
        inside += batch_heads * (workspace + 4096) * 4
        return sizes.backward_bytes(gradients, inside)

    def _limited(self, call: CallShape, extent: Extent) -> Extent:
        if call.mask is None:
            return extent
        return replace(
            extent,
            max_queries=min(extent.max_queries, self.masked_limit),
            max_keys=min(extent.max_keys, self.masked_limit),
        )


def _fit(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, its rows padded to multiples of 16 bytes, stride 0 in dimensions of size 1."""
    padded = pad_last(tensor, _aligned(tensor.shape[-1], tensor.element_size()))
    return zero_unit_strides(padded)


def _aligned(width: int, item: int) -> int:
    return round_up(width, 16 // item)


def _expanded(call: Call) -> torch.Tensor | None:
    if call.bias is None:
        return None
    n_keys = call.key.shape[2]
    aligned = zero_unit_strides(aligned_bias(call.bias, n_keys))
    return aligned.expand(*call.query.shape[:3], n_keys)


def _pad_bytes(call: CallShape, sizes: RectangleSizes, backward: bool) -> int:
    head_dim, value_dim = (_aligned(n, sizes.item) for n in (call.head_dim, call.value_dim))
    padded = 0
    if head_dim != call.head_dim:
        padded += (sizes.rows + sizes.key_rows) * head_dim
    if value_dim != call.value_dim:
        padded += ((2 * sizes.rows if backward else 0) + sizes.key_rows) * value_dim
    return padded * sizes.item


_CUDNN = "_scaled_dot_product_cudnn_attention"
_CUDNN_BACKWARD = "_scaled_dot_product_cudnn_attention_backward"
# What cuDNN allocates internally, independent of the shape (measured, with a margin).
_CUDNN_BYTES = 4 * 1024 * 1024
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
    plain_softmax = True
    lowest_score = BASE_TWO_LOWEST
    grouped = True
    row_unit = 128

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        reason = operator_refusal(call, "cuda", _NARROW, 256 if call.needs_grad else 512)
        if reason is not None:
            return reason
        if torch.cuda.is_available() and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return _small_factor(call) or operator_reason(
            _CUDNN, *([_CUDNN_BACKWARD] if call.needs_grad else [])
        )

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
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, True, 0.0, call.is_causal, False, scale=call.scale
        )[:2]
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
        lse_dims, seed_dtype = _forward_template(query.device)
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
        (batch, heads, _, head_dim), (_, key_heads, _, value_dim) = sizes.query, sizes.value
        row_bytes = (head_dim + value_dim) * sizes.item
        rows = _whole_tiles(_cache_bytes(sizes.device) // 3 // row_bytes)
        fills = _FILLING_ROWS * multiprocessors()
        if not backward and r.n_queries * batch * heads >= fills:
            return r.n_queries, min(r.n_keys, rows)
        if backward and r.n_keys * batch * key_heads >= fills // 2:
            return min(r.n_queries, _whole_tiles(rows // min(batch * heads, 2))), r.n_keys
        return r.n_queries, r.n_keys

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = RectangleSizes(call, _padded(extent, _SHORTEST))
        return sizes.forward_bytes(call.value_dim, _CUDNN_BYTES + sizes.aligned_bias_bytes)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = RectangleSizes(call, _padded(extent, _WHOLE_TILE))
        widths = call.head_dim + call.value_dim
        gradients = (sizes.rows * call.head_dim + sizes.key_rows * widths) * sizes.item
        copies = 2 * sizes.rows * call.value_dim * sizes.item
        # dQ is summed in fp32 over padded rows, beside delta and a copy of lse. The gradients of
        # grouped keys are first computed for every query head.
        padded_rows = sizes.lanes * round_up(sizes.extent.max_queries, 128)
        internal = padded_rows * (round_up(call.head_dim, 32) + 2) * 4 + _CUDNN_BYTES
        if sizes.shared > 1:
            internal += sizes.shared_key_rows * widths * sizes.item
        inside = copies + internal + sizes.aligned_bias_bytes
        return sizes.backward_bytes(gradients, inside)


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


@functools.cache
def _forward_template(device: torch.device) -> tuple[int, torch.dtype]:
    """How many dimensions cuDNN's lse has in this torch, and the dtype of the random state.

    Both changed between releases, and the backward requires what the forward returned.
    """
    with outside():
        tiny = torch.zeros((1, 1, 64, 64), dtype=torch.float16, device=device)
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(
            tiny, tiny, tiny, None, True, 0.0, False, False
        )
    return results[1].dim(), results[6].dtype
