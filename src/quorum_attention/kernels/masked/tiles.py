"""``tiles``: the reference with a soft cap, for whole rectangles.

It runs what no other kernel here can: a soft cap on a CPU or in float64, and masks that an operator
refuses.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.kernels import reference
from quorum_attention.kernels.protocol import Call, CallShape, Extent, Saved, Three


class Tiles:
    """An operator, as ``RectangleKernel``'s are: whole rectangles, results as they are.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)``, before the mask is added; None
            is none.
    """

    name = "tiles"

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap
        self.scores = reference.PLAIN
        if softcap is not None:
            self.scores = reference.Scores(change=self._change, matrices=1)

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``; ``out`` in fp32 (fp64 for fp64 inputs)."""
        wide = replace(call, stored=reference.work_dtype(call.query))
        return reference.whole_forward(wide, self.scores)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``; gradients in fp32 (fp64 for fp64 inputs)."""
        wide = replace(call, stored=reference.work_dtype(call.query))
        return reference.whole_backward(wide, saved, self.scores)

    def cap_(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Cap scaled scores in place; returns the derivative of the cap, None without one."""
        if self.softcap is None:
            return None
        return self._change(scores, None, slice(None), True)[1]

    def _change(
        self, scores: torch.Tensor, block: reference.Block | None, keys: slice, derivative: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.softcap is not None
        scores.div_(self.softcap).tanh_()
        found = (scores * scores).neg_().add_(1.0) if derivative else None
        return scores.mul_(self.softcap), found

    def forward_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes that ``whole_forward`` takes, its results among them."""
        return reference.forward_bytes(call, replace(extent, direct=True), self.scores)

    def backward_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes that ``whole_backward`` takes, its results among them."""
        return reference.backward_bytes(call, replace(extent, direct=True), self.scores)
