"""Rectangles on cuDNN's fused attention, by torch's operator, for NVIDIA GPUs."""

from __future__ import annotations

import functools

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.dead_rows import BASE_TWO_LOWEST
from quorum_attention.kernels.limits import GRID_BLOCKS, INT32, CallLimits
from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three
from quorum_attention.kernels.operator_inputs import (
    HALF_DTYPES,
    operator_refusal,
    small_scale_refusal,
)
from quorum_attention.kernels.operator_layout import aligned_bias, in_layout_of
from quorum_attention.kernels.operator_sizes import OperatorSizes, multiprocessors
from quorum_attention.kernels.padding import bias_for_padding, pad_rows, repeat_last
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.task_tensors import TaskTensors
from quorum_attention.kernels.torch_private import no_torch_modes

_TILE_ROWS = 128
_WIDEST_FORWARD = 512
_WIDEST_BACKWARD = 256
_FP32_BYTES = 4
# Bytes that cuDNN allocates internally, independent of the shape (measured, with a
# margin).
_INTERNAL_BYTES = 4 * 1024 * 1024
# With very few queries or keys its backward returns wrong results or crashes the
# process (seen with cuDNN 9.19 at lengths of 1 to 7): shorter rectangles are padded to
# this length.
_SHORTEST = 64
# Its backward works on tiles of this many keys and masks the keys past the end. It does
# not mask them if all real keys lie in the first half of a single tile: the keys past
# the end then have a score of 0, and if 0 is far above a row's lse, the row's gradient
# becomes NaN (seen with 9.19 on 1 to 64 keys, in bf16 below an lse of -88, in fp16
# below -11). So few keys are padded to a tile.
_WHOLE_TILE = 128
# Query rows for each multiprocessor, all heads together, that keep the whole device
# busy.
_FILLING_ROWS = 1024


