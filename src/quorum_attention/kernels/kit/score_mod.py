"""A score modification and a mask in FlexAttention's form, computed by the reference.

The functions get the positions of a task's tokens in the whole sequence. The reference
computes the task tile by tile, on any device and in any floating dtype.
"""

from __future__ import annotations

from functools import partial

import torch

from quorum_attention.decomposition import Pairs
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels import score_tiles
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.masked.geometry import Geometry, geometry_of
from quorum_attention.kernels.masked.pair_functions import MaskMod, ScoreMod, over_pairs
from quorum_attention.kernels.masked.partwise import PartwiseKernel
from quorum_attention.kernels.masked.user_functions import UserModKernel
from quorum_attention.kernels.reference import TiledKernel
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

# Score matrices that a function may hold at a time, its result among them.
_MATRICES = 8


class ScoreModKernel(UserModKernel):
    """The kernel of ``from_score_mod`` without a compiler.

    Attributes:
        score_mod: the score modification, or None.
        mask_mod: the mask, or None.
        geometry: the pairs that the mask keeps.
        transform: what is done to the scores of a tile.
    """

    def __init__(
        self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, name: str
    ) -> None:
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self.name = name
        self.geometry = geometry_of(mask_mod)
        self.mask_mods = self.geometry.functions
        self._causal_geometry = Geometry(Band(None, 0)) & self.geometry
        self.transform = score_tiles.ScoreTransform(
            None if score_mod is None else partial(_modify_tile, score_mod),
            tiles=score_tiles.LARGE,
            matrices=_MATRICES,
        )
        tiled = TiledKernel(self.transform)
        self._plain_kernel = PartwiseKernel(self.geometry, tiled, self.transform)
        self._causal_kernel = PartwiseKernel(
            self._causal_geometry, tiled, self.transform
        )

    def geometry_under(self, *, is_causal: bool) -> Geometry:
        """Return the pairs that the mask keeps, and with ``is_causal`` the causal rule
        too."""
        return self._causal_geometry if is_causal else self.geometry

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it
        can."""
        if shape.bias is not None:
            return "it takes no attention mask: give it as mask_mod or score_mod"
        return None

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """The pairs of a call, as far as they are known without trying the mask."""
        unknown = self.geometry.keeps_all or self.geometry.functions
        verdict = None if unknown else self.geometry.verdict
        return Pairs(n_queries, n_keys, is_causal, verdict)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return self._causal_kernel.forward_workspace_bytes(shape, extent)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        return self._causal_kernel.backward_workspace_bytes(shape, extent)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        self._partwise_kernel(task).forward(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        self._partwise_kernel(task).backward(task, grads)

    def _partwise_kernel(self, task: TaskTensors) -> PartwiseKernel:
        return self._causal_kernel if task.is_causal else self._plain_kernel


def _modify_tile(
    score_mod: ScoreMod,
    scores: torch.Tensor,
    block: score_tiles.QueryBlock,
    keys: slice,
    derivative: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A ``score_tiles.ScoreFunction``: the modified scores of a tile, and their
    derivative.

    Autograd computes the derivative, if it is asked for.
    """
    # Autograd refuses tensors of inference mode: those of this tile are made without
    # it.
    with torch.inference_mode(False), torch.set_grad_enabled(derivative):
        if scores.is_inference():
            scores = scores.clone()
        leaf = scores.requires_grad_(derivative)
        modified = modified_scores(score_mod, leaf, block, keys)
        slope = _derivative(modified, leaf) if derivative else None
        return modified.detach().contiguous(), slope


def modified_scores(
    score_mod: ScoreMod,
    scores: torch.Tensor,
    block: score_tiles.QueryBlock,
    keys: slice,
) -> torch.Tensor:
    """Return the modified scores of a tile (b, h, rows, keys), in the dtype of
    ``scores``."""
    modify = over_pairs(score_mod, scored=True)
    indices = block.indices(keys)
    modified = modify(
        scores, indices.entries, indices.heads, indices.queries, indices.keys
    )
    return modified.to(scores.dtype)


def _derivative(modified: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return the derivative of ``modified`` scores by the scores ``leaf``, element by
    element."""
    if not modified.requires_grad:
        return torch.zeros_like(leaf)
    (slope,) = torch.autograd.grad(modified, leaf, torch.ones_like(modified))
    return slope
