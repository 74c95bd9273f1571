"""Pairs as a bias: a mask becomes a tensor of 0 and -inf on the device, beside which a vendor's
kernel computes a whole call.

On a GPU that takes one or a few kernel calls, and the host makes no tables of tokens or blocks. It
is for calls whose pairs are few enough: each of them is computed, and takes an element of the bias,
unless all queries keep the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent, state_dtype
from quorum_attention.kernels.masked.token_rules import PlaceRule, TokenRules
from quorum_attention.kernels.masked.whole_calls import WholeCallKernel
from quorum_attention.kernels.operator_call import Call, Saved, Three
from quorum_attention.kernels.operator_inputs import four_dims
from quorum_attention.kernels.operator_layout import empty_in_order_of
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.score_tiles import PLAIN
from quorum_attention.mask import Mask

# Most bytes of the bias of one call.
_MOST_BYTES = 64 << 20
# Bytes of a token in the tables of a mask: an id, a place, and whether it is there.
_TOKEN_BYTES = 8 + 8 + 1
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class PairBias:
    """The bias of a mask.

    Attributes:
        rules: the pairs that the mask keeps.
        is_causal: whether the kernel leaves out the keys after a query's own number, in which case
            the bias does not know of places.
        has_rows: whether queries of an entry keep different keys.
        has_entries: whether batch entries keep different pairs.
    """

    rules: TokenRules
    is_causal: bool
    has_rows: bool
    has_entries: bool

    def shape(self, call_bias: BiasShape | None) -> BiasShape:
        """The shape of the bias, together with that of the call."""
        if call_bias is None:
            return BiasShape(batch=self.has_entries, heads=False, rows=self.has_rows)
        return replace(
            call_bias,
            batch=call_bias.batch or self.has_entries,
            rows=call_bias.rows or self.has_rows,
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
        entries_of_a_call = max(1, _MOST_BYTES // max(1, self.bytes_of_entry(shape)))
        return ceil_div(n_entries, entries_of_a_call)

    def entries_of_calls(self, shape: CallShape, n_entries: int) -> list[slice]:
        """The entries of each call: as many in all of them as there can be."""
        size = ceil_div(n_entries, self.calls(shape, n_entries))
        return [slice(start, start + size) for start in range(0, n_entries, size)]

    def of(self, call: Call) -> torch.Tensor:
        """The bias of a call, with its own: (b or 1, h or 1, n or 1, m)."""
        query = call.query
        entries = slice(call.first_entry, call.first_entry + query.shape[0])
        is_kept = self.rules.kept(entries, _ALL, _ALL, query.device, by_places=not self.is_causal)
        is_kept = is_kept.unsqueeze(1)
        if call.bias is not None:
            return torch.where(is_kept, four_dims(call.bias), -torch.inf)
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        return torch.where(is_kept, zero, -torch.inf)

    def workspace_bytes(
        self, kernel: Kernel, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """Upper bound of the device bytes of a whole call that ``kernel`` computes."""
        largest = replace(shape, n_queries=extent.max_queries, n_keys=extent.max_keys)
        n_entries = ceil_div(extent.batch, self.calls(largest, max(1, extent.batch)))
        inside = replace(extent, batch=n_entries)
        biased = replace(shape, bias=self.shape(shape.bias), is_causal=self.is_causal)
        ask = kernel.backward_workspace_bytes if backward else kernel.forward_workspace_bytes
        n_bytes: int = ask(biased, inside)
        tokens = extent.batch * (extent.max_queries + extent.max_keys)
        tests = n_entries * (extent.max_queries if self.has_rows else 1) * extent.max_keys * 3
        n_bytes += tokens * _TOKEN_BYTES + tests
        if n_entries < extent.batch:
            rows = extent.batch * extent.query_heads * extent.max_queries
            key_rows = extent.batch * extent.key_heads * extent.max_keys
            numbers = rows * (max(shape.head_dim, shape.value_dim) + 1)
            numbers += key_rows * (shape.head_dim + shape.value_dim)
            n_bytes += numbers * max(shape.dtype.itemsize, shape.state_dtype.itemsize)
        return n_bytes


class BiasedKernel(WholeCallKernel):
    """Attention under a mask that becomes a bias; other arguments as of ``WholeCallKernel``."""

    def __init__(self, pair_bias: PairBias, **options: Any) -> None:
        super().__init__(pair_bias.rules, share=1.0, **options)
        self.pair_bias = pair_bias

    def remember_prices(self) -> None:
        """Share what is found out about short calls with kernels of other such masks."""
        bias = self.pair_bias
        self.priced_as = _priced_kernel(
            self.base, self.shape, bias.is_causal, bias.has_rows, bias.has_entries
        )

    def masked_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``WholeCallKernel``."""
        parts = list(self._parts(call))
        if len(parts) == 1:
            return self.base.whole_forward(self._with_bias(call))
        query, dtype = call.query, call.query.dtype
        rows = query.shape[:3]
        width = call.value.shape[-1]
        out = empty_in_order_of(query, (*rows, width), call.stored or dtype)
        lse = torch.empty(rows, dtype=state_dtype(dtype), device=query.device)
        for at, part in parts:
            out[at], lse[at] = self.base.whole_forward(self._with_bias(part))
        return out, lse

    def masked_backward(self, call: Call, saved: Saved) -> Three:
        """See ``WholeCallKernel``."""
        parts = list(self._parts(call))
        if len(parts) == 1:
            return self.base.whole_backward(self._with_bias(call), saved)
        grad_query, grad_key, grad_value = (
            empty_in_order_of(tensor, tensor.shape, call.stored or tensor.dtype)
            for tensor in call.inputs
        )
        for at, part in parts:
            part_saved = saved.mapped(itemgetter(at))
            part_grads = self.base.whole_backward(self._with_bias(part), part_saved)
            grad_query[at].copy_(part_grads[0])
            grad_key[at].copy_(part_grads[1])
            grad_value[at].copy_(part_grads[2])
            del part_grads  # before the next part's are made
        return grad_query, grad_key, grad_value

    def _parts(self, call: Call) -> Iterator[tuple[slice, Call]]:
        """The entries of each kernel call, and the call without the bias of the mask."""
        query, key, value = call.inputs
        call_bias = None if call.bias is None else _shape_of(four_dims(call.bias), query.dtype)
        shape = CallShape(
            query.device.type,
            query.dtype,
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            bias=call_bias,
            n_queries=query.shape[2],
            n_keys=key.shape[2],
        )
        for at in self.pair_bias.entries_of_calls(shape, query.shape[0]):
            bias = call.bias
            if bias is not None and four_dims(bias).shape[0] > 1:
                bias = four_dims(bias)[at]
            part = call.mapped(itemgetter(at), itemgetter(at), bias=bias)
            yield at, replace(part, first_entry=call.first_entry + at.start)

    def _with_bias(self, call: Call) -> Call:
        return replace(call, causal=self.pair_bias.is_causal, bias=self.pair_bias.of(call))

    def masked_workspace_bytes(self, shape: CallShape, extent: Extent, *, backward: bool) -> int:
        """See ``WholeCallKernel``."""
        return self.pair_bias.workspace_bytes(self.base, shape, extent, backward=backward)


def _shape_of(bias: torch.Tensor, dtype: torch.dtype) -> BiasShape:
    """Which dimensions a bias (b or 1, h or 1, n or 1, m or 1) spans."""
    batch, heads, rows, columns = (size > 1 for size in bias.shape)
    return BiasShape(batch, heads, rows, columns, wide=bias.dtype != dtype)


@lru_cache(maxsize=64)
def _priced_kernel(
    base: Kernel, shape: CallShape, is_causal: bool, has_rows: bool, has_entries: bool
) -> BiasedKernel:
    """A kernel of an empty mask, with the costs of the masks whose bias has this shape."""
    places = PlaceRule(Band(), np.zeros((1, shape.n_queries), np.int64))
    rules = TokenRules(Mask(), shape.n_keys, places)
    pair_bias = PairBias(rules, is_causal, has_rows, has_entries)
    return BiasedKernel(pair_bias, shape=shape, base=base, by_blocks=lambda: base, scores=PLAIN)
