"""Rectangles on torch's operator for CPUs; with dropout tile by tile by the reference
instead."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from quorum_attention.arithmetic import ceil_div, round_up
from quorum_attention.kernels.call_shape import DTYPES, CallShape, Extent
from quorum_attention.kernels.grouped_heads import group_rows
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.odd_rows import mend_odd_rows_, mending_bytes
from quorum_attention.kernels.operator_call import Call, OutLse, Saved, Three
from quorum_attention.kernels.operator_inputs import operator_refusal
from quorum_attention.kernels.operator_sizes import OperatorSizes, bias_bytes
from quorum_attention.kernels.padding import pad_last
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.result_layout import laid_out_like
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

_OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
# As torch's own Python calls it, which takes less time than ``torch.ops``, if it has a
# name there.
_forward: Any = getattr(torch, _OPERATOR, None) or getattr(
    torch.ops.aten, _OPERATOR, None
)
_backward: Any = getattr(torch.ops.aten, f"{_OPERATOR}_backward").default

# The operator works on tiles of at most this many queries and keys, one tile for each
# thread.
_TILE_QUERIES = 256
_TILE_KEYS = 512
# Repacked tiles of keys, and repacked rows of values, are rounded up to multiples of
# this.
_PACKED_SIDE = 64
# Least bytes of a pass: its first call may try the kernel out (kernels/probing.py).
_TRIAL_BYTES = 6 << 20
# The share of the threads that should be busy in a backward.
_BUSY_THREADS = 0.9
_FP32_BYTES = 4
# The operator takes grouped heads from this version on.
_TAKES_GROUPS = torch.__version__ >= "2.9"
# The operator adds the gradients of keys up in the inputs' dtype, one addition for each
# tile of at least this many queries.
_SUMMED_QUERIES = 32
# With more additions the operator's sum over a group is less exact than a sum over the
# sums of its heads.
_MOST_SUMMED_ROWS = 16 * _SUMMED_QUERIES
_WITH_DROPOUT = TiledKernel()


class CpuKernel(RectangleKernel):
    """torch's tiled CPU attention: fp16, bf16, fp32 and fp64, any head size, masks."""

    name = "cpu"
    splits_fp32_scale = True
    dropout = True
    wide_masks = True
    thread_per_head = True
    regroups = True
    most_group_rows = _SUMMED_QUERIES

    def refusal(self, shape: CallShape) -> str | None:
        """Return why this kernel cannot run such a call, in words for the user, or
        None."""
        return operator_refusal(shape, "cpu", DTYPES)

    def as_unrounded(self) -> Kernel:
        """Return the kernel that computes in fp32."""
        return _unrounded_kernel()

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place; with dropout by the
        reference."""
        if task.dropout is None:
            super().forward(task, state)
        else:
            _WITH_DROPOUT.forward(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place; with dropout by the
        reference."""
        if task.dropout is None:
            super().backward(task, grads)
        else:
            _WITH_DROPOUT.backward(task, grads)

    def whole_forward(self, call: Call) -> OutLse:
        """See ``RectangleKernel.whole_forward``."""
        if call.dropout is not None:
            return _WITH_DROPOUT.whole_forward(call)
        out, lse = super().whole_forward(call)
        return laid_out_like(out, call.query), lse

    def clear_dead_rows_(
        self, out: torch.Tensor, lse: torch.Tensor, call: Call
    ) -> None:
        """See ``RectangleKernel.clear_dead_rows_``; mends rows that are not finite,
        too."""
        ones = lse / lse  # NaN where lse is 0, NaN or infinite, as of rows without keys
        if not torch.equal(ones, ones):
            super().clear_dead_rows_(out, lse, call)
            mend_odd_rows_(out, lse, call)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.whole_backward``."""
        if call.dropout is not None:
            return _WITH_DROPOUT.whole_backward(call, saved)
        return super().whole_backward(call, saved)

    def takes_groups(self, call: Call, *, backward: bool) -> bool:
        """See ``RectangleKernel.takes_groups``.

        A forward without a causal mask is faster where the operator reads a key once
        for all rows of a group. A backward of 16 bits is more exact where gradients are
        not summed by the operator.
        """
        if not _TAKES_GROUPS or call.bias is not None:
            return False
        if not backward:
            return call.is_causal
        is_16_bits = call.query.dtype.itemsize == 2
        return not is_16_bits and group_rows(call) <= _MOST_SUMMED_ROWS

    def rectangle_forward(self, call: Call) -> OutLse:
        """See ``RectangleKernel.rectangle_forward``."""
        value_dim = call.value.shape[-1]
        out, lse = _forward(
            *_inputs_of_one_width(call),
            0.0,  # dropout
            call.causal,
            attn_mask=call.bias,
            scale=call.scale,
        )
        if out.shape[-1] != value_dim:
            out = out[..., :value_dim]
        return out, lse

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        head_dim = call.query.shape[-1]
        value_dim = call.value.shape[-1]
        query, key, value = _inputs_of_one_width(call)
        width = query.shape[-1]
        grad_query, grad_key, grad_value = _backward(
            pad_last(saved.grad_out, width),
            query,
            key,
            value,
            pad_last(saved.out, width),
            saved.lse,
            0.0,  # dropout
            call.causal,
            attn_mask=call.bias,
            scale=call.scale,
        )
        if head_dim == value_dim:
            return grad_query, grad_key, grad_value
        return (
            grad_query[..., :head_dim],
            grad_key[..., :head_dim],
            grad_value[..., :value_dim],
        )

    def backward_parts(self, batch_and_heads: int) -> int:
        """Return as many runs of rows as keep all threads busy: each works on whole
        runs."""
        threads = torch.get_num_threads()
        parts = ceil_div(threads, batch_and_heads)
        while (
            parts < threads
            and _busy_share(batch_and_heads * parts, threads) < _BUSY_THREADS
        ):
            parts += 1
        return parts

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        if shape.dropout:
            return _WITH_DROPOUT.forward_workspace_bytes(shape, extent)
        sizes = _sizes(shape, extent)
        width = shape.width
        inside = torch.get_num_threads() * _forward_tile_bytes(sizes)
        inside += _repacked_bytes(sizes)
        inside += _padded_bytes(sizes, n_outputs=0)
        if extent.direct and shape.head_dim != shape.value_dim:
            # A copy of the output that lies as the query does.
            inside += sizes.rows * shape.value_dim * sizes.itemsize
        if sizes.group > 1:
            # Copies of the queries by group, and of the results in the order of the
            # heads.
            inside += sizes.rows * (2 * width * sizes.itemsize + sizes.state_itemsize)
        # Weights of the rows; or what finds odd rows, and mends them, one head after
        # the other.
        lse_bytes = sizes.rows * sizes.state_itemsize
        weights = min(MERGE_WORKSPACE_BYTES, 3 * lse_bytes + 2 * sizes.rows)
        merging = max(weights, lse_bytes)
        merging += mending_bytes(sizes)
        merging += _widened_bytes(sizes, sizes.rows * shape.value_dim)
        nbytes = sizes.forward_bytes(width, inside, merging)
        return max(_TRIAL_BYTES, nbytes)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        if shape.dropout:
            return _WITH_DROPOUT.backward_workspace_bytes(shape, extent)
        sizes = _sizes(shape, extent)
        width = shape.width
        row_bytes = width * sizes.itemsize
        parts = 1 if shape.bias is not None else self.backward_parts(sizes.lanes)
        part_key_rows = parts * sizes.key_rows
        gradients = (sizes.rows + 2 * part_key_rows) * row_bytes
        if sizes.group > 1:
            # Key gradients of every query head before they are summed; copies of the
            # rows by group, and of the results in the order of the heads.
            gradients += 2 * sizes.expanded_key_rows * row_bytes
            gradients += sizes.rows * (4 * row_bytes + 2 * sizes.state_itemsize)
        inside = torch.get_num_threads() * _backward_tile_bytes(sizes)
        inside += (
            sizes.rows * row_bytes
        )  # the operator copies a grad_out that is not token-major
        inside += _padded_bytes(sizes, n_outputs=2)
        most_rows = max(sizes.rows, part_key_rows)
        adding = _widened_bytes(sizes, most_rows * width)
        nbytes = sizes.backward_bytes(inside, gradients, adding)
        return max(_TRIAL_BYTES, nbytes)


class UnroundedCpuKernel(CpuKernel):
    """The kernel ``cpu`` with 16-bit inputs as fp32, so that no output is rounded.

    The operator returns outputs in the inputs' dtype, so its calls get copies of the
    inputs in fp32. These are exact, and so are delta and the gradients, which are
    rounded once.
    """

    scaled_backward = frozenset()
    fp32_products = True
    wide_out = True
    reads_wide_out = True

    def as_unrounded(self) -> UnroundedCpuKernel:
        """Return this kernel."""
        return self

    def whole_forward(self, call: Call) -> OutLse:
        """See ``Kernel.whole_forward``; the output is in fp32."""
        return super().whole_forward(_in_fp32(call))

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel.whole_backward``; gradients are in fp32."""
        saved_in_fp32 = Saved(
            saved.grad_out.float(),
            saved.out.float(),
            saved.lse,
        )
        return super().whole_backward(_in_fp32(call), saved_in_fp32)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        computing = super().forward_workspace_bytes(_as_fp32(shape), extent)
        return computing + _copied_bytes(shape, extent)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        computing = super().backward_workspace_bytes(_as_fp32(shape), extent)
        copies = _copied_bytes(shape, extent)
        upstream = extent.rows * shape.value_dim * _FP32_BYTES
        return computing + copies + 2 * upstream


