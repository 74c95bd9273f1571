"""Rectangles on torch's memory-efficient attention (CUTLASS), for NVIDIA GPUs."""

from __future__ import annotations

import torch

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.dead_rows import BASE_TWO_LOWEST
from quorum_attention.kernels.limits import GRID_BLOCKS, INT32, CallLimits
from quorum_attention.kernels.operator_call import Call, Four, OutLse, Saved, Three
from quorum_attention.kernels.operator_inputs import (
    HALF_DTYPES,
    operator_refusal,
    small_scale_refusal,
    with_positive_scale,
)
from quorum_attention.kernels.operator_layout import (
    aligned_bias,
    token_major,
    zero_unit_strides,
)
from quorum_attention.kernels.operator_sizes import OperatorSizes
from quorum_attention.kernels.padding import pad_last
from quorum_attention.kernels.rectangles import RectangleKernel

_ROW_UNIT_BYTES = 16
_TILE_ROWS = 128
# Heads of at most this width are computed in square tiles of this size. Gradients of
# keys and values take no memory beside the results (torch's kernel_backward.h).
_NARROW = 64
_LSE_ROWS = 32
_FP32_BYTES = 4


class EfficientKernel(RectangleKernel):
    """torch's memory-efficient attention: 16-bit and fp32 inputs, masks, any head
    dimension.

    Head dimensions that are not a multiple of 16 bytes are padded with zero columns.
    """

    name = "efficient"
    lowest_score = BASE_TWO_LOWEST
    # Before mid-2026 it returned wrong results, without an error, for masks longer than
    # 65,536.
    masked_limit: int = 32_768
    row_unit = _LSE_ROWS
    regroups = True
    # Beyond these elements of an entry it read and wrote outside its memory. More
    # entries it cuts by itself, but not where keys have a stride of 0.
    forward_limits = backward_limits = CallLimits(
        entries=GRID_BLOCKS,
        heads=GRID_BLOCKS,
        query_elements=INT32,
        key_elements=INT32,
        scope="entry",
    )

    def refusal(self, shape: CallShape) -> str | None:
        """Return why this kernel cannot run such a call, in words for the user, or
        None."""
        reason = operator_refusal(shape, "cuda", (*HALF_DTYPES, torch.float32))
        return reason or small_scale_refusal(shape)

    def rectangle_forward(self, call: Call) -> OutLse:
        """See ``RectangleKernel.rectangle_forward``."""
        results = torch.ops.aten._scaled_dot_product_efficient_attention(
            *_readable_inputs(call),
            _expanded_bias(call),
            True,  # compute lse
            0.0,  # dropout
            call.is_causal,
            scale=call.scale,
        )
        out, lse = results[:2]
        return _first(out, call.value.shape[-1]), _first(lse, call.query.shape[2])

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        grad_query, grad_key, grad_value, _ = _gradients(call, saved)
        return grad_query, grad_key, grad_value

    def gives_bias_gradient(self, shape: CallShape) -> bool:
        """See ``Kernel.gives_bias_gradient``. The gradient of a bias is in the inputs'
        dtype: in fp16 it might overflow, and fp32 products may be rounded."""
        return (
            shape.dtype == torch.bfloat16
            and not shape.is_causal
            and shape.heads == shape.kv_heads
            and not self.is_cut(shape)
        )

    def whole_backward_with_bias(self, call: Call, saved: Saved) -> Four:
        """See ``Kernel.whole_backward_with_bias``."""
        scaled_call, query_factor = with_positive_scale(call)
        grad_query, grad_key, grad_value, grad_bias = _gradients(
            scaled_call, saved, of_bias=True
        )
        if query_factor != 1:
            grad_query.mul_(query_factor)
        return grad_query, grad_key, grad_value, grad_bias

    def _sizes(self, shape: CallShape, extent: Extent) -> OperatorSizes:
        if shape.bias is not None:
            extent = extent.with_sides_within(high=self.masked_limit)
        # A mask's parts run all heads together, too, by a copy that is grouped.
        grouped = extent.direct or self.grouped
        return OperatorSizes(shape, extent, grouped=grouped, limits=self.forward_limits)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = self._sizes(shape, extent)
        head_dim = _padded_dim(shape.head_dim, sizes.itemsize)
        value_dim = _padded_dim(shape.value_dim, sizes.itemsize)
        inside = _input_copies_bytes(sizes)
        if sizes.itemsize == 2 and value_dim > 64:
            inside += (
                sizes.rows * value_dim * _FP32_BYTES
            )  # the output is summed in fp32
        inside += sizes.lanes * _LSE_ROWS * _FP32_BYTES
        if sizes.group > 1:
            # The query with the rows of a group as those of a head; and the output of
            # all calls in the order of the query's rows.
            numbers = sizes.rows * (head_dim + 2 * value_dim)
            inside += numbers * sizes.itemsize
        return sizes.forward_bytes(value_dim, inside)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = self._sizes(shape, extent)
        head_dim = _padded_dim(shape.head_dim, sizes.itemsize)
        value_dim = _padded_dim(shape.value_dim, sizes.itemsize)
        grad_query = sizes.rows * head_dim
        grad_key_and_value = sizes.expanded_key_rows * (head_dim + value_dim)
        gradients = (grad_query + grad_key_and_value) * sizes.itemsize
        inside = _input_copies_bytes(sizes)
        outputs = 2 * sizes.rows * value_dim * sizes.itemsize  # grad_out and out
        if value_dim != shape.value_dim:
            inside += outputs  # padded
        inside += outputs  # token-major
        inside += (
            sizes.lanes * round_up(sizes.extent.max_queries, _LSE_ROWS) * 8
        )  # lse, padded
        if sizes.itemsize == _FP32_BYTES:
            inside += sizes.rows * (value_dim + 2) * _FP32_BYTES  # delta, out of place
        inside += self._fp32_sums_bytes(sizes, head_dim, value_dim)
        if sizes.group > 1:
            # Output and its gradient in the order of the call; the gradients with a key
            # for every query head beside their sums, of a part and of all.
            key_rows = extent.lanes * extent.max_keys
            numbers = extent.rows * (head_dim + 2 * value_dim)
            numbers += key_rows * (head_dim + value_dim)
            inside += 2 * numbers * sizes.itemsize
        return sizes.backward_bytes(inside, gradients)

    def _fp32_sums_bytes(
        self, sizes: OperatorSizes, head_dim: int, value_dim: int
    ) -> int:
        """Return the bytes of gradients that are summed in fp32."""
        queries = sizes.extent.max_queries
        keys = sizes.extent.max_keys
        lanes = sizes.lanes
        width = max(head_dim, value_dim)
        if width <= _NARROW:
            # The gradient of queries, with four numbers of a lock for each tile.
            n_tiles = ceil_div(queries, _NARROW)
            return lanes * n_tiles * (_NARROW * _NARROW + 4) * _FP32_BYTES
        # The gradient of queries, of all query tiles.
        numbers = round_up(queries, _TILE_ROWS) * round_up(head_dim, 128)
        if sizes.itemsize == 2 and width > 128:
            # The gradients of key and value are too wide for registers: a copy for each
            # split of the keys.
            splits = max(1, min(ceil_div(keys, 64), 200 // lanes))
            if torch.are_deterministic_algorithms_enabled():
                splits = 1
            columns = round_up(head_dim, 128) + round_up(value_dim, 128)
            numbers += splits * round_up(keys, _TILE_ROWS) * columns
        return lanes * (numbers + 4096) * _FP32_BYTES


def _padded_dim(width: int, itemsize: int) -> int:
    return round_up(width, _ROW_UNIT_BYTES // itemsize)


def _with_whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with its rows padded to multiples of 16 bytes."""
    width = tensor.shape[-1]
    unit = _ROW_UNIT_BYTES // tensor.element_size()
    return tensor if width % unit == 0 else pad_last(tensor, round_up(width, unit))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as the operator reads it."""
    return zero_unit_strides(_with_whole_rows(tensor))


def _readable_inputs(call: Call) -> Three:
    """Return query, key and value as the operator reads them: its offsets of heads, and
    of keys within an entry, have 32 bits."""
    query = call.query
    last_head = query.shape[1] - 1
    if last_head * query.stride(1) > INT32:
        query = query.contiguous()
    return (
        _readable(query),
        _readable(_near(call.key)),
        _readable(_near(call.value)),
    )


def _near(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows``, or a copy in one piece where offsets within an entry do not fit
    32 bits."""
    _, heads, n_rows, _ = rows.shape
    _, head_step, row_step, _ = rows.stride()
    offset = (heads - 1) * head_step
    offset += (n_rows - 1) * row_step
    return rows if offset <= INT32 else rows.contiguous()


def _expanded_bias(call: Call) -> torch.Tensor | None:
    if call.bias is None:
        return None
    n_keys = call.key.shape[2]
    bias = aligned_bias(call.bias, n_keys)
    return zero_unit_strides(bias.expand(*call.query.shape[:3], n_keys))


def _padded_lse(lse: torch.Tensor) -> torch.Tensor:
    """Return lse at an address that the operator can read, with rows past the end as
    its forward has them: +inf, because exp(s - inf) = 0."""
    missing = -lse.shape[-1] % _LSE_ROWS
    if missing > 0:
        return torch.constant_pad_nd(lse, (0, missing), torch.inf)
    if lse.data_ptr() % _ROW_UNIT_BYTES == 0:
        return lse.contiguous()
    # The operator reads four numbers at a time, and rows of a part begin anywhere.
    return lse.clone(memory_format=torch.contiguous_format)


def _input_copies_bytes(sizes: OperatorSizes) -> int:
    """Return the bytes of copies of query, key, value and bias."""
    shape = sizes.shape
    head_dim = _padded_dim(shape.head_dim, sizes.itemsize)
    value_dim = _padded_dim(shape.value_dim, sizes.itemsize)
    numbers = 0
    if sizes.is_cut:
        # Heads of a call that was cut may lie side by side in rows as far apart as
        # before.
        numbers += sizes.rows * shape.head_dim
        numbers += sizes.expanded_key_rows * shape.kv_width
    if head_dim != shape.head_dim:
        numbers += (sizes.rows + sizes.expanded_key_rows) * head_dim
    if value_dim != shape.value_dim:
        numbers += sizes.expanded_key_rows * value_dim
    return numbers * sizes.itemsize + sizes.aligned_bias_bytes


def _gradients(call: Call, saved: Saved, *, of_bias: bool = False) -> Four:
    """Return the operator's gradients of query, key, value and, if wanted, of the
    bias."""
    query = call.query
    head_dim = query.shape[-1]
    value_dim = call.value.shape[-1]
    if not (saved.out.device == saved.lse.device == query.device):
        # The operator does not look, and reads what is no memory of the GPU's.
        raise RuntimeError(f"out and lse must be on {query.device}")
    # The seed of dropout, which is not read.
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        _readable(saved.grad_out),
        *_readable_inputs(call),
        _expanded_bias(call),
        # Delta is computed with a row stride of heads x dimension, whatever the real
        # one is.
        token_major(_with_whole_rows(saved.out)),
        _padded_lse(saved.lse),
        seed,
        seed,
        0.0,  # dropout
        [True, True, True, of_bias],
        call.is_causal,
        scale=call.scale,
    )
    grad_query, grad_key, grad_value, grad_bias = gradients
    return (
        _first(grad_query, head_dim),
        _first(grad_key, head_dim),
        _first(grad_value, value_dim),
        grad_bias,
    )


def _first(result: torch.Tensor, width: int) -> torch.Tensor:
    """Return the first ``width`` columns of a result, without those that were
    padded."""
    if result.shape[-1] == width:
        return result
    return result[..., :width]
