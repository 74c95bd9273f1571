"""FlexAttention's score modifications and masks as an inner kernel, in global positions.

The modifications get the positions of a task's tokens in the whole sequence. They can be run in two
ways: by compiled FlexAttention, a whole task at a time (``flex.py``), or here, by the reference on
any device. Neither runs the parts in which the mask keeps no pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quorum_attention.decomposition import FULL, Pairs, Ranges, Rectangle
from quorum_attention.kernels import reference
from quorum_attention.kernels.cache import Cache
from quorum_attention.kernels.masked.block_table import (
    BLOCK,
    TaskPairs,
    blocks_key,
    evaluated_bytes,
    joined,
    listed_blocks,
)
from quorum_attention.kernels.masked.functions import (
    BlockMask,
    MaskMod,
    ScoreMod,
    depends_on_batch_head,
    over_pairs,
    results_at,
    tensors,
)
from quorum_attention.kernels.masked.geometry import FunctionRule, Geometry
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
        geometry: what the mask keeps.
    """

    own_attention = True
    sparse = True

    def __init__(self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str) -> None:
        self.score_mod, self.mask_mod, self.name = score_mod, mask_mod, name
        rules = () if mask_mod is None else (FunctionRule(mask_mod),)
        self.geometry = Geometry(rules=rules)
        self._parts: Cache[tuple[Rectangle, ...]] = Cache(_CACHED_RECTANGLES, lambda found: 1)

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
        score_mod = self.score_mod
        return self.geometry.depends(device)[0] or (
            score_mod is not None and depends_on_batch_head(score_mod, device, scored=True)[0]
        )

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.mask is not None:
            return "it takes no attention mask: give it as mask_mod or score_mod"
        return None

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call, as far as they are known without trying the mask."""
        mask = self.mask_mod
        verdict = mask.verdict if isinstance(mask, BlockMask) else None
        return Pairs(n_queries, n_keys, is_causal, verdict)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return max(reference.forward_bytes(call, extent, _BOUND), self._evaluated(extent))

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        return max(reference.backward_bytes(call, extent, _BOUND), self._evaluated(extent))

    def _evaluated(self, extent: Extent) -> int:
        """Bytes for finding out which blocks are kept."""
        lanes = extent.batch * extent.query_heads
        return evaluated_bytes(lanes) if self.geometry.opaque else 0

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        reference.forward(self._live(task), state, self._scores())

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        reference.backward(self._live(task), grads, self._scores())

    def _live(self, task: TaskTensors) -> TaskTensors:
        """The task without the parts of its rectangles in which the mask keeps no pair."""
        live = [r for r in task.rectangles if r.n_queries and r.n_keys]
        if self.mask_mod is not None:
            live = [part for r in live for part in self._parts_of(task, r)]
        return replace(task, rectangles=live)

    def _parts_of(self, task: TaskTensors, r: Rectangle) -> tuple[Rectangle, ...]:
        key = blocks_key(self.geometry, task, (r,))
        return self._parts.get(key, lambda: tuple(self._prune(task, r)))

    def _prune(self, task: TaskTensors, r: Rectangle) -> list[Rectangle]:
        """Strips of ``r`` from the first to the last block in which the mask keeps pairs; ``r``
        itself if that leaves out less than a fifth of it."""
        pairs = TaskPairs.of(task.task, (r,), r.causal, r.query_stop, r.key_stop)
        blocks = joined([*listed_blocks(self.geometry, task, pairs)[:2]]) * BLOCK
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

    def _scores(self) -> reference.Scores:
        change = None
        if self.score_mod is not None:
            change = partial(_changed, over_pairs(self.score_mod, scored=True))
        kept = None if self.mask_mod is None else partial(_kept, self.geometry)
        return reference.Scores(change, kept, tiles=reference.LARGE, matrices=_MATRICES)


_BOUND = reference.Scores(tiles=reference.LARGE, matrices=_MATRICES)
_Mapped = Callable[..., torch.Tensor]


def _pairs(block: reference.Block, keys: slice) -> Indices:
    """The pairs of a tile."""
    task, device = block.task, block.query.device
    first = task.first_head
    return Indices(
        torch.tensor(task.entries[block.entries], device=device),
        torch.arange(first + block.heads.start, first + block.heads.stop, device=device),
        positions(task.task, block.rows.start, block.rows.stop, device),
        positions(task.task, keys.start, keys.stop, device),
    )


def _kept(geometry: Geometry, block: reference.Block, keys: slice) -> torch.Tensor | None:
    """Which pairs of a tile are kept; None if all are known to be."""
    r = Rectangle(block.rows.start, block.rows.stop, keys.start, keys.stop)
    parts = block.task.task.contiguous(r)
    if all(geometry.verdict(Ranges.of(*q[:2], *k[:2])) is FULL for q, k, _ in parts):
        return None
    with torch.inference_mode(False), torch.no_grad():
        return geometry.keeps(_pairs(block, keys))


def _changed(
    mapped: _Mapped, scores: torch.Tensor, block: reference.Block, keys: slice, derivative: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tile's modified scores, and their derivative by autograd if it is asked for."""
    with torch.inference_mode(False), torch.set_grad_enabled(derivative):
        # Autograd refuses tensors of inference mode.
        scores = scores.clone() if scores.is_inference() else scores
        leaf = scores.requires_grad_(derivative)
        at = _pairs(block, keys)
        changed = mapped(leaf, at.entries, at.heads, at.queries, at.keys).to(scores.dtype)
        slope = None
        if derivative:
            slope = torch.zeros_like(scores)
            if changed.requires_grad:
                (slope,) = torch.autograd.grad(changed, leaf, torch.ones_like(changed))
        return changed.detach().contiguous(), slope
