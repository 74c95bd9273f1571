"""A sharded pass on one rank: rows come, blocks are computed, results go where their rows belong.

Stage by stage: while one is computed, the rows of the next are on their way, and the results of the
one before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from quorum_attention.distributed.agreement import alive
from quorum_attention.distributed.calls import Calls, MaskGradients
from quorum_attention.distributed.exchange import Gathered, Moving, Transfer
from quorum_attention.distributed.partition import Assignment, Block, Piece
from quorum_attention.execution.problem import state_dtype
from quorum_attention.kernels.merge import add_, empty_, merge_


@dataclass(frozen=True, slots=True)
class Sharded:
    """A call on one rank.

    Attributes:
        calls: how its attention calls are made.
        kept: the forward's inputs stay where they were computed with until the backward.
    """

    assignment: Assignment
    _group: weakref.ref[dist.ProcessGroup]
    calls: Calls
    kept: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; a graph of autograd's, which a caller may keep, holds this."""
        return alive(self._group)

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return self.group.rank()

    def own(self, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A piece of a tensor of this rank's shard."""
        start = piece.rows.start - self.assignment.of.starts[self.rank]
        rows = tensor.narrow(2, start, piece.rows.length)
        return rows.narrow(1, piece.heads.start, piece.heads.length)

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
        for stage, (queries, (keys, values), n_bytes) in enumerate(
            _arriving(self, (query,), (key, value))
        ):
            received += n_bytes
            results = [
                _statistics(self, stage, rows, keys, values, out.dtype, state)
                for (rows,) in queries
            ]
            if self.kept and keep and results:
                kept += [keys.tensor, values.tensor]
                for (rows,), parts in zip(queries, results, strict=True):
                    kept += [rows.tensor, *(part.tensor for part in parts)]
            pieces = self.assignment.query_pieces
            backs.append(_sent_back(self, stage, pieces, results, (out, lse), state))
        _merged(self, backs, out, lse, state)
        if self.calls.report is not None:
            self.calls.report.forward_bytes = received + sum(one.received_bytes for one in backs)
        return out, kept if self.kept else [query, key, value, out, lse]

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
        assignment, state = self.assignment, state_dtype(grad_out.dtype)
        grad_out = grad_out.contiguous()
        by_query: tuple[torch.Tensor, ...] = (grad_out,)
        by_key: tuple[torch.Tensor, ...] = ()
        if not self.kept:
            query, key, value, out, lse = saved
            by_query, by_key = (grad_out, query, out, lse), (key, value)
        grads = [grad_out.new_empty(shape) for shape in shapes]
        of_queries, of_keys = list[Transfer](), list[Transfer]()
        held, received = iter(saved), 0
        for stage, (queries, gathered, n_bytes) in enumerate(_arriving(self, by_query, by_key)):
            received += n_bytes
            if self.kept:
                queries, gathered = _held(self, stage, queries, held)
            of_query, of_key = _gradients(self, stage, queries, gathered, state, of_mask)
            for backs, pieces, results, likes in (
                (of_queries, assignment.query_pieces, of_query, grads[:1]),
                (of_keys, assignment.key_pieces, of_key, grads[1:]),
            ):
                backs.append(_sent_back(self, stage, pieces, results, likes, state))
        _summed(self, of_queries, grads[:1], state)
        _summed(self, of_keys, grads[1:], state)
        if self.calls.report is not None:
            received += sum(one.received_bytes for one in (*of_queries, *of_keys))
            self.calls.report.backward_bytes = received
        return grads


def _of_stage(call: Sharded, pieces: Sequence[Piece], stage: int) -> list[Piece]:
    """The pieces of a stage that this rank sends or receives."""
    here = call.rank
    return [p for p in pieces if p.stage == stage and here in (p.rank, p.owner)]


def _arriving(
    call: Sharded, by_query: Sequence[torch.Tensor], by_key: Sequence[torch.Tensor]
) -> Iterator[tuple[list[tuple[Gathered, ...]], list[Gathered], int]]:
    """By stage: by heads of queries, the tensors ``by_query``; the tensors ``by_key``; received
    bytes. The next stage is on its way meanwhile.

    Args:
        by_query: tensors of the shard with a row for each query; ``by_key`` likewise.
    """
    assignment, rank = call.assignment, call.rank

    def sent(stage: int) -> Transfer:
        every = [
            Moving(piece, tensors, lambda n, p=piece, some=tensors: call.own(some[n], p))  # type: ignore[misc]
            for pieces, tensors in (
                (assignment.query_pieces, by_query),
                (assignment.key_pieces, by_key),
            )
            for piece in _of_stage(call, pieces, stage)
        ]
        return Transfer(every, call.group, by_query[0].device)

    following = sent(0) if assignment.n_stages else None
    for stage in range(assignment.n_stages):
        now, following = following, sent(stage + 1) if stage + 1 < assignment.n_stages else None
        assert now is not None
        came = list(zip(now.coming, now.arrived(), strict=True))
        count = sum(p.rank == rank for p in _of_stage(call, assignment.query_pieces, stage))
        queries = [
            tuple(
                Gathered.of(
                    needed, [(p, t[n]) for p, t in came[:count] if p.heads == needed.heads], like
                )
                for n, like in enumerate(by_query)
            )
            for needed in assignment.queries(rank, stage)
        ]
        needed = assignment.keys(rank, stage)
        keys = [
            Gathered.of(needed, [(p, t[n]) for p, t in came[count:]], like)
            for n, like in enumerate(by_key)
        ]
        yield queries, keys, now.received_bytes


def _sent_back(
    call: Sharded,
    stage: int,
    pieces: Sequence[Piece],
    results: Sequence[tuple[Gathered, ...]],
    likes: Sequence[torch.Tensor],
    state: torch.dtype,
) -> Transfer:
    """Results of a stage on their way to the ranks that hold their rows.

    Args:
        pieces: of queries, or of keys.
        results: by heads, tensors of the rows that were computed.
        likes: a tensor of the shard for each of the results: sizes, and the dtype of rows that are
            complete; others travel in ``state``.
    """
    by_heads = {one[0].needed.heads: one for one in results}
    every = [
        Moving(piece, likes, lambda n, p=piece: by_heads[p.heads][n].at(p.rows))  # type: ignore[misc]
        for piece in _of_stage(call, pieces, stage)
    ]
    return Transfer(every, call.group, likes[0].device, back=True, state=state)


def _statistics(
    call: Sharded,
    stage: int,
    rows: Gathered,
    keys: Gathered,
    values: Gathered,
    dtype: torch.dtype,
    state: torch.dtype,
) -> tuple[Gathered, Gathered]:
    """Output and lse of some heads' rows over the keys of this rank's blocks.

    The output is in ``dtype`` where no other rank computes with any of the rows, else in ``state``.
    """
    heads, assignment = rows.needed.heads, call.assignment
    blocks = [block for block in assignment.blocks(call.rank, stage) if block.heads == heads]
    final = dtype if assignment.query_alone(call.rank, stage, heads) else state

    def computed(block: Block, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        kv = assignment.of.kv_of(heads)
        return call.calls.forward(
            rows.at(block.queries), keys.over(block.keys, kv), values.over(block.keys, kv),
            heads, block.queries, block.causal if call.calls.partial else None, out_dtype,
        )  # fmt: skip

    if len(blocks) == 1:
        part, lse = computed(blocks[0], final)
        return Gathered(rows.needed, part), Gathered(rows.needed, lse.to(part.device))
    total = Gathered.empty(rows.needed, heads.length, values.tensor, state)
    weight = Gathered.empty(rows.needed, heads.length, values.tensor[..., 0], state)
    empty_(total.tensor, weight.tensor)
    for block in blocks:
        part, lse = computed(block, state)
        merge_(total.at(block.queries), weight.at(block.queries), part, lse.to(part.device))
    total.tensor = total.tensor.to(final)
    return total, weight


def _merged(
    call: Sharded,
    backs: Sequence[Transfer],
    out: torch.Tensor,
    lse: torch.Tensor,
    state: torch.dtype,
) -> None:
    """Bring the statistics of this rank's rows together, in ``out`` and ``lse``."""
    partial = [p for back in backs for p in back.coming if not p.alone]
    if partial:
        total = torch.zeros(out.shape, dtype=state, device=out.device)
        lse.fill_(-torch.inf)
    for back in backs:
        for piece, (part, part_lse) in zip(back.coming, back.arrived(), strict=True):
            if piece.alone:
                call.own(out, piece).copy_(part)
                call.own(lse, piece).copy_(part_lse)
            else:
                merge_(call.own(total, piece), call.own(lse, piece), part, part_lse)
    for piece in partial:
        call.own(out, piece).copy_(call.own(total, piece))


def _summed(
    call: Sharded, backs: Sequence[Transfer], grads: Sequence[torch.Tensor], state: torch.dtype
) -> None:
    """Add up the gradients of this rank's rows, in ``grads``."""
    partial = [p for back in backs for p in back.coming if not p.alone]
    totals = [torch.zeros(g.shape if partial else 0, dtype=state, device=g.device) for g in grads]
    for back in backs:
        for piece, parts in zip(back.coming, back.arrived(), strict=True):
            for grad, total, part in zip(grads, totals, parts, strict=True):
                if piece.alone:
                    call.own(grad, piece).copy_(part)
                else:
                    add_(call.own(total, piece), part)
    for piece in partial:
        for grad, total in zip(grads, totals, strict=True):
            call.own(grad, piece).copy_(call.own(total, piece))


def _gradients(
    call: Sharded,
    stage: int,
    inputs: Sequence[tuple[Gathered, ...]],
    gathered: Sequence[Gathered],
    state: torch.dtype,
    of_mask: MaskGradients,
) -> tuple[list[tuple[Gathered, ...]], list[tuple[Gathered, ...]]]:
    """The gradients of a stage's rows, added up over this rank's blocks: by heads, those of their
    queries; those of keys and values."""
    blocks = call.assignment.blocks(call.rank, stage)
    if not blocks:
        return [], []
    # Of one block the results are what the kernel returns, and may be rounded at once.
    single = len(blocks) == 1
    alone = single and call.assignment.alone(call.rank, stage)
    dtype = gathered[0].tensor.dtype if alone else state
    make = torch.empty_like if single else torch.zeros_like

    def room(rows: Gathered) -> Gathered:
        made = make(rows.tensor, dtype=dtype, memory_format=torch.contiguous_format)
        return Gathered(rows.needed, made)

    queries = {one[0].needed.heads: room(one[1]) for one in inputs}
    keys = room(gathered[0]), room(gathered[1])
    by_heads = {one[0].needed.heads: one for one in inputs}
    for block in blocks:
        kv, target = call.assignment.of.kv_of(block.heads), queries[block.heads]
        names = ("grad_out", "query", "out", "lse")
        given = {
            n: one.at(block.queries) for n, one in zip(names, by_heads[block.heads], strict=True)
        }
        for n, one in zip(("key", "value"), gathered, strict=True):
            given[n] = one.over(block.keys, kv)
        mine = target.tensor, keys[0].tensor, keys[1].tensor
        if not single:
            query, key, value = (
                torch.empty(given[n].shape, dtype=state, device=target.tensor.device)
                for n in ("query", "key", "value")
            )
            mine = query, key, value
        causal = block.causal if call.calls.partial else None
        call.calls.backward(given, block.heads, block.queries, of_mask, causal, mine)
        if single:
            break
        add_(target.at(block.queries), mine[0])
        for total, part in zip(keys, mine[1:], strict=True):
            low = 0
            for rows in block.keys:
                add_(total.at(rows, kv), part.narrow(2, low, rows.length))
                low += rows.length
    return [(one,) for one in queries.values()], [keys]


def _held(
    call: Sharded,
    stage: int,
    upstream: Sequence[tuple[Gathered, ...]],
    held: Iterator[torch.Tensor],
) -> tuple[list[tuple[Gathered, ...]], list[Gathered]]:
    """What the forward kept of a stage, with the upstream gradient, as it is gathered otherwise."""
    if not upstream:
        return [], []
    needed = call.assignment.keys(call.rank, stage)
    keys = [Gathered(needed, next(held)), Gathered(needed, next(held))]
    queries = []
    for (grad_out,) in upstream:
        rows = (Gathered(grad_out.needed, next(held)) for _ in range(3))
        queries.append((grad_out, *rows))
    return queries, keys


__all__ = ["Sharded"]
