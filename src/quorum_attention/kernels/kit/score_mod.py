"""FlexAttention's score modifications and masks as an inner kernel, in global positions.

The modifications get the positions of a task's tokens in the whole sequence. They can be run in two
ways: by compiled FlexAttention, a whole task at a time (``flex.py``), or here, by rectangles with
materialised scores, on any device. Neither runs the parts in which the mask keeps no pair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quorum_attention.counts import shown, switch
from quorum_attention.decomposition import (
    EMPTY,
    PARTIAL,
    Pairs,
    Ranges,
    Rectangle,
    Task,
    Verdict,
)
from quorum_attention.decomposition.quadtree import walk
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit.block_masks import BLOCK, geometry, listed_nodes
from quorum_attention.kernels.kit.flex import FlexKernel
from quorum_attention.kernels.kit.function import FunctionKernel, LseFunction, quadratic_workspace
from quorum_attention.kernels.kit.functions import tensors, versions
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod, kept_pairs
from quorum_attention.kernels.kit.materialised import ScoreMod, materialised
from quorum_attention.kernels.kit.sample import Watched, results_at
from quorum_attention.kernels.kit.trials import (
    scores_apart,
    task_indices,
    told_apart,
    trial_bytes,
    tried_nodes,
)
from quorum_attention.kernels.protocol import CallShape, Extent, Indices, TaskTensors

# Rectangles whose parts are cached.
_CACHED_RECTANGLES = 4096


class ScoreModKernel(FunctionKernel):
    """See ``from_score_mod``: one rectangle at a time, with materialised scores.

    Attributes:
        pruned: number of rectangles left out so far, because the mask keeps none of their pairs.
        run: number of rectangles run so far; parts of a rectangle count one by one.
    """

    traits = replace(FunctionKernel.traits, sparse=True)

    def __init__(self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str) -> None:
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self._watched = Watched([] if mask_mod is None else [mask_mod])
        self.pruned = self.run = 0
        self._parts: Cache[tuple[Rectangle, ...]] = Cache(_CACHED_RECTANGLES, lambda found: 1)
        super().__init__(_attention(self), name=name, grouped=True, workspace=self._bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScoreModKernel:
        """A kernel of its own, as it was when it was made. Its functions are shared, as all
        functions are; what can be called and is none (a module) is copied."""
        score_mod, mask_mod = deepcopy((self.score_mod, self.mask_mod), memo)
        return ScoreModKernel(score_mod, mask_mod, self.name)

    def captured(self) -> list[torch.Tensor]:
        """See ``Captures``."""
        return tensors(self.called_back())

    def called_back(self) -> tuple[Callable[..., Any], ...]:
        """See ``CallsBack``."""
        return tuple(f for f in (self.score_mod, self.mask_mod) if f is not None)

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> Sequence[torch.Tensor]:
        """See ``CallsBack``."""
        found = [] if self.mask_mod is None else results_at([self.mask_mod], at)
        if self.score_mod is not None:
            score = torch.zeros((), device=at.queries.device)
            found += results_at([partial(self.score_mod, score)], at)
        return found

    def check_functions(self, sizes: tuple[int, int, int, int], device: torch.device) -> None:
        """See ``CallsBack``."""
        self._watched.check(sizes, device)

    def tells_entries_apart(self, device: torch.device) -> bool:
        """See ``ByEntry``."""
        mask, score_mod = self.mask_mod, self.score_mod
        return (mask is not None and told_apart(mask, device)[0]) or (
            score_mod is not None and scores_apart(score_mod, device)
        )

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.mask is not None:
            return "it takes no attention mask: give it as mask_mod or score_mod"
        return None

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call, as far as they are known without trying the mask."""
        return kept_pairs(self.mask_mod, n_queries, n_keys, is_causal)

    def rectangles(self, task: TaskTensors) -> Iterator[Rectangle]:
        """The task's rectangles without the parts in which the mask keeps no pair."""
        seen = versions(self.mask_mod)
        for r in task.rectangles:
            if r.n_queries == 0 or r.n_keys == 0:
                continue
            kept = self._live(task, r, seen)
            self.run += len(kept)
            self.pruned += not kept
            yield from kept

    def _live(self, task: TaskTensors, r: Rectangle, seen: Hashable) -> tuple[Rectangle, ...]:
        mask = self.mask_mod
        if mask is None:
            return (r,)
        key: tuple[Hashable, ...] = (task.task, r, seen)
        if isinstance(mask, BlockMask):
            return self._parts.get(key, lambda: tuple(_prune(mask, task.task, r)))
        key += (task.entries, task.first_head, task.query.shape[1])
        return self._parts.get(key, lambda: tuple(_tried(mask, task, r)))

    def _bytes(self, call: CallShape, extent: Extent) -> int:
        # The scores, and the results of the modifications.
        tried = self.mask_mod is not None and not isinstance(self.mask_mod, BlockMask)
        lanes = extent.batch * extent.query_heads
        return max(2 * quadratic_workspace(call, extent), trial_bytes(lanes) if tried else 0)


