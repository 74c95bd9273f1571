"""A sharded pass on one rank: rows come, blocks are computed, results go where their rows belong.

Stage by stage: while one is computed, the rows of the next are on their way, and the results of the
one before, each as one message of several tensors. Heads that are exchanged whole may be computed
on two streams of a GPU, stages in turn.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from quorum_attention.arithmetic import round_up
from quorum_attention.autograd import run_with_hook
from quorum_attention.call.block import BlockResults, CallBlock, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.call.settings import with_current_settings
from quorum_attention.decomposition.intervals import Interval, below, counted, union
from quorum_attention.distributed.agreement import Signature, alive
from quorum_attention.distributed.partition import Assignment, RowSlice, ShardBlock, Side
from quorum_attention.execution.device.streams import TwoStreams
from quorum_attention.execution.report import Report
from quorum_attention.kernels.call_shape import state_dtype
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.passes.block_call import compute_block
from quorum_attention.units import counted as in_words
from quorum_attention.units import format_bytes

# Parts of a message begin at multiples of this, so that each can be read as a tensor of any dtype.
_ALIGNMENT = 16
_Like = tuple[tuple[int, ...], torch.dtype]


@dataclass(slots=True)
class Gathered:
    """Tensors of some rows, and of none between them, in ascending order.

    Attributes:
        heads, rows: in positions of the whole call.
        tensors: each (batch, heads, rows, ...).
    """

    heads: Interval
    rows: tuple[Interval, ...]
    tensors: list[torch.Tensor]

    @classmethod
    def like(
        cls, heads: Interval, rows: tuple[Interval, ...], tensors: Iterable[torch.Tensor]
    ) -> Gathered:
        """Uninitialised; batch, dtypes and dimensions of a row are those of ``tensors``."""
        sizes = heads.length, counted(rows)
        made = [t.new_empty((t.shape[0], *sizes, *t.shape[3:])) for t in tensors]
        return cls(heads, rows, made)

    def at(self, heads: Interval, *pieces: Interval) -> list[torch.Tensor]:
        """Some rows of some heads; views where nothing lies between the rows here."""
        some = self.tensors
        if heads != self.heads:
            some = [t.narrow(1, heads.start - self.heads.start, heads.length) for t in some]
        runs = _runs(self.rows, pieces)
        views = [[tensor.narrow(2, *run) for run in runs] for tensor in some]
        return [each[0] if len(each) == 1 else torch.cat(each, dim=2) for each in views]

    def write(self, heads: Interval, rows: Interval, parts: Iterable[torch.Tensor]) -> None:
        """Copy ``parts`` to some rows."""
        for target, part in zip(self.at(heads, rows), parts, strict=True):
            target.copy_(part)


# By what the rows are of.
Sides = dict[Side, Gathered]


def add_up(
    sums: Sides,
    side: Side,
    rows: tuple[Interval, ...],
    pieces: Sequence[Interval],
    parts: Sequence[torch.Tensor],
) -> None:
    """Add ``parts`` to some rows of a side's sum, which is one of ``rows``; an output and its
    log-sum-exp are merged."""
    merges = parts[-1].dim() == 3
    total = sums.get(side)
    if total is None:
        total = sums[side] = Gathered.like(side.heads, rows, parts)
        for number, tensor in enumerate(total.tensors):
            tensor.fill_(-math.inf if merges and number else 0.0)
    split = (part.split([piece.length for piece in pieces], dim=2) for part in parts)
    for piece, *some in zip(pieces, *split, strict=True):
        targets = total.at(side.heads, piece)
        if merges:
            merge_(*targets, *some)
            continue
        for target, part in zip(targets, some, strict=True):
            add_(target, part)


class Transfer:
    """Rows that are under way, in one message to each rank.

    Made by all ranks of the group together, of the same pieces in the same order; a rank may leave
    out those that it neither sends nor gets.

    Args:
        shards: of queries and of keys: this rank's rows, or where their results belong.
        results: what this rank has computed; of inputs nothing, which come from their owners.
        state: dtype of results that have to be added up, which go to their owners; None: of inputs.

    Attributes:
        received_bytes: from other ranks.
        messages: what came, and what is sent.
    """

    def __init__(
        self,
        pieces: Iterable[RowSlice],
        shards: tuple[Gathered, Gathered],
        group: dist.ProcessGroup,
        results: Sides,
        state: torch.dtype | None,
    ) -> None:
        here, ranks, device = group.rank(), group.size(), shards[0].tensors[0].device
        outgoing, incoming = ([list[_Like]() for _ in range(ranks)] for _ in range(2))
        sent: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        coming: list[tuple[RowSlice, int, Sequence[torch.Tensor]]] = []
        for piece in pieces:
            shard, heads, rows = shards[piece.side.of_keys], piece.side.heads, piece.rows
            own: Sequence[torch.Tensor] = ()
            source, target = piece.owner, piece.rank
            if state is not None:
                source, target = target, source
            if source == here:
                own = results.get(piece.side, shard).at(heads, rows)[: len(shard.tensors)]
            if target == here:
                coming.append((piece, source, own))
            if source == target:
                continue
            for t in shard.tensors:
                dtype = t.dtype if state is None or piece.alone else state
                like = (t.shape[0], heads.length, rows.length, *t.shape[3:]), dtype
                (incoming[source] if target == here else outgoing[target]).append(like)
            sent[target] += own
        outbox, go, places = _message(outgoing, device)
        inbox, come, came = _message(incoming, device)
        for place, part in zip(chain(*places), chain(*sent), strict=True):
            place.copy_(part)
        self.messages, self.received_bytes = (inbox, outbox), sum(come)
        queues = [iter(each) for each in came]
        self._arrived: list[tuple[RowSlice, Sequence[torch.Tensor]]] = [
            (piece, own or [next(queues[source]) for _ in shards[piece.side.of_keys].tensors])
            for piece, source, own in coming
        ]
        self._work: Any = None
        if ranks > 1:
            self._work = dist.all_to_all_single(inbox, outbox, come, go, group=group, async_op=True)

    def arrived(self) -> list[tuple[RowSlice, Sequence[torch.Tensor]]]:
        """The pieces that came with their tensors; this rank's own as they are.

        On a GPU the current stream waits for it.
        """
        if self._work is not None:
            self._work.wait()
        return self._arrived


def _message(
    likes: Sequence[Sequence[_Like]], device: torch.device
) -> tuple[torch.Tensor, list[int], list[list[torch.Tensor]]]:
    """A message to or from each rank: all its bytes, how many are of each rank, and its tensors."""
    exact = [[math.prod(shape) * dtype.itemsize for shape, dtype in each] for each in likes]
    sizes = [[round_up(n, _ALIGNMENT) for n in each] for each in exact]
    message = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=device)
    parts = iter(message.split([n for each in sizes for n in each]))
    tensors = [
        [next(parts)[:n].view(dtype).view(shape) for n, (shape, dtype) in zip(*both, strict=True)]
        for both in zip(exact, likes, strict=True)
    ]
    return message, [sum(each) for each in sizes], tensors


@lru_cache(maxsize=4096)
def _runs(rows: tuple[Interval, ...], pieces: tuple[Interval, ...]) -> list[tuple[int, int]]:
    """Where ``pieces`` lie among ``rows``, without gaps between these: first row and length."""
    starts = [counted(below(rows, piece.start)) for piece in pieces]
    runs = union((n, n + piece.length) for n, piece in zip(starts, pieces, strict=True))
    return [(run.start, run.length) for run in runs]


@dataclass(slots=True)
class ShardedReport:
    """Filled by ``distributed.attention``, on every rank for itself.

    Attributes:
        way: how the pairs were shared among the ranks (distributed/partition.py).
        rank, ranks: of the group.
        pairs: query-key pairs that this rank computes.
        imbalance: the most pairs of any rank, over an equal share.
        forward_bytes, backward_bytes: received by this rank.
        most_forward_bytes: received in a forward by the busiest rank, as planned.
        stages: number of transfers that overlap with computation.
        kept: whether gathered inputs are kept for the backward.
        calls: what each attention call of this rank did, in order.
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

    def fill(self, group: dist.ProcessGroup, **known: Any) -> None:
        """Fill in what is known; the rest is emptied."""
        ShardedReport.__init__(self, rank=group.rank(), ranks=group.size(), **known)

    def __str__(self) -> str:
        both = f"{format_bytes(self.forward_bytes)} received"
        if self.backward_bytes:
            both += f" forward, {format_bytes(self.backward_bytes)} backward"
        return (
            f"rank {self.rank} of {self.ranks}: {self.way}, {in_words(self.pairs, 'pair')} "
            f"(busiest rank: {self.imbalance:.3f} of an equal share), {both}"
        )


