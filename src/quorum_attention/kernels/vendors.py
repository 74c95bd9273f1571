"""Rectangles on torch's operators: FlashAttention-2, CUTLASS and cuDNN on NVIDIA GPUs, and that for
CPUs, with dropout tile by tile instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels import reference
from quorum_attention.kernels.limits import GRID_BLOCKS, INT32, CallLimits
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.protocol import (
    DTYPES,
    Call,
    CallShape,
    Extent,
    Gradients,
    Saved,
    Statistics,
    TaskTensors,
    Three,
    part_of,
)
from quorum_attention.kernels.rectangles import (
    RectangleKernel,
    RectangleSizes,
    multiprocessors,
    operator_refusal,
    signed,
)
from quorum_attention.kernels.result_layout import laid_out_like
from quorum_attention.kernels.tensors import (
    BASE_TWO_LOWEST,
    Pick,
    aligned_bias,
    bias_for_padding,
    in_layout_of,
    pad_last,
    pad_rows,
    repeat_last,
    token_major,
    zero_unit_strides,
)
from quorum_attention.kernels.torch_private import as_it_is, flash_implementation, outside

_NARROW = (torch.float16, torch.bfloat16)
_FLASH_BYTES = 256 * 1024


class FlashKernel(RectangleKernel):
    """torch's FlashAttention-2: 16-bit inputs, no mask; takes grouped heads directly."""

    name = "flash"
    grouped = True
    row_unit = 128
    forward_limits = CallLimits(entries=GRID_BLOCKS, heads=GRID_BLOCKS)
    # With several batch entries it read and wrote outside its memory.
    backward_limits = CallLimits(
        entries=GRID_BLOCKS,
        heads=GRID_BLOCKS,
        query_elements=INT32,
        key_elements=INT32,
        scope="several entries",
        padded=True,
    )

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        reason = operator_refusal(shape, "cuda", _NARROW, 256)
        if reason is not None:
            return reason
        if shape.bias is not None:
            return "it takes no attention mask"
        if shape.value_dim != shape.head_dim:
            return f"it takes equal head dimensions, not {shape.head_dim} and {shape.value_dim}"
        instead = flash_implementation()
        if instead is not None:
            # Other bounds, other refusals, and gradients that may differ from run to run.
            return f"torch's flash operators have been replaced by {instead}"
        return None

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

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = RectangleSizes(shape, extent, limits=self.forward_limits)
        # If the query tiles are too few to fill the GPU, the keys are split, and each split has its
        # own fp32 statistics. There are at most about two waves of 128-row tiles.
        split_rows = 2 * 2 * multiprocessors() * 128
        inside = split_rows * (_padded_dim(shape.head_dim) + 1) * 4
        return sizes.forward_bytes(shape.value_dim, inside)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = RectangleSizes(shape, extent, limits=self.backward_limits)
        dim = shape.head_dim
        # Token-major copies of grad_out and out; dQ summed in fp32 over padded rows, and delta; the
        # gradients of grouped keys for every query head.
        inside = 2 * sizes.rows * dim * sizes.item
        padded_rows = sizes.lanes * round_up(sizes.extent.max_queries, 128)
        copies = 1
        if torch.are_deterministic_algorithms_enabled():
            copies = ceil_div(multiprocessors(), max(1, sizes.lanes))
        # A few blocks hold a second copy of the row statistics.
        inside += padded_rows * (copies * _padded_dim(dim) + 4) * 4 + _FLASH_BYTES
        if sizes.shared > 1:
            inside += 2 * sizes.shared_key_rows * dim * sizes.item
        return sizes.backward_bytes(inside)


def _padded_dim(head_dim: int) -> int:
    return round_up(head_dim, 32) if head_dim <= 192 else 256


def _bounded(extent: Extent, least: int = 0, most: int = 1 << 62) -> Extent:
    """The extent with rectangles of at least ``least`` and at most ``most`` queries and keys."""
    queries, keys = (min(max(least, n), most) for n in (extent.max_queries, extent.max_keys))
    return replace(extent, max_queries=queries, max_keys=keys)


def _small_factor(shape: CallShape) -> str | None:
    """Why a kernel that multiplies gradients of scores by the factor before it rounds them to fp16
    cannot run a call: nothing would be left of them."""
    if shape.needs_grad and shape.dtype == torch.float16 and not shape.exact_scale:
        return "its float16 gradients lose their digits where scale is below 2**-9"
    return None


