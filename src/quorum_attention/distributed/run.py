"""A sharded pass on one rank: rows come, blocks are computed, results go where their
rows belong.

Stage by stage: while stage k is computed, the inputs of the next stage and the results
of the stage
before are on their way, each as one message of several tensors::

    inputs     k + 1
    compute    k
    results    k - 1

Heads that are exchanged whole may be computed on two streams of a GPU, stages in turn.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import itemgetter

import torch

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.assignment import HeadSlice, Operand, RowSlice
from quorum_attention.distributed.call import NO_MASK_PARAMS, MaskParams, ShardedCall
from quorum_attention.distributed.exchange import Exchange
from quorum_attention.distributed.gathered_rows import (
    GatheredRows,
    RowsByHeads,
    Shards,
    add_rows,
    joined_rows,
)
from quorum_attention.execution.device.streams import TwoStreams
from quorum_attention.kernels.tensors import NamedTensors

# Tensors that a forward keeps for the backward where rows were gathered, in this order.
_KEPT_NAMES = {Operand.QUERY: ("query", "out", "lse"), Operand.KV: ("key", "value")}


def run_forward(
    call: ShardedCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the output of this rank's rows, and the tensors that the backward needs.

    Args:
        query: (batch, heads, rows, head_dim) of this rank's shard; key and value
            likewise.
    """
    keeps_inputs = call.assignment.keeps_inputs
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    results = {"out": out}
    if not keeps_inputs:
        # Where inputs are kept, the log-sum-exp stays with them.
        results["lse"] = query.new_empty(query.shape[:3], dtype=call.state_dtype)
    forward = _StagedPass(
        call,
        _shards(call, {"query": query}, {"key": key, "value": value}),
        _shards(call, results, {}),
        saves=call.records and keeps_inputs,
    )
    forward.run()
    if call.report is not None:
        call.report.forward_bytes = forward.received_bytes
    if keeps_inputs:
        return out, forward.saved
    return out, [query, key, value, *results.values()]


def run_backward(
    call: ShardedCall,
    grad_out: torch.Tensor,
    shapes: Sequence[torch.Size],
    saved: Sequence[torch.Tensor],
    mask_grads: MaskParams,
) -> list[torch.Tensor]:
    """Return the gradients of this rank's rows.

    Args:
        grad_out: (batch, heads, rows, value_dim).
        shapes: of query, key and value.
        saved: what the forward returned.
        mask_grads: gradients to which those of this rank are added.
    """
    grad_out = grad_out.contiguous()
    of_queries = {"grad_out": grad_out}
    of_keys: NamedTensors = {}
    kept_tensors: Sequence[torch.Tensor] = saved
    if not call.assignment.keeps_inputs:
        query, key, value, out, lse = saved
        of_queries |= {"query": query, "out": out, "lse": lse}
        of_keys = {"key": key, "value": value}
        kept_tensors = ()
    grad_query, grad_key, grad_value = (grad_out.new_empty(shape) for shape in shapes)
    grads_of_keys = {"grad_key": grad_key, "grad_value": grad_value}
    backward = _StagedPass(
        call,
        _shards(call, of_queries, of_keys),
        _shards(call, {"grad_query": grad_query}, grads_of_keys),
        kept_tensors=kept_tensors,
        mask_grads=mask_grads,
    )
    backward.run()
    if call.report is not None:
        call.report.backward_bytes = backward.received_bytes
    return [grad_query, grad_key, grad_value]


def _shards(
    call: ShardedCall, of_queries: NamedTensors, of_keys: NamedTensors
) -> Shards:
    """Return tensors of this rank's rows, with their positions."""
    shape = call.assignment.shape
    rows = (shape.shards[call.rank],)
    queries = HeadSlice(Operand.QUERY, Interval(0, shape.heads))
    keys = HeadSlice(Operand.KV, Interval(0, shape.kv_heads))
    return {
        Operand.QUERY: GatheredRows(queries, rows, of_queries),
        Operand.KV: GatheredRows(keys, rows, of_keys),
    }


