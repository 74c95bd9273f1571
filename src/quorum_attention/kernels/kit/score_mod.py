"""FlexAttention's score modifications and masks as an inner kernel, in global positions.

The modifications get the positions of a task's tokens in the whole sequence. They can be run in two
ways: by compiled FlexAttention, a whole task at a time (``flex.py``), or here, by rectangles with
materialised scores, on any device. Neither runs the parts in which the mask keeps no pair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from quorum_attention.decomposition import Pairs, Rectangle
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit.block_table import (
    BLOCK,
    TaskPairs,
    evaluated_bytes,
    joined,
    listed_blocks,
)
from quorum_attention.kernels.kit.function import FunctionKernel, quadratic_workspace
from quorum_attention.kernels.kit.functions import results_at, tensors, versions
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod, kept_pairs
from quorum_attention.kernels.kit.over_pairs import ScoreMod, depends_on_batch_head, materialised
from quorum_attention.kernels.protocol import CallShape, Extent, Indices, TaskTensors

# Rectangles whose parts are cached.
_CACHED_RECTANGLES = 4096
# Rows of blocks of a part of a rectangle that is cut.
_STRIP = 4


class ScoreModKernel(FunctionKernel):
    """See ``from_score_mod``: one rectangle at a time, with materialised scores.

    Attributes:
        score_mod, mask_mod: the score modification and the mask.
        pruned: number of rectangles left out so far, because the mask keeps none of their pairs.
        run: number of rectangles run so far; parts of a rectangle count one by one.
    """

    sparse = True

    def __init__(self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str) -> None:
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.pruned = self.run = 0
        self._parts: Cache[tuple[Rectangle, ...]] = Cache(_CACHED_RECTANGLES, lambda found: 1)
        self._apart: Cache[tuple[bool, bool]] = Cache(64, lambda answer: 1)
        super().__init__(self._attention, name=name, grouped=True, workspace=self._bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScoreModKernel:
        """A kernel of its own, as it was when it was made. Its functions are shared, as all
        functions are; what can be called and is none (a module) is copied."""
        score_mod, mask_mod = deepcopy((self.score_mod, self.mask_mod), memo)
        return type(self)(score_mod, mask_mod, self.name)

    def captured(self) -> list[torch.Tensor]:
        """See ``Kernel``."""
        return tensors(self.called_back())

    def called_back(self) -> tuple[Callable[..., Any], ...]:
        """See ``Kernel``."""
        return tuple(f for f in (self.score_mod, self.mask_mod) if f is not None)

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> Sequence[torch.Tensor]:
        """See ``Kernel``."""
        found = [] if self.mask_mod is None else results_at([self.mask_mod], at)
        if self.score_mod is not None:
            score = torch.zeros((), device=at.queries.device)
            found += results_at([partial(self.score_mod, score)], at)
        return found

    def tells_entries_apart(self, device: torch.device) -> bool:
        """See ``Kernel``."""
        mask, score_mod = self.mask_mod, self.score_mod
        return (mask is not None and depends_on_batch_head(mask, device)[0]) or (
            score_mod is not None and depends_on_batch_head(score_mod, device, scored=True)[0]
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
        seen = self._seen
        for r in task.rectangles:
            if r.n_queries == 0 or r.n_keys == 0:
                continue
            kept = self._live(task, r, seen)
            self.run += len(kept)
            self.pruned += not kept
            yield from kept

    @property
    def _opaque(self) -> bool:
        """Whether the mask is a plain function, which has to be called for every pair."""
        return self.mask_mod is not None and not isinstance(self.mask_mod, BlockMask)

    @property
    def _seen(self) -> Hashable:
        """What is another where the mask is seen to keep other pairs."""
        mask = self.mask_mod
        return (id(mask), versions(mask)) if self._opaque else mask

    def _live(self, task: TaskTensors, r: Rectangle, seen: Hashable) -> tuple[Rectangle, ...]:
        if self.mask_mod is None:
            return (r,)
        key: tuple[Hashable, ...] = (task.task, r, seen)
        if self._opaque:
            key += (task.entries, task.first_head, task.query.shape[1])
        return self._parts.get(key, lambda: tuple(self._prune(task, r)))

    def _prune(self, task: TaskTensors, r: Rectangle) -> list[Rectangle]:
        """Strips of ``r`` from the first to the last block in which the mask keeps pairs; ``r``
        itself if that leaves out less than a fifth of it."""
        pairs = TaskPairs.of(task.task, (r,), r.causal, r.query_stop, r.key_stop)
        apart = self._depends(task.query.device)
        blocks = joined([*listed_blocks(self.mask_mod, task, pairs, apart)[:2]]) * BLOCK
        found, height = [], _STRIP * BLOCK
        for top in range(r.query_start // height * height, r.query_stop, height):
            here = blocks[(blocks[:, 1] < top + height) & (blocks[:, 2] > top)]
            if len(here):
                rows = max(top, r.query_start), min(top + height, r.query_stop)
                first, last = int(here[:, 3].min()), int(here[:, 4].max())
                columns = max(first, r.key_start), min(last, r.key_stop)
                found.append(Rectangle(*rows, *columns))
        whole = r.causal or sum(part.pairs for part in found) >= 0.8 * r.pairs
        return [r] if found and whole else found

    def _depends(self, device: torch.device) -> tuple[bool, bool]:
        """Whether blocks have to be evaluated for every batch entry, and for every head."""
        mask = self.mask_mod
        if mask is None or not self._opaque:
            return False, False
        key = (device, self._seen)
        return self._apart.get(key, lambda: depends_on_batch_head(mask, device))

    def _attention(
        self,
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
        """The function of ``FunctionKernel``."""
        score_mod, mask_mod = self.score_mod, self.mask_mod
        if isinstance(mask_mod, BlockMask):
            mask_mod = mask_mod.on(query.device)

        def at(b: Any, h: Any, q: Any, k: Any) -> tuple[Any, Any, Any, Any]:
            return batch_indices[b], head_indices[h], query_positions[q], key_positions[k]

        def keeps(*local: Any) -> Any:
            _, _, q, k = numbers = at(*local)
            keep = q >= k if is_causal else q >= 0
            return keep if mask_mod is None else keep & mask_mod(*numbers)

        changed = None
        if score_mod is not None:

            def changed(score: Any, *local: Any) -> Any:
                return score_mod(score, *at(*local))

        masked = is_causal or mask_mod is not None
        return materialised(query, key, value, changed, keeps if masked else None, scale)

    def _bytes(self, call: CallShape, extent: Extent) -> int:
        # The scores, and the results of the modifications.
        lanes = extent.batch * extent.query_heads
        own = 2 * quadratic_workspace(call, extent)
        return max(own, evaluated_bytes(lanes)) if self._opaque else own
