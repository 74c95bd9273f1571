"""What users' functions and soft caps make of a kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.masked.pair_functions import (
    MaskMod,
    ScoreMod,
    boolean,
)
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.score_tiles import PLAIN, QueryBlock, ScoreTransform
from quorum_attention.kernels.task_tensors import Indices


class UserModKernel(Kernel):
    """A kernel of users' functions.

    Attributes:
        mask_mods, score_mod: they.
    """

    own_attention = True
    sparse = True
    mask_mods: tuple[MaskMod, ...]
    score_mod: ScoreMod | None = None

    def called_back(self) -> tuple[Callable[..., Any], ...]:
        """See ``Kernel``."""
        if self.score_mod is None:
            return self.mask_mods
        return self.score_mod, *self.mask_mods

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> list[torch.Tensor]:
        """The results of the functions for the first pair of ``at`` and for the
        last."""
        mods: list[Callable[..., Any]] = [boolean(mod) for mod in self.mask_mods]
        if self.score_mod is not None:
            score = torch.zeros((), device=at.queries.device)
            mods.append(partial(self.score_mod, score))
        numbers = (at.entries, at.heads, at.queries, at.keys)
        first = [tensor[0] for tensor in numbers]
        last = [tensor[-1] for tensor in numbers]
        results = list[torch.Tensor]()
        for mod in mods:
            results.append(mod(*first))
            results.append(mod(*last))
        return results


class BasedKernel(UserModKernel):
    """Attention under a mask, whose parts another kernel computes.

    Args:
        base: computes the parts.
        scores: what is done to scores beside the mask.
    """

    mask_mods: tuple[MaskMod, ...] = ()

    def __init__(self, base: Kernel, scores: ScoreTransform) -> None:
        self.name = base.name
        self.base = base
        self._scores = scores
        self.compute_like(base)

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it
        can."""
        return self.base.refusal(replace(shape, is_causal=True))

    def scores_of_pairs(self) -> ScoreTransform:
        """See ``Kernel``: the change of scores, and what the mask keeps."""
        return replace(self._scores, keeps=self.kept_pairs_of_tile)

    @abstractmethod
    def kept_pairs_of_tile(self, block: QueryBlock, keys: slice) -> torch.Tensor:
        """Which pairs of a tile are kept: a ``score_tiles.Kept``."""

    @abstractmethod
    def pass_workspace_bytes(
        self, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """Upper bound of the device bytes of a pass at any one time."""

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return self.pass_workspace_bytes(shape, extent, backward=False)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        return self.pass_workspace_bytes(shape, extent, backward=True)


def _cap(
    cap: float, scores: torch.Tensor, block: object, keys: object, derivative: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A ``ScoreFunction``: scores become ``cap * tanh(score / cap)``, in place."""
    scores.div_(cap)
    scores.tanh_()
    slope = None
    if derivative:
        squares = scores * scores
        slope = squares.neg_().add_(1.0)
    return scores.mul_(cap), slope


def capped(softcap: float | None) -> ScoreTransform:
    """The change of scores by a soft cap; None is none."""
    if softcap is None:
        return PLAIN
    return ScoreTransform(function=partial(_cap, softcap), matrices=1)
