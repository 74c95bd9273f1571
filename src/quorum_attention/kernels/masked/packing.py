"""Packed calls: tokens that may meet are gathered, and many small groups of them go to
one kernel call.

The groups are ``cells.py``'s. So a key that no query keeps is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from quorum_attention.arithmetic import ceil_div
from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.limits import runs
from quorum_attention.kernels.masked.cells import Bucket, buckets_of
from quorum_attention.kernels.masked.costs import cost_of_packed_calls
from quorum_attention.kernels.masked.packed_calls import packed_part
from quorum_attention.kernels.masked.token_rules import Ids, PlaceRule
from quorum_attention.kernels.masked.whole_calls import WholeCallPart, WholeCallWay
from quorum_attention.kernels.operator_call import Call
from quorum_attention.kernels.protocol import Kernel, workspace_bytes

# Bytes of the tensors of one call: on a CPU a cache's, elsewhere what keeps the device
# busy.
_HOST_BYTES = 8 << 20
_DEVICE_BYTES = 256 << 20
# Most pairs of a cell whose pairs are kept by their positions: they make a mask.
_MOST_PAIRS = 1 << 24
# How much less a packed call has to take.
_CLEARLY = 2


@dataclass(frozen=True, eq=False)
class Packing(WholeCallWay):
    """The cells of a mask.

    Attributes:
        buckets: which hold all cells.
        n_queries, n_keys: of a batch entry.
    """

    buckets: tuple[Bucket, ...]
    n_queries: int
    n_keys: int

    def count_pairs(self, shape: CallShape) -> int:
        """See ``WholeCallWay``: pairs of all cells."""
        return sum(bucket.pairs for bucket in self.buckets)

    @property
    def computed_pairs(self) -> int:
        """Pairs that calls compute, those with copies of tokens among them."""
        return sum(bucket.computed_pairs for bucket in self.buckets)

    @cached_property
    def bias_shapes(self) -> frozenset[BiasShape | None]:
        """The shapes of the biases of kernel calls, each once; None is that of a call
        without."""
        return frozenset(bucket.bias_shape for bucket in self.buckets)

    @property
    def makes_large_masks(self) -> bool:
        """Whether a cell's mask of positions would be large."""
        for bucket in self.buckets:
            n_pairs = bucket.queries.longest * bucket.keys.longest
            if bucket.rule is not None and n_pairs > _MOST_PAIRS:
                return True
        return False

    def count_calls(self, shape: CallShape) -> int:
        """How many kernel calls all cells take."""
        heads = (shape.heads, shape.kv_heads)
        n_calls = 0
        for bucket in self.buckets:
            limit = self.cells_of_a_call(bucket, shape, heads)
            n_calls += ceil_div(len(bucket.entries), limit)
        return n_calls

    def parts(self, call: Call, shape: CallShape) -> Iterator[WholeCallPart]:
        """See ``WholeCallWay``: the cells of the call's entries, as many at a time as
        one kernel call computes."""
        bounds = (call.first_entry, call.first_entry + shape.batch)
        heads = (shape.heads, shape.kv_heads)
        for bucket in self.buckets:
            first, last = np.searchsorted(bucket.entries, bounds).tolist()
            limit = self.cells_of_a_call(bucket, shape, heads)
            for cells in runs(slice(first, last), limit):
                yield packed_part(bucket.part(cells), call)

    def cells_of_a_call(
        self, bucket: Bucket, shape: CallShape, heads: tuple[int, int]
    ) -> int:
        """The most cells of a bucket that are computed at a time."""
        most_bytes = _HOST_BYTES if shape.device_type == "cpu" else _DEVICE_BYTES
        n_cells: int = max(1, most_bytes // bucket.cell_bytes(shape, *heads))
        return n_cells

    def workspace_bytes(
        self, kernel: Kernel, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """See ``WholeCallWay``."""
        largest = 0
        for bucket in self.buckets:
            n_bytes = self._bucket_bytes(bucket, kernel, shape, extent, backward)
            largest = max(largest, n_bytes)
        # Results, and rows that have to be copied to lie one after the other.
        rows = extent.lanes * (self.n_queries + 1)
        key_rows = extent.key_lanes * (self.n_keys + 1)
        row_numbers = shape.head_dim + 3 * shape.value_dim + 1
        key_numbers = 2 * shape.kv_width
        numbers = rows * row_numbers + key_rows * key_numbers
        itemsize = max(shape.dtype.itemsize, shape.state_dtype.itemsize)
        return largest + numbers * itemsize

    def _bucket_bytes(
        self,
        bucket: Bucket,
        kernel: Kernel,
        shape: CallShape,
        extent: Extent,
        backward: bool,
    ) -> int:
        """Bytes of the largest call of a bucket."""
        heads = (extent.query_heads, extent.key_heads)
        limit = self.cells_of_a_call(bucket, shape, heads)
        n_cells = min(limit, bucket.most_cells(extent.batch))
        bias = bucket.bias_shape
        if shape.bias is not None:
            bias = replace(shape.bias, batch=True, rows=True)
        call = replace(shape, bias=bias, is_causal=bucket.causal)
        call_extent = bucket.extent(extent, n_cells)
        computed = workspace_bytes(kernel, call, call_extent, backward=backward)
        gathered = n_cells * bucket.cell_bytes(shape, *heads)
        return gathered + computed


def packing_of(
    by_query: Ids, by_key: Ids, rule: PlaceRule, shape: CallShape, cost: float
) -> Packing | None:
    """The packing of a mask that keeps pairs of equal ids, as far as a rule of
    positions keeps them; None where it would not be clearly cheaper than ``cost``
    (``costs.py``).

    Args:
        by_query, by_key: (1 or batch, n); of keys ``NO_KEY`` in those that no query
            keeps.
    """
    buckets = buckets_of(
        np.broadcast_to(by_query, (shape.batch, shape.n_queries)),
        np.broadcast_to(by_key, (shape.batch, shape.n_keys)),
        rule,
    )
    packing = Packing(buckets, shape.n_queries, shape.n_keys)
    if packing.makes_large_masks:
        return None
    n_calls = packing.count_calls(shape)
    packed_cost = cost_of_packed_calls(n_calls, packing.computed_pairs, shape)
    return packing if packed_cost * _CLEARLY <= cost else None
