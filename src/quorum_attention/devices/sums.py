"""Gradients that several blocks contribute to, added up in fp32 (fp64) and rounded once: the rows
of a gradient in the order of the blocks, whatever the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.devices.buffers import made_for
from quorum_attention.devices.partition import is_whole
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.problem import state_dtype

Buffers = dict[str, torch.Tensor]


class _HeadSum:
    """The gradients of one key/value head's keys and values; its first query head is ``first``."""

    def __init__(self, like: Sequence[torch.Tensor], first: int) -> None:
        self.both = [_zeros(t.shape[2:], t) for t in like]
        # Query head and row of what is added next, and what has come before its turn.
        self._next = first, 0
        self.early: dict[tuple[int, int], tuple[Block, list[torch.Tensor]]] = {}

    def add(self, block: Block, made: list[torch.Tensor], n_queries: int) -> None:
        """Add what a block makes of them, in the order of query heads and rows. Blocks have some
        rows of one query head, or all of several."""
        self.early[block.heads.start, block.rows.start] = block, made
        while self._next in self.early:
            (_, heads, rows, _), parts = self.early.pop(self._next)
            for total, part in zip(self.both, parts, strict=True):
                total[: part.shape[0]] += part
            at_end = rows.stop == n_queries
            self._next = (heads.stop, 0) if at_end else (heads.start, rows.stop)


class Sums:
    """The gradients of keys and values of heads that are cut, and that of a mask.

    Args:
        call: the whole call, with one batch dimension.
        key, value: (batch, kv_heads, n_keys, width); the gradients are like them.
        mask: (batch or 1, heads or 1, n_queries or 1, n_keys or 1), if its gradient is wanted.
    """

    def __init__(
        self,
        call: WholeCall,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> None:
        self._call, self._like = call, (key, value)
        self._mask = None if mask is None else _zeros(mask.shape, mask)
        self._heads: dict[tuple[int, int], _HeadSum] = {}

    def buffers(self, block: Block) -> Buffers:
        """Where a worker puts those of a block's gradients that are added up, by name; the others
        are results themselves."""
        found: Buffers = {}
        if not is_whole(self._call, block):
            for name, like in zip(("grad_key", "grad_value"), self._like, strict=True):
                found[name] = _buffer((1, 1, block.keys.length, like.shape[3]), like)
        if self._mask is not None:
            found["grad_mask"] = _buffer(self._call.cut_bias(self._mask, block).shape, self._mask)
        return found

    def add(self, block: Block, made: Buffers) -> None:
        """Add the gradients of a block that is done."""
        if self._mask is not None:
            self._call.cut_bias(self._mask, block).add_(made["grad_mask"])
        if "grad_key" not in made:
            return
        head = self._call.key_heads(block).start
        place = block.entries.start, head
        if place not in self._heads:
            first = head * (self._call.heads // self._call.kv_heads)
            self._heads[place] = _HeadSum(self._like, first)
        rows = [made[name][0, 0] for name in ("grad_key", "grad_value")]
        self._heads[place].add(block, rows, self._call.n_queries)

    def store(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        """Put the sums of keys and values where they belong."""
        for (entry, head), found in self._heads.items():
            assert not found.early, "a block is missing"
            grad_key[entry, head], grad_value[entry, head] = found.both

    def store_mask(self, result: torch.Tensor, batch: tuple[int, ...]) -> None:
        """Put the mask's where it belongs, a tensor of the caller's shape; ``batch``: dimensions
        of the call."""
        assert self._mask is not None
        if self._mask.shape[0] == 1:
            result.copy_(self._mask.reshape(result.shape))
        else:
            every = self._mask.reshape(*batch, *self._mask.shape[1:])
            result.copy_(every.sum_to_size(result.shape))


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=state_dtype(like.dtype), device=like.device)


def _buffer(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    made = made_for(shape, state_dtype(like.dtype), like.device)
    # Its memory may have been a sum that is still being read; the worker would not wait for it.
    backend_of(made.device).synchronize(made.device)
    return made


__all__ = ["Buffers", "Sums"]
