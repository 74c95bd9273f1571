"""Gradients that several blocks contribute to: sums in fp32 (fp64), rounded once at the end.

The rows of a gradient are added up in the order of the blocks, whatever the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.devices.buffers import Shared, made_for
from quorum_attention.devices.partition import Sizes
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.workload import state_dtype

Buffers = dict[str, torch.Tensor]


def _buffer(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    made = made_for(shape, state_dtype(like.dtype), like.device)
    # Its memory may have been a sum that is still being read; the worker would not wait for it.
    backend_of(made.device).synchronize(made.device)
    return made


class MaskSum:
    """The gradient of a mask tensor.

    Where no two blocks contribute to an element, workers write to the result itself.

    Args:
        flat: the mask with one batch dimension, (batch or 1, heads or 1, n_queries or 1, n_keys or
            1).
        result: the gradient, of the shape of the caller's mask.
        batch: batch dimensions of the call.
        target: ``result`` as workers get it, with the shape of ``flat``; None where there is no
            such view.
    """

    def __init__(
        self,
        sizes: Sizes,
        call: WholeCall,
        blocks: Sequence[Block],
        flat: torch.Tensor,
        result: torch.Tensor,
        batch: tuple[int, ...],
        target: Shared | None,
    ) -> None:
        self._call, self._flat, self.result, self._batch = call, flat, result, batch

        def alone(block: Block) -> bool:
            """Whether no other block contributes to the elements that this one does."""
            every = (
                sizes.batch == 1,
                block.heads == (0, sizes.heads),
                block.rows == (0, sizes.n_queries),
            )
            return all(n != 1 or whole for n, whole in zip(flat.shape, every, strict=False))

        apart = target is not None and all(map(alone, blocks))
        self.target = target if apart else None
        self._total: torch.Tensor | None = None
        if not apart:
            self._total = torch.zeros(flat.shape, dtype=state_dtype(flat.dtype), device=flat.device)

    def buffer(self, block: Block) -> torch.Tensor | None:
        """Where a worker puts a block's gradient; None: in the result."""
        if self._total is None:
            return None
        return _buffer(self._call.cut_bias(self._total, block).shape, self._flat)

    def add(self, block: Block, made: torch.Tensor | None) -> None:
        """Add the gradient of a block that is done."""
        if self._total is not None and made is not None:
            self._call.cut_bias(self._total, block).add_(made)

    def store(self) -> None:
        """Put the sum where it belongs."""
        if self._total is None:
            return
        if self._flat.shape[0] == 1:
            self.result.copy_(self._total.reshape(self.result.shape))
        else:
            every = self._total.reshape(*self._batch, *self._total.shape[1:])
            self.result.copy_(every.sum_to_size(self.result.shape))


class _HeadSum:
    """The gradients of one key/value head's keys and values; its first query head is ``first``."""

    def __init__(self, like: Sequence[torch.Tensor], first: int) -> None:
        self.both = [
            torch.zeros(t.shape[2:], dtype=state_dtype(t.dtype), device=t.device) for t in like
        ]
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
        key, value: (batch, kv_heads, n_keys, width); the gradients are like them.
        mask: the gradient of the mask, if it is wanted.
    """

    def __init__(
        self, sizes: Sizes, key: torch.Tensor, value: torch.Tensor, mask: MaskSum | None = None
    ) -> None:
        self._sizes, self._like, self._mask = sizes, (key, value), mask
        self._heads: dict[tuple[int, int], _HeadSum] = {}

    def buffers(self, block: Block) -> Buffers | None:
        """Where a worker puts those of a block's gradients that are added up, by name; None: all
        are results themselves."""
        found: Buffers = {}
        if not self._sizes.is_whole(block):
            for name, like in zip(("grad_key", "grad_value"), self._like, strict=True):
                found[name] = _buffer((1, 1, block.keys.length, like.shape[3]), like)
        of_mask = None if self._mask is None else self._mask.buffer(block)
        if of_mask is not None:
            found["grad_mask"] = of_mask
        return found or None

    def add(self, block: Block, made: Buffers | None) -> None:
        """Add the gradients of a block that is done."""
        if made is None:
            return
        if self._mask is not None:
            self._mask.add(block, made.get("grad_mask"))
        if "grad_key" not in made:
            return
        head = self._sizes.key_heads(block).start
        place = block.entries.start, head
        if place not in self._heads:
            self._heads[place] = _HeadSum(self._like, head * self._sizes.share)
        rows = [made[name][0, 0] for name in ("grad_key", "grad_value")]
        self._heads[place].add(block, rows, self._sizes.n_queries)

    def store(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        """Put the sums where they belong."""
        for (entry, head), found in self._heads.items():
            assert not found.early, "a block is missing"
            grad_key[entry, head], grad_value[entry, head] = found.both
        if self._mask is not None:
            self._mask.store()


__all__ = ["MaskSum", "Sums"]
