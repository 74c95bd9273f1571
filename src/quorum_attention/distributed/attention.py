"""``distributed.attention``: each rank gives its rows of the sequence, and gets their results."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from quorum_attention.argument_checks import shown
from quorum_attention.call.block import WholeCall
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.settings import current_settings, with_current_settings
from quorum_attention.call.validation import Tensors, as_mask, check_tensors
from quorum_attention.decomposition import Ranges
from quorum_attention.decomposition.intervals import cut
from quorum_attention.distributed import agreement, partition
from quorum_attention.distributed.run import Sharded, ShardedReport
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.kernels.call_shape import CallShape, state_dtype
from quorum_attention.kernels.masked.mask_fields import fields_key, tensors_of
from quorum_attention.kernels.masked.resolve import ResolvedMask, resolve
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.torch_private import first_derivative, uncompiled
from quorum_attention.keywords import helps_with_names
from quorum_attention.mask import Mask, map_tensors

# Fields with a number for each token.
_PER_TOKEN = ("documents", "key_padding")
_KEPT: WeakKeyDictionary[ResolvedMask, tuple[int, ...]] = WeakKeyDictionary()
# 16-bit calls of so few pairs are computed in fp32: on one device they get an exact delta
# (kernels/reference.py), which needs whole rows.
_WIDENED_PAIRS = 1 << 16


@uncompiled
@helps_with_names
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    lengths: Sequence[int] | str | None = None,
    budget: int | str | None = None,
    depth: int | str = "auto",
    kernel: str | InnerKernel = "auto",
    report: ShardedReport | None = None,
) -> torch.Tensor:
    """Exact attention over a sequence whose tokens are sharded over the ranks of a group.

    All ranks call it together, in the same order, and run the backward of its result together.
    Each gives its contiguous shard, in the order of the ranks. Shards may have any lengths, also 0,
    and the group any number of ranks. Heads are exchanged, or keys and values are moved, or tasks
    of a cyclic quorum set are computed: of the ways that share the work evenly, the one that sends
    fewest bytes (docs/distributed.md). Partial results are sent and added in fp32 (fp64 for fp64
    inputs).

    Args:
        query: (..., heads, rows, head_dim): this rank's rows; fp16, bf16, fp32 or fp64, on the
            device of the group's backend (NCCL: CUDA; Gloo: CPU).
        key: (..., kv_heads, rows, head_dim), value: (..., kv_heads, rows, value_dim): the same
            rows. Batch dimensions, heads and dtype are the same on all ranks.
        attn_mask: a ``Mask`` of the whole sequence, the same on all ranks; ``documents`` and
            ``key_padding`` may have this rank's rows only, and are then gathered. Or a tensor that
            broadcasts to (..., heads, tokens, tokens) of the whole call. Under a mask a rank
            computes whole rows, with all keys. Its gradients of ``sinks`` and of an additive tensor
            are those of its own pairs: sum them over the ranks.
        group: the process group; None is the default one.
        is_causal: token i of the whole sequence sees tokens j <= i.
        scale: of the scores; None is head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads.
        dropout_p, dropout_seed: as in ``quorum_attention.attention``. With the same seed on all
            ranks the same pairs are dropped as on one device. None: each rank draws its own. With
            dropout heads are not cut.
        lengths: rows of every rank, or "equal" if all have as many as this one. None: they are
            gathered. The ranks compare their calls, and all raise if these differ. The host waits
            for that; on GPUs with ``lengths`` only in the first call of these sizes and options.
        budget, depth, kernel: as in ``quorum_attention.attention``, for each part that this rank
            computes. Rows gathered from other ranks come on top of the budget.
        report: a ``ShardedReport``, to be filled with what this rank did.

    Returns:
        (..., heads, rows, value_dim): the result for this rank's rows.

    Raises:
        TypeError, ValueError: arguments that do not fit, or differ between ranks.
        RuntimeError: there is no process group, or an earlier call over it failed on this rank. An
            error of ``quorum_attention.attention`` is raised on its own rank; the others raise when
            the group's time limit ends, or that rank's connection.
    """
    group = agreement.member_of(group)
    options = CallOptions(budget, None, depth, kernel)
    mask = _checked_mask(attn_mask)
    arguments = Arguments(
        None,
        dropout_p,
        dropout_seed,
        is_causal,
        scale,
        enable_gqa,
        options=with_current_settings(options),
    )
    inputs, shard = _checked_shard(query, key, value, arguments, report)
    options = options._replace(kernel=shard.options.kernel)
    query, shape, dropout = inputs.query, shard.shape, shard.dropout
    of_sizes = ("batch", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "is_causal")
    signature: agreement.Signature = {
        **{name: getattr(shape, name) for name in of_sizes},
        "scale": shard.scale, "attn_mask": _signature_of(mask),
        "dropout_p": 0.0 if dropout is None else dropout.p,
        "dropout_seed": None if dropout_seed is None else int(dropout_seed),
        "gradients": shard.records,
    }  # fmt: skip
    columns = [t.shape[-1] for name, t in _tensors_of(mask) if name in _PER_TOKEN]
    sizes = agreement.agreed_sizes(
        group, query, {"call": "attention", **signature}, columns, lengths
    )
    tokens, kept = sum(sizes), None
    every = replace(shape, batch_shape=(shape.batch,), n_queries=tokens, n_keys=tokens)
    if mask is not None:
        mask = _whole_mask(mask, group, sizes, inputs)
        kept = pairs_above(mask, every)
        agreement.agree_on(group, query, {"the pairs that attn_mask keeps (a hash)": hash(kept)})
    whole = WholeCall(every, mask, shard.scale, dropout)
    with torch.autocast(query.device.type, enabled=False):
        rows = [t.reshape(shape.batch, *t.shape[-3:]) for t in inputs[:3]]
        if shape.dtype.itemsize == 2 and shape.batch * shape.heads * tokens**2 <= _WIDENED_PAIRS:
            rows = [t.float() for t in rows]
        assignment, moved = _assigned(rows, whole, sizes, kept)
        # Whole heads in turns, where nothing limits a call's memory.
        two_streams = assignment.whole_heads and assignment.n_stages > 1
        call = Sharded(
            assignment, whole, weakref.ref(group), group.rank(), options, signature, report,
            two_streams and options.is_default and current_settings() is None,
        )  # fmt: skip
        if report is not None:
            report.fill(
                group, way=assignment.way, pairs=assignment.pairs(group.rank()),
                imbalance=assignment.imbalance, stages=assignment.n_stages, kept=assignment.kept,
                most_forward_bytes=assignment.most_received(moved),
            )  # fmt: skip
        apply: Any = _ShardedAttention.apply
        out: torch.Tensor = apply(*rows, *call.learned, call)
    return shard.drop_heads(out.to(shape.dtype).reshape(*query.shape[:-1], shape.value_dim))


def _checked_shard(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Arguments, report: Any
) -> tuple[Tensors, Request]:
    """The tensors of this rank as a call of their own, with the kernel that now has that name.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument makes no sense, by name.
    """
    if report is not None and not isinstance(report, ShardedReport):
        raise TypeError(f"report must be a distributed.ShardedReport, got {shown(report)}")
    tensors, request = request_of("attention", query, key, value, arguments)
    shape = request.shape
    if shape.n_queries != shape.n_keys or not shape.heads:
        raise ValueError(
            "key must have the query's rows, and there must be heads, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)}; for cross attention over ranks "
            "gather the keys and give them to quorum_attention.attention with this rank's queries"
        )
    agreement.check_kernel_of_parts(request.options.kernel)
    return tensors, request


def _assigned(
    inputs: Sequence[torch.Tensor],
    whole: WholeCall,
    sizes: Sequence[int],
    kept: tuple[int, ...] | None,
) -> tuple[partition.Assignment, partition.RowBytes]:
    """Who computes what, and the bytes of a row. All ranks decide the same, of sizes alone.

    Args:
        inputs: query, key and value of this rank, with one batch dimension.
        sizes: rows of every rank.
        kept: as of ``Sequences``.
    """
    shape, value_dim, (batch, heads, _, head_dim) = whole.shape, inputs[2].shape[3], inputs[0].shape
    units: Literal["pairs", "rows", "heads"] = "heads"
    if whole.dropout is None:
        units = "pairs" if kept is None else "rows"
    starts, element = (0, *accumulate(sizes)), batch * inputs[0].element_size()
    of = partition.Sequences(starts, heads, shape.kv_heads, shape.is_causal, units, kept=kept)
    pair_flops = 2.0 * batch * (head_dim + value_dim)
    in_turns = units == "pairs" and not on_host(inputs[0].device)
    of = replace(of, turns=partition.turns_of(in_turns * of.pairs / of.ranks * pair_flops))
    state = max(4 * batch, element)
    moved = partition.RowBytes(
        query=head_dim * element, out=value_dim * element, partial=(value_dim + 1) * state,
        key=(head_dim + value_dim) * element, lse=state,
    )  # fmt: skip
    return partition.choose(of, moved, pair_flops), moved


class _ShardedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        call: Sharded,
    ) -> torch.Tensor:
        keep = any(ctx.needs_input_grad)
        with agreement.exchanging(call.group):
            out, saved = call.forward(query, key, value, keep)
        if keep:
            # A checkpoint recomputes where something saved is asked for, and all ranks have to.
            saved = saved or [out.new_empty(0)]
            # Tensors of the mask: changed before the backward, they would give a wrong one.
            read = [tensor for _, tensor in _tensors_of(call.whole.mask)]
            ctx.save_for_backward(*saved, *read)
            ctx.count = len(saved)
        ctx.call, ctx.shapes = call, [t.shape for t in (query, key, value)]
        return out

    @staticmethod
    @first_derivative("quorum_attention.distributed.attention")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        call: Sharded = ctx.call
        group = call.group
        with agreement.exchanging(group):  # other ranks may have begun
            saved = ctx.saved_tensors[: ctx.count]
        of_mask = [
            torch.zeros_like(t, dtype=state_dtype(t.dtype)) if wanted and t is not None else None
            for wanted, t in zip(ctx.needs_input_grad[3:5], call.learned, strict=True)
        ]
        if on_host(grad_out.device):  # the hosts wait anyway
            agreement.compare(group, {"call": "the backward of attention", **call.arguments})
        with agreement.exchanging(group):
            made = call.backward(grad_out, ctx.shapes, saved, of_mask)
        return (*made, *of_mask, None)


def _checked_mask(attn_mask: Any) -> Mask | None:
    """The argument ``attn_mask`` as a ``Mask``.

    Raises:
        TypeError: it is none.
    """
    attn_mask = as_mask(attn_mask)
    if attn_mask is None or isinstance(attn_mask, Mask):
        return attn_mask
    if isinstance(attn_mask, torch.Tensor):
        return Mask(bias=attn_mask)
    raise TypeError(f"attn_mask must be a Mask, a tensor or None, got {shown(attn_mask)}")


def _whole_mask(
    mask: Mask,
    group: dist.ProcessGroup,
    lengths: Sequence[int],
    tensors: Tensors,
) -> Mask:
    """The mask of the whole sequence: ids and paddings of this rank's rows gathered.

    Args:
        lengths: rows of every rank.
        tensors: this rank's part of the call.

    Raises:
        ValueError: a bias or sinks do not fit the whole call, by name.
    """
    rows, tokens, most = tensors.query.shape[-2], sum(lengths), max(lengths)

    def gathered(mine: torch.Tensor, name: str) -> torch.Tensor:
        # Where one rank has all rows the two cannot be told apart there, so all of them gather.
        if name not in _PER_TOKEN or len(lengths) == 1 or mine.shape[-1] == tokens > most:
            return mine
        own = torch.atleast_2d(mine)[:, :rows].cpu()
        return torch.cat(agreement.told(group, own), dim=1).to(mine.device)

    mask = map_tensors(mask, gathered)
    # Bias and sinks have to fit the whole call.
    query, key, value = (
        t.new_empty(()).expand(*t.shape[:-2], tokens, t.shape[-1]) for t in tensors[:3]
    )
    check_tensors(query, key, value, Arguments(mask, enable_gqa=True))
    bias, batch_shape = mask.bias, tensors.query.shape[:-3]
    if bias is None or bias.dim() <= 3 or len(batch_shape) <= 1:
        return mask
    return replace(mask, bias=bias.expand(*batch_shape, *bias.shape[-3:]).flatten(0, -4))


def pairs_above(mask: Mask, shape: CallShape) -> tuple[int, ...]:
    """Pairs of a head's rows that the mask keeps, as ``Sequences.kept``; those that rules of single
    pairs leave out are counted as well."""
    resolved, n = resolve(mask, shape), shape.n_queries
    if resolved not in _KEPT:
        edges = range(0, n + partition.step_of(n), partition.step_of(n))
        kept = [0] * len(edges)
        for geometry in resolved.geometries:
            for part, band in geometry.within(Ranges.from_bounds(0, n, 0, n)):
                for rows in cut(part.queries, edges):
                    kept[rows.start // edges.step + 1] += band.count(*rows, *part.keys)
        _KEPT[resolved] = tuple(accumulate(kept))
    return _KEPT[resolved]


def _signature_of(mask: Mask | None) -> Any:
    """What must be the same on all ranks; of tensors for each token all but how many they have."""
    tensors = _tensors_of(mask)
    shapes = [(n, tuple(t.shape[: -1 if n in _PER_TOKEN else None])) for n, t in tensors]
    return mask and (fields_key(mask), shapes)


def _tensors_of(mask: Mask | None) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a ``Mask``, by the names of their fields; of None none."""
    if mask is None:
        return []
    own = ("bias", mask.bias), ("sinks", mask.sinks)
    return tensors_of(mask) + [(name, tensor) for name, tensor in own if tensor is not None]
