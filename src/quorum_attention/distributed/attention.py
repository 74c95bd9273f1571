"""``distributed.attention``: each rank gives its rows of the sequence, and gets their
results."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quorum_attention.call.block import WholeCall
from quorum_attention.call.options import DEFAULT_OPTIONS, Arguments, CallOptions
from quorum_attention.call.request import Request
from quorum_attention.call.settings import with_current_settings
from quorum_attention.call.validation import Tensors
from quorum_attention.dispatch import cache_key, is_plain_call
from quorum_attention.distributed import strategies
from quorum_attention.distributed.agreement import (
    CallSignature,
    agree_on,
    agree_on_lengths,
    agreed_calls,
    compare,
)
from quorum_attention.distributed.assignment import Assignment, RowBytes
from quorum_attention.distributed.call import MaskParams, ShardedCall
from quorum_attention.distributed.checks import (
    check_kernel,
    checked_shard,
    is_recorded,
    refuse_transforms,
)
from quorum_attention.distributed.groups import (
    poison_group_on_error,
    resolve_group,
    tell_ranks_of_error,
)
from quorum_attention.distributed.report import ShardedReport
from quorum_attention.distributed.run import run_backward, run_forward
from quorum_attention.distributed.sharded_mask import (
    checked_mask,
    count_kept_pairs,
    gather_mask,
    mask_signature,
    token_widths,
)
from quorum_attention.distributed.sharded_shape import Divisible, ShardedShape
from quorum_attention.execution.device.lookup import on_host
from quorum_attention.kernels.call_shape import CallShape, state_dtype
from quorum_attention.kernels.masked.read_values import (
    record_values,
    warn_of_changed_values,
)
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.torch_private import (
    first_derivative,
    no_grad_no_autocast,
    uncompiled,
)
from quorum_attention.keywords import helps_with_names
from quorum_attention.mask import Mask

# 16-bit calls of so few pairs are computed in fp32: on one device they get an exact
# delta (kernels/reference.py), which needs whole rows.
_MAX_WIDENED_PAIRS = 1 << 16
# Arguments ``lengths`` whose texts have all of their numbers.
_PLAIN_LENGTHS = (str, list, tuple, torch.Size)
# Sizes that are the same on all ranks.
_COMMON_SIZES = (
    "batch",
    "heads",
    "kv_heads",
    "head_dim",
    "value_dim",
    "dtype",
    "is_causal",
)


class _Prepared(NamedTuple):
    """A call that has been checked.

    Attributes:
        shard: the request of this rank's rows.
    """

    shard: Request
    call: ShardedCall


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
    """Exact attention over a sequence whose tokens are sharded over the ranks of a
    group.

    All ranks must make the same calls, in the same order, and also run the backward
    together. Each rank gives a contiguous shard, in the order of the ranks. Shards may
    have any lengths, also 0, and the group any number of ranks. There are three ways to
    share the work: ranks exchange heads, or move keys and values, or compute tasks of a
    cyclic quorum set. In most cases the call takes the way that sends the fewest bytes
    (docs/distributed.md). Partial results are sent and added in fp32 (fp64 for fp64
    inputs).

    Args:
        query: (..., heads, rows, head_dim): this rank's rows; fp16, bf16, fp32 or fp64,
            on the device of the group's backend (NCCL: CUDA; Gloo: CPU).
        key: (..., kv_heads, rows, head_dim): the same rows.
        value: (..., kv_heads, rows, value_dim): the same rows. Batch dimensions, heads
            and dtype are the same on all ranks.
        attn_mask: a ``Mask`` of the whole sequence, the same on all ranks; or a tensor
            that broadcasts to (..., heads, tokens, tokens) of the whole call. Only
            ``documents`` and ``key_padding`` may have this rank's rows alone; the ranks
            then gather them. Under a mask a rank computes whole rows, with all keys. A
            rank gets the gradients of ``sinks`` and of an additive tensor for its own
            pairs: sum them over the ranks.
        group: the process group; None is the default one.
        is_causal: token i of the whole sequence sees tokens j <= i.
        scale: of the scores; None is head_dim ** -0.5.
        enable_gqa: allow fewer key/value heads than query heads.
        dropout_p, dropout_seed: as in ``quorum_attention.attention``. With the same
            seed on all ranks the same pairs are dropped as on one device. If the seed
            is None, each rank draws its own. With dropout heads are not cut.
        lengths: the number of rows of every rank, or "equal" if all ranks have as many
            as this one. None: the ranks tell each other. The ranks compare their calls,
            and all raise if these differ. The host waits for that. On GPUs, if
            ``lengths`` is given, they compare only the first of the calls with the same
            sizes and options.
        budget, depth, kernel: as in ``quorum_attention.attention``, for each part that
            this rank computes. Rows gathered from other ranks come on top of the
            budget.
        report: a ``ShardedReport``, to be filled with what this rank did.

    Returns:
        The result for this rank's rows, (..., heads, rows, value_dim).

    Raises:
        TypeError, ValueError: arguments that do not fit, or differ between ranks, or do
            not fit on another rank.
        RuntimeError: there is no process group, or an earlier call over it failed on
            this rank. If ``quorum_attention.attention`` raises an error on one rank,
            the other ranks raise one at the group's time limit, or when that rank's
            process ends.
    """
    group = resolve_group(group)
    options = CallOptions(budget, None, depth, kernel)
    arguments = Arguments(
        None,
        dropout_p,
        dropout_seed,
        is_causal,
        scale,
        enable_gqa,
        options=DEFAULT_OPTIONS if options.is_default else options,
    )
    call_key: Hashable | None = None
    if attn_mask is None and report is None and lengths is not None:
        call_key = _call_key(query, key, value, arguments, lengths)
    inputs = Tensors(query, key, value, None)
    # Looked up once: what is prepared must not outlive the agreement on it. A rank that
    # finds its call prepared would not compare it where another rank does.
    agreed = agreed_calls(group)
    prepared: _Prepared | None = agreed.prepared.get(call_key)
    if prepared is None:
        inputs, prepared = _prepare(
            query,
            key,
            value,
            attn_mask,
            arguments,
            group,
            lengths,
            report,
        )
        is_unchanged = (
            inputs.query is query and inputs.key is key and inputs.value is value
        )
        if call_key is not None and is_unchanged:
            agreed.keep(call_key, prepared)
    shard, call = prepared
    with torch.autocast(inputs.query.device.type, enabled=False):
        with poison_group_on_error(group):  # other ranks may have begun
            shards = _flattened_shards(inputs, call.whole_call.shape, call.dtype)
        out = _apply(*shards, *call.mask_params, call)
    out = out.to(shard.shape.dtype)
    out = out.reshape(*inputs.query.shape[:-1], shard.shape.value_dim)
    return shard.drop_heads(out)


def _call_key(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: Arguments,
    lengths: Sequence[int] | str,
) -> Hashable | None:
    """Return the key of a call on a GPU: if an earlier call had the same, this one is
    neither checked nor compared. None: the call is one that always is."""
    if not is_plain_call(query, key, value, arguments) or on_host(query.device):
        return None
    if type(lengths) not in _PLAIN_LENGTHS:
        return None  # its text need not tell its numbers
    key_of_shard = cache_key(query, key, value, arguments)
    return None if key_of_shard is None else (key_of_shard, repr(lengths))


def _prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None,
    arguments: Arguments,
    group: dist.ProcessGroup,
    lengths: Sequence[int] | str | None,
    report: ShardedReport | None,
) -> tuple[Tensors, _Prepared]:
    """Check a call, compare it with those of the other ranks, and decide who computes
    what.

    Returns:
        This rank's tensors, and the rest, which holds no tensors where there is no
        mask.
    """
    # The backward has the settings of its forward.
    options = with_current_settings(arguments.options)
    arguments = arguments._replace(options=options)
    ranks_compare = lengths is None or dist.get_backend(group) == dist.Backend.GLOO
    with tell_ranks_of_error(group, is_awaited=ranks_compare):
        mask = checked_mask(attn_mask)
        inputs, shard = checked_shard(query, key, value, arguments, report)
        records = is_recorded(shard, inputs, mask)
        signature = _signature_of(shard, mask, arguments.dropout_seed, records)
        lengths_of_ranks = agree_on_lengths(
            group,
            inputs.query,
            {"call": "attention", **signature},
            token_widths(mask),
            lengths,
        )
    if shard.options.kernel is not options.kernel:
        options = options._replace(kernel=shard.options.kernel)
    n_tokens = sum(lengths_of_ranks)
    shape = replace(
        shard.shape,
        batch_shape=(shard.shape.batch,),
        n_queries=n_tokens,
        n_keys=n_tokens,
    )
    dtype = _dtype_of_parts(shape, options.kernel)
    whole_call = WholeCall(shape, None, shard.scale, shard.dropout)
    kept_pairs: tuple[int, ...] | None = None
    if mask is None:
        check_kernel(whole_call, options, inputs, dtype, records)
    else:
        is_on_host = on_host(inputs.query.device)
        with tell_ranks_of_error(group, is_awaited=is_on_host):
            mask = gather_mask(mask, group, lengths_of_ranks, inputs)
            whole_call = replace(whole_call, mask=mask)
            kept_pairs = count_kept_pairs(mask, shape)
            check_kernel(whole_call, options, inputs, dtype, records)
            kept_hash = {"the pairs that attn_mask keeps (a hash)": hash(kept_pairs)}
            agree_on(group, inputs.query, kept_hash)
    assignment, row_bytes = _assign(
        whole_call, lengths_of_ranks, kept_pairs, dtype, inputs.query.device, records
    )
    # Whole heads in turns, where nothing limits a call's memory.
    has_turns = assignment.whole_heads and assignment.n_stages > 1
    is_unlimited = options is DEFAULT_OPTIONS
    call = ShardedCall(
        assignment,
        whole_call,
        weakref.ref(group),
        group.rank(),
        options,
        signature,
        report,
        dtype,
        records,
        two_streams=has_turns and is_unlimited,
    )
    if report is not None:
        report.fill(
            call.group,
            way=assignment.way,
            pairs=assignment.n_pairs(call.rank),
            imbalance=assignment.imbalance,
            stages=assignment.n_stages,
            kept=assignment.keeps_inputs,
            most_forward_bytes=assignment.most_received(row_bytes),
        )
    return inputs, _Prepared(shard, call)


def _signature_of(
    request: Request, mask: Mask | None, dropout_seed: int | None, records: bool
) -> CallSignature:
    """Return the arguments that must be the same on all ranks.

    Args:
        records: whether there may be a backward, in which all ranks take part.
    """
    sizes = {name: getattr(request.shape, name) for name in _COMMON_SIZES}
    return {
        **sizes,
        # Plus 0.0: of two calls like each other one may have -0.0.
        "scale": request.scale + 0.0,
        "attn_mask": mask_signature(mask),
        "dropout_p": 0.0 if request.dropout is None else request.dropout.p,
        "dropout_seed": None if dropout_seed is None else int(dropout_seed),
        "gradients": records,
    }


def _dtype_of_parts(shape: CallShape, kernel: str | InnerKernel) -> torch.dtype:
    """Return the dtype in which parts of a call are computed and sent.

    It is the inputs' dtype; or fp32 for 16-bit calls that are small, or whose delta
    must come from an output that was not rounded (``exact_delta``). A kernel that was
    asked for and takes no fp32 gets the inputs' dtype.
    """
    is_small = shape.lanes * shape.n_queries**2 <= _MAX_WIDENED_PAIRS
    if shape.dtype.itemsize != 2 or not (is_small or shape.wide_out):
        return shape.dtype
    wide_shape = replace(shape, dtype=torch.float32, wide_out=False)
    if kernel != "auto" and get_kernel(kernel).refusal(wide_shape) is not None:
        return shape.dtype
    return torch.float32


def _flattened_shards(
    tensors: Tensors, shape: CallShape, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return query, key and value of this rank with one batch dimension, in a dtype."""
    return [
        tensor.reshape(shape.batch, *tensor.shape[-3:]).to(dtype)
        for tensor in (tensors.query, tensors.key, tensors.value)
    ]


