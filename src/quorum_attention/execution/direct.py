"""The monolithic call: the inner kernel on the inputs as they lie, all at once or by head group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.execution.call import Call, flat_batch
from quorum_attention.execution.masks import no_bias
from quorum_attention.execution.rows import Axis
from quorum_attention.execution.scaling import scales
from quorum_attention.execution.schedule import Schedule
from quorum_attention.execution.workload import Group, GroupSize, Workload, groups
from quorum_attention.kernels.protocol import Bias, InnerKernel
from quorum_attention.kernels.traits import whole_calls


def runs_directly(call: Call, schedule: Schedule) -> bool:
    """Whether the inner kernel can take the inputs as they lie: no slots, nothing to merge."""
    return call.in_place and runs_whole(call.work, schedule, call.kernel)


def gives_directly(
    kernel: InnerKernel, work: Workload, dtype: torch.dtype, *, divided: bool
) -> bool:
    """Whether an operator's gradients can be the results as they are.

    Args:
        dtype: of the results. What a scaled backward rounds to 16 bits is not right in 32.
        divided: the upstream gradient was divided (execution/upstream.py).
    """
    return not divided and (dtype == work.dtype or not scales(kernel, work))


def runs_whole(work: Workload, schedule: Schedule, kernel: InnerKernel) -> bool:
    """Whether ``kernel`` can take all of a head group in one call of its operator."""
    masked = work.mask is not None
    # Several batch dimensions may have no flat view: entries are then run one by one (``pieces``).
    every = schedule.group == GroupSize(work.batch, work.kv_heads) and len(work.batch_shape) <= 1
    calls = whole_calls(kernel)
    return (
        schedule.decomposition.depth == 0
        and calls is not None
        and calls.takes_whole(work.heads, work.kv_heads, work.n_tokens, masked, every)
        and _is_everything(_rectangles(work, schedule), work)
    )


def _is_everything(rectangles: tuple[Rectangle, ...], work: Workload) -> bool:
    """Whether there is one rectangle, of all queries and all keys. (With more keys than queries a
    causal one leaves keys out, and operators differ on what they make of the rest.)"""
    sizes = [(r.n_queries, r.n_keys) for r in rectangles]
    return sizes == [(work.n_queries, work.n_keys)]


@lru_cache(maxsize=256)
def _rectangles(work: Workload, schedule: Schedule) -> tuple[Rectangle, ...]:
    return schedule.decomposition.task(()).rectangles(
        work.is_causal, work.n_queries, work.n_keys, schedule.max_queries, schedule.max_keys
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """One kernel call: a head group, or (``whole``) the call itself.

    Attributes:
        group: batch entries and heads.
        whole: nothing is cut; results can be returned as the kernel made them.
        rectangle: the only one there is.
        bias: its additive mask.
    """

    group: Group
    whole: bool
    rectangle: Rectangle
    bias: Bias

    def take(self, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The piece's part of (*batch, heads, ...) as (b, heads, ...), a view."""
        if self.whole:
            batch_dims = len(self.group.entries[0])
            return tensor.reshape(len(self.group.entries), *tensor.shape[batch_dims:])
        return self._part(tensor, axis).unsqueeze(0)

    def put(self, target: torch.Tensor, axis: Axis, part: torch.Tensor) -> None:
        """Write a result (b, heads, ...) to its place in (*batch, heads, ...)."""
        if self.whole:
            target.copy_(part.reshape(target.shape))
        else:
            self._part(target, axis).copy_(part[0])

    def _part(self, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        heads = self.group.query_heads if axis == "query" else self.group.key_heads
        return tensor[self.group.entries[0]][heads]


def pieces(call: Call, schedule: Schedule, tensors: tuple[torch.Tensor, ...]) -> list[Piece]:
    """The kernel calls of a monolithic schedule.

    Args:
        tensors: everything the pass reads; where one of them has no (b, heads, n, d) view, batch
            entries are run one by one.
    """
    work = call.work
    task = schedule.decomposition.task(())
    (rectangle,) = _rectangles(work, schedule)
    every = GroupSize(work.batch, work.kv_heads)
    whole = schedule.group == every and all(flat_batch(t) is not None for t in tensors)
    size = every if whole else replace(schedule.group, batch=1)
    found = []
    for group in groups(work, size):
        bias: Bias = no_bias
        if call.mask is not None:
            bias = call.mask.bias(group, task, work.dtype, call.device)
        found.append(Piece(group, whole, rectangle, bias))
    return found
