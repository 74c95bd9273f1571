"""FlexAttention's score modifications and masks as an inner kernel, in global positions.

The modifications get the positions of a task's tokens in the whole sequence. They can be run in two
ways: by compiled FlexAttention, a whole task at a time (``flex.py``), or here, by the reference on
any device. Neither runs the parts in which the mask keeps no pair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quorum_attention.decomposition import FULL, Pairs, Ranges, Rectangle
from quorum_attention.kernels import reference
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.kit.block_table import (
    BLOCK,
    TaskPairs,
    evaluated_bytes,
    joined,
    listed_blocks,
)
from quorum_attention.kernels.kit.functions import (
    ScoreMod,
    depends_on_batch_head,
    over_pairs,
    results_at,
    tensors,
    versions,
)
from quorum_attention.kernels.kit.masks import BlockMask, MaskMod, kept_pairs
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Indices,
    Kernel,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.tensors import positions

# Rectangles whose parts are cached.
_CACHED_RECTANGLES = 4096
# Rows of blocks of a part of a rectangle that is cut.
_STRIP = 4


# Score matrices that a function may hold at a time, its result among them.
_MATRICES = 8


class ScoreModKernel(Kernel):
    """See ``from_score_mod``: by the reference, tile by tile.

    Attributes:
        score_mod, mask_mod: the score modification and the mask.
        pruned: number of rectangles left out so far, because the mask keeps none of their pairs.
        run: number of rectangles run so far; parts of a rectangle count one by one.
    """

    own_attention = True
    sparse = True

    def __init__(self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str) -> None:
        self.score_mod, self.mask_mod, self.name = score_mod, mask_mod, name
        self.pruned = self.run = 0
        self._parts: Cache[tuple[Rectangle, ...]] = Cache(_CACHED_RECTANGLES, lambda found: 1)
        self._apart: Cache[tuple[bool, bool]] = Cache(64, lambda answer: 1)

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

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return max(reference.forward_bytes(call, extent, _BOUND), self._evaluated(extent))

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        return max(reference.backward_bytes(call, extent, _BOUND), self._evaluated(extent))

    def _evaluated(self, extent: Extent) -> int:
        """Bytes for finding out which blocks are kept."""
        return evaluated_bytes(extent.batch * extent.query_heads) if self._opaque else 0

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        reference.forward(self._live(task), state, self._scores(task.query.device))

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        reference.backward(self._live(task), grads, self._scores(task.query.device))

    def _live(self, task: TaskTensors) -> TaskTensors:
        return replace(task, rectangles=tuple(self._rectangles(task)))

    def _rectangles(self, task: TaskTensors) -> Iterator[Rectangle]:
        """The task's rectangles without the parts in which the mask keeps no pair."""
        seen = self._seen
        for r in task.rectangles:
            if r.n_queries == 0 or r.n_keys == 0:
                continue
            kept = self._parts_of(task, r, seen)
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

    def _parts_of(self, task: TaskTensors, r: Rectangle, seen: Hashable) -> tuple[Rectangle, ...]:
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

    def _scores(self, device: torch.device) -> reference.Scores:
        """What the modifications do to scores on a device."""
        score_mod, mask_mod = self.score_mod, self.mask_mod
        change = kept = None
        if score_mod is not None:
            change = partial(_changed, over_pairs(score_mod, scored=True))
        if isinstance(mask_mod, BlockMask):
            kept = partial(_kept, over_pairs(mask_mod.on(device)), mask_mod)
        elif mask_mod is not None:
            kept = partial(_kept, over_pairs(mask_mod), None)
        return reference.Scores(change, kept, tiles=reference.LARGE, matrices=_MATRICES)


_BOUND = reference.Scores(tiles=reference.LARGE, matrices=_MATRICES)
_Mapped = Callable[..., torch.Tensor]


def _numbers(block: reference.Block, keys: slice) -> tuple[torch.Tensor, ...]:
    """Of a tile: the numbers of its batch entries and heads, the positions of queries and keys."""
    task, device = block.task, block.query.device
    first = task.first_head
    return (
        torch.tensor(task.entries[block.entries], device=device),
        torch.arange(first + block.heads.start, first + block.heads.stop, device=device),
        positions(task.task, block.rows.start, block.rows.stop, device),
        positions(task.task, keys.start, keys.stop, device),
    )


def _kept(
    mapped: _Mapped, mask: BlockMask | None, block: reference.Block, keys: slice
) -> torch.Tensor | None:
    """Which pairs of a tile a mask keeps; None if it is known to keep all."""
    if mask is not None:
        r = Rectangle(block.rows.start, block.rows.stop, keys.start, keys.stop)
        parts = block.task.task.contiguous(r)
        if all(mask.verdict(Ranges.of(*q[:2], *k[:2])) is FULL for q, k, _ in parts):
            return None
    with torch.inference_mode(False), torch.no_grad():
        return mapped(*_numbers(block, keys))


def _changed(
    mapped: _Mapped, scores: torch.Tensor, block: reference.Block, keys: slice, derivative: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tile's modified scores, and their derivative by autograd if it is asked for."""
    with torch.inference_mode(False), torch.set_grad_enabled(derivative):
        # Autograd refuses tensors of inference mode.
        scores = scores.clone() if scores.is_inference() else scores
        leaf = scores.requires_grad_(derivative)
        changed = mapped(leaf, *_numbers(block, keys)).to(scores.dtype)
        slope = None
        if derivative:
            slope = torch.zeros_like(scores)
            if changed.requires_grad:
                (slope,) = torch.autograd.grad(changed, leaf, torch.ones_like(changed))
        return changed.detach().contiguous(), slope