def from_score_mod(
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    name: str = "flex",
    compiled: bool | None = None,
) -> ScoreModKernel | FlexKernel:
    """An inner kernel from FlexAttention's score modification and mask.

    Args:
        score_mod: ``score_mod(score, batch, head, query, key)`` -> score, positions global.
        mask_mod: ``mask_mod(batch, head, query, key)`` -> which pairs are kept, positions global.
            A mask from ``quorum_attention.kernels.kit.masks`` (``sliding_window``, ``document``,
            ``prefix_lm``, ``causal``, combined with ``&`` and ``|``) knows which blocks it keeps.
            Any other mask is tried once on every pair of a task. Both functions must stay what they
            are as long as the kernel lives (docs/kit.md says how that is checked): make another
            kernel to change what they read, which costs next to nothing.
        name: for messages and reports.
        compiled: whether to use FlexAttention with torch.compile, one call for a task; default
            True if there is CUDA. Otherwise, and always for float64, rectangles are run with
            materialised scores, on any device.

    A call's own ``is_causal`` applies in addition.

    Raises:
        TypeError: a modification that cannot be called.

    Examples:
        >>> def nearer(score, batch, head, query, key):
        ...     return score - 0.1 * (query - key).abs()
        >>> kernel = qa.from_score_mod(nearer, compiled=False)
        >>> q = torch.randn(1, 2, 300, 16)
        >>> out = qa.attention(q, q, q, kernel=kernel, depth=1)
    """
    for what, given in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if given is not None and not callable(given):
            raise TypeError(f"{what} must be callable or None, got {type(given).__name__}")
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a str of at least a letter, got {shown(name)}")
    if compiled is None:
        compiled = torch.cuda.is_available()
    compiled = switch(compiled, "compiled")
    in_memory = ScoreModKernel(score_mod, mask_mod, name)
    return FlexKernel(in_memory) if compiled else in_memory


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
        if isinstance(mask_mod, BlockMask):
            mask_mod = mask_mod.on(query.device)

        def moved(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            at = (batch_indices[b], head_indices[h], query_positions[q], key_positions[k])
            return score if score_mod is None else score_mod(score, *at)

        def keeps(b: Any, h: Any, q: Any, k: Any) -> Any:
            keep = query_positions[q] >= key_positions[k] if is_causal else q >= 0
            if mask_mod is not None:
                keep = keep & mask_mod(batch_indices[b], head_indices[h], query_positions[q],
                                       key_positions[k])  # fmt: skip
            return keep

        changed = moved if score_mod is not None else None
        masked = is_causal or mask_mod is not None
        return materialised(query, key, value, changed, keeps if masked else None, scale)

    return attention


def _prune(mask: BlockMask, task: Task, r: Rectangle) -> list[Rectangle]:
    """The parts of ``r`` in which the mask keeps pairs; ``r`` itself if a cut saves too little."""
    cuts: dict[Rectangle, list[Rectangle]] = {}

    def parts(part: Rectangle, found: Verdict) -> list[Rectangle]:
        small = max(part.n_queries, part.n_keys) <= 4 * BLOCK
        if found is not PARTIAL or part.causal or small:
            return []
        cuts[part] = _quarters(part)
        return cuts[part]

    leaves = walk(r, lambda part: _verdict_of(mask, task, part), parts)
    left = {part: [] if found is EMPTY else [part] for part, found in leaves}
    # From the smallest parts up: a cut is worth its calls only if it leaves out a fifth or more.
    for whole in reversed(cuts):
        found = [one for part in cuts[whole] for one in left[part]]
        left[whole] = found if sum(one.pairs for one in found) < 0.8 * whole.pairs else [whole]
    return left[r]


def _quarters(r: Rectangle) -> list[Rectangle]:
    def halves(start: int, stop: int) -> list[tuple[int, int]]:
        if stop - start <= 2 * BLOCK:
            return [(start, stop)]
        middle = start + -(-(stop - start) // (2 * BLOCK)) * BLOCK
        return [(start, middle), (middle, stop)]

    return [
        Rectangle(*rows, *columns)
        for rows in halves(r.query_start, r.query_stop)
        for columns in halves(r.key_start, r.key_stop)
    ]


def _verdict_of(mask: BlockMask, task: Task, r: Rectangle) -> Verdict:
    found = {
        mask.verdict(Ranges.of(queries.start, queries.stop, keys.start, keys.stop))
        for queries, keys, _ in task.contiguous(r)
    }
    return found.pop() if len(found) == 1 else PARTIAL


def _tried(mask_mod: MaskMod, task: TaskTensors, r: Rectangle) -> list[Rectangle]:
    """``[r]``, or ``[]`` if no head of any batch entry keeps a pair of it."""
    sizes = (r.query_stop, r.key_stop)
    pairs, at = geometry(task.task, (r,), r.causal, *sizes), task_indices(task, *sizes)
    apart = told_apart(mask_mod, task.query.device)
    clear, mixed, _ = tried_nodes(mask_mod, pairs, *listed_nodes(pairs, None), at, apart)
    return [r] if len(clear) + len(mixed) else []
