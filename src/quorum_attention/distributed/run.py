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
from quorum_attention.distributed.calls import Calls, MaskGradients, ShardedReport
from quorum_attention.distributed.exchange import Delivery, Gathered, Parcel
from quorum_attention.distributed.partition import Assignment, Block, Piece
from quorum_attention.execution.workload import state_dtype
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
    def report(self) -> ShardedReport | None:
        """To be filled."""
        return self.calls.report

    @property
    def rank(self) -> int:
        """The number of this process in the group."""
        return self.group.rank()

    @property
    def start(self) -> int:
        """The first row of this rank's shard."""
        return self.assignment.of.starts[self.rank]

    def own(self, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A piece of a tensor of this rank's shard."""
        rows = tensor.narrow(2, piece.rows.start - self.start, piece.rows.length)
        return rows.narrow(1, piece.heads.start, piece.heads.length)

    def mine(self, pieces: Sequence[Piece], stage: int) -> list[Piece]:
        """The pieces of a stage that this rank sends or receives."""
        here = self.rank
        return [p for p in pieces if p.stage == stage and here in (p.rank, p.owner)]


class Inward:
    """The rows of a stage on their way to who computes with them.

    Args:
        by_query: tensors of the shard with a row for each query; ``by_key`` likewise.
    """

    def __init__(
        self,
        call: Sharded,
        stage: int,
        by_query: Sequence[torch.Tensor],
        by_key: Sequence[torch.Tensor],
    ) -> None:
        self._call, self._stage = call, stage
        self._by_query, self._by_key = by_query, by_key
        assignment = call.assignment
        self._pieces = [(p, by_query) for p in call.mine(assignment.query_pieces, stage)]
        self._pieces += [(p, by_key) for p in call.mine(assignment.key_pieces, stage)]
        parcels = []
        for piece, tensors in self._pieces:
            for tensor in tensors:
                shape = (tensor.shape[0], piece.heads.length, piece.rows.length, *tensor.shape[3:])
                parcel = Parcel(piece.owner, piece.rank, shape, tensor.dtype)
                if piece.owner == call.rank:
                    parcel.content = call.own(tensor, piece)
                parcels.append(parcel)
        self._delivery = Delivery(parcels, call.group, by_query[0].device)
        self.received_bytes = self._delivery.received_bytes

    def arrived(self) -> tuple[list[tuple[Gathered, ...]], list[Gathered]]:
        """By heads of queries, the tensors ``by_query``; and the tensors ``by_key``."""
        contents = iter(self._delivery.contents())
        got: dict[int, list[list[tuple[Piece, torch.Tensor]]]] = {
            id(t): [[] for _ in t] for t in (self._by_query, self._by_key)
        }
        for piece, tensors in self._pieces:
            if piece.rank != self._call.rank:
                continue
            for number in range(len(tensors)):
                got[id(tensors)][number].append((piece, next(contents)))
        assignment, rank = self._call.assignment, self._call.rank
        queries = []
        for needed in assignment.queries(rank, self._stage):
            parts = got[id(self._by_query)]
            queries.append(
                tuple(
                    Gathered.of(needed, [(p, c) for p, c in part if p.heads == needed.heads], like)
                    for part, like in zip(parts, self._by_query, strict=True)
                )
            )
        needed = assignment.keys(rank, self._stage)
        parts = got[id(self._by_key)]
        keys = [
            Gathered.of(needed, part, like) for part, like in zip(parts, self._by_key, strict=True)
        ]
        return queries, keys


class Back:
    """Results of a stage on their way to the ranks that hold their rows.

    Args:
        pieces: of queries, or of keys.
        results: by heads, tensors of the rows that were computed.
        likes: a tensor of the shard for each of the results: sizes, and the dtype of rows that are
            complete; others travel in ``state``.
    """

    def __init__(
        self,
        call: Sharded,
        stage: int,
        pieces: Sequence[Piece],
        results: Sequence[tuple[Gathered, ...]],
        likes: Sequence[torch.Tensor],
        state: torch.dtype,
    ) -> None:
        self._pieces = call.mine(pieces, stage)
        self._count = len(likes)
        by_heads = {one[0].needed.heads: one for one in results}
        parcels = []
        for piece in self._pieces:
            for number, like in enumerate(likes):
                shape = (like.shape[0], piece.heads.length, piece.rows.length, *like.shape[3:])
                dtype = like.dtype if piece.alone else state
                parcel = Parcel(piece.rank, piece.owner, shape, dtype)
                if piece.rank == call.rank:
                    parcel.content = by_heads[piece.heads][number].at(piece.rows)
                parcels.append(parcel)
        self._delivery = Delivery(parcels, call.group, likes[0].device)
        self.received_bytes = self._delivery.received_bytes

        self.owned = [p for p in self._pieces if p.owner == call.rank]

    def arrived(self) -> list[tuple[Piece, list[torch.Tensor]]]:
        """The pieces of this rank's shard, and their tensors in the order of the results."""
        contents = iter(self._delivery.contents())
        return [(piece, [next(contents) for _ in range(self._count)]) for piece in self.owned]


def _arriving(
    call: Sharded, by_query: Sequence[torch.Tensor], by_key: Sequence[torch.Tensor]
) -> Iterator[tuple[list[tuple[Gathered, ...]], list[Gathered], int]]:
    """By stage, what ``Inward.arrived`` returns, and its bytes; the next stage is on its way."""
    stages = range(call.assignment.n_stages)
    coming = [Inward(call, stage, by_query, by_key) for stage in stages[:1]]
    for stage in stages:
        coming += [Inward(call, later, by_query, by_key) for later in stages[stage + 1 : stage + 2]]
        now = coming.pop(0)
        yield *now.arrived(), now.received_bytes


def forward(
    call: Sharded, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Output and lse of this rank's rows, and the tensors that are kept for the backward.

    Args:
        query: (batch, heads, rows, head_dim) of this rank's shard; key and value likewise.
    """
    assignment, state = call.assignment, state_dtype(query.dtype)
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    lse = torch.empty(query.shape[:3], dtype=state, device=query.device)
    kept: list[torch.Tensor] = []
    backs = []
    received = 0
    for stage, (queries, (keys, values), nbytes) in enumerate(
        _arriving(call, (query,), (key, value))
    ):
        received += nbytes
        results = [
            _statistics(call, stage, rows, keys, values, out.dtype, state) for (rows,) in queries
        ]
        if call.kept and results:
            kept += [keys.tensor, values.tensor]
            for (rows,), (part, part_lse) in zip(queries, results, strict=True):
                kept += [rows.tensor, part.tensor, part_lse.tensor]
        backs.append(Back(call, stage, assignment.query_pieces, results, (out, lse), state))
    _merged(call, backs, out, lse, state)
    if call.report is not None:
        call.report.forward_bytes = received + sum(back.received_bytes for back in backs)
    return out, lse, kept


def backward(
    call: Sharded,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rest: Sequence[torch.Tensor],
    of_mask: MaskGradients,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of this rank's rows.

    Args:
        of_mask: to which the gradients of the mask's own tensors are added, of the pairs computed
            here.
        query, key, value: of this rank's shard; where inputs were kept only their sizes are used.
        rest: output and lse of this rank's rows; or the tensors that the forward kept.
    """
    assignment, state = call.assignment, state_dtype(query.dtype)
    by_query = (grad_out,) if call.kept else (grad_out, query, rest[0], rest[1])
    by_key = () if call.kept else (key, value)
    grads = [
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
    ]
    backs: list[tuple[Back, Back]] = []
    held, received = iter(rest), 0
    for stage, (queries, gathered, nbytes) in enumerate(_arriving(call, by_query, by_key)):
        received += nbytes
        if call.kept:
            queries, gathered = _held(call, stage, queries, held)
        made = _Gradients(call, stage, queries, gathered, state, of_mask)
        backs.append(
            (
                Back(call, stage, assignment.query_pieces, made.queries, grads[:1], state),
                Back(call, stage, assignment.key_pieces, made.keys, grads[1:], state),
            )
        )
    _summed(call, [pair[0] for pair in backs], grads[:1], state)
    _summed(call, [pair[1] for pair in backs], grads[1:], state)
    if call.report is not None:
        call.report.backward_bytes = received + sum(
            b.received_bytes for pair in backs for b in pair
        )
    return grads[0], grads[1], grads[2]


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
    call: Sharded, backs: Sequence[Back], out: torch.Tensor, lse: torch.Tensor, state: torch.dtype
) -> None:
    """Bring the statistics of this rank's rows together, in ``out`` and ``lse``."""
    partial = [p for back in backs for p in back.owned if not p.alone]
    if partial:
        total = torch.zeros(out.shape, dtype=state, device=out.device)
        lse.fill_(-torch.inf)
    for back in backs:
        for piece, (part, part_lse) in back.arrived():
            if piece.alone:
                call.own(out, piece).copy_(part)
                call.own(lse, piece).copy_(part_lse)
            else:
                merge_(call.own(total, piece), call.own(lse, piece), part, part_lse)
    for piece in partial:
        call.own(out, piece).copy_(call.own(total, piece))


def _summed(
    call: Sharded, backs: Sequence[Back], grads: Sequence[torch.Tensor], state: torch.dtype
) -> None:
    """Add up the gradients of this rank's rows, in ``grads``; rows that nobody needed get 0."""
    partial = [p for back in backs for p in back.owned if not p.alone]
    totals: Sequence[torch.Tensor] = ()
    if partial:
        totals = [torch.zeros(g.shape, dtype=state, device=g.device) for g in grads]
    for back in backs:
        for piece, parts in back.arrived():
            for number, part in enumerate(parts):
                if piece.alone:
                    call.own(grads[number], piece).copy_(part)
                else:
                    add_(call.own(totals[number], piece), part)
    for piece in partial:
        for grad, total in zip(grads, totals, strict=True):
            call.own(grad, piece).copy_(call.own(total, piece))


class _Gradients:
    """The gradients of a stage's rows, added up over this rank's blocks.

    Attributes:
        queries: by heads, the gradient of their queries.
        keys: the gradients of keys and of values.
    """

    def __init__(
        self,
        call: Sharded,
        stage: int,
        queries: Sequence[tuple[Gathered, ...]],
        keys: Sequence[Gathered],
        state: torch.dtype,
        of_mask: MaskGradients,
    ) -> None:
        self.queries: list[tuple[Gathered, ...]] = []
        self.keys: list[tuple[Gathered, ...]] = []
        blocks = call.assignment.blocks(call.rank, stage)
        if not blocks:
            return
        self._call, self._inputs, self._gathered = call, queries, keys
        self._of_mask = of_mask
        # Of one block the results are what the kernel returns, and may be rounded at once.
        alone = len(blocks) == 1 and call.assignment.alone(call.rank, stage)
        dtype = keys[0].tensor.dtype if alone else state
        make = torch.empty_like if len(blocks) == 1 else torch.zeros_like
        contiguous = torch.contiguous_format

        def room(rows: Gathered) -> Gathered:
            made = make(rows.tensor, dtype=dtype, memory_format=contiguous)
            return Gathered(rows.needed, made)

        self.queries = [(room(one[1]),) for one in queries]
        self.keys = [(room(keys[0]), room(keys[1]))]
        for block in blocks:
            self._add(block, written=len(blocks) == 1, state=state)

    def _add(self, block: Block, written: bool, state: torch.dtype) -> None:
        """Add a block's gradients, or write them where it is the only one."""
        number = [one[0].needed.heads for one in self._inputs].index(block.heads)
        inputs, (target,) = self._inputs[number], self.queries[number]
        kv, (keys, values) = self._call.assignment.of.kv_of(block.heads), self._gathered
        names = ("grad_out", "query", "out", "lse")
        given = {n: one.at(block.queries) for n, one in zip(names, inputs, strict=True)}
        given |= {"key": keys.over(block.keys, kv), "value": values.over(block.keys, kv)}
        mine: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        if written:
            mine = (target.tensor, self.keys[0][0].tensor, self.keys[0][1].tensor)
        else:
            query_grad, key_grad, value_grad = (
                torch.empty(given[n].shape, dtype=state, device=target.tensor.device)
                for n in ("query", "key", "value")
            )
            mine = (query_grad, key_grad, value_grad)
        causal = block.causal if self._call.calls.partial else None
        self._call.calls.backward(given, block.heads, block.queries, self._of_mask, causal, mine)
        if written:
            return
        add_(target.at(block.queries), mine[0])
        for total, part in zip(self.keys[0], mine[1:], strict=True):
            low = 0
            for rows in block.keys:
                add_(total.at(rows, kv), part.narrow(2, low, rows.length))
                low += rows.length


def _held(
    call: Sharded,
    stage: int,
    upstream: Sequence[tuple[Gathered, ...]],
    held: Iterator[torch.Tensor],
) -> tuple[list[tuple[Gathered, ...]], list[Gathered]]:
    """What the forward kept of a stage, with the upstream gradient, in the order of ``Inward``."""
    if not upstream:
        return [], []
    needed = call.assignment.keys(call.rank, stage)
    keys = [Gathered(needed, next(held)), Gathered(needed, next(held))]
    queries = []
    for (grad_out,) in upstream:
        rows = (Gathered(grad_out.needed, next(held)) for _ in range(3))
        queries.append((grad_out, *rows))
    return queries, keys


__all__ = ["Sharded", "backward", "forward"]