class _StagedPass:
    """A pass on this rank.

    Args:
        shards: this rank's rows of the tensors that are sent to those that compute with
            them.
        targets: this rank's rows of the results, all of which are written.
        saves: whether gathered rows and their results are kept for the backward.
        kept_tensors: what the forward has kept.
        mask_grads: gradients to which those of this rank are added.

    Attributes:
        saved: tensors that are kept for the backward.
        received_bytes: from other ranks.
    """

    def __init__(
        self,
        call: ShardedCall,
        shards: Shards,
        targets: Shards,
        *,
        saves: bool = False,
        kept_tensors: Iterable[torch.Tensor] = (),
        mask_grads: MaskParams = NO_MASK_PARAMS,
    ) -> None:
        self._call = call
        self._member = call.member
        self._shards = shards
        self._targets = targets
        self._saves = saves
        self._kept_tensors = iter(kept_tensors)
        self._mask_grads = mask_grads
        self.saved: list[torch.Tensor] = []
        self.received_bytes = 0

    def run(self) -> None:
        """Run the pass."""
        n_stages = self._call.assignment.n_stages
        device = self._targets[Operand.QUERY].device
        streams = TwoStreams(device, self._call.two_streams)
        coming = deque[Exchange]()
        returning: list[Exchange] = []
        if n_stages:
            coming.append(self._send_inputs(0))
        for stage in range(n_stages):
            if stage + 1 < n_stages:
                coming.append(self._send_inputs(stage + 1))
            # The stage has the only reference to its inputs, whose memory ends with it.
            results = self._run_stage(stage, coming.popleft(), streams)
            returning.append(results)
        streams.meet()
        self._collect(returning)

    def _send_inputs(self, stage: int) -> Exchange:
        exchange = Exchange(
            self._slices(stage),
            self._shards,
            lambda part: self._shards[part.operand],
            self._member,
        )
        exchange.start()
        return exchange

    def _run_stage(self, stage: int, inputs: Exchange, streams: TwoStreams) -> Exchange:
        """Compute a stage when its inputs have come, and return its results on their
        way."""
        streams.reads(stage, *inputs.messages)
        with streams.turn(stage):
            results = self._compute(stage, self._gather(stage, inputs))
            exchange = Exchange(
                self._slices(stage),
                self._targets,
                lambda part: results[part.head_slice],
                self._member,
                self._call.state_dtype,
            )
            exchange.start()
        for rows in results.values():
            streams.leaves(*rows.tensors.values())
        streams.leaves(*self.saved, *exchange.messages)
        self.received_bytes += inputs.received_bytes + exchange.received_bytes
        return exchange

    def _slices(self, stage: int) -> tuple[RowSlice, ...]:
        return self._call.assignment.slices_of(self._call.rank, stage)

    def _gather(self, stage: int, inputs: Exchange) -> RowsByHeads:
        """Return the rows that came for a stage, those of the same heads together."""
        arrived: dict[HeadSlice, list[tuple[Interval, NamedTensors]]] = defaultdict(
            list
        )
        for row_slice, tensors in inputs.wait():
            arrived[row_slice.head_slice].append((row_slice.rows, tensors))
        gathered: RowsByHeads = {}
        needed = self._call.assignment.rows_needed(self._call.rank, stage)
        for head_slice, rows in needed.items():
            parts = sorted(arrived[head_slice], key=itemgetter(0))
            if not parts:
                # Nothing is sent of these heads, or there are no rows.
                shard = self._shards[head_slice.operand]
                gathered[head_slice] = GatheredRows.empty_like(
                    head_slice, rows, shard.tensors
                )
                continue
            joined: NamedTensors = {}
            for name in parts[0][1]:
                joined[name] = joined_rows([tensors[name] for _, tensors in parts])
            gathered[head_slice] = GatheredRows(head_slice, rows, joined)
        return gathered

    def _compute(self, stage: int, rows: RowsByHeads) -> RowsByHeads:
        """Return the results of a stage, from the rows that came and those that were
        kept."""
        for head_slice, gathered in rows.items():
            # The names come first: otherwise a tensor of the next heads would be taken
            # and lost.
            names = _KEPT_NAMES[head_slice.operand]
            gathered.tensors.update(zip(names, self._kept_tensors, strict=False))
        results = self._call.compute_stage(stage, rows, self._mask_grads)
        if self._saves:
            self._save(rows, results)
        return results

    def _save(self, rows: RowsByHeads, results: RowsByHeads) -> None:
        """Keep gathered rows for the backward, with their output and log-sum-exp."""
        for head_slice, gathered in rows.items():
            inputs = gathered.tensors
            self.saved += inputs.values()
            if head_slice.operand == Operand.QUERY:
                computed = results[head_slice].tensors
                dtype = inputs["query"].dtype
                out = computed["out"].to(dtype)
                self.saved += [out, computed["lse"]]

    def _collect(self, returning: Iterable[Exchange]) -> None:
        """Write what came of this rank's rows: complete results, and sums of partial
        results."""
        sums: RowsByHeads = {}
        summed: list[RowSlice] = []
        for exchange in returning:
            for row_slice, tensors in exchange.wait():
                target = self._targets[row_slice.operand]
                if row_slice.is_exclusive:
                    target.write(row_slice.heads, row_slice.rows, tensors)
                    continue
                part = GatheredRows(row_slice.head_slice, (row_slice.rows,), tensors)
                add_rows(sums, target.rows, part)
                summed.append(row_slice)
        for row_slice in summed:
            target = self._targets[row_slice.operand]
            total = sums[row_slice.head_slice].at(row_slice.heads, [row_slice.rows])
            target.write(row_slice.heads, row_slice.rows, total)
