"""One FlexAttention call for a task: its views of the tensors, positions and block mask."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.kernels.kit.block_masks import BlockLists
from quorum_attention.kernels.kit.block_table import BLOCK
from quorum_attention.kernels.kit.laid_out import laid_out, layout
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod
from quorum_attention.kernels.kit.materialised import ScoreMod
from quorum_attention.kernels.protocol import TaskTensors, Three
from quorum_attention.kernels.tensors import positions
from quorum_attention.kernels.torch_private import outside


def has_diagonal(task: TaskTensors) -> bool:
    """Whether keys after the query are masked."""
    return task.is_causal or any(r.causal for r in task.rectangles)


@dataclass(frozen=True, slots=True)
class Indexed:
    """By local index, the numbers that the modifications get; int32, on the launch's device.

    Attributes:
        queries, keys: global positions.
        heads, entries: numbers of the query heads and batch entries in the whole call.
        pieces: (piece of every query, piece of every key, table), which say whether a pair belongs
            to a rectangle; None if rectangles end only between blocks.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    heads: torch.Tensor
    entries: torch.Tensor
    pieces: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def mask(self, is_causal: bool, mask_mod: MaskMod | None) -> MaskMod:
        """The mask of partial blocks, by local indices; there are few kinds: each is compiled."""
        entries, heads, queries, keys = self.entries, self.heads, self.queries, self.keys
        tests: list[MaskMod] = []
        if self.pieces is not None:
            rows, columns, table = self.pieces
            tests.append(lambda b, h, q, k: table[rows[q], columns[k]] != 0)
        if is_causal:
            tests.append(lambda b, h, q, k: queries[q] >= keys[k])
        if mask_mod is not None:
            tests.append(lambda b, h, q, k: mask_mod(entries[b], heads[h], queries[q], keys[k]))
        keeps = tests[0] if tests else _everything
        for test in tests[1:]:
            keeps = _also(keeps, test)
        return keeps

    def score(self, score_mod: ScoreMod | None) -> ScoreMod | None:
        """The score modification, by local indices."""
        if score_mod is None:
            return None
        entries, heads, queries, keys = self.entries, self.heads, self.queries, self.keys
        return lambda score, b, h, q, k: score_mod(score, entries[b], heads[h], queries[q], keys[k])


def _everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= 0


def _also(one: MaskMod, other: MaskMod) -> MaskMod:
    return lambda b, h, q, k: one(b, h, q, k) & other(b, h, q, k)


@dataclass(frozen=True, slots=True)
class Launch:
    """One call: the part of a task between the first and the last listed block.

    All its tensors are detached: torch.compile also looks at the base of a view, and would compile
    again for every kind of view.
    """

    lists: BlockLists
    inputs: Three
    indexed: Indexed
    sent: list[torch.Tensor]
    is_causal: bool
    mask_mod: MaskMod | None
    scale: float

    def of_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The queries' part of (b, h, nq, ...), a view."""
        return tensor[:, :, self.lists.rows]

    def of_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """The keys' part of (b, hk, nk, ...), a view."""
        return tensor[:, :, self.lists.columns]

    @property
    def in_blocks(self) -> bool:
        """Whether queries and keys are whole blocks, so that no row has to be tested."""
        return all(t.shape[2] % BLOCK == 0 for t in self.inputs)

    def kind(self, needs_grad: bool) -> Hashable:
        """All that needs code of its own, so that calls of one kind are compiled once."""
        query, key, value = self.inputs
        return (
            query.device, query.dtype, query.shape[0] == 1, query.shape[1], key.shape[1],
            query.shape[3], value.shape[3], self.is_causal, self.lists.in_pieces, self.in_blocks,
            tuple(layout(t) for t in self.inputs),
            tuple(size == 1 for t in (self.sent[0], self.sent[4]) for size in t.shape), needs_grad,
        )  # fmt: skip

    def block_mask(self) -> Any:
        """The call as a ``BlockMask`` of torch."""
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        keeps = self.indexed.mask(self.is_causal, self.mask_mod)
        sizes = (self.inputs[0].shape[2], self.inputs[1].shape[2])
        # Not BlockMask.from_kv_blocks, which makes the lists by key from a matrix of all blocks.
        make: Any = FlexBlockMask
        return make(sizes, *self.sent[:8], BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=keeps)


def launch(task: TaskTensors, lists: BlockLists, mask_mod: MaskMod | None) -> Launch:
    """The call for ``task`` with its block lists."""
    device, rows, columns = task.query.device, lists.rows, lists.columns
    if isinstance(mask_mod, BlockMask):
        mask_mod = mask_mod.on(device)
    sent = lists.on(device)
    indexed = Indexed(
        positions(task.task, rows.start, rows.stop, device, torch.int32),
        positions(task.task, columns.start, columns.stop, device, torch.int32),
        _numbers(tuple(range(task.first_head, task.first_head + task.query.shape[1])), device),
        _numbers(task.entries, device),
        (sent[8], sent[9], sent[10]) if lists.in_pieces else None,
    )
    query = laid_out(task.query[:, :, rows])
    key, value = (laid_out(t[:, :, columns]) for t in (task.key, task.value))
    causal = has_diagonal(task)
    return Launch(lists, (query, key, value), indexed, sent, causal, mask_mod, task.scale)


@lru_cache(maxsize=64)
def _numbers(which: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``which`` on the device; cached, because every task of a head group needs it."""
    # A backward may use it, so it must not be a tensor of inference mode.
    with outside():
        return torch.tensor(which, dtype=torch.int32, device="cpu").to(device)
