"""``dense``: attention under the CQS mask of a task, as the paper writes it (section 3).

Scores of whole rows are in memory, and the pairs that a task does not keep are masked one by one.
Every other kernel is tested against this one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels import reference
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Kernel,
    Saved,
    Statistics,
    TaskTensors,
    Three,
)

_WHOLE_ROWS = reference.Scores(whole_rows=True, tiles=reference.LARGE)


class DenseKernel(Kernel):
    """The reference (kernels/reference.py) over a whole task: any device, any floating dtype.

    It computes in fp32 (fp64 for fp64 inputs), so its results are exact up to fp32 rounding.
    """

    name = "dense"
    plain_softmax = True
    dropout = True
    wide_products = True

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if not call.dtype.is_floating_point:
            return f"it takes floating-point tensors, not {call.dtype}"
        return None

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        reference.forward(_everything(task), state, _under_mask(task))

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place.

        ``grads.scaling`` is for 16-bit probabilities; here they are not 16-bit, nor scaled.
        """
        reference.backward(_everything(task), grads, _under_mask(task))

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time; quadratic in tokens."""
        return _mask_bytes(extent) + reference.forward_bytes(call, _all_pairs(extent), _WHOLE_ROWS)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time; quadratic in tokens."""
        return _mask_bytes(extent) + reference.backward_bytes(call, _all_pairs(extent), _WHOLE_ROWS)


def _everything(task: TaskTensors) -> TaskTensors:
    """The task with all of its pairs as one rectangle."""
    return replace(task, rectangles=(Rectangle(0, task.query.shape[2], 0, task.key.shape[2]),))


def _under_mask(task: TaskTensors) -> reference.Scores:
    """Scores under the CQS mask (nq, nk); combined with the causal mask, if any."""
    n_queries, n_keys = task.query.shape[2], task.key.shape[2]
    mask = torch.from_numpy(task.task.mask())[:n_queries, :n_keys].to(task.query.device)
    if task.is_causal:
        # The tokens of a task are in ascending order, so local positions order them as global ones.
        mask = mask.tril()
    return replace(_WHOLE_ROWS, kept=lambda block, keys: mask[block.rows, keys])


def _all_pairs(extent: Extent) -> Extent:
    return replace(extent, max_queries=extent.n_tokens, max_keys=extent.n_tokens)


def _mask_bytes(extent: Extent) -> int:
    """The CQS mask, its causal half, and what says which pairs of a tile are masked."""
    return 4 * extent.n_tokens * extent.n_tokens


# ``tiles``: the reference with a soft cap, for whole rectangles.
#
# It runs what no other kernel here can: a soft cap on a CPU or in float64, and masks that an
# operator refuses.


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
