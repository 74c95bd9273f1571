"""A sharded pass on one rank: rows come, blocks are computed, results go where their rows belong.

Stage by stage: while one is computed, the rows of the next are on their way, and the results of the
one before. Heads that are exchanged whole may be computed on two streams of a GPU, stages in turn.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from quorum_attention.autograd import computed_once
from quorum_attention.call.block import Block as PartOfCall
from quorum_attention.call.block import BlockResults, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.call.settings import filled
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.agreement import Signature, alive
from quorum_attention.distributed.exchange import Gathered, Sides, Transfer
from quorum_attention.distributed.partition import Assignment, Block, Needed, Piece
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.execution.device.cuda import TwoStreams
from quorum_attention.execution.problem import state_dtype
from quorum_attention.execution.report import Report
from quorum_attention.passes import compute_block

# Of queries; of keys and values.
_Shards = tuple[list[Gathered], list[Gathered]]
_OF_QUERIES = ("grad_out", "query", "out", "lse")
# The gradients of a mask's bias and sinks, added up over what this rank computes; None: not wanted.
MaskGradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Sharded:
    """A call on one rank.

    Attributes:
        whole: the call of all ranks.
        written: budget, depth and kernel of every attention call.
        arguments: what the ranks have agreed on.
        two_streams: whether stages are computed on two streams.
    """

    assignment: Assignment
    whole: WholeCall
    _group: weakref.ref[dist.ProcessGroup]
    written: CallOptions
    arguments: Signature
    report: ShardedReport | None
    two_streams: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; a graph of autograd's, which a caller may keep, holds this call."""
        return alive(self._group)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output of this rank's rows, and what the backward needs.

        Args:
            query: (batch, heads, rows, head_dim) of this rank's shard; key and value likewise.
        """
        state, kept = state_dtype(query.dtype), list[torch.Tensor]()
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        results = [out]
        if not self.assignment.kept:  # else the log-sum-exp stays with the inputs
            results += [torch.empty(query.shape[:3], dtype=state, device=query.device)]

        def compute(stage: int, sides: Sides) -> Sides:
            found = self._computed(stage, sides, state)
            if self.assignment.kept and keep:
                for name, rows in sides.items():
                    kept.extend(one.tensor for one in rows)
                    if name in found:
                        part, part_lse = found[name]
                        kept.extend((part.tensor.to(query.dtype), part_lse.tensor))
            return found

        shards, targets = (self._shard(query), self._shard(key, value)), self._shard(*results)
        received = self._stages(shards, compute, (targets, []), state, kept)
        if self.report is not None:
            self.report.forward_bytes = received
        return out, kept if self.assignment.kept else [query, key, value, *results]

    def backward(
        self,
        grad_out: torch.Tensor,
        shapes: Sequence[torch.Size],
        saved: Sequence[torch.Tensor],
        of_mask: MaskGradients,
    ) -> list[torch.Tensor]:
        """The gradients of this rank's rows.

        Args:
            shapes: of query, key and value.
            saved: what the forward returned.
            of_mask: are added to.
        """
        state, grad_out = state_dtype(grad_out.dtype), grad_out.contiguous()
        shards: _Shards = self._shard(grad_out), []
        if not self.assignment.kept:
            query, key, value, out, lse = saved
            shards = self._shard(grad_out, query, out, lse), self._shard(key, value)
        grads, held = [grad_out.new_empty(shape) for shape in shapes], iter(saved)

        def compute(stage: int, sides: Sides) -> Sides:
            for of_keys, n in ((False, 3), (True, 2)) if self.assignment.kept else ():
                for needed in self.assignment.needs(self.group.rank(), stage, of_keys):
                    sides[of_keys, needed.heads] += [Gathered(needed, next(held)) for _ in range(n)]
            return self._computed(stage, sides, state, of_mask)

        targets = self._shard(grads[0]), self._shard(*grads[1:])
        received = self._stages(shards, compute, targets, state)
        if self.report is not None:
            self.report.backward_bytes = received
        return grads

    def _stages(
        self,
        shards: _Shards,
        compute: Callable[[int, Sides], Sides],
        targets: _Shards,
        state: torch.dtype,
        kept: Sequence[torch.Tensor] = (),
    ) -> int:
        """Run a pass; returns the bytes received.

        Args:
            shards: this rank's rows of what is sent to those that compute with it.
            compute: the results of a stage, from its number and the rows that came.
            targets: this rank's rows of the results, of which it writes all.
            state: dtype of results that have to be added up.
            kept: tensors that ``compute`` leaves to the backward.
        """
        device, n_stages = targets[0][0].tensor.device, self.assignment.n_stages
        coming = [self._sent(0, shards)] if n_stages else []
        lanes, backs = TwoStreams(device, self.two_streams), list[Transfer]()
        for stage in range(n_stages):
            if stage + 1 < n_stages:
                coming.append(self._sent(stage + 1, shards))
            lanes.reads(stage, *coming[0].messages)
            with lanes.turn(stage):
                sides = self._gathered(stage, coming[0], shards)
                results = compute(stage, sides)
                backs.append(self._sent(stage, targets, results, state))
            made = [one.tensor for rows in results.values() for one in rows]
            lanes.leaves(*made, *kept, *backs[-1].messages)
            backs[-1].received_bytes += coming.pop(0).received_bytes
            del sides, results, made
        lanes.meet()
        self._collect(backs, targets)
        return sum(back.received_bytes for back in backs)

    def _shard(self, *tensors: torch.Tensor) -> list[Gathered]:
        """Tensors of this rank's rows, with the positions of these."""
        rank = self.group.rank()
        rows = (Interval(*self.assignment.of.starts[rank : rank + 2]),)
        return [Gathered(Needed(Interval(0, t.shape[1]), rows), t) for t in tensors]

    def _sent(
        self,
        stage: int,
        shards: _Shards,
        results: Sides | None = None,
        state: torch.dtype | None = None,
    ) -> Transfer:
        """Rows of a stage on their way from their owners; or its results, on their way back."""
        here = self.group.rank()

        def content(piece: Piece) -> list[torch.Tensor]:
            wanted = source = shards[piece.of_keys]
            if results is not None:
                source = results[piece.of_keys, piece.heads][: len(wanted)]
            return [one.at(piece.rows, heads=piece.heads) for one in source]

        pieces = [
            piece
            for piece in self.assignment.pieces
            if piece.stage == stage and here in (piece.rank, piece.owner) and shards[piece.of_keys]
        ]
        return Transfer(pieces, shards, content, self.group, state)

    def _gathered(self, stage: int, came: Transfer, shards: _Shards) -> Sides:
        """The rows of a stage that came, of queries and of keys."""
        sides: Sides = {}
        parts: dict[tuple[bool, Interval], list[tuple[Interval, Sequence[torch.Tensor]]]]
        parts = defaultdict(list)
        for piece, rows in came.arrived():
            parts[piece.of_keys, piece.heads].append((piece.rows, rows))
        for of_keys in (False, True):
            for needed in self.assignment.needs(self.group.rank(), stage, of_keys):
                mine = parts[of_keys, needed.heads]
                sides[of_keys, needed.heads] = [
                    Gathered.of(needed, [(rows, part[n]) for rows, part in mine], like.tensor)
                    for n, like in enumerate(shards[of_keys])
                ]
        return sides

    def _collect(self, backs: Sequence[Transfer], targets: _Shards) -> None:
        """Merge or add up what came of this rank's rows, in ``targets``."""
        totals: Sides = {}
        partial: list[Piece] = []
        for piece, parts in (one for back in backs for one in back.arrived()):
            shard = targets[piece.of_keys]
            if piece.alone:
                for target, part in zip(shard, parts, strict=True):
                    target.at(piece.rows, heads=piece.heads).copy_(part)
                continue
            computed = Needed(piece.heads, (piece.rows,))
            Gathered.add(totals, piece.of_keys, shard[0].needed, computed, parts)
            partial.append(piece)
        for of_keys, _, _, _, heads, rows, _ in partial:
            sums = totals[of_keys, targets[of_keys][0].needed.heads]
            for target, total in zip(targets[of_keys], sums, strict=True):
                target.at(rows, heads=heads).copy_(total.at(rows, heads=heads))

    def _computed(
        self, stage: int, sides: Sides, state: torch.dtype, of_mask: MaskGradients = (None, None)
    ) -> Sides:
        """The results of a stage over this rank's blocks, from the rows that came of queries and of
        keys: output and lse; gradients, if the upstream gradient is among the rows. In ``state``,
        those of whole heads in their own dtype."""
        found: Sides = {}
        own_dtype = self.assignment.whole_heads
        for block in self.assignment.blocks(self.group.rank(), stage):
            kv = self.assignment.of.kv_of(block.heads)
            rows, both = sides[False, block.heads], sides[True, kv]
            names = _OF_QUERIES if len(rows) > 1 else ("query",)
            inputs = {n: one.at(block.queries) for n, one in zip(names, rows, strict=True)}
            for name, one in zip(("key", "value"), both, strict=True):
                inputs[name] = one.at(*block.keys)
            made = partial(self.compute, block, inputs, None if own_dtype else state, of_mask)
            if len(rows) == 1:
                out, lse = computed_once(made)
                parts = [out, lse.to(out.device)]
                if own_dtype:  # no other block has these heads
                    found[False, block.heads] = [Gathered(rows[0].needed, part) for part in parts]
                    continue
            else:
                *parts, k, v = made()
                Gathered.add(found, True, both[0].needed, Needed(kv, block.keys), [k, v])
            computed = Needed(block.heads, (block.queries,))
            Gathered.add(found, False, rows[0].needed, computed, parts)
        return found

    def compute(
        self,
        block: Block,
        inputs: Mapping[str, torch.Tensor],
        out_dtype: torch.dtype | None,
        of_mask: MaskGradients,
    ) -> tuple[torch.Tensor, ...]:
        """Output and log-sum-exp of a block, or gradients, as ``compute_block``.

        Args:
            inputs: query, key, value; for gradients grad_out, out and lse besides.
            of_mask: to which the gradients of the mask's own tensors are added.
        """
        report, whole, (bias, sinks) = None, self.whole, of_mask
        results = BlockResults(
            out_dtype=out_dtype, grad_mask=bias is not None, grad_sinks=sinks is not None
        )
        plain = self.assignment.of.units == "pairs"  # neither a mask nor dropout
        if self.report is not None:
            report = Report()
            self.report.calls.append(report)
        part = PartOfCall(
            Interval(0, whole.batch_shape[0]), block.heads, block.queries, Interval(0, whole.n_keys)
        )
        # Where a block may have some of its rows' keys alone there is no mask.
        masked = (None, block.causal) if plain else None
        written = filled(self.written._replace(report=report))
        every = list(compute_block(whole, part, inputs, written, results, masked))
        if sinks is not None:
            sinks[block.heads.start : block.heads.stop] += every.pop()
        if bias is not None:
            whole.cut_bias(bias, part).add_(every.pop())
        return tuple(every)