class CudnnKernel(RectangleKernel):
    """cuDNN's fused attention: 16-bit inputs; takes grouped heads and broadcast masks
    directly."""

    name = "cudnn"
    lowest_score = BASE_TWO_LOWEST
    grouped = True
    row_unit = _TILE_ROWS
    forward_limits = CallLimits(entries=GRID_BLOCKS, heads=GRID_BLOCKS)
    # Beyond these elements of out and grad_out the gradients of query and key were
    # wrong, without an error: by 15 to 70 per cent in the last heads.
    backward_limits = CallLimits(
        entries=GRID_BLOCKS, heads=GRID_BLOCKS, query_elements=INT32
    )

    def refusal(self, shape: CallShape) -> str | None:
        """Return why this kernel cannot run such a call, in words for the user, or
        None."""
        widest = _WIDEST_BACKWARD if shape.needs_grad else _WIDEST_FORWARD
        reason = operator_refusal(shape, "cuda", HALF_DTYPES, widest)
        if reason is not None:
            return reason
        if torch.cuda.is_available() and not torch.backends.cudnn.is_available():
            return "this torch has no cuDNN"
        return small_scale_refusal(shape)

    def rectangle_forward(self, call: Call) -> OutLse:
        """See ``RectangleKernel.rectangle_forward``."""
        n_rows = call.query.shape[2]
        query, key, value, bias = _padded_inputs(call, _SHORTEST, _SHORTEST)
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query,
            key,
            value,
            bias,
            True,  # compute lse
            0.0,  # dropout
            call.is_causal,
            False,  # no debug mask
            scale=call.scale,
        )
        out, lse = results[:2]
        lse = lse.reshape(query.shape[:3])  # some releases have a last dimension of 1
        return out[:, :, :n_rows], lse[:, :, :n_rows]

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        n_rows = call.query.shape[2]
        n_keys = call.key.shape[2]
        least_rows, least_keys = _backward_least(n_rows, n_keys, call.is_causal)
        query, key, value, bias = _padded_inputs(call, least_rows, least_keys)
        out = pad_rows(saved.out, least_rows)
        grad_out = pad_rows(saved.grad_out, least_rows)
        lse = repeat_last(saved.lse, least_rows, -1).contiguous()
        lse_dims, seed_dtype = _forward_template(query.device)
        seed = torch.zeros((), dtype=seed_dtype, device=query.device)
        # torch caches cuDNN's plans by the strides of query, key and value alone. A
        # plan made for other strides of grad_out and out would read the wrong elements.
        gradients: Three = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            in_layout_of(grad_out, query),
            query,
            key,
            value,
            in_layout_of(out, query),
            lse.unsqueeze(-1) if lse_dims == 4 else lse,
            seed,
            seed,
            bias,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,  # dropout
            call.is_causal,
            scale=call.scale,
        )
        grad_query, grad_key, grad_value = gradients
        return (
            grad_query[:, :, :n_rows],
            grad_key[:, :, :n_keys],
            grad_value[:, :, :n_keys],
        )

    def preferred_sizes(
        self, task: TaskTensors, r: Rectangle, backward: bool
    ) -> tuple[int, int]:
        """Return sizes of pieces whose inner loop stays within the L2 cache
        (docs/kernels.md).

        The forward walks all keys for every tile of queries, the backward all queries
        for every tile of keys: if that is more than a third of the cache, the rate
        falls by 5 to 8 %. A rectangle is cut only if its other side alone fills the
        device, because each piece has a start and an end at which the device is partly
        idle.
        """
        query = task.query
        batch, query_heads, _, head_dim = query.shape
        _, key_heads, _, value_dim = task.value.shape
        heads = batch * query_heads
        row_bytes = (head_dim + value_dim) * query.element_size()
        device = torch.cuda.get_device_properties(query.device)
        cache_bytes = int(device.L2_cache_size)
        cached_rows = _whole_tiles(cache_bytes // 3 // row_bytes)
        filling_rows = _FILLING_ROWS * multiprocessors()
        # Heads run one after another, in a backward two at a time.
        n_queries = r.n_queries
        n_keys = r.n_keys
        if not backward and n_queries * heads >= filling_rows:
            n_keys = min(n_keys, cached_rows)
        if backward and n_keys * batch * key_heads >= filling_rows // 2:
            cached_rows = _whole_tiles(cached_rows // min(heads, 2))
            n_queries = min(n_queries, cached_rows)
        return n_queries, n_keys

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        padded_extent = extent.with_sides_within(low=_SHORTEST)
        sizes = OperatorSizes(shape, padded_extent, limits=self.forward_limits)
        inside = _INTERNAL_BYTES + sizes.aligned_bias_bytes
        inside += _lengthened_bytes(sizes, extent, _SHORTEST, backward=False)
        return sizes.forward_bytes(shape.value_dim, inside)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        padded_extent = extent.with_sides_within(low=_WHOLE_TILE)
        sizes = OperatorSizes(shape, padded_extent, limits=self.backward_limits)
        inside = _INTERNAL_BYTES + sizes.aligned_bias_bytes
        inside += _lengthened_bytes(sizes, extent, _WHOLE_TILE, backward=True)
        # Copies of out and grad_out.
        inside += 2 * sizes.rows * shape.value_dim * sizes.itemsize
        # The gradient of queries is summed in fp32 over padded rows, beside delta and a
        # copy of lse.
        padded_rows = sizes.lanes * round_up(sizes.extent.max_queries, _TILE_ROWS)
        row_numbers = round_up(shape.head_dim, 32) + 2
        inside += padded_rows * row_numbers * _FP32_BYTES
        if sizes.group > 1:
            # The gradients of grouped keys and values are first computed for every
            # query head.
            inside += sizes.expanded_key_rows * shape.kv_width * sizes.itemsize
        return sizes.backward_bytes(inside)


def _lengthened_bytes(
    sizes: OperatorSizes, extent: Extent, length: int, *, backward: bool
) -> int:
    """Return the bytes of copies of rows and of a bias that are made ``length`` long
    because they are shorter.

    The rows of a large extent may be short as well. They take less than its longest
    ones, unless these are hardly longer than ``length``.

    Args:
        sizes: of the longest call, in which all rows have at least ``length`` tokens.
        extent: the same without that.
    """
    shape = sizes.shape
    numbers = 0
    statistics = 0
    if extent.max_queries < 2 * length:
        rows = sizes.lanes * length
        numbers += rows * shape.head_dim
        if backward:
            numbers += rows * 2 * shape.value_dim  # the output and its gradient
            statistics += rows * 2
    if extent.max_keys < 2 * length:
        key_rows = sizes.extent.key_lanes * length
        numbers += key_rows * shape.kv_width
    if not numbers:
        return 0
    nbytes = numbers * sizes.itemsize + statistics * sizes.state_itemsize
    return nbytes + 2 * sizes.aligned_bias_bytes


def _padded_inputs(
    call: Call, least_rows: int, least_keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return query, key and value with at least so many rows, and the bias as cuDNN
    needs it."""
    bias = bias_for_padding(call, least_rows, least_keys)
    key = repeat_last(call.key, least_keys)
    if bias is not None:
        bias = aligned_bias(bias, key.shape[2])
    return (
        repeat_last(call.query, least_rows),
        key,
        pad_rows(call.value, least_keys),
        bias,
    )


def _backward_least(queries: int, keys: int, causal: bool) -> tuple[int, int]:
    """Return the least numbers of queries and keys to which a backward's rectangle is
    padded."""
    if keys > _SHORTEST:
        return _SHORTEST, keys
    # A causal rectangle is a square and has to stay one.
    return _WHOLE_TILE if causal else _SHORTEST, _WHOLE_TILE


def _whole_tiles(rows: int) -> int:
    return max(_TILE_ROWS, rows // _TILE_ROWS * _TILE_ROWS)


@functools.cache
def _forward_template(device: torch.device) -> tuple[int, torch.dtype]:
    """Return how many dimensions cuDNN's lse has in this torch, and the dtype of the
    random state.

    Both changed between releases, and the backward requires what the forward returned.
    """
    with no_torch_modes():
        tiny = torch.zeros((1, 1, 64, 64), dtype=torch.float16, device=device)
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(
            tiny, tiny, tiny, None, True, 0.0, False, False
        )
    return results[1].dim(), results[6].dtype