def _assign(
    whole_call: WholeCall,
    lengths: Sequence[int],
    kept_pairs: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    records: bool,
) -> tuple[Assignment, RowBytes]:
    """Return who computes what, and the bytes of a row. All ranks decide the same, by
    sizes alone.

    Args:
        lengths: rows of every rank.
        kept_pairs: as of ``ShardedShape``.
        dtype: of the rows that are sent.
        device: of this rank's rows.
        records: whether there may be a backward.
    """
    shape = whole_call.shape
    units: Divisible = "pairs"
    if whole_call.dropout is not None:
        units = "heads"
    elif kept_pairs is not None:
        units = "rows"
    sharded = ShardedShape(
        tuple(accumulate(lengths, initial=0)),
        shape.heads,
        shape.kv_heads,
        shape.is_causal,
        units,
        kept_pairs=kept_pairs,
    )
    pair_flops = 2.0 * shape.batch * shape.kv_width
    flops = 0.0
    on_gpu = not on_host(device)
    if units == "pairs" and on_gpu:
        flops = sharded.n_pairs / sharded.n_ranks * pair_flops
    n_head_groups = strategies.n_head_groups(flops, records)
    sharded = replace(sharded, n_head_groups=n_head_groups)
    element = shape.batch * dtype.itemsize
    state = shape.batch * state_dtype(dtype).itemsize
    row_bytes = RowBytes(
        query=shape.head_dim * element,
        key=shape.kv_width * element,
        out=shape.value_dim * element,
        partial=(shape.value_dim + 1) * state,
        lse=state,
    )
    assignment = strategies.choose_assignment(
        sharded, row_bytes, pair_flops, on_gpu=on_gpu
    )
    return assignment, row_bytes


