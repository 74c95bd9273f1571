"""The attention calls of a rank: blocks of the whole call, with its mask and dropout."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from quorum_attention.call.block import Block, BlockResults, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.call.settings import current, filled
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.agreement import Arguments, alive
from quorum_attention.distributed.partition import Assignment
from quorum_attention.execution.problem import state_dtype
from quorum_attention.execution.report import Report
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Mask
from quorum_attention.passes import compute_block
from quorum_attention.sizes import format_bytes


def kernel_of_parts(kernel: str | InnerKernel) -> InnerKernel:
    """The kernel of that name, for calls that are parts of one.

    Raises:
        ValueError, TypeError: there is none.
        NotImplementedError: it computes another attention, by positions in the whole call.
    """
    found = get_kernel(kernel)
    if found.probed_as is not None or (found.own_attention and not found.position_free):
        raise NotImplementedError(
            f"kernel {found.name!r} computes another attention, of positions in the whole call; "
            "ranks have parts of it: give attn_mask, or a function that takes no positions"
        )
    return found


@dataclass(slots=True)
class ShardedReport:
    """Filled by ``distributed.attention``, on every rank for itself.

    Attributes:
        way: how pairs were given to ranks; it moved the fewest bytes of those that share the work
            evenly (distributed/partition.py).
        rank, ranks: of the group.
        pairs: query-key pairs that this rank computes.
        imbalance: the most pairs of any rank, over an equal share.
        forward_bytes, backward_bytes: received by this rank.
        most_forward_bytes: received in a forward by the rank that receives most, as counted
            beforehand.
        stages: transfers that go on beside computation.
        kept: whether the forward's inputs stay where they were computed with until the backward.
        calls: what each attention call of this rank did, in the order of the calls.
    """

    way: str = ""
    rank: int = 0
    ranks: int = 1
    pairs: int = 0
    imbalance: float = 1.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    most_forward_bytes: int = 0
    stages: int = 0
    kept: bool = False
    calls: list[Report] = field(default_factory=list)

    def begin(self, assignment: Assignment, rank: int, most_bytes: int, stages: int) -> None:
        """Filled with what is known beforehand; the rest is emptied."""
        self.stages, self.kept = stages, assignment.kept
        self.way, self.rank, self.ranks = assignment.way, rank, assignment.of.ranks
        self.pairs, self.imbalance = assignment.pairs(rank), assignment.imbalance
        self.most_forward_bytes, self.forward_bytes, self.backward_bytes = most_bytes, 0, 0
        self.calls.clear()

    def __str__(self) -> str:
        both = f"{format_bytes(self.forward_bytes)} received"
        if self.backward_bytes:
            both += f" forward, {format_bytes(self.backward_bytes)} backward"
        return (
            f"rank {self.rank} of {self.ranks}: {self.way}, {self.pairs:,} pairs "
            f"(the largest share is {self.imbalance:.3f} of an equal one), {both}"
        )


@dataclass(slots=True)
class MaskGradients:
    """The gradients of a mask's own tensors, added up over what this rank computes.

    Attributes:
        bias, sinks: like the mask's, in at least fp32; None: not asked for.
    """

    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, mask: Mask | None, bias: bool, sinks: bool) -> MaskGradients:
        """Zeros for the gradients that are wanted."""
        named = (None, None) if mask is None else (mask.bias, mask.sinks)
        return cls(*(
            torch.zeros_like(t, dtype=state_dtype(t.dtype)) if wanted and t is not None else None
            for wanted, t in zip((bias, sinks), named, strict=True)
        ))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Calls:
    """What all calls of a rank have in common.

    Attributes:
        whole: the call of all ranks.
        sizes: rows of every rank.
        written: budget, depth and kernel of every call.
        arguments: what the ranks have agreed on.
        partial: whether a call may have some of its rows' keys alone.
    """

    whole: WholeCall
    _group: weakref.ref[dist.ProcessGroup]
    sizes: tuple[int, ...]
    written: CallOptions
    arguments: Arguments
    report: ShardedReport | None = None
    partial: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; a graph of autograd's, which a caller may keep, holds this."""
        return alive(self._group)

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return self.group.rank()

    @property
    def mask(self) -> Mask | None:
        """Of the whole call."""
        mask = self.whole.mask
        assert not isinstance(mask, torch.Tensor)
        return mask

    @property
    def unlimited(self) -> bool:
        """Whether nothing is said of how a call is run, as by a budget."""
        return self.written.says_nothing and current() is None

    def compute(
        self,
        inputs: Mapping[str, torch.Tensor],
        heads: Interval,
        rows: Interval,
        causal: bool | None = None,
        results: BlockResults | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Output and log-sum-exp of some rows of some heads, or gradients, as ``compute_block``.

        Args:
            inputs: query, key, value; for gradients grad_out, out and lse besides.
            heads, rows: the whole call's numbers of both.
            causal: of these rows and keys, where there is no mask; None: as the whole call.
        """
        report = None
        if self.report is not None:
            report = Report()
            self.report.calls.append(report)
        written = filled(self.written._replace(report=report))
        masked = None if causal is None else (None, causal)
        return compute_block(self.whole, self._block(heads, rows), inputs, written, results, masked)

    def backward(
        self,
        inputs: Mapping[str, torch.Tensor],
        heads: Interval,
        rows: Interval,
        of_mask: MaskGradients,
        causal: bool | None = None,
        grads: Sequence[torch.Tensor] | None = None,
    ) -> Sequence[torch.Tensor]:
        """The gradients of such a call; ``grads`` are filled.

        Args:
            inputs: grad_out, query, key, value, out, lse.
            of_mask: to which the gradients of the mask's own tensors are added.
        """
        bias, sinks = of_mask.bias, of_mask.sinks
        results = BlockResults(
            grads=None if grads is None else (grads[0], grads[1], grads[2]),
            grad_mask=bias is not None, grad_sinks=sinks is not None, partial=self.partial,
        )  # fmt: skip
        made = list(self.compute(inputs, heads, rows, causal, results))
        if sinks is not None:
            sinks[heads.start : heads.stop] += made.pop()
        if bias is not None:
            self.whole.cut_bias(bias, self._block(heads, rows)).add_(made.pop())
        return made

    def _block(self, heads: Interval, rows: Interval) -> Block:
        entries, keys = Interval(0, self.whole.batch_shape[0]), Interval(0, self.whole.n_keys)
        return Block(entries, heads, rows, keys)


__all__ = ["Calls", "MaskGradients", "ShardedReport", "kernel_of_parts"]