# Of queries; of keys and values.
_Shards = tuple[Gathered, Gathered]
_OF_QUERIES = ("query", "out", "lse", "grad_out")
# Of a mask's bias and sinks; None: there are none, or no gradients are wanted.
OfMask = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Sharded:
    """A call on one rank.

    Attributes:
        whole: the call of all ranks.
        options: budget, depth and kernel of every attention call.
        arguments: what the ranks have agreed on.
        two_streams: whether stages are computed on two streams.
    """

    assignment: Assignment
    whole: WholeCall
    _group: weakref.ref[dist.ProcessGroup]
    rank: int
    options: CallOptions
    arguments: Signature
    report: ShardedReport | None
    two_streams: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; a graph of autograd's, which a caller may keep, holds this call."""
        return alive(self._group)

    @property
    def learned(self) -> OfMask:
        """The tensors of the mask that may have gradients."""
        mask: Any = self.whole.mask
        return (None, None) if mask is None else (mask.bias, mask.sinks)

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
            made = self._computed(stage, sides, state)
            for side, rows in sides.items() if self.assignment.kept and keep else ():
                kept.extend(rows.tensors)
                if side in made:
                    part, part_lse = made[side].tensors
                    kept.extend((part.to(query.dtype), part_lse))
            return made

        shards, targets = self._shards([query], [key, value]), self._shards(results, [])
        self._stages("forward_bytes", shards, compute, targets, state, kept)
        return out, kept if self.assignment.kept else [query, key, value, *results]

    def backward(
        self,
        grad_out: torch.Tensor,
        shapes: Sequence[torch.Size],
        saved: Sequence[torch.Tensor],
        of_mask: OfMask,
    ) -> list[torch.Tensor]:
        """The gradients of this rank's rows.

        Args:
            shapes: of query, key and value.
            saved: what the forward returned.
            of_mask: are added to.
        """
        state, grad_out = state_dtype(grad_out.dtype), grad_out.contiguous()
        shards = self._shards([grad_out], [])
        if not self.assignment.kept:
            query, key, value, out, lse = saved
            shards = self._shards([query, out, lse, grad_out], [key, value])
        grads, held = [grad_out.new_empty(shape) for shape in shapes], iter(saved)

        def compute(stage: int, sides: Sides) -> Sides:
            for side, rows in sides.items() if self.assignment.kept else ():
                rows.tensors[:0] = islice(held, 2 if side.of_keys else 3)
            return self._computed(stage, sides, state, of_mask)

        targets = self._shards(grads[:1], grads[1:])
        self._stages("backward_bytes", shards, compute, targets, state)
        return grads

    def _shards(self, of_queries: list[torch.Tensor], of_keys: list[torch.Tensor]) -> _Shards:
        """Tensors of this rank's rows, with the positions of these."""
        rows = (Interval(*self.assignment.of.starts[self.rank : self.rank + 2]),)
        return (
            Gathered(Interval(0, self.whole.shape.heads), rows, of_queries),
            Gathered(Interval(0, self.whole.shape.kv_heads), rows, of_keys),
        )

    def _stages(
        self,
        counted_as: str,
        shards: _Shards,
        compute: Callable[[int, Sides], Sides],
        targets: _Shards,
        state: torch.dtype,
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        """Run a pass.

        Args:
            counted_as: name of the bytes received, in the report.
            shards: this rank's rows of what is sent to those that compute with it.
            compute: the results of a stage, from its number and the rows that came.
            targets: this rank's rows of the results, of which it writes all.
            state: dtype of results that have to be added up.
            kept: tensors that ``compute`` leaves to the backward.
        """
        group, n_stages = self.group, self.assignment.n_stages

        def send(stage: int, rows: _Shards, results: Sides, of: torch.dtype | None) -> Transfer:
            pieces = self.assignment.moving(self.rank, stage)
            some = [piece for piece in pieces if rows[piece.side.of_keys].tensors]
            return Transfer(some, rows, group, results, of)

        coming, backs = [send(0, shards, {}, None)] if n_stages else [], list[Transfer]()
        lanes = TwoStreams(targets[0].tensors[0].device, self.two_streams)
        for stage in range(n_stages):
            if stage + 1 < n_stages:
                coming.append(send(stage + 1, shards, {}, None))
            lanes.reads(stage, *coming[0].messages)
            with lanes.turn(stage):
                results = compute(stage, self._gathered(stage, coming[0], shards))
                backs.append(send(stage, targets, results, state))
            made = [tensor for rows in results.values() for tensor in rows.tensors]
            lanes.leaves(*made, *kept, *backs[-1].messages)
            backs[-1].received_bytes += coming.pop(0).received_bytes
            del results, made
        lanes.meet()
        self._collect(backs, targets)
        if self.report is not None:
            setattr(self.report, counted_as, sum(back.received_bytes for back in backs))

    def _gathered(self, stage: int, came: Transfer, shards: _Shards) -> Sides:
        """The rows of a stage that came, of queries and of keys."""
        sides: Sides = {}
        parts: dict[Side, list[tuple[Interval, Sequence[torch.Tensor]]]] = defaultdict(list)
        for piece, tensors in came.arrived():
            parts[piece.side].append((piece.rows, tensors))
        for side, rows in self.assignment.needs(self.rank, stage).items():
            mine = parts[side]
            if len(mine) == 1:
                sides[side] = Gathered(side.heads, rows, list(mine[0][1]))
                continue
            sides[side] = Gathered.like(side.heads, rows, shards[side.of_keys].tensors)
            for some, tensors in mine:
                sides[side].write(side.heads, some, tensors)
        return sides

    def _collect(self, backs: Sequence[Transfer], targets: _Shards) -> None:
        """Merge or add up what came of this rank's rows, in ``targets``."""
        sums: Sides = {}
        summed: list[RowSlice] = []
        for piece, parts in (one for back in backs for one in back.arrived()):
            shard = targets[piece.side.of_keys]
            if piece.alone:
                shard.write(piece.side.heads, piece.rows, parts)
                continue
            add_up(sums, piece.side, shard.rows, [piece.rows], parts)
            summed.append(piece)
        for side, rows, *_ in summed:
            targets[side.of_keys].write(side.heads, rows, sums[side].at(side.heads, rows))

    def _computed(
        self, stage: int, sides: Sides, state: torch.dtype, of_mask: OfMask = (None, None)
    ) -> Sides:
        """The results of a stage over this rank's blocks, from the rows that came of queries and of
        keys: output and lse; gradients, if the upstream gradient is among the rows. In ``state``,
        those of whole heads in their own dtype."""
        made: Sides = {}
        blocks = self.assignment.blocks(self.rank, stage)
        for block in blocks:
            heads, kv_heads = block.heads, self.assignment.of.kv_of(block.heads)
            of_rows, of_keys = Side(False, heads), Side(True, kv_heads)
            inputs = dict(zip(_OF_QUERIES, sides[of_rows].at(heads, block.queries), strict=False))
            keys = sides[of_keys].at(kv_heads, *block.keys)
            inputs |= zip(("key", "value"), keys, strict=True)
            run = partial(self._of_block, block, inputs, state, of_mask)
            if "out" in inputs:
                query, *rest = run()
                parts = {of_rows: [query], of_keys: rest}
            else:
                out, lse = run_with_hook(run)
                parts = {of_rows: [out, lse.to(out.device)]}
            for side, tensors in parts.items():
                if len(blocks) == 1:
                    made[side] = Gathered(side.heads, sides[side].rows, tensors)
                    continue
                rows = block.keys if side.of_keys else (block.queries,)
                add_up(made, side, sides[side].rows, rows, tensors)
        return made

    def _of_block(
        self,
        block: ShardBlock,
        inputs: Mapping[str, torch.Tensor],
        state: torch.dtype,
        of_mask: OfMask,
    ) -> tuple[torch.Tensor, ...]:
        """Output and log-sum-exp of a block, or gradients, as ``compute_block``.

        Args:
            inputs: query, key, value; for gradients grad_out, out and lse besides.
            of_mask: to which the gradients of the mask's own tensors are added.
        """
        report, whole, (bias, sinks) = None, self.whole, of_mask
        results = BlockResults(
            out_dtype=None if self.assignment.whole_heads else state,
            grad_mask=bias is not None, grad_sinks=sinks is not None,
        )  # fmt: skip
        if self.report is not None:
            report = Report()
            self.report.calls.append(report)
        entries, keys = Interval(0, whole.shape.batch), Interval(0, whole.shape.n_keys)
        part = CallBlock(entries, block.heads, block.queries, keys)
        # Where a block may have some of its rows' keys alone there is neither mask nor dropout.
        masked = (None, block.causal) if self.assignment.of.units == "pairs" else None
        options = with_current_settings(self.options._replace(report=report))
        made = list(compute_block(whole, part, inputs, options, results, masked))
        if sinks is not None:
            sinks[slice(*block.heads)] += made.pop()
        if bias is not None:
            whole.cut_bias(bias, part).add_(made.pop())
        return tuple(made)
