"""A kernel that computes uncut calls under a mask in a way of its own, and all others by blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch

from quorum_attention.decomposition import PARTIAL, Pairs, Ranges, Verdict
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.masked.token_rules import TokenRules
from quorum_attention.kernels.operator_call import Call, Saved, Three
from quorum_attention.kernels.protocol import Kernel, Launches
from quorum_attention.kernels.score_tiles import QueryBlock, ScoreTransform
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors

# The blocks of more entries are not looked at together.
_FEW_ENTRIES = 64


class WholeCallKernel(Kernel):
    """Attention under a mask of tokens.

    Args:
        rules: the pairs that the mask keeps.
        shape: of the calls; torch.vmap may add entries, which are those of the batch over and over.
        base: computes the calls.
        by_blocks: makes the kernel for all that is no whole call: tasks, and calls with dropout.
        scores: what is done to scores beside the mask.
        share: of pairs, that calls compute.
    """

    own_attention = True
    sparse = True

    def __init__(
        self,
        rules: TokenRules,
        shape: CallShape,
        base: Kernel,
        by_blocks: Callable[[], Kernel],
        scores: ScoreTransform,
        share: float,
    ) -> None:
        self.name = base.name
        self.rules = rules
        self.shape = shape
        self.base = base
        self._by_blocks = by_blocks
        self._scores = scores
        self._share = min(1.0, share)
        is_one_launch = base.launches is Launches.ONE
        self.launches = Launches.ONE if is_one_launch else Launches.CALLS_ON_STREAMS
        self.compute_like(base)

    @abstractmethod
    def masked_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """``whole_forward`` of entries from ``call.first_entry`` on, without dropout."""

    @abstractmethod
    def masked_backward(self, call: Call, saved: Saved) -> Three:
        """``whole_backward`` of entries from ``call.first_entry`` on, without dropout."""

    @abstractmethod
    def masked_workspace_bytes(self, shape: CallShape, extent: Extent, *, backward: bool) -> int:
        """Upper bound of the device bytes of a whole call."""

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        return self.base.refusal(replace(shape, is_causal=True))

    def kept_pairs(self, n_queries: int, n_keys: int, is_causal: bool) -> Pairs:
        """See ``Kernel``."""
        return Pairs(n_queries, n_keys, is_causal, self._verdict, self._share)

    def _verdict(self, block: Ranges) -> Verdict:
        if self.shape.batch > _FEW_ENTRIES:
            return PARTIAL
        verdict = self._by_blocks().kept_pairs(*self.shape.lengths).verdict
        return PARTIAL if verdict is None else verdict(block)

    def scores_of_pairs(self) -> ScoreTransform:
        """See ``Kernel``."""
        return replace(self._scores, keeps=self._kept)

    def _kept(self, block: QueryBlock, keys: slice) -> torch.Tensor:
        pairs = block.indices(keys)
        entries = pairs.entries % self.shape.batch
        queries, columns = pairs.queries.unsqueeze(0), pairs.keys.unsqueeze(0)
        return self.rules.kept(entries, queries, columns, columns.device).unsqueeze(1)

    def takes_whole(self, shape: CallShape, tokens: int, all_heads: bool) -> bool:
        """Calls are told which entries they have."""
        return all_heads or not shape.dropout

    def _is_masked_call(self, call: Call) -> bool:
        last = call.first_entry + call.query.shape[0]
        return call.dropout is None and last <= self.shape.batch

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Kernel``."""
        if self._is_masked_call(call):
            return self.masked_forward(call)
        return self._by_blocks().whole_forward(call)

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``Kernel``."""
        if self._is_masked_call(call):
            return self.masked_backward(call, saved)
        return self._by_blocks().whole_backward(call, saved)

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        self._by_blocks().forward(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        self._by_blocks().backward(task, grads)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        if extent.direct and not shape.dropout:
            return self.masked_workspace_bytes(shape, extent, backward=False)
        return self._by_blocks().forward_workspace_bytes(shape, extent)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        if extent.direct and not shape.dropout:
            return self.masked_workspace_bytes(shape, extent, backward=True)
        return self._by_blocks().backward_workspace_bytes(shape, extent)
