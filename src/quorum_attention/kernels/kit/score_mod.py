"""FlexAttention's score and mask modifications as an inner kernel, in global positions.

A rectangle is one call of ``torch.nn.attention.flex_attention``: the modifications are handed the
positions of the rectangle's tokens in the whole sequence. Rectangles, and blocks of them, that the
mask empties are never run; no mask of all pairs is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.decomposition import Rectangle, Task
from quorum_attention.kernels.kit.function import FunctionKernel, LseFunction, quadratic_workspace
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod, Ranges, Verdict
from quorum_attention.kernels.kit.positions import positions
from quorum_attention.kernels.protocol import CallShape, Extent, TaskTensors

ScoreMod = Callable[[Any, Any, Any, Any, Any], torch.Tensor]

_BLOCK = 128
# Pairs of a mask without verdicts that are tried at a time.
_PAIRS = 1 << 24


class ScoreModKernel(FunctionKernel):
    """See ``from_score_mod``.

    Attributes:
        pruned: rectangles and parts of them left out so far because the mask empties them.
        run: those that were run.
    """

    def __init__(
        self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str, compiled: bool
    ) -> None:
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.compiled = compiled
        self.pruned = self.run = 0
        self._kept: dict[tuple[Task, Rectangle], tuple[Rectangle, ...]] = {}
        super().__init__(_attention(self), name=name, grouped=True, workspace=self._bytes)

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.mask is not None:
            return "it takes no attention mask: give it as mask_mod or score_mod"
        if call.needs_grad and call.device_type == "cpu" and self.compiled:
            return "FlexAttention has no backward on the CPU: give compiled=False"
        return None

    def rectangles(self, task: TaskTensors) -> Iterator[Rectangle]:
        """The task's rectangles, less what the mask empties."""
        for r in task.rectangles:
            if r.n_queries == 0 or r.n_keys == 0:
                continue
            kept = self._live(task.task, r, task.query.device)
            self.run += len(kept)
            self.pruned += not kept
            yield from kept

    def _live(self, task: Task, r: Rectangle, device: torch.device) -> tuple[Rectangle, ...]:
        if self.mask_mod is None:
            return (r,)
        key = (task, r)
        if key not in self._kept:
            if len(self._kept) > 4096:
                self._kept.clear()
            self._kept[key] = tuple(_prune(self.mask_mod, task, r, device))
        return self._kept[key]

    def _bytes(self, call: CallShape, extent: Extent) -> int:
        if not self.compiled:
            # Scores, and what the modifications make of them.
            return 2 * quadratic_workspace(call, extent)
        lanes = extent.batch * extent.query_heads
        rows = lanes * (extent.max_queries + extent.max_keys)
        widths = call.head_dim + call.value_dim + 4
        blocks = -(-extent.max_queries // _BLOCK) * -(-extent.max_keys // _BLOCK)
        return 3 * rows * widths * 4 + 32 * blocks * extent.batch * extent.query_heads


def from_score_mod(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    name: str = "flex",
    compiled: bool | None = None,
) -> ScoreModKernel:
    """An inner kernel of FlexAttention with the user's modifications.

    Args:
        score_mod: ``score_mod(score, batch, head, query, key)`` -> score, positions global.
        mask_mod: ``mask_mod(batch, head, query, key)`` -> which pairs are kept, positions global.
            One of ``quorum_attention.kernels.kit.masks`` (``sliding_window``, ``document``,
            ``prefix_lm``, ``causal``, combined with ``&`` and ``|``) also knows what it empties;
            of any other, pairs are tried in blocks, once for each rectangle.
        name: for messages and reports.
        compiled: FlexAttention with torch.compile; default on CUDA. Otherwise the same with every
            score of a rectangle in memory, on any device.

    A call's own ``is_causal`` comes on top.

    Raises:
        TypeError: a modification that cannot be called.
    """
    for what, given in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if given is not None and not callable(given):
            raise TypeError(f"{what} must be callable or None, got {type(given).__name__}")
    if compiled is None:
        compiled = torch.cuda.is_available()
    return ScoreModKernel(score_mod, mask_mod, name, compiled)


def _attention(kernel: ScoreModKernel) -> LseFunction:
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool,
        scale: float,
        query_positions: torch.Tensor,
        key_positions: torch.Tensor,
        head_indices: torch.Tensor,
        batch_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        score_mod, mask_mod = kernel.score_mod, kernel.mask_mod

        def moved(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            if score_mod is None:
                return score
            at = (batch_indices[b], head_indices[h], query_positions[q], key_positions[k])
            return score_mod(score, *at)

        def keeps(b: Any, h: Any, q: Any, k: Any) -> Any:
            keep = query_positions[q] >= key_positions[k] if is_causal else q >= 0
            if mask_mod is not None:
                keep = keep & mask_mod(batch_indices[b], head_indices[h], query_positions[q],
                                       key_positions[k])  # fmt: skip
            return keep

        masked = is_causal or mask_mod is not None
        if not kernel.compiled:
            changed = moved if score_mod is not None else None
            return materialised(query, key, value, changed, keeps if masked else None, scale)
        mask = None
        if masked:
            mask = _block_mask(keeps, mask_mod, is_causal, query_positions, key_positions)
        out, lse = _flex()(
            query, key, value, score_mod=moved, block_mask=mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1], return_lse=True,
        )  # fmt: skip
        return out, lse

    return attention


def materialised(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What FlexAttention computes, with every score in memory: (out, lse), differentiable.

    For where FlexAttention has no backward (the CPU). Modifications may be written for single
    numbers, as FlexAttention allows: they are mapped over all pairs.
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
    work = torch.promote_types(query.dtype, torch.float32)
    scores = scale * (query.to(work) @ key.to(work).mT)
    at = [torch.arange(size, device=query.device) for size in scores.shape]
    if score_mod is not None:
        scores = _over_pairs(score_mod, True)(scores, *at).to(work)
    if mask_mod is not None:
        kept = _over_pairs(mask_mod, False)(*at)
        scores = scores.masked_fill(~kept, -torch.inf)
        # A row that keeps nothing: its exponentials are of -inf, whatever is taken off them.
        some = kept.any(dim=-1)
        lse = torch.logsumexp(scores.masked_fill(~some.unsqueeze(-1), 0.0), dim=-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
        lse = lse.masked_fill(~some, -torch.inf)
    else:
        lse = torch.logsumexp(scores, dim=-1)
        p = torch.exp(scores - lse.unsqueeze(-1))
    return (p @ value.to(work)).to(query.dtype), lse


def _over_pairs(function: Callable[..., Any], scored: bool) -> Callable[..., torch.Tensor]:
    """``function`` of (score,) batch, head, query, key over (b, h, q, k)."""
    found = function
    # From the innermost dimension out.
    for axis in (3, 2, 1, 0):
        dims = [0 if i == axis else None for i in range(4)]
        found = torch.vmap(found, in_dims=(*([0] if scored else []), *dims))
    return found


@lru_cache(maxsize=1)
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _block_mask(
    keeps: MaskMod,
    mask_mod: MaskMod | None,
    is_causal: bool,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
) -> Any:
    """FlexAttention's block mask, from verdicts on blocks."""
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    queries, keys = query_positions.cpu().numpy(), key_positions.cpu().numpy()
    found = block_verdicts(mask_mod, is_causal, queries, keys, _BLOCK)
    device = query_positions.device
    return FlexBlockMask.from_kv_blocks(
        *_listed(found == _MIXED, device), *_listed(found == _FULL, device),
        BLOCK_SIZE=_BLOCK, mask_mod=keeps, seq_lengths=(len(queries), len(keys)),
    )  # fmt: skip


_EMPTY, _FULL, _MIXED = 0, 1, 2


def block_verdicts(
    mask_mod: MaskMod | None,
    is_causal: bool,
    queries: NDArray[np.int64],
    keys: NDArray[np.int64],
    block: int,
) -> NDArray[np.int8]:
    """Of every block of pairs: empty (0), full (1) or mixed (2); of unknown content is mixed.

    Found by halves of halves, so that its cost is that of the border between empty and full.

    Args:
        queries, keys: global positions, ascending.
        block: queries and keys of a block.
    """
    found = np.full((-(-len(queries) // block), -(-len(keys) // block)), _MIXED, dtype=np.int8)

    def descend(row: int, rows: int, column: int, columns: int) -> None:
        r = Ranges(
            int(queries[row * block]), int(queries[min(rows * block, len(queries)) - 1]),
            int(keys[column * block]), int(keys[min(columns * block, len(keys)) - 1]),
        )  # fmt: skip
        verdict = _verdict_on(mask_mod, is_causal, r)
        if verdict != "mixed":
            found[row:rows, column:columns] = _FULL if verdict == "full" else _EMPTY
            return
        if rows - row == 1 and columns - column == 1:
            return
        for low, high in _halves(row, rows):
            for first, last in _halves(column, columns):
                descend(low, high, first, last)

    if found.size and (is_causal or mask_mod is None or isinstance(mask_mod, BlockMask)):
        descend(0, found.shape[0], 0, found.shape[1])
    return found


def _verdict_on(mask_mod: MaskMod | None, is_causal: bool, r: Ranges) -> Verdict:
    own: Verdict = "full"
    if mask_mod is not None:
        own = mask_mod.verdict(r) if isinstance(mask_mod, BlockMask) else "mixed"
    if not is_causal or own == "empty":
        return own
    if r.first_key > r.last_query:
        return "empty"
    return own if r.last_key <= r.first_query else "mixed"


def _halves(start: int, stop: int) -> list[tuple[int, int]]:
    if stop - start <= 1:
        return [(start, stop)]
    middle = (start + stop) // 2
    return [(start, middle), (middle, stop)]


def _listed(chosen: NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(counts, indices) of the blocks of every row, as FlexAttention lists them."""
    counts = chosen.sum(axis=1, dtype=np.int32)
    indices = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return (
        torch.from_numpy(counts)[None, None].to(device),
        torch.from_numpy(indices)[None, None].to(device),
    )


def _prune(mask_mod: MaskMod, task: Task, r: Rectangle, device: torch.device) -> list[Rectangle]:
    """``r`` without what the mask empties: whole, halved where that helps, or nothing."""
    verdict = _verdict_of(mask_mod, task, r, device)
    if verdict == "empty":
        return []
    small = max(r.n_queries, r.n_keys) <= 4 * _BLOCK
    if verdict == "full" or r.causal or small or not isinstance(mask_mod, BlockMask):
        return [r]
    found = []
    for part in _quarters(r):
        found += _prune(mask_mod, task, part, device)
    # Parts are worth their calls only where they leave a good deal out.
    left = sum(part.pairs for part in found)
    return found if left < 0.8 * r.pairs else [r]


def _quarters(r: Rectangle) -> list[Rectangle]:
    def halves(start: int, stop: int) -> list[tuple[int, int]]:
        if stop - start <= 2 * _BLOCK:
            return [(start, stop)]
        middle = start + -(-(stop - start) // (2 * _BLOCK)) * _BLOCK
        return [(start, middle), (middle, stop)]

    return [
        Rectangle(*rows, *columns)
        for rows in halves(r.query_start, r.query_stop)
        for columns in halves(r.key_start, r.key_stop)
    ]


def _verdict_of(mask_mod: MaskMod, task: Task, r: Rectangle, device: torch.device) -> Verdict:
    rows = task.segments(r.query_start, r.query_stop)
    columns = task.segments(r.key_start, r.key_stop)
    if isinstance(mask_mod, BlockMask):
        found = {
            mask_mod.verdict(Ranges(q0, q1 - 1, k0, k1 - 1))
            for q0, q1, _ in rows
            for k0, k1, _ in columns
        }
        return found.pop() if len(found) == 1 else "mixed"
    queries = positions(task, r.query_start, r.query_stop, device)
    keys = positions(task, r.key_start, r.key_stop, device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    step = max(1, _PAIRS // max(1, len(keys)))
    for start in range(0, len(queries), step):
        part = queries[start : start + step, None]
        try:
            kept = mask_mod(zero, zero, part, keys[None])
        except (RuntimeError, TypeError, IndexError):
            # Not written for whole tensors: nothing is known, so it is run.
            return "mixed"
        if bool(kept.any()):
            return "mixed"
    # Of other heads and batch entries nothing is known.
    return "empty" if _ignores_heads(mask_mod, zero, queries, keys) else "mixed"


def _ignores_heads(
    mask_mod: MaskMod, zero: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> bool:
    """Whether a mask gives the same answer whatever the head and the batch entry (tried with
    something that cannot be read)."""

    class Unread:
        def refuse(self, *others: object) -> bool:
            raise TypeError("read after all")

    for operator in ("__eq__", "__ne__", "__bool__"):
        setattr(Unread, operator, Unread.refuse)
    try:
        mask_mod(Unread(), Unread(), queries[:1, None], keys[None, :1])
    except (AttributeError, TypeError, RuntimeError, IndexError):
        return False
    return True
