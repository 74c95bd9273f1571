"""The attention calls of a rank: blocks of the whole call, with its mask and dropout."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from quorum_attention.call.block import Block, BlockResults, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.call.settings import current, filled
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.agreement import Arguments, compare, waits
from quorum_attention.distributed.masks import tensors_of
from quorum_attention.distributed.partition import Assignment
from quorum_attention.execution.problem import state_dtype
from quorum_attention.execution.report import Report
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.mask import Mask
from quorum_attention.passes import compute_block
from quorum_attention.sizes import format_bytes

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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

    def begin(self, assignment: Assignment, rank: int, most_bytes: int) -> None:
        """Filled with what is known beforehand; the rest is emptied."""
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
        if mask is None:
            return cls()
        rooms = [
            torch.zeros_like(t, dtype=state_dtype(t.dtype)) if wanted and t is not None else None
            for wanted, t in ((bias, mask.bias), (sinks, mask.sinks))
        ]
        return cls(*rooms)

    def found(self, mask: Mask | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both, in the dtypes of the mask's tensors."""
        if mask is None:
            return None, None
        both = ((self.bias, mask.bias), (self.sinks, mask.sinks))
        bias, sinks = (None if g is None or t is None else g.to(t.dtype) for g, t in both)
        return bias, sinks


@dataclass(frozen=True, slots=True)
class Calls:
    """What all calls of a rank have in common.

    Attributes:
        whole: the call of all ranks.
        written: budget, depth and kernel of every call.
        arguments: what the ranks have agreed on.
        partial: whether a call may have some of its rows' keys alone.
    """

    whole: WholeCall
    written: CallOptions
    arguments: Arguments
    report: ShardedReport | None = None
    partial: bool = False

    @property
    def mask(self) -> Mask | None:
        """Of the whole call."""
        mask = self.whole.mask
        assert not isinstance(mask, torch.Tensor)
        return mask

    def compare_backward(self, group: dist.ProcessGroup, grad_out: torch.Tensor) -> None:
        """Whether all ranks begin the backward of this call, where their hosts wait anyway."""
        if waits(group, grad_out):
            compare(group, {"call": "the backward of attention", **self.arguments})

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        heads: Interval,
        rows: Interval,
        causal: bool | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of some rows of some heads; the whole call's numbers of both.

        Args:
            causal: of these rows and keys, where there is no mask; None: as the whole call.
        """
        inputs = {"query": query, "key": key, "value": value}
        out, lse = compute_block(
            self.whole, self._block(heads, rows), inputs, self._written(),
            BlockResults(out_dtype=out_dtype), None if causal is None else (None, causal),
        )  # fmt: skip
        return out, lse

    def backward(
        self,
        inputs: dict[str, torch.Tensor],
        heads: Interval,
        rows: Interval,
        of_mask: MaskGradients,
        causal: bool | None = None,
        grads: Three | None = None,
    ) -> Three:
        """The gradients of such a call; ``grads`` are filled.

        Args:
            inputs: grad_out, query, key, value, out, lse.
            of_mask: to which the gradients of the mask's own tensors are added.
        """
        block = self._block(heads, rows)
        results = BlockResults(
            grads=grads, grad_mask=of_mask.bias is not None, grad_sinks=of_mask.sinks is not None,
            partial=self.partial,
        )  # fmt: skip
        masked = None if causal is None else (None, causal)
        query, key, value, *more = compute_block(
            self.whole, block, inputs, self._written(), results, masked
        )
        if of_mask.bias is not None:
            self.whole.cut_bias(of_mask.bias, block).add_(more.pop(0))
        if of_mask.sinks is not None:
            of_mask.sinks[heads.start : heads.stop] += more.pop(0)
        return query, key, value

    def read(self) -> list[torch.Tensor]:
        """Tensors of the mask: changed before the backward, they would give a wrong one."""
        return [] if self.mask is None else tensors_of(self.mask)

    @property
    def unlimited(self) -> bool:
        """Whether nothing is said of how a call is run, as by a budget."""
        return self.written.says_nothing and current() is None

    def _block(self, heads: Interval, rows: Interval) -> Block:
        entries, keys = Interval(0, self.whole.batch_shape[0]), Interval(0, self.whole.n_keys)
        return Block(entries, heads, rows, keys)

    def _written(self) -> CallOptions:
        report = None
        if self.report is not None:
            report = Report()
            self.report.calls.append(report)
        return filled(self.written._replace(report=report))


__all__ = ["Calls", "MaskGradients", "ShardedReport", "Three", "kernel_of_parts"]