class _ShardedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        call: ShardedCall,
    ) -> torch.Tensor:
        # The saved tensors may be views of the inputs. If an input with a graph is
        # changed, torch raises an obscure error for its views.
        inputs = [tensor.detach() for tensor in (query, key, value)]
        with poison_group_on_error(call.group):
            out, saved = run_forward(call, *inputs)
        ctx.call = call
        ctx.shapes = [tensor.shape for tensor in (query, key, value)]
        if call.records:
            # A checkpoint recomputes where something saved is asked for, and all ranks
            # have to.
            saved = saved or [out.new_empty(0)]
            ctx.n_saved = len(saved)
            # Changed before the backward, they would give a wrong one. Tensors of
            # inference mode cannot be saved.
            savable = [tensor for tensor in call.captured if not tensor.is_inference()]
            functions = call.functions
            recorded_values = [record_values(functions)] if functions else []
            ctx.save_for_backward(*saved, *savable, *recorded_values)
        return out

    @staticmethod
    @first_derivative("quorum_attention.distributed.attention")
    def backward(ctx: Any, grad_out: torch.Tensor) -> Any:
        call: ShardedCall = ctx.call
        group = call.group
        # In host memory the ranks compare the pass. The hosts wait anyway.
        ranks_compare = on_host(grad_out.device)
        before_messages = (
            tell_ranks_of_error if ranks_compare else poison_group_on_error
        )
        refuse_transforms(grad_out)
        with before_messages(group):
            # Torch raises here if one of them has changed.
            saved_tensors = ctx.saved_tensors
            saved = saved_tensors[: ctx.n_saved]
            if call.functions:
                warn_of_changed_values(call.functions, saved_tensors[-1])
            _, _, _, needs_bias, needs_sinks, _ = ctx.needs_input_grad
            mask_grads = MaskParams(
                _zero_grad(call.mask_params.bias, needs_bias),
                _zero_grad(call.mask_params.sinks, needs_sinks),
            )
            if ranks_compare:
                signature = {"call": "the backward of attention", **call.signature}
                compare(group, signature)
        # The gradients are those of the forward, which autocast has left alone.
        with poison_group_on_error(group), no_grad_no_autocast():
            grads = run_backward(call, grad_out, ctx.shapes, saved, mask_grads)
        return (*grads, *mask_grads, None)


_apply: Any = _ShardedAttention.apply


def _zero_grad(param: torch.Tensor | None, is_wanted: bool) -> torch.Tensor | None:
    """Return a gradient of a mask's tensor to be added to; None where none is
    wanted."""
    if param is None or not is_wanted:
        return None
    return torch.zeros_like(param, dtype=state_dtype(param.dtype))