@cache
def _unrounded_kernel() -> UnroundedCpuKernel:
    """Return the one kernel, which caches what is found out about it."""
    return UnroundedCpuKernel()


def _inputs_of_one_width(call: Call) -> Three:
    """Return query, key and value, the narrower ones padded to the width of the
    others."""
    query, key, value = call.inputs
    head_dim = query.shape[-1]
    value_dim = value.shape[-1]
    if head_dim == value_dim:
        return query, key, value
    width = max(head_dim, value_dim)
    return (
        pad_last(query, width),
        _pad_last_once(key, width),
        _pad_last_once(value, width),
    )


def _pad_last_once(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``tensor`` (b, h, n, d) with zero columns up to ``width``. Heads that are
    one and the same by a stride of 0 are padded once, and are one and the same
    again."""
    heads = tensor.shape[1]
    if heads < 2 or tensor.stride(1) != 0:
        return pad_last(tensor, width)
    padded = pad_last(tensor[:, :1], width)
    return padded.expand(-1, heads, -1, -1)


def _busy_share(tasks: int, threads: int) -> float:
    """Return the share of the threads that are busy if each works on whole tasks."""
    return tasks / (threads * ceil_div(tasks, threads))


def _sizes(shape: CallShape, extent: Extent) -> OperatorSizes:
    splits_scale = shape.dtype == torch.float32 and not shape.exact_scale
    return OperatorSizes(
        shape, extent, grouped=extent.direct, splits_scale=splits_scale
    )


def _tile_queries(sizes: OperatorSizes) -> int:
    """Return the most query rows of a tile. Those of a group may be rows of one
    head."""
    return min(_TILE_QUERIES, sizes.group * sizes.extent.max_queries)


def _forward_tile_bytes(sizes: OperatorSizes) -> int:
    """Return the bytes of a forward's temporaries of one thread."""
    queries = _tile_queries(sizes)
    keys = min(_TILE_KEYS, sizes.extent.max_keys)
    width = sizes.shape.width
    # Scores, row maxima and sums, and output.
    nbytes = queries * (keys + 2 + width) * sizes.state_itemsize
    if sizes.itemsize == 2:
        # The probabilities and operands in 16 bits.
        nbytes += (queries * keys + (queries + keys) * width) * 2
    return nbytes


def _backward_tile_bytes(sizes: OperatorSizes) -> int:
    """Return the bytes of a backward's temporaries of one thread."""
    queries = _tile_queries(sizes)
    keys = min(_TILE_KEYS, sizes.extent.max_keys)
    width = sizes.shape.width
    nbytes = queries * (2 * keys + 1) * sizes.state_itemsize
    if sizes.itemsize == 2:
        # Probabilities and their gradients once more in 16 bits, and the reordered
        # operands of a matrix product.
        nbytes += 4 * queries * keys * 2
        nbytes += (queries + keys) * width * 8
    return nbytes


def _repacked_bytes(sizes: OperatorSizes) -> int:
    """Return the bytes of all keys and values of 16 bits that a forward may repack for
    the matrix units, once for each head of its call (kernels/grouped_heads.py)."""
    if sizes.itemsize != 2 or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return 0
    shape = sizes.shape
    width = shape.width
    by_query_head = shape.is_causal or shape.bias is not None
    lanes = sizes.lanes if by_query_head else sizes.extent.key_lanes
    rows = lanes * round_up(sizes.extent.max_keys, _PACKED_SIDE)
    return rows * (round_up(width, 2) + round_up(width, _PACKED_SIDE)) * 2


def _padded_bytes(sizes: OperatorSizes, n_outputs: int) -> int:
    """Return the bytes of inputs, and of so many outputs, that are padded to one
    width."""
    shape = sizes.shape
    width = shape.width
    rows = 0
    if shape.head_dim < width:
        rows += sizes.rows + sizes.key_rows  # query and key
    if shape.value_dim < width:
        rows += n_outputs * sizes.rows + sizes.key_rows  # out and grad_out; value
    return rows * width * sizes.itemsize


def _widened_bytes(sizes: OperatorSizes, numbers: int) -> int:
    """Return the bytes to merge or add 16-bit ``numbers`` to a state: in blocks
    (kernels/merge.py)."""
    if sizes.itemsize == sizes.state_itemsize:
        return 0
    return min(MERGE_WORKSPACE_BYTES, 3 * numbers * sizes.state_itemsize)


def _in_fp32(call: Call) -> Call:
    """Return a call with copies of its 16-bit tensors in fp32."""
    bias = call.bias
    if bias is not None:
        bias = bias.float()
    as_fp32 = torch.Tensor.float
    return call.mapped(as_fp32, as_fp32, bias=bias)


def _as_fp32(shape: CallShape) -> CallShape:
    """Return the shape of the copied call."""
    return replace(shape, dtype=torch.float32)


def _copied_bytes(shape: CallShape, extent: Extent) -> int:
    """Return the bytes of the copies of query, key, value and bias."""
    key_width = shape.head_dim + shape.value_dim
    numbers = extent.rows * shape.head_dim
    numbers += extent.key_rows * key_width
    return numbers * _FP32_BYTES + bias_bytes(shape, extent)