_LSE_ROWS = 32


class EfficientKernel(RectangleKernel):
    """torch's memory-efficient attention: 16-bit and fp32 inputs, masks, any head dimension.

    Head dimensions that are not a multiple of 16 bytes are padded with zero columns.
    """

    name = "efficient"
    lowest_score = BASE_TWO_LOWEST
    # Before mid-2026 it returned wrong results, without an error, for masks longer than 65,536.
    masked_limit: int = 32_768
    row_unit = 32
    # Beyond these elements of an entry it read and wrote outside its memory.
    forward_limits = backward_limits = CallLimits(
        heads=GRID_BLOCKS, query_elements=INT32, key_elements=INT32, scope="entry"
    )

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return operator_refusal(shape, "cuda", (*_NARROW, torch.float32)) or _small_factor(shape)

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            *_fit_inputs(call), _expanded(call), True, 0.0, call.is_causal, scale=call.scale
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
            *_fit_inputs(call),
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

    def _sizes(self, shape: CallShape, extent: Extent) -> RectangleSizes:
        if shape.bias is not None:
            extent = _bounded(extent, most=self.masked_limit)
        return RectangleSizes(shape, extent, grouped=False, limits=self.forward_limits)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = self._sizes(shape, extent)
        head_dim, value_dim = (_aligned(n, sizes.item) for n in (shape.head_dim, shape.value_dim))
        inside = sizes.aligned_bias_bytes + _near_copy_bytes(sizes)
        inside += _pad_bytes(shape, sizes, (head_dim, value_dim), backward=False)
        if sizes.item == 2 and value_dim > 64:
            inside += sizes.rows * value_dim * 4  # the output is summed in fp32
        inside += sizes.lanes * _LSE_ROWS * 4
        return sizes.forward_bytes(value_dim, inside)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = self._sizes(shape, extent)
        head_dim, value_dim = (_aligned(n, sizes.item) for n in (shape.head_dim, shape.value_dim))
        widths = head_dim + value_dim
        gradients = (sizes.rows * head_dim + sizes.key_rows * widths) * sizes.item
        # grad_out and out token-major; lse padded.
        inside = sizes.aligned_bias_bytes + _near_copy_bytes(sizes)
        inside += _pad_bytes(shape, sizes, (head_dim, value_dim), backward=True)
        inside += 2 * sizes.rows * value_dim * sizes.item
        inside += sizes.lanes * round_up(sizes.extent.max_queries, _LSE_ROWS) * 8
        if sizes.item == 4:
            inside += sizes.rows * (value_dim + 2) * 4  # torch computes delta out of place
        # dQ of all query tiles, in fp32.
        batch_heads = max(1, sizes.lanes)
        workspace = round_up(sizes.extent.max_queries, 128) * round_up(head_dim, 128)
        if sizes.item == 2 and max(head_dim, value_dim) > 128:
            # dK and dV are too wide for registers: an fp32 copy for each split of the keys.
            splits = max(1, min(ceil_div(sizes.extent.max_keys, 64), 200 // batch_heads))
            if torch.are_deterministic_algorithms_enabled():
                splits = 1
            padded = round_up(head_dim, 128) + round_up(value_dim, 128)
            workspace += splits * round_up(sizes.extent.max_keys, 128) * padded
        inside += batch_heads * (workspace + 4096) * 4
        return sizes.backward_bytes(inside, gradients)


def _fit(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, its rows padded to multiples of 16 bytes, stride 0 in dimensions of size 1."""
    padded = pad_last(tensor, _aligned(tensor.shape[-1], tensor.element_size()))
    return zero_unit_strides(padded)


def _fit_inputs(call: Call) -> Three:
    """Query, key and value as ``EfficientKernel`` needs them: its offsets of heads, and of keys
    within an entry, have 32 bits."""
    query, key, value = call.inputs
    return (
        _fit(_copied_if_far(query, (1,))),
        _fit(_copied_if_far(key, (1, 2))),
        _fit(_copied_if_far(value, (1, 2))),
    )


def _copied_if_far(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """``tensor``, or a copy in one piece where offsets along ``dims`` do not fit 32 bits."""
    offset = sum((tensor.shape[dim] - 1) * tensor.stride(dim) for dim in dims)
    return tensor if offset <= INT32 else tensor.contiguous()


def _near_copy_bytes(sizes: RectangleSizes) -> int:
    """Bytes of copies of the inputs of a call that was cut: heads may lie side by side in rows that
    are as far apart as before."""
    if not sizes.is_cut:
        return 0
    widths = sizes.call.head_dim + sizes.call.value_dim
    return (sizes.rows * sizes.call.head_dim + sizes.key_rows * widths) * sizes.item


def _aligned(width: int, item: int) -> int:
    return round_up(width, 16 // item)


def _expanded(call: Call) -> torch.Tensor | None:
    if call.bias is None:
        return None
    n_keys = call.key.shape[2]
    aligned = zero_unit_strides(aligned_bias(call.bias, n_keys))
    return aligned.expand(*call.query.shape[:3], n_keys)


def _pad_bytes(
    shape: CallShape, sizes: RectangleSizes, widths: tuple[int, int], backward: bool
) -> int:
    """Bytes of copies of rows that are padded to these head and value dimensions."""
    padded = 0
    if widths[0] != shape.head_dim:
        padded += (sizes.rows + sizes.key_rows) * widths[0]
    if widths[1] != shape.value_dim:
        padded += ((2 * sizes.rows if backward else 0) + sizes.key_rows) * widths[1]
    return padded * sizes.item


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
    lowest_score = BASE_TWO_LOWEST
    grouped = True
    row_unit = 128
    forward_limits = CallLimits(entries=GRID_BLOCKS, heads=GRID_BLOCKS)
    # Beyond these elements of out and grad_out the gradients of query and key were wrong, without
    # an error: by 15 to 70 per cent in the last heads.
    backward_limits = CallLimits(entries=GRID_BLOCKS, heads=GRID_BLOCKS, query_elements=INT32)

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        reason = operator_refusal(shape, "cuda", _NARROW, 256 if shape.needs_grad else 512)
        if reason is not None:
            return reason
        if torch.cuda.is_available() and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return _small_factor(shape)

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        rows, (padded, mask) = call.query.shape[2], _padded(call, (_SHORTEST, _SHORTEST))
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *padded, mask, True, 0.0, call.is_causal, False, scale=call.scale
        )[:2]
        return out[:, :, :rows], lse.reshape(padded[0].shape[:3])[:, :, :rows]

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        rows, keys, causal = call.query.shape[2], call.key.shape[2], call.is_causal
        least = _backward_least(rows, keys, causal)
        (query, key, value), mask = _padded(call, least)
        out, grad_out = pad_rows(saved.out, least[0]), pad_rows(saved.grad_out, least[0])
        lse = repeat_last(saved.lse, least[0], -1).contiguous()
        lse_dims, seed_dtype = _forward_template(query.device)
        seed = torch.zeros((), dtype=seed_dtype, device=query.device)
        # torch caches cuDNN's plans by the strides of query, key and value alone. A plan made for
        # other strides of grad_out and out would read the wrong elements.
        gradients: Three = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            in_layout_of(grad_out, query), query, key, value, in_layout_of(out, query),
            lse.unsqueeze(-1) if lse_dims == 4 else lse, seed, seed, mask, None, None,
            query.shape[2], key.shape[2], 0.0, causal, scale=call.scale,
        )  # fmt: skip
        grad_query, grad_key, grad_value = gradients
        return grad_query[:, :, :rows], grad_key[:, :, :keys], grad_value[:, :, :keys]

    def preferred_sizes(self, task: TaskTensors, r: Rectangle, backward: bool) -> tuple[int, int]:
        """Pieces whose inner loop stays within the L2 cache (docs/kernels.md).

        The forward walks all keys for every tile of queries, the backward all queries for every
        tile of keys: if that is more than a third of the cache, the rate falls by 5 to 8 %. A
        rectangle is cut only if its other side alone fills the device, because each piece has a
        start and an end at which the device is partly idle.
        """
        # Heads run one after another, in a backward two at a time.
        query, value = task.query, task.value
        (batch, heads, _, head_dim), (_, key_heads, _, value_dim) = query.shape, value.shape
        row_bytes = (head_dim + value_dim) * query.element_size()
        cache = int(torch.cuda.get_device_properties(query.device).L2_cache_size)
        rows = _whole_tiles(cache // 3 // row_bytes)
        fills = _FILLING_ROWS * multiprocessors()
        if not backward and r.n_queries * batch * heads >= fills:
            return r.n_queries, min(r.n_keys, rows)
        if backward and r.n_keys * batch * key_heads >= fills // 2:
            return min(r.n_queries, _whole_tiles(rows // min(batch * heads, 2))), r.n_keys
        return r.n_queries, r.n_keys

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        least = _bounded(extent, least=_SHORTEST)
        sizes = RectangleSizes(shape, least, limits=self.forward_limits)
        inside = _CUDNN_BYTES + sizes.aligned_bias_bytes
        inside += _lengthened_bytes(sizes, extent, _SHORTEST, backward=False)
        return sizes.forward_bytes(shape.value_dim, inside)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        least = _bounded(extent, least=_WHOLE_TILE)
        sizes = RectangleSizes(shape, least, limits=self.backward_limits)
        copies = 2 * sizes.rows * shape.value_dim * sizes.item
        # dQ is summed in fp32 over padded rows, beside delta and a copy of lse. The gradients of
        # grouped keys are first computed for every query head.
        padded_rows = sizes.lanes * round_up(sizes.extent.max_queries, 128)
        internal = padded_rows * (round_up(shape.head_dim, 32) + 2) * 4 + _CUDNN_BYTES
        if sizes.shared > 1:
            internal += sizes.shared_key_rows * (shape.head_dim + shape.value_dim) * sizes.item
        inside = copies + internal + sizes.aligned_bias_bytes
        inside += _lengthened_bytes(sizes, extent, _WHOLE_TILE, backward=True)
        return sizes.backward_bytes(inside)


def _lengthened_bytes(sizes: RectangleSizes, extent: Extent, least: int, *, backward: bool) -> int:
    """Bytes of copies of rows and of a mask that are made ``least`` long because they are shorter.

    The rows of a large extent may be short as well. They take less than its longest ones, unless
    these are hardly longer than ``least``.

    Args:
        sizes: of the longest call, in which all rows have at least ``least`` tokens.
        extent: the same without that.
    """
    shape = sizes.call
    numbers = 0
    inside = 0
    if extent.max_queries < 2 * least:
        # Query; in a backward output, its gradient, and the statistics twice.
        numbers += sizes.lanes * least * shape.head_dim
        if backward:
            numbers += sizes.lanes * least * 2 * shape.value_dim
            inside += sizes.lanes * least * 2 * sizes.work
    if extent.max_keys < 2 * least:
        key_lanes = sizes.extent.batch * sizes.extent.key_heads
        numbers += key_lanes * least * (shape.head_dim + shape.value_dim)
    if numbers:
        inside += numbers * sizes.item + 2 * sizes.aligned_bias_bytes
    return inside


def _padded(call: Call, least: tuple[int, int]) -> tuple[Three, torch.Tensor | None]:
    """Query, key and value with at least so many rows, and the mask as cuDNN needs it."""
    query, key, bias = call.query, call.key, call.bias
    bias = bias_for_padding(bias, query, key.shape[2], least, call.is_causal)
    key = repeat_last(key, least[1])
    mask = None if bias is None else aligned_bias(bias, key.shape[2])
    return (repeat_last(query, least[0]), key, pad_rows(call.value, least[1])), mask


def _backward_least(queries: int, keys: int, causal: bool) -> tuple[int, int]:
    """The numbers of queries and keys that a rectangle is padded to for a backward, at least."""
    if keys > _SHORTEST:
        return _SHORTEST, keys
    # A causal rectangle is a square and has to stay one.
    return _WHOLE_TILE if causal else _SHORTEST, _WHOLE_TILE


def _whole_tiles(rows: int) -> int:
    return max(_TILE_ROWS, rows // _TILE_ROWS * _TILE_ROWS)


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


# --- torch's operator for CPUs --------------------------------------------------------------------

# Rows that are not finite are computed again so many at a time, by tiles of these limits.
_MENDED = reference.TileLimits(1 << 15, 64, 128)

MEND_WORKSPACE_BYTES = 1 << 20
"""Upper bound of the bytes ``mend_odd_rows_`` allocates at any one time, besides its results of
``_MENDED.rows`` rows of every head, and ``MEND_ROW_BYTES`` for each row of all."""

MEND_ROW_BYTES = 3


def mend_odd_rows_(out: torch.Tensor, lse: torch.Tensor, call: Call) -> None:
    """Correct, in place, the rows that have NaN, infinite or no scores.

    A row with a score of NaN or +inf has to be NaN; a row whose scores are all -inf has to be 0
    with lse -inf. torch's CPU operator differs: among few keys it ignores NaN when it looks for the
    maximum, it returns 0 with lse 0 if there is no maximum, and its 16-bit exponential turns NaN
    into 0. In all these rows lse is 0, NaN or infinite; nothing else of the other rows is read.

    Args:
        out: (b, h, lq, dv), as the operator returned it.
        lse: (b, h, lq), as the operator returned it; rows with -inf are right already.
        call: the operator's arguments.
    """
    odd = lse.isfinite().logical_not_().logical_or_(lse == 0.0).logical_and_(lse != -torch.inf)
    blocks = odd.flatten(0, 1).any(0).nonzero().flatten() // _MENDED.rows
    for start in (blocks.unique() * _MENDED.rows).tolist():
        r = Rectangle(start, min(start + _MENDED.rows, lse.shape[2]), 0, call.key.shape[2])
        at = (slice(None), slice(None), slice(start, r.query_stop))

        def kept(block: reference.QueryBlock, keys: slice, start: int = start) -> torch.Tensor:
            queries = torch.arange(start + block.rows.start, start + block.rows.stop)
            return torch.arange(keys.start, keys.stop) <= queries.unsqueeze(-1)

        changes = {"causal": False, "bias": part_of(call.bias, r), "stored": out.dtype}
        some = call.mapped(itemgetter(at), as_it_is, **changes)
        transform = reference.ScoreTransform(kept=kept if call.is_causal else None, tiles=_MENDED)
        right, its = reference.TiledKernel(transform).whole_forward(some)
        wrong = odd[at].logical_and_(its.isfinite().logical_not_())
        out[at][wrong], lse[at][wrong] = right[wrong], its[wrong]


_CPU = "_scaled_dot_product_flash_attention_for_cpu"
# As torch's own Python calls it, which takes less time than ``torch.ops``, if it has a name there.
_forward: Any = getattr(torch, _CPU, None) or getattr(torch.ops.aten, _CPU, None)
_backward: Any = getattr(torch.ops.aten, f"{_CPU}_backward").default

# The operator works on tiles of at most this many queries and keys, one tile for each thread.
_TILE_QUERIES = 256
_TILE_KEYS = 512
# Repacked tiles of keys, and repacked rows of values, are rounded up to multiples of this.
_PACKED_SIDE = 64
# Least bytes of a pass: its first call may try the kernel out (kernels/registry.py).
_TRIAL_BYTES = 6 << 20
# The share of the threads that should be busy in a backward.
_BUSY = 0.9


_TILES = reference.TiledKernel()


class CpuKernel(RectangleKernel):
    """torch's tiled CPU attention: fp16, bf16, fp32 and fp64, any head size, masks."""

    name = "cpu"
    rounds_scale = True
    dropout = True
    wide_masks = True
    thread_per_head = True

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return operator_refusal(shape, "cpu", DTYPES)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place; with dropout by the reference."""
        (super().forward if task.dropout is None else _TILES.forward)(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place; with dropout by the reference."""
        (super().backward if task.dropout is None else _TILES.backward)(task, grads)

    def takes_whole(self, shape: CallShape, tokens: int, every: bool) -> bool:
        """Any call: grouped heads go to the operator as views."""
        return True

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.whole_forward``; takes grouped heads, mends rows that are not
        finite."""
        if call.dropout is not None:
            return _TILES.whole_forward(call)
        if call.query.shape[1] != call.key.shape[1]:
            out, lse = grouped_forward(self.whole_forward, call)
            return laid_out_like(out, call.query), lse
        out, lse = self.rectangle_forward(signed(call, self.rounds_scale)[0])
        ones = lse / lse  # NaN where lse is 0, NaN or infinite, as of rows without keys
        if not torch.equal(ones, ones):
            self.clear_dead_rows_(out, lse, call)
            mend_odd_rows_(out, lse, call)
        return laid_out_like(out, call.query), lse

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.whole_backward``; takes grouped heads."""
        if call.dropout is not None:
            return _TILES.whole_backward(call, saved)
        if call.query.shape[1] != call.key.shape[1]:
            return grouped_backward(self.whole_backward, call, saved)
        return super().whole_backward(call, saved)

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        value_dim = call.value.shape[-1]
        three = _of_one_width(call, call.inputs)
        out, lse = _forward(*three, 0.0, call.causal, attn_mask=call.bias, scale=call.scale)
        return (out if out.shape[-1] == value_dim else out[..., :value_dim]), lse

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        head_dim, value_dim = call.query.shape[-1], call.value.shape[-1]
        five = _of_one_width(call, (saved.grad_out, *call.inputs, saved.out))
        dq, dk, dv = _backward(
            *five, saved.lse, 0.0, call.causal, attn_mask=call.bias, scale=call.scale
        )
        if head_dim == value_dim:
            return dq, dk, dv
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]

    def backward_parts(self, batch_and_heads: int) -> int:
        """As many runs of rows as keep all threads busy: each works on whole ones."""
        threads, lanes = torch.get_num_threads(), max(1, batch_and_heads)
        parts = ceil_div(threads, lanes)
        while parts < threads and lanes * parts < _BUSY * threads * ceil_div(
            lanes * parts, threads
        ):
            parts += 1
        return parts

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        if shape.dropout:
            return _TILES.forward_workspace_bytes(shape, extent)
        sizes = _sizes(shape, extent)
        shared = sizes.shared
        width = max(shape.head_dim, shape.value_dim)
        tile_queries, tile_keys = _tile(extent)
        # For each thread: scores, row maxima and sums, and output of one tile. For 16-bit inputs
        # also the probabilities and operands in 16 bits.
        tiles = tile_queries * (tile_keys + 2 + width) * sizes.work
        packed = 0
        if sizes.item == 2:
            tiles += (tile_queries * tile_keys + (tile_queries + tile_keys) * width) * 2
            if "AVX512" in torch.backends.cpu.get_cpu_capability():
                # Here torch may repack all keys and values for the matrix units, once for each
                # head of its call: see ``grouped_forward``.
                by_query_head = shape.is_causal or shape.bias is not None
                packed = extent.batch * (sizes.heads if by_query_head else extent.key_heads)
                packed *= round_up(extent.max_keys, _PACKED_SIDE)
                packed *= (round_up(width, 2) + round_up(width, _PACKED_SIDE)) * 2
        inside = torch.get_num_threads() * tiles + packed
        inside += _pad_bytes(shape, sizes, (width, width), backward=False)
        if extent.direct and shape.head_dim != shape.value_dim:
            # A copy of the output that lies as the query does.
            inside += sizes.rows * shape.value_dim * sizes.item
        if shared > 1:
            # Copies of the queries by group, and of the results in the order of the heads.
            inside += sizes.rows * (2 * width * sizes.item + sizes.work)
        # Weights of the rows; or what finds odd rows, and mends them, one head after the other.
        merging = min(MERGE_WORKSPACE_BYTES, sizes.rows * (3 * sizes.work + 2))
        merging = max(merging, sizes.rows * sizes.work)
        mended = sizes.lanes * min(_MENDED.rows, extent.max_queries)
        mended *= shape.value_dim * (sizes.work + 2 * sizes.item) + 4 * sizes.work
        merging += MEND_WORKSPACE_BYTES + mended + sizes.rows * MEND_ROW_BYTES
        merging += _widened(sizes, sizes.rows * shape.value_dim)
        return max(_TRIAL_BYTES, sizes.forward_bytes(width, inside, merging))

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        if shape.dropout:
            return _TILES.backward_workspace_bytes(shape, extent)
        sizes = _sizes(shape, extent)
        shared = sizes.shared
        width = max(shape.head_dim, shape.value_dim)
        tile_queries, tile_keys = _tile(extent)
        tiles = tile_queries * (2 * tile_keys + 1) * sizes.work
        if sizes.item == 2:
            # Probabilities and their gradients once more in 16 bits, and the reordered operands
            # of a matrix product.
            tiles += 4 * tile_queries * tile_keys * 2
            tiles += (tile_queries + tile_keys) * width * 8
        parts = 1 if shape.bias is not None else self.backward_parts(sizes.lanes)
        gradients = (sizes.rows + 2 * parts * sizes.key_rows) * width * sizes.item
        if shared > 1:
            # Key gradients of every query head before they are summed; copies of the rows by
            # group, and of the results in the order of the heads.
            gradients += 2 * sizes.shared_key_rows * width * sizes.item
            gradients += sizes.rows * (4 * width * sizes.item + 2 * sizes.work)
        # The operator copies a grad_out that is not token-major.
        inside = torch.get_num_threads() * tiles + sizes.rows * width * sizes.item
        inside += _pad_bytes(shape, sizes, (width, width), backward=True)
        adding = _widened(sizes, max(sizes.rows, parts * sizes.key_rows) * width)
        return max(_TRIAL_BYTES, sizes.backward_bytes(inside, gradients, adding))


def _of_one_width(call: Call, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors of a call, with zero columns where its head and value dimensions differ."""
    head_dim, value_dim = call.query.shape[-1], call.value.shape[-1]
    if head_dim == value_dim:
        return tensors
    return [pad_last(tensor, max(head_dim, value_dim)) for tensor in tensors]


def _sizes(shape: CallShape, extent: Extent) -> RectangleSizes:
    split = shape.dtype == torch.float32 and not shape.exact_scale
    return RectangleSizes(shape, extent, extent.direct, split)


def _widened(sizes: RectangleSizes, numbers: int) -> int:
    """Bytes to merge or add so many 16-bit ``numbers`` to a state: in blocks (kernels/merge.py)."""
    if sizes.item == sizes.work:
        return 0
    return min(MERGE_WORKSPACE_BYTES, 3 * numbers * sizes.work)


def _tile(extent: Extent) -> tuple[int, int]:
    return min(_TILE_QUERIES, extent.max_queries), min(_TILE_KEYS, extent.max_keys)


# Grouped heads, without expanding keys.
#
# In a forward without a causal mask, the query heads that share a key/value head become further
# rows of one head. Otherwise each key/value head becomes a batch entry: the query heads of its
# group are the entry's heads, and all of them read its keys through a stride of 0. Where (batch,
# key heads) cannot become one dimension without a copy, batch entries run one after the other.


def grouped_forward(
    run: Callable[[Call], tuple[torch.Tensor, torch.Tensor]], call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` of a call with fewer key heads than query heads, by calls with as many."""
    query, key, bias = call.query, call.key, call.bias
    batch, key_heads = key.shape[:2]
    if not call.causal and (bias is None or bias.shape[1:3] == (1, 1)):
        rows = query.reshape(batch, key_heads, -1, query.shape[-1])
        out, lse = run(replace(call, query=rows))
    elif (grouped := _by_group(call)) is not None:
        out, lse = run(grouped)
    else:
        parts = [grouped_forward(run, one) for _, one in _entries(call)]
        out, lse = (torch.cat(some) for some in zip(*parts, strict=True))
    return out.reshape(*query.shape[:-1], -1), lse.reshape(query.shape[:-1])


def grouped_backward(run: Callable[[Call, Saved], Three], call: Call, saved: Saved) -> Three:
    """The gradients of query, key and value, summed over the query heads that share a key head."""
    grouped = _by_group(call)
    if grouped is None:
        parts = [grouped_backward(run, one, saved.mapped(pick)) for pick, one in _entries(call)]
        dq, dk, dv = (torch.cat(some) for some in zip(*parts, strict=True))
        return dq, dk, dv
    lanes = grouped.query.shape[:2]
    dq, dk, dv = run(grouped, saved.mapped(lambda rows: rows.reshape(*lanes, *rows.shape[2:])))
    shapes = (t.shape for t in call.inputs)
    return dq.reshape(next(shapes)), dk.sum(1).view(next(shapes)), dv.sum(1).view(next(shapes))


def _entries(call: Call) -> Iterator[tuple[Pick, Call]]:
    """Each batch entry, and what selects it."""
    for entry in range(call.key.shape[0]):
        pick, bias = itemgetter(slice(entry, entry + 1)), call.bias
        bias = bias if bias is None or bias.shape[0] == 1 else pick(bias)
        yield pick, call.mapped(pick, pick, bias=bias)


def _by_group(call: Call) -> Call | None:
    """Each key head as a batch entry, whose heads are the query heads of its group; None where that
    takes a copy."""
    (batch, key_heads), heads, bias = call.key.shape[:2], call.query.shape[1], call.bias
    lanes = batch * key_heads, heads // key_heads
    try:
        if bias is not None and bias.shape[:2] != (1, 1):
            bias = bias.expand(batch, heads, -1, -1).view(*lanes, *bias.shape[2:])
        return call.mapped(
            lambda tensor: tensor.view(*lanes, *tensor.shape[2:]),
            lambda tensor: tensor.view(lanes[0], 1, *tensor.shape[2:]).expand(*lanes, -1, -1),
            bias=bias,
        )
    except RuntimeError:
        return None
