"""The sizes of an operator's largest call, from which kernels compute their bounds in
bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.dead_rows import dead_rows_bytes
from quorum_attention.kernels.limits import UNLIMITED, CallLimits, CallSizes, part_sizes
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES

SLACK_BYTES = 64 * 1024
"""Bound of what the allocator adds by rounding, for the few tensors alive at once."""

UNSPLIT_BYTES = 1 << 20
"""torch's CUDA caching allocator does not split a large block if less than this would
be left: a tensor may then take this much more."""

_MULTIPROCESSORS_OF_THE_LARGEST_GPU = 160
# Rows of a bias that is copied by ``operator_layout.aligned_bias`` begin at multiples
# of it.
_BIAS_ROW_BYTES = 16


@cache
def multiprocessors() -> int:
    """Return the multiprocessors of the largest GPU here; without a GPU, those of the
    largest one there is."""
    if not torch.cuda.is_available():
        return _MULTIPROCESSORS_OF_THE_LARGEST_GPU
    counts = [
        torch.cuda.get_device_properties(index).multi_processor_count
        for index in range(torch.cuda.device_count())
    ]
    return max(counts, default=_MULTIPROCESSORS_OF_THE_LARGEST_GPU)


def bias_bytes(shape: CallShape, extent: Extent, row_unit: int = 1) -> int:
    """Return the bytes of the bias of one rectangle.

    Args:
        row_unit: the bytes to a multiple of which its rows are padded.
    """
    bias = shape.bias
    if bias is None:
        return 0
    entries = extent.batch if bias.batch else 1
    heads = extent.query_heads if bias.heads else 1
    rows = extent.max_queries if bias.rows else 1
    columns = extent.max_keys if bias.columns else 1
    row_bytes = round_up(columns * shape.bias_dtype.itemsize, row_unit)
    return entries * heads * rows * row_bytes


class OperatorSizes:
    """The sizes of the largest call a kernel makes of its operator, and bounds of its
    bytes.

    Args:
        shape: the kind of call.
        extent: the sizes of the task, or of the uncut call.
        grouped: whether the operator takes fewer key heads than query heads.
        splits_scale: whether queries are copied to multiply them by a part of the
            scale, whatever the scale is (``operator_inputs.with_positive_scale``).
        limits: what one call may have at most; larger ones are cut into parts.

    Attributes:
        shape: the kind of call.
        extent: the sizes of one call.
        is_cut: whether the task, or the uncut call, is cut into parts within the
            limits.
        group: query heads of one call that share a key head.
        lanes: batch entries times query heads of one call.
        rows: query rows of one call, of all heads.
        key_rows: key rows of one call, of all key heads.
        expanded_key_rows: key rows of one call if every query head had its own.
        itemsize: bytes of an element of the inputs.
        state_itemsize: bytes of an element of the statistics.
        aligned_bias_bytes: bytes of a copy of the bias by
            ``operator_layout.aligned_bias``.
    """

    def __init__(
        self,
        shape: CallShape,
        extent: Extent,
        grouped: bool = True,
        splits_scale: bool = False,
        limits: CallLimits = UNLIMITED,
    ) -> None:
        # Without grouped heads a call has one query head of each group.
        call_extent = (
            extent if grouped else replace(extent, query_heads=extent.key_heads)
        )
        largest = _largest_call(limits, shape, call_extent)
        self.shape = shape
        self.extent = largest
        self.is_cut = largest != call_extent
        self.group = largest.group
        self.lanes = largest.lanes
        self.rows = largest.rows
        self.key_rows = largest.key_rows
        self.expanded_key_rows = largest.lanes * largest.max_keys
        self.itemsize = shape.dtype.itemsize
        self.state_itemsize = shape.state_dtype.itemsize
        self._task_rows = extent.token_rows
        # The results of a call that is cut are all there while its last part runs.
        self._joined_rows = 0
        self._joined_key_rows = 0
        if self.is_cut:
            self._joined_rows = extent.lanes * largest.max_queries
            self._joined_key_rows = extent.key_lanes * largest.max_keys
        self.aligned_bias_bytes = 0
        if shape.bias is not None:
            with_all_columns = replace(shape, bias=replace(shape.bias, columns=True))
            self.aligned_bias_bytes = bias_bytes(
                with_all_columns, extent, _BIAS_ROW_BYTES
            )
        self._held_bytes = SLACK_BYTES + bias_bytes(shape, extent)
        if splits_scale or not shape.positive_scale or shape.dtype == torch.float64:
            # The queries of one call times a part of the scale.
            self._held_bytes += self.rows * shape.head_dim * self.itemsize

    def forward_bytes(
        self, out_width: int, inside: int, merging: int = MERGE_WORKSPACE_BYTES
    ) -> int:
        """Return a bound of the bytes of a forward.

        Args:
            out_width: columns of the output that the operator returns.
            inside: bytes that the operator holds until it returns (out, lse).
            merging: bytes that it takes to merge (out, lse).
        """
        shape = self.shape
        results = self.rows * (out_width * self.itemsize + self.state_itemsize)
        joined_row = shape.value_dim * self.itemsize + self.state_itemsize
        results += self._joined_rows * joined_row
        dead = dead_rows_bytes(shape, self.extent)
        after_the_operator = max(dead, merging) + dead
        return self._held_bytes + results + max(inside, after_the_operator)

    def backward_bytes(
        self,
        inside: int,
        gradients: int | None = None,
        adding: int = MERGE_WORKSPACE_BYTES,
    ) -> int:
        """Return a bound of the bytes of a backward.

        Args:
            inside: bytes that the operator holds until it returns the gradients.
            gradients: bytes of the gradients that it returns; None: they are as wide as
                the inputs.
            adding: bytes that it takes to add them up.
        """
        if gradients is None:
            gradients = self._gradient_bytes(self.rows, self.key_rows)
        gradients += self._gradient_bytes(self._joined_rows, self._joined_key_rows)
        # The shifted lse and the flags of its empty rows.
        shifted_lse = self._task_rows * (self.state_itemsize + 1)
        lse_copies = 2 * self.rows * self.state_itemsize
        results = shifted_lse + lse_copies + gradients
        return self._held_bytes + results + max(inside, adding)

    def _gradient_bytes(self, rows: int, key_rows: int) -> int:
        """Return the bytes of gradients as wide as the inputs."""
        grad_query = rows * self.shape.head_dim
        grad_key_and_value = key_rows * self.shape.kv_width
        return (grad_query + grad_key_and_value) * self.itemsize


def _largest_call(limits: CallLimits, shape: CallShape, extent: Extent) -> Extent:
    """Return the sizes of the largest call that ``limits`` leave of ``extent``."""
    if limits is UNLIMITED:
        return extent
    most_queries, most_keys = limits.rows(shape.width)
    queries = min(extent.max_queries, most_queries)
    keys = min(extent.max_keys, most_keys)
    group = extent.group
    sizes = CallSizes(
        extent.batch,
        extent.key_heads,
        group,
        queries,
        keys,
        shape.width,
    )
    entries, key_heads = part_sizes(limits, sizes)
    return replace(
        extent,
        batch=entries,
        query_heads=key_heads * group,
        key_heads=key_heads,
        max_queries=queries,
        max_keys=keys,
    )
