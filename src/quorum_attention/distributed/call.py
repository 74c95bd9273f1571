"""A sharded call on one rank, and the results of its blocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.autograd import run_with_hook
from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.block import BlockResults, CallBlock, Masked, WholeCall
from quorum_attention.call.options import DEFAULT_OPTIONS, Arguments, CallOptions
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.dispatch import cached_request
from quorum_attention.distributed.agreement import CallSignature
from quorum_attention.distributed.assignment import (
    Assignment,
    HeadSlice,
    Operand,
    ShardBlock,
)
from quorum_attention.distributed.gathered_rows import (
    GatheredRows,
    RowsByHeads,
    add_rows,
)
from quorum_attention.distributed.groups import GroupMember, deref_group
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.distributed.sharded_mask import functions_of_mask, mask_tensors
from quorum_attention.execution.report import Report
from quorum_attention.kernels.masked.captured_tensors import tensors
from quorum_attention.kernels.masked.read_values import functions_of
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.passes.block_call import compute_block
from quorum_attention.passes.run import run_backward, run_forward


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
        whole_call: the call of all ranks.
        group_reference: weak, as autograd's graph, which a caller may keep, holds this
            call.
        rank: this rank.
        options: budget, depth and kernel of every attention call, with the settings of
            the forward.
        signature: what the ranks have agreed on.
        report: filled with what this rank does.
        dtype: in which rows are sent and parts are computed.
        records: whether there may be a backward.
        two_streams: whether stages are computed on two streams.
    """

    assignment: Assignment
    whole_call: WholeCall
    group_reference: weakref.ref[dist.ProcessGroup]
    rank: int
    options: CallOptions
    signature: CallSignature
    report: ShardedReport | None
    dtype: torch.dtype
    records: bool
    two_streams: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return deref_group(self.group_reference)

    @property
    def member(self) -> GroupMember:
        """The process group, with this rank."""
        return GroupMember(self.group, self.rank, self.assignment.shape.n_ranks)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of results that have to be added up."""
        return self.whole_call.shape.state_dtype

    @property
    def mask_params(self) -> MaskParams:
        """The tensors of the mask that may have gradients."""
        mask = self.whole_call.mask
        return NO_MASK_PARAMS if mask is None else MaskParams(mask.bias, mask.sinks)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The users' functions that both passes call."""
        of_mask = functions_of_mask(self.whole_call.mask)
        return [*of_mask, *functions_of(self.options.kernel)]

    @property
    def captured(self) -> list[torch.Tensor]:
        """The tensors that both passes read besides the inputs: those of the mask, and
        those that functions read."""
        of_mask = [tensor for _, tensor in mask_tensors(self.whole_call.mask)]
        of_functions = tensors(functions_of_mask(self.whole_call.mask))
        of_kernel: Sequence[torch.Tensor] = ()
        if self.options.kernel != "auto":
            of_kernel = get_kernel(self.options.kernel).captured()
        return [*of_mask, *of_functions, *of_kernel]

    def compute_stage(
        self, stage: int, rows: RowsByHeads, mask_grads: MaskParams = NO_MASK_PARAMS
    ) -> RowsByHeads:
        """Return the results of a stage over this rank's blocks.

        Args:
            rows: the rows that came; the pass is a backward if ``grad_out`` is among
                them.
            mask_grads: gradients to which those of the blocks are added.

        Returns:
            Output and lse of the rows, or gradients, in the state's dtype, or those of
            whole heads in their own.
        """
        blocks = self.assignment.blocks(self.rank, stage)
        results: RowsByHeads = {}
        for block in blocks:
            for part in self._compute_block(block, rows, mask_grads):
                if len(blocks) == 1:
                    results[part.head_slice] = part
                else:
                    add_rows(results, rows[part.head_slice].rows, part)
        return results

    def _compute_block(
        self, block: ShardBlock, rows: RowsByHeads, mask_grads: MaskParams
    ) -> list[GatheredRows]:
        """Return the results of a block: those of its queries, and in a backward of its
        keys.

        Args:
            rows: query, key and value of the stage; for gradients grad_out, out and lse
                besides.
        """
        shape = self.whole_call.shape
        queries = HeadSlice(Operand.QUERY, block.heads)
        keys = HeadSlice(Operand.KV, self.assignment.shape.kv_of(block.heads))
        inputs = {
            **rows[queries].at(queries.heads, [block.queries]),
            **rows[keys].at(keys.heads, block.keys),
        }
        call_block = CallBlock(
            Interval(0, shape.batch),
            block.heads,
            block.queries,
            Interval(0, shape.n_keys),
        )
        masked: Masked | None = None
        if self.assignment.shape.units == "pairs":
            # A block may have some of its rows' keys alone: there is neither mask nor
            # dropout.
            masked = (None, block.causal)
        if "grad_out" not in inputs:
            compute = partial(self._run_block, call_block, inputs, masked)
            out, lse = run_with_hook(compute)
            of_queries = {"out": out, "lse": lse.to(out.device)}
            return [GatheredRows(queries, (block.queries,), of_queries)]
        grads = self._run_block(call_block, inputs, masked, mask_grads)
        grad_query, grad_key, grad_value, *param_grads = grads
        self._add_mask_grads(mask_grads, call_block, param_grads)
        of_queries = {"grad_query": grad_query}
        of_keys = {"grad_key": grad_key, "grad_value": grad_value}
        return [
            GatheredRows(queries, (block.queries,), of_queries),
            GatheredRows(keys, block.keys, of_keys),
        ]

    def _run_block(
        self,
        block: CallBlock,
        inputs: NamedTensors,
        masked: Masked | None,
        mask_grads: MaskParams = NO_MASK_PARAMS,
    ) -> tuple[torch.Tensor, ...]:
        """Make the attention call of a block, with a report of its own if there is one
        of all."""
        request = self._cached_request(inputs, masked)
        if request is not None:
            return self._run_request(request, inputs)
        report: Report | None = None
        if self.report is not None:
            report = Report()
            self.report.calls.append(report)
        results = BlockResults(
            out_dtype=None if self.assignment.whole_heads else self.state_dtype,
            grad_mask=mask_grads.bias is not None,
            grad_sinks=mask_grads.sinks is not None,
        )
        options = self.options._replace(report=report)
        return compute_block(
            self.whole_call,
            block,
            inputs,
            options,
            results,
            masked,
        )

    def _cached_request(
        self, inputs: NamedTensors, masked: Masked | None
    ) -> Request | None:
        """Return the request of a block of whole heads that needs not be checked again;
        None: it has to be."""
        is_plain = masked is not None and self.assignment.whole_heads
        if not is_plain or self.options is not DEFAULT_OPTIONS or self.report:
            return None
        arguments = Arguments(
            is_causal=self.whole_call.shape.is_causal,
            scale=self.whole_call.scale,
            enable_gqa=True,
        )
        return cached_request(
            inputs["query"],
            inputs["key"],
            inputs["value"],
            arguments,
        )

    def _run_request(
        self, request: Request, inputs: NamedTensors
    ) -> tuple[torch.Tensor, ...]:
        """Compute the results of a plain block."""
        tensors = Tensors(
            inputs["query"],
            inputs["key"],
            inputs["value"],
            None,
        )
        if "grad_out" not in inputs:
            return run_forward(tensors, request)
        backward_inputs = BackwardInputs(
            inputs["grad_out"],
            inputs["out"],
            inputs["lse"],
        )
        return run_backward(tensors, request, backward_inputs)

    def _add_mask_grads(
        self, mask_grads: MaskParams, block: CallBlock, grads: Sequence[torch.Tensor]
    ) -> None:
        """Add a block's gradients of bias and sinks, as far as they are wanted, in this
        order."""
        remaining = iter(grads)
        if mask_grads.bias is not None:
            bias_of_block = self.whole_call.cut_bias(mask_grads.bias, block)
            bias_of_block.add_(next(remaining))
        if mask_grads.sinks is not None:
            sinks_of_heads = mask_grads.sinks[slice(*block.heads)]
            sinks_of_heads.add_(next(remaining))
