"""A sharded call on one rank, and the results of its blocks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.autograd import run_with_hook
from quorum_attention.call.block import BlockResults, CallBlock, Masked, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.call.settings import with_current_settings
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.agreement import CallSignature
from quorum_attention.distributed.assignment import Assignment, HeadSlice, Operand, ShardBlock
from quorum_attention.distributed.gathered_rows import (
    GatheredRows,
    NamedTensors,
    RowsByHeads,
    add_rows,
)
from quorum_attention.distributed.groups import deref_group
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.execution.report import Report
from quorum_attention.passes.block_call import compute_block


class MaskParams(NamedTuple):
    """The tensors of a mask that may have gradients, or their gradients.

    Attributes:
        bias: None: the mask has none, or its gradient is not wanted.
        sinks: likewise.
    """

    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


NO_MASK_PARAMS = MaskParams()


@dataclass(frozen=True, slots=True)
class ShardedCall:
    """A call on one rank.

    Attributes:
        assignment: who computes what.
        whole: the call of all ranks.
        group_reference: weak, as autograd's graph, which a caller may keep, holds this call.
        rank: this rank.
        options: budget, depth and kernel of every attention call.
        signature: what the ranks have agreed on.
        report: filled with what this rank does.
        two_streams: whether stages are computed on two streams.
    """

    assignment: Assignment
    whole: WholeCall
    group_reference: weakref.ref[dist.ProcessGroup]
    rank: int
    options: CallOptions
    signature: CallSignature
    report: ShardedReport | None
    two_streams: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return deref_group(self.group_reference)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of results that have to be added up."""
        return self.whole.shape.state_dtype

    @property
    def mask_params(self) -> MaskParams:
        """The tensors of the mask that may have gradients."""
        mask = self.whole.mask
        return NO_MASK_PARAMS if mask is None else MaskParams(mask.bias, mask.sinks)

    def compute_stage(
        self, stage: int, rows: RowsByHeads, mask_grads: MaskParams = NO_MASK_PARAMS
    ) -> RowsByHeads:
        """Return the results of a stage over this rank's blocks.

        Args:
            rows: the rows that came; the pass is a backward if ``grad_out`` is among them.
            mask_grads: gradients to which those of the blocks are added.

        Returns:
            Output and lse of the rows, or gradients, in the state's dtype, or those of whole heads
            in their own.
        """
        results: RowsByHeads = {}
        blocks = self.assignment.blocks(self.rank, stage)
        for block in blocks:
            queries = HeadSlice(Operand.QUERY, block.heads)
            keys = HeadSlice(Operand.KV, self.assignment.shape.kv_of(block.heads))
            inputs = rows[queries].at(queries.heads, [block.queries])
            inputs |= rows[keys].at(keys.heads, block.keys)
            row_results, key_results = self._compute_block(block, inputs, mask_grads)
            parts = {queries: ([block.queries], row_results), keys: (block.keys, key_results)}
            for head_slice, (runs, tensors) in parts.items():
                rows_of_heads = rows[head_slice].rows
                if len(blocks) == 1:
                    results[head_slice] = GatheredRows(head_slice.heads, rows_of_heads, tensors)
                else:
                    add_rows(results, head_slice, rows_of_heads, runs, tensors)
        return results

    def _compute_block(
        self, block: ShardBlock, inputs: NamedTensors, mask_grads: MaskParams
    ) -> tuple[NamedTensors, NamedTensors]:
        """Return the results of a block by name: those of its queries, and those of its keys.

        Args:
            inputs: query, key, value; for gradients grad_out, out and lse besides.
        """
        entries = Interval(0, self.whole.shape.batch)
        all_keys = Interval(0, self.whole.shape.n_keys)
        call_block = CallBlock(entries, block.heads, block.queries, all_keys)
        # Where a block may have some of its rows' keys alone there is neither mask nor dropout.
        masked = (None, block.causal) if self.assignment.shape.units == "pairs" else None
        if "grad_out" not in inputs:
            out, lse = run_with_hook(partial(self._run_block, call_block, inputs, masked))
            return {"out": out, "lse": lse.to(out.device)}, {}
        grads = self._run_block(call_block, inputs, masked, mask_grads)
        grad_query, grad_key, grad_value, *param_grads = grads
        self._add_mask_grads(mask_grads, call_block, param_grads)
        return {"grad_query": grad_query}, {"grad_key": grad_key, "grad_value": grad_value}

    def _run_block(
        self,
        call_block: CallBlock,
        inputs: NamedTensors,
        masked: Masked | None,
        mask_grads: MaskParams = NO_MASK_PARAMS,
    ) -> tuple[torch.Tensor, ...]:
        """Make the attention call of a block, with a report of its own if there is one of all."""
        report: Report | None = None
        if self.report is not None:
            report = Report()
            self.report.calls.append(report)
        results = BlockResults(
            out_dtype=None if self.assignment.whole_heads else self.state_dtype,
            grad_mask=mask_grads.bias is not None,
            grad_sinks=mask_grads.sinks is not None,
        )
        options = with_current_settings(self.options._replace(report=report))
        return compute_block(self.whole, call_block, inputs, options, results, masked)

    def _add_mask_grads(
        self, mask_grads: MaskParams, block: CallBlock, grads: Sequence[torch.Tensor]
    ) -> None:
        """Add a block's gradients of bias and sinks, as far as they are wanted, in this order."""
        remaining = iter(grads)
        if mask_grads.bias is not None:
            self.whole.cut_bias(mask_grads.bias, block).add_(next(remaining))
        if mask_grads.sinks is not None:
            sinks_of_heads = mask_grads.sinks[slice(*block.heads)]
            sinks_of_heads.add_(next(remaining))
