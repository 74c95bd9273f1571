"""Gradients that several blocks of a call contribute to, and that have to be added up.

These are the gradients of keys and values of a head that is cut, and that of a bias.
They are added up in fp32 (fp64) and rounded once. The rows of a gradient are added in
the order of the blocks, whatever the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.partition import block_of, is_whole
from quorum_attention.devices.shared_files import alloc_shared
from quorum_attention.kernels.call_shape import state_dtype
from quorum_attention.kernels.tensors import NamedTensors


class _KeyHead(NamedTuple):
    """A key/value head of a batch entry."""

    entry: int
    head: int


class _BlockStart(NamedTuple):
    """The first query head and row of a block."""

    head: int
    row: int


@dataclass(slots=True, eq=False)
class _HeadSum:
    """The gradients of the keys and values of one head.

    Attributes:
        totals: the sums so far, (n_keys, width), by name.
        next_start: where the block begins that is added next.
        early: blocks that came before their turn.
    """

    totals: NamedTensors
    next_start: _BlockStart
    early: dict[_BlockStart, tuple[CallBlock, NamedTensors]] = field(
        default_factory=dict
    )

    def add_in_order(self, n_queries: int) -> None:
        """Add all blocks whose turn it is."""
        while self.next_start in self.early:
            block, gradients = self.early.pop(self.next_start)
            for name, total in self.totals.items():
                head_gradient = gradients[name][0, 0]  # (block's n_keys, width)
                total[: block.keys.length] += head_gradient
            if block.rows.stop < n_queries:
                self.next_start = _BlockStart(block.heads.start, block.rows.stop)
            else:
                self.next_start = _BlockStart(block.heads.stop, 0)


class GradientSums:
    """The sums of one backward.

    Args:
        call: the whole call.
        key, value: (*batch, kv_heads, n_keys, width); the gradients are like them.
        bias: the bias if its gradient is wanted, else None.

    Attributes:
        bias: the sum of the bias's gradient, or None.
    """

    def __init__(
        self,
        call: WholeCall,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._call = call
        self._inputs = {"grad_key": key, "grad_value": value}
        self.bias = None if bias is None else _zeros(bias.shape, bias)
        self._heads: dict[_KeyHead, _HeadSum] = {}

    def buffers(self, block: CallBlock) -> NamedTensors:
        """Allocate shared memory for those of a block's gradients that are added up.

        The other gradients of the block are results themselves.

        Raises:
            OSError: there is no memory or no file for it.
        """
        parts: NamedTensors = {}
        if not is_whole(self._call.shape, block):
            parts |= self._call.cut_named(self._inputs, block)
        if self.bias is not None:
            parts["grad_bias"] = self._call.cut_bias(self.bias, block)
        return {
            name: alloc_shared(tuple(part.shape), state_dtype(part.dtype))
            for name, part in parts.items()
        }

    def add(self, block: CallBlock, gradients: NamedTensors) -> None:
        """Add the gradients of a block that is done.

        A block has some rows of one query head, or all rows of several.
        """
        if self.bias is not None:
            self._call.cut_bias(self.bias, block).add_(gradients["grad_bias"])
        if "grad_key" not in gradients:
            return
        first_key_head = self._call.key_heads(block).start
        key_head = _KeyHead(block.entries.start, first_key_head)
        if key_head not in self._heads:
            self._heads[key_head] = self._empty_sum(key_head)
        head_sum = self._heads[key_head]
        block_start = _BlockStart(block.heads.start, block.rows.start)
        head_sum.early[block_start] = block, gradients
        head_sum.add_in_order(self._call.shape.n_queries)

    def store(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        """Write the sums into the gradients of keys and values."""
        gradients = {"grad_key": grad_key, "grad_value": grad_value}
        shape = self._call.shape
        all_rows = Interval(0, shape.n_queries)
        for key_head, head_sum in self._heads.items():
            assert not head_sum.early, "a block is missing"
            one_head = Interval(key_head.head, key_head.head + 1)
            query_heads = self._call.query_heads(one_head)
            block = block_of(shape, key_head.entry, query_heads, all_rows)
            for name, part in self._call.cut_named(gradients, block).items():
                part.copy_(head_sum.totals[name])

    def _empty_sum(self, key_head: _KeyHead) -> _HeadSum:
        """Return the sum of a head to which nothing has been added."""
        totals = {
            name: _zeros(tensor.shape[-2:], tensor)
            for name, tensor in self._inputs.items()
        }
        group_size = self._call.shape.queries_per_key_head
        first_block = _BlockStart(key_head.head * group_size, 0)
        return _HeadSum(totals, first_block)


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=state_dtype(like.dtype), device="cpu")
