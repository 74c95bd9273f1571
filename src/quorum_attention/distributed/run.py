"""A sharded pass on one rank: rows come, blocks are computed, results go where their rows belong.

Stage by stage: while one is computed, the rows of the next are on their way, and the results of the
one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quorum_attention.call.block import BlockResults
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.distributed.calls import Calls, MaskGradients
from quorum_attention.distributed.exchange import Gathered, Transfer
from quorum_attention.distributed.partition import Assignment, Block, Piece
from quorum_attention.execution.problem import state_dtype
from quorum_attention.kernels.merge import add_, empty_, merge_

# Tensors of some rows by their heads; of queries, and of keys and values.
_ByHeads = dict[Interval, list[Gathered]]
_Sides = tuple[_ByHeads, _ByHeads]
_Shards = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Sharded:
    """A call on one rank.

    Attributes:
        calls: how its attention calls are made.
    """

    assignment: Assignment
    calls: Calls

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output of this rank's rows, and what the backward needs.

        Args:
            query: (batch, heads, rows, head_dim) of this rank's shard; key and value likewise.
        """
        state = state_dtype(query.dtype)
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        lse = torch.empty(query.shape[:3], dtype=state, device=query.device)
        kept: list[torch.Tensor] = []
        backs, received = list[Transfer](), 0
        for stage, (queries, keys), n_bytes in self._arriving(((query,), (key, value))):
            received += n_bytes
            results = self._statistics(stage, queries, keys, state)
            if self.assignment.kept and keep:
                for heads, (rows,) in queries.items():
                    part, part_lse = results[heads]
                    kept += [rows.tensor, part.tensor.to(query.dtype), part_lse.tensor]
                kept += [rows.tensor for both in keys.values() for rows in both]
            backs.append(self._sent_back(stage, (results, {}), ((out, lse), ()), state))
        self._collect(backs, ((out, lse), ()), state, statistics=True)
        if self.calls.report is not None:
            self.calls.report.forward_bytes = received + sum(one.received_bytes for one in backs)
        return out, kept if self.assignment.kept else [query, key, value, out, lse]

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
            of_mask: to which the gradients of the mask's own tensors are added, of the pairs
                computed here.
        """
        state, grad_out = state_dtype(grad_out.dtype), grad_out.contiguous()
        shards: _Shards = ((grad_out,), ())
        if not self.assignment.kept:
            query, key, value, out, lse = saved
            shards = (grad_out, query, out, lse), (key, value)
        grads = [grad_out.new_empty(shape) for shape in shapes]
        backs, received, held = list[Transfer](), 0, iter(saved)
        for stage, sides, n_bytes in self._arriving(shards):
            received += n_bytes
            if self.assignment.kept:
                for heads, (upstream,) in sides[0].items():
                    rows = [Gathered(upstream.needed, next(held)) for _ in range(3)]
                    sides[0][heads] = [upstream, *rows]
                for needed in self.assignment.needs(self.calls.rank, stage, of_keys=True):
                    sides[1][needed.heads] = [Gathered(needed, next(held)) for _ in range(2)]
            made = self._gradients(stage, *sides, state, of_mask)
            backs.append(self._sent_back(stage, made, (grads[:1], grads[1:]), state))
        self._collect(backs, (grads[:1], grads[1:]), state, statistics=False)
        if self.calls.report is not None:
            self.calls.report.backward_bytes = received + sum(one.received_bytes for one in backs)
        return grads

    def _own(self, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A piece of a tensor of this rank's shard."""
        start = piece.rows.start - self.assignment.of.starts[self.calls.rank]
        rows = tensor.narrow(2, start, piece.rows.length)
        return rows.narrow(1, piece.heads.start, piece.heads.length)

    def _pieces(self, stage: int, shards: _Shards) -> list[Piece]:
        """What this rank sends or receives of these tensors in a stage."""
        here = self.calls.rank
        return [
            piece
            for piece in self.assignment.pieces
            if piece.stage == stage and here in (piece.rank, piece.owner) and shards[piece.of_keys]
        ]

    def _arriving(self, shards: _Shards) -> Iterator[tuple[int, _Sides, int]]:
        """By stage: what came of these tensors of all shards, and received bytes. The next stage is
        on its way meanwhile."""
        stages = self.assignment.n_stages

        def sent(stage: int) -> Transfer:
            return Transfer(
                self._pieces(stage, shards), lambda p: shards[p.of_keys],
                lambda p: [self._own(t, p) for t in shards[p.of_keys]],
                self.calls.group, shards[0][0].device,
            )  # fmt: skip

        following = sent(0) if stages else None
        for stage in range(stages):
            now, following = following, sent(stage + 1) if stage + 1 < stages else None
            assert now is not None
            came, sides = now.arrived(), (_ByHeads(), _ByHeads())
            for of_keys, side in enumerate(sides):
                for needed in self.assignment.needs(self.calls.rank, stage, bool(of_keys)):
                    mine = [
                        one for one in came if one[0][0] == of_keys and one[0].heads == needed.heads
                    ]
                    side[needed.heads] = [
                        Gathered.of(needed, [(p, rows[n]) for p, rows in mine], like)
                        for n, like in enumerate(shards[of_keys])
                    ]
            yield stage, sides, now.received_bytes

    def _sent_back(
        self, stage: int, results: _Sides, likes: _Shards, state: torch.dtype
    ) -> Transfer:
        """Results of a stage on their way to the ranks that hold their rows.

        Args:
            likes: a tensor of the shard for each of the results: sizes, and the dtype of rows that
                are complete; others travel in ``state``.
        """
        return Transfer(
            self._pieces(stage, likes), lambda p: likes[p.of_keys],
            lambda p: [rows.at(p.rows) for rows in results[p.of_keys][p.heads]],
            self.calls.group, likes[0][0].device, state,
        )  # fmt: skip

    def _collect(
        self, backs: Sequence[Transfer], targets: _Shards, state: torch.dtype, *, statistics: bool
    ) -> None:
        """Merge or add up what came of this rank's rows, in ``targets``."""
        partial = [p for back in backs for p in back.coming if not p.alone]
        totals = [
            [torch.zeros(t.shape if partial else 0, dtype=state, device=t.device) for t in side]
            for side in targets
        ]
        if statistics:
            empty_(*totals[0])
        for piece, rows in (one for back in backs for one in back.arrived()):
            into = targets if piece.alone else totals
            mine = [self._own(t, piece) for t in into[piece.of_keys]]
            if statistics and not piece.alone:
                merge_(mine[0], mine[1], *rows)
                continue
            for target, part in zip(mine, rows, strict=True):
                target.copy_(part) if piece.alone else add_(target, part)
        for piece in partial:
            for target, total in zip(targets[piece.of_keys], totals[piece.of_keys], strict=True):
                self._own(target, piece).copy_(self._own(total, piece))

    def _statistics(
        self, stage: int, queries: _ByHeads, keys: _ByHeads, state: torch.dtype
    ) -> _ByHeads:
        """Output and lse of a stage's rows over the keys of this rank's blocks, in ``state``."""
        found: _ByHeads = {}
        blocks = self.assignment.blocks(self.calls.rank, stage)
        for heads, (rows,) in queries.items():
            mine = [block for block in blocks if block.heads == heads]
            for block in mine:
                inputs = self._inputs(block, {"query": rows}, keys)
                part, lse = self.calls.compute(
                    inputs, heads, block.queries, self._causal(block), BlockResults(out_dtype=state)
                )
                lse = lse.to(part.device)
                if len(mine) == 1:
                    found[heads] = [Gathered(rows.needed, part), Gathered(rows.needed, lse)]
                    break
                if heads not in found:
                    found[heads] = [Gathered.zeros(rows.needed, t, state) for t in (part, lse)]
                    empty_(*(one.tensor for one in found[heads]))
                total, weight = (one.at(block.queries) for one in found[heads])
                merge_(total, weight, part, lse)
        return found

    def _gradients(
        self,
        stage: int,
        queries: _ByHeads,
        keys: _ByHeads,
        state: torch.dtype,
        of_mask: MaskGradients,
    ) -> _Sides:
        """The gradients of a stage's rows, added up over this rank's blocks, in ``state``."""
        of_query = {heads: rows[1:2] for heads, rows in queries.items()}
        of_query, of_keys = (
            {h: [Gathered.zeros(one.needed, one.tensor, state) for one in some] for h, some in side}
            for side in (of_query.items(), keys.items())
        )
        for block in self.assignment.blocks(self.calls.rank, stage):
            names = ("grad_out", "query", "out", "lse")
            given = dict(zip(names, queries[block.heads], strict=True))
            inputs = self._inputs(block, given, keys)
            three = [inputs[name] for name in ("query", "key", "value")]
            grads = [torch.empty(t.shape, dtype=state, device=t.device) for t in three]
            self.calls.backward(
                inputs, block.heads, block.queries, of_mask, self._causal(block), grads
            )
            add_(of_query[block.heads][0].at(block.queries), grads[0])
            (both,), kv = of_keys.values(), self.assignment.of.kv_of(block.heads)
            for total, part in zip(both, grads[1:], strict=True):
                parts = part.split([rows.length for rows in block.keys], dim=2)
                for rows, some in zip(block.keys, parts, strict=True):
                    add_(total.at(rows, kv), some)
        return of_query, of_keys

    def _inputs(
        self, block: Block, of_queries: dict[str, Gathered], keys: _ByHeads
    ) -> dict[str, torch.Tensor]:
        """What a block's attention call is given."""
        inputs = {name: rows.at(block.queries) for name, rows in of_queries.items()}
        (both,), kv = keys.values(), self.assignment.of.kv_of(block.heads)
        for name, rows in zip(("key", "value"), both, strict=True):
            inputs[name] = rows.over(block.keys, kv)
        return inputs

    def _causal(self, block: Block) -> bool | None:
        return block.causal if self.calls.partial else None


__all__ = ["Sharded"]
