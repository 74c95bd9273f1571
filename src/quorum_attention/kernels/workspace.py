"""Sizes of an operator call, from which kernels compute their workspace bounds in bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from quorum_attention.kernels.bias import dead_rows_bytes
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.protocol import CallShape, Extent

SLACK_BYTES = 64 * 1024
"""Bound of what the allocator adds by rounding, for the few tensors alive at once."""

UNSPLIT_BYTES = 1 << 20
"""torch's CUDA caching allocator does not split a large block if less than this would be left: a
tensor may then take this much more."""


SMALL_FACTOR = 2.0**-9
"""Products of fp16's gradients of scores with factors below this may be no normal numbers."""


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not less than ``number``."""
    return -(-number // multiple) * multiple


@functools.cache
def multiprocessors() -> int:
    """Multiprocessors of the largest GPU here; without a GPU, 160, as many as the largest has."""
    if not torch.cuda.is_available():
        return 160
    counts = [
        torch.cuda.get_device_properties(index).multi_processor_count
        for index in range(torch.cuda.device_count())
    ]
    return max(counts, default=160)


@dataclass(frozen=True, slots=True)
class RectangleSizes:
    """Sizes of the largest operator call a kernel makes.

    Attributes:
        heads: query heads of one call.
        item: bytes of an element of the inputs.
        work: bytes of an element of the statistics (4, or 8 for float64).
        bias_bytes: bytes of the mask of one rectangle, as the task hands it over.
        aligned_bias_bytes: bytes of a copy of it from ``aligned_bias``.
        dead_bytes: bytes that ``dead_rows`` takes.
        task_rows: query rows of a whole task, all heads and batch entries together.
        signed_query: whether the queries may be copied to multiply them by a part of the scale.
        lifted: whether the factor is one for which a backward may be given a larger one.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    item: int
    work: int
    bias_bytes: int
    aligned_bias_bytes: int
    dead_bytes: int
    task_rows: int
    signed_query: bool = False
    lifted: bool = False

    @classmethod
    def of(cls, call: CallShape, extent: Extent, grouped: bool) -> RectangleSizes:
        """Sizes of a call; ``grouped``: the operator takes fewer key heads than query heads."""
        heads = extent.query_heads if grouped else extent.key_heads
        item = call.dtype.itemsize
        bias = aligned = dead = 0
        if call.mask is not None:
            bias_batch = extent.batch if call.mask.batch else 1
            bias_heads = extent.query_heads if call.mask.heads else 1
            bias_rows = extent.max_queries if call.mask.rows else 1
            bias_columns = extent.max_keys if call.mask.columns else 1
            bias = bias_batch * bias_heads * bias_rows * bias_columns * item
            columns = round_up(extent.max_keys, max(1, 16 // item))
            aligned = bias_batch * bias_heads * bias_rows * columns * item
            dead = dead_rows_bytes(
                bias_batch, heads, extent.max_queries, extent.max_keys, call.is_causal
            )
        return cls(
            batch=extent.batch,
            heads=heads,
            key_heads=extent.key_heads,
            queries=extent.max_queries,
            keys=extent.max_keys,
            head_dim=call.head_dim,
            value_dim=call.value_dim,
            item=item,
            work=8 if call.dtype == torch.float64 else 4,
            bias_bytes=bias,
            aligned_bias_bytes=aligned,
            dead_bytes=dead,
            task_rows=extent.batch * extent.query_heads * extent.n_tokens,
            signed_query=not call.positive_scale or call.dtype == torch.float64,
            lifted=call.dtype == torch.float16 and not call.exact_scale,
        )

    @property
    def rows(self) -> int:
        """Query rows of one call."""
        return self.batch * self.heads * self.queries

    @property
    def key_rows(self) -> int:
        """Key rows of one call."""
        return self.batch * self.key_heads * self.keys

    @property
    def shared_key_rows(self) -> int:
        """Key rows of one call if every query head had its own."""
        return self.batch * self.heads * self.keys

    @property
    def signed_bytes(self) -> int:
        """Bytes of the queries of one call times a part of its scale (``signed``)."""
        return self.rows * self.head_dim * self.item if self.signed_query else 0

    @property
    def lifted_bytes(self) -> int:
        """Bytes of queries and keys of one call for a larger factor (``RectangleKernel``'s
        ``narrow_factor``), and of their gradients in fp32."""
        numbers = (self.rows + self.key_rows) * self.head_dim
        return numbers * (self.item + 4) if self.lifted else 0

    @property
    def lse_bytes(self) -> int:
        """Bytes of the lse of one call."""
        return self.rows * self.work

    @property
    def shifted_lse_bytes(self) -> int:
        """Bytes of a task's shifted lse, the flags of its empty rows, and two copies for a call."""
        return self.task_rows * (self.work + 1) + 2 * self.rows * self.work


def forward_bytes(
    sizes: RectangleSizes, out_width: int, inside: int, merging: int = MERGE_WORKSPACE_BYTES
) -> int:
    """Bound of a forward whose operator holds ``inside`` bytes until it returns (out, lse), which
    are merged with ``merging`` bytes."""
    results = sizes.rows * out_width * sizes.item + sizes.lse_bytes
    held = sizes.bias_bytes + sizes.signed_bytes + results
    # Temporaries after the operator has returned: rows without keys, merge.
    after = max(sizes.dead_bytes, merging) + sizes.dead_bytes
    return held + max(inside, after) + SLACK_BYTES


def backward_bytes(
    sizes: RectangleSizes, gradients: int, inside: int, adding: int = MERGE_WORKSPACE_BYTES
) -> int:
    """Bound of a backward that returns ``gradients`` bytes and holds ``inside`` until it does, and
    whose gradients are added with ``adding`` bytes."""
    held = sizes.bias_bytes + sizes.signed_bytes + sizes.shifted_lse_bytes + gradients
    return held + max(inside, adding) + SLACK_BYTES
