"""Pairs as a bias: a mask becomes a tensor of 0 and -inf on the device, beside which a
vendor's kernel computes a whole call.

On a GPU that takes one or a few kernel calls, and the host makes no tables of tokens or
blocks. It is for calls whose pairs are few enough: each of them is computed, and takes
an element of the bias, unless all queries keep the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.limits import runs
from quorum_attention.kernels.masked.cell_rows import EntryRun
from quorum_attention.kernels.masked.token_rules import PlaceRule, TokenRules
from quorum_attention.kernels.masked.whole_calls import (
    WholeCallKernel,
    WholeCallPart,
    WholeCallWay,
)
from quorum_attention.kernels.operator_call import Call, four_dims
from quorum_attention.kernels.protocol import Kernel, workspace_bytes
from quorum_attention.kernels.score_tiles import PLAIN
from quorum_attention.mask import Mask

# Most bytes of the bias of one call.
_MOST_BYTES = 64 << 20
# Bytes of a token in the tables of a mask: an id, a place, and whether it is there.
_TOKEN_BYTES = 8 + 8 + 1
# Bytes of a pair while it is tested.
_TEST_BYTES = 3
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class PairBias(WholeCallWay):
    """The bias of a mask.

    Attributes:
        rules: the pairs that the mask keeps.
        is_causal: whether the kernel leaves out the keys after a query's own number, in
            which case the bias does not know of places.
        has_rows: whether queries of an entry keep different keys.
        has_entries: whether batch entries keep different pairs.
    """

    rules: TokenRules
    is_causal: bool
    has_rows: bool
    has_entries: bool

    def shape(self, call_bias: BiasShape | None) -> BiasShape:
        """The shape of the bias, together with that of the call."""
        bias = call_bias or BiasShape(batch=False, heads=False, rows=False)
        return replace(
            bias,
            batch=bias.batch or self.has_entries,
            rows=bias.rows or self.has_rows,
            columns=True,
        )

    def bytes_of_entry(self, shape: CallShape) -> int:
        """Bytes of the bias of a batch entry, together with the call's own."""
        bias = self.shape(shape.bias)
        rows = shape.n_queries if bias.rows else 1
        heads = shape.heads if bias.heads else 1
        return heads * rows * shape.n_keys * shape.bias_dtype.itemsize

    def calls(self, shape: CallShape, n_entries: int) -> int:
        """The number of calls that so many entries are cut into."""
        if not self.shape(shape.bias).batch:
            return 1
        entries_of_a_call = max(1, _MOST_BYTES // self.bytes_of_entry(shape))
        return ceil_div(n_entries, entries_of_a_call)

    def count_pairs(self, shape: CallShape) -> int:
        """See ``WholeCallWay``: all pairs."""
        return shape.batch * shape.n_queries * shape.n_keys

    def parts(self, call: Call, shape: CallShape) -> Iterator[WholeCallPart]:
        """See ``WholeCallWay``: as many entries in all calls as there can be."""
        n_entries = shape.batch
        step = ceil_div(n_entries, self.calls(shape, n_entries))
        for run in runs(slice(0, n_entries), step):
            places = EntryRun(run)
            make_bias = partial(self.bias_of, call, run)
            yield WholeCallPart(places, places, self.is_causal, make_bias)

    def bias_of(self, call: Call, run: slice) -> torch.Tensor:
        """The bias of some entries of a call, with the call's own: (b or 1, h or 1, n
        or 1, m).

        Args:
            run: the entries, counted from the call's first one.
        """
        query = call.query
        entries = slice(call.first_entry + run.start, call.first_entry + run.stop)
        is_kept = self.rules.kept_pairs(
            entries, _ALL, _ALL, query.device, by_places=not self.is_causal
        )
        bias = torch.zeros((), dtype=query.dtype, device=query.device)
        if call.bias is not None:
            bias = four_dims(call.bias)
            if bias.shape[0] > 1:
                bias = bias[run]
        return torch.where(is_kept.unsqueeze(1), bias, -torch.inf)

    def workspace_bytes(
        self, kernel: Kernel, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """See ``WholeCallWay``."""
        largest = replace(shape, n_queries=extent.max_queries, n_keys=extent.max_keys)
        n_calls = self.calls(largest, extent.batch)
        n_entries = ceil_div(extent.batch, n_calls)
        part = replace(extent, batch=n_entries)
        biased = replace(
            shape,
            bias=self.shape(shape.bias),
            is_causal=self.is_causal,
        )
        n_bytes = workspace_bytes(kernel, biased, part, backward=backward)
        n_tokens = extent.max_queries + extent.max_keys
        n_bytes += extent.batch * n_tokens * _TOKEN_BYTES
        tested_rows = extent.max_queries if self.has_rows else 1
        n_bytes += n_entries * tested_rows * extent.max_keys * _TEST_BYTES
        if n_entries < extent.batch:
            n_bytes += _result_bytes(shape, extent)
        return n_bytes


def _result_bytes(shape: CallShape, extent: Extent) -> int:
    """Bytes of the results of a call that is cut."""
    query_rows = extent.rows + 1
    key_rows = extent.key_rows + 1
    # A query's output or gradient, with its lse; the gradients of a key and its value.
    query_width = shape.width + 1
    n_numbers = query_rows * query_width + key_rows * shape.kv_width
    itemsize = max(shape.dtype.itemsize, shape.state_dtype.itemsize)
    return n_numbers * itemsize


@lru_cache(maxsize=64)
def priced_kernel(
    base: Kernel, shape: CallShape, is_causal: bool, has_rows: bool, has_entries: bool
) -> WholeCallKernel:
    """A kernel of an empty mask, with the costs of the masks whose bias has this
    shape."""
    numbers = np.zeros((1, shape.n_queries), np.int64)
    places = PlaceRule(Band(), numbers)
    rules = TokenRules(Mask(), shape.n_keys, places)
    return WholeCallKernel(
        PairBias(rules, is_causal, has_rows, has_entries),
        rules,
        shape,
        base,
        by_blocks=lambda: base,
        scores=PLAIN,
    )
