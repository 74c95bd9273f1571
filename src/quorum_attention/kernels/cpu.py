"""Rectangles on torch's flash attention for the CPU; with dropout tile by tile instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from quorum_attention.kernels import reference
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.protocol import (
    Call,
    CallShape,
    Extent,
    Gradients,
    Saved,
    Statistics,
    TaskTensors,
    Three,
)
from quorum_attention.kernels.rectangles import (
    RectangleKernel,
    RectangleSizes,
    operator_refusal,
    round_up,
    signed,
)
from quorum_attention.kernels.tensors import pad_last, row_blocks
from quorum_attention.kernels.torch_private import operator_reason

# Rows that are not finite are computed again so many at a time, by tiles of these limits.
_MENDED = reference.TileLimits(1 << 15, 64, 128)

MEND_WORKSPACE_BYTES = 1 << 20
"""Upper bound of the bytes ``mend_odd_rows_`` allocates at any one time, besides ``MEND_ROW_BYTES``
for each row of a head."""

MEND_ROW_BYTES = 48


def _has_odd_rows(lse: torch.Tensor) -> bool:
    """Whether the operator's lse of any row is 0, NaN or infinite, as of rows without keys."""
    batch, heads, n_rows = lse.shape
    for block in row_blocks(batch, heads, n_rows, lse.element_size()):
        ones = lse[block] / lse[block]
        if not torch.equal(ones, ones):  # one operator that tells a bool: no NaN equals itself
            return True
    return False


def mend_odd_rows_(out: torch.Tensor, lse: torch.Tensor, call: Call) -> None:
    """Correct, in place, the rows that have NaN, infinite or no scores.

    A row with a score of NaN or +inf has to be NaN; a row whose scores are all -inf has to be 0
    with lse -inf. torch's CPU operator differs: among few keys it ignores NaN when it looks for the
    maximum, it returns 0 with lse 0 if there is no maximum, and its 16-bit exponential turns NaN
    into 0. In all these rows lse is 0, NaN or infinite; nothing else of the other rows is read.

    Args:
        out: (b, h, lq, dv), as the operator returned it.
        lse: (b, h, lq), as the operator returned it; rows with -inf are right already.
        call: the operator's arguments; query heads may share key heads.
    """
    batch, heads, n_rows = lse.shape
    for block in row_blocks(batch, heads, n_rows, lse.element_size()):
        part = lse[block]
        odd = (part / part).isnan() & (part != -torch.inf)
        for entry, head in odd.any(dim=-1).nonzero().tolist():
            at = (block[0].start + entry, block[1].start + head)
            every = odd[entry, head].nonzero().flatten() + block[2].start
            for rows in every.split(_MENDED.rows):
                right, its = _computed_again(call, at, rows)
                wrong = ~its.isfinite()
                out[at][rows[wrong]] = right[wrong].to(out.dtype)
                lse[at][rows[wrong]] = its[wrong]


def _computed_again(
    call: Call, at: tuple[int, int], rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (rows, dv) and lse (rows,) of some rows of one head of a batch entry."""
    entry, head = at
    of_keys = (entry, head * call.key.shape[1] // call.query.shape[1])
    bias = call.bias
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
        bias = bias.expand(*call.query.shape[:3], call.key.shape[2])[at][rows][None, None]

    def kept(block: reference.Block, keys: slice) -> torch.Tensor:
        return torch.arange(keys.start, keys.stop) <= rows[block.rows, None]

    query, key, value = call.query[at][rows], call.key[of_keys], call.value[of_keys]
    one = Call(query[None, None], key[None, None], value[None, None], scale=call.scale, bias=bias)
    how = reference.Scores(kept=kept if call.is_causal else None, tiles=_MENDED)
    out, lse = reference.whole_forward(one, how)
    return out[0, 0], lse[0, 0]


_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
# As torch's own Python calls it, which takes less time than ``torch.ops``, if it has a name there.
_forward: Any = getattr(torch, _FORWARD, None) or getattr(torch.ops.aten, _FORWARD, None)
_backward: Any = getattr(torch.ops.aten, _BACKWARD, None)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The operator works on tiles of at most this many queries and keys, one tile for each thread.
_TILE_QUERIES = 256
_TILE_KEYS = 512
# Least bytes of a pass: its first call may try the kernel out (kernels/probe.py).
_TRIAL_BYTES = 6 << 20
# The share of the threads that should be busy in a backward.
_BUSY = 0.9


class CpuKernel(RectangleKernel):
    """torch's tiled CPU attention: fp16, bf16, fp32 and fp64, any head size, masks."""

    name = "cpu"
    rounds_scale = True
    plain_softmax = True
    dropout = True
    heads_by_thread = True

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        reason = operator_refusal(call, "cpu", _DTYPES)
        return reason or operator_reason(_FORWARD, *([_BACKWARD] if call.needs_grad else []))

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place; with dropout by the reference."""
        (super().forward if task.dropout is None else reference.forward)(task, state)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place; with dropout by the reference."""
        (super().backward if task.dropout is None else reference.backward)(task, grads)

    def takes_whole(
        self, query_heads: int, key_heads: int, tokens: int, masked: bool, every: bool
    ) -> bool:
        """Any call: grouped heads go to the operator as views."""
        return True

    def whole_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.whole_forward``; takes grouped heads, mends rows that are not
        finite."""
        if call.dropout is not None:
            return reference.whole_forward(call)
        if call.query.shape[1] != call.key.shape[1]:
            return grouped_forward(self.whole_forward, call)
        out, lse = self.rectangle_forward(signed(call, self.rounds_scale)[0])
        if _has_odd_rows(lse):
            self.clear_dead_rows_(out, lse, call)
            mend_odd_rows_(out, lse, call)
        return out, lse

    def whole_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.whole_backward``; takes grouped heads."""
        if call.dropout is not None:
            return reference.whole_backward(call, saved)
        if call.query.shape[1] != call.key.shape[1]:
            return grouped_backward(self.whole_backward, call, saved)
        return super().whole_backward(call, saved)

    def rectangle_forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RectangleKernel.rectangle_forward``."""
        value_dim = call.value.shape[-1]
        width = max(call.query.shape[-1], value_dim)
        pad = partial(pad_last, width=width)
        out, lse = _run(call.mapped(pad, pad))
        return (out if width == value_dim else out[..., :value_dim]), lse

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        head_dim, value_dim = call.query.shape[-1], call.value.shape[-1]
        pad = partial(pad_last, width=max(head_dim, value_dim))
        dq, dk, dv = _backward(
            pad(saved.grad_out), *map(pad, call.inputs), pad(saved.out), saved.lse, 0.0,
            call.causal, attn_mask=call.bias, scale=call.scale,
        )  # fmt: skip
        if head_dim == value_dim:
            return dq, dk, dv
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]

    def backward_parts(self, batch_and_heads: int) -> int:
        """As many runs of rows as keep all threads busy: each works on whole ones."""
        threads, lanes = torch.get_num_threads(), max(1, batch_and_heads)
        parts = -(-threads // lanes)
        while parts < threads and lanes * parts < _BUSY * threads * -(-lanes * parts // threads):
            parts += 1
        return parts

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``forward`` allocates at any one time."""
        if call.dropout:
            return reference.forward_bytes(call, extent)
        sizes = _sizes(call, extent)
        shared = sizes.shared
        width = max(call.head_dim, call.value_dim)
        tile_queries, tile_keys = _tile(extent)
        # For each thread: scores, row maxima and sums, and output of one tile. For 16-bit inputs
        # also the probabilities and operands in 16 bits.
        tiles = tile_queries * (tile_keys + 2 + width) * sizes.work
        packed = 0
        if sizes.item == 2:
            tiles += (tile_queries * tile_keys + (tile_queries + tile_keys) * width) * 2
            if "AVX512" in torch.backends.cpu.get_cpu_capability():
                # Here torch may repack all keys and values for the matrix units.
                packed = 2 * extent.batch * extent.key_heads * round_up(extent.max_keys, _TILE_KEYS)
                packed *= round_up(width, 64) * 2
        inside = torch.get_num_threads() * tiles + packed
        if call.head_dim < width:
            inside += (sizes.rows + sizes.key_rows) * width * sizes.item
        if call.value_dim < width:
            inside += sizes.key_rows * width * sizes.item
        if shared > 1:
            # Copies of the queries by group, and of the results in the order of the heads.
            inside += sizes.rows * (2 * width * sizes.item + sizes.work)
        # Weights of the rows, and what mends odd rows, one head after the other.
        merging = min(MERGE_WORKSPACE_BYTES, sizes.rows * (3 * sizes.work + 2))
        merging += MEND_WORKSPACE_BYTES + extent.max_queries * MEND_ROW_BYTES
        merging += _widened(sizes, sizes.rows * call.value_dim)
        return max(_TRIAL_BYTES, sizes.forward_bytes(width, inside, merging))

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the bytes ``backward`` allocates at any one time."""
        if call.dropout:
            return reference.backward_bytes(call, extent)
        sizes = _sizes(call, extent)
        shared = sizes.shared
        width = max(call.head_dim, call.value_dim)
        tile_queries, tile_keys = _tile(extent)
        tiles = tile_queries * (2 * tile_keys + 1) * sizes.work
        if sizes.item == 2:
            # Probabilities and their gradients once more in 16 bits, and the reordered operands
            # of a matrix product.
            tiles += 4 * tile_queries * tile_keys * 2
            tiles += (tile_queries + tile_keys) * width * 8
        parts = 1 if call.mask is not None else self.backward_parts(sizes.lanes)
        gradients = (sizes.rows + 2 * parts * sizes.key_rows) * width * sizes.item
        if shared > 1:
            # Key gradients of every query head before they are summed; copies of the rows by
            # group, and of the results in the order of the heads.
            gradients += 2 * sizes.shared_key_rows * width * sizes.item
            gradients += sizes.rows * (4 * width * sizes.item + 2 * sizes.work)
        # The operator copies a grad_out that is not token-major.
        inside = torch.get_num_threads() * tiles + sizes.rows * width * sizes.item
        if call.head_dim < width:
            inside += (sizes.rows + sizes.key_rows) * width * sizes.item
        if call.value_dim < width:
            inside += (2 * sizes.rows + sizes.key_rows) * width * sizes.item
        adding = _widened(sizes, max(sizes.rows, parts * sizes.key_rows) * width)
        return max(_TRIAL_BYTES, sizes.backward_bytes(gradients, inside, adding))


def _run(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = _forward(
        *call.inputs, 0.0, call.causal, attn_mask=call.bias, scale=call.scale
    )
    return found


def _sizes(call: CallShape, extent: Extent) -> RectangleSizes:
    split = call.dtype == torch.float32 and not call.exact_scale
    return RectangleSizes(call, extent, extent.direct, split)


def _widened(sizes: RectangleSizes, numbers: int) -> int:
    """Bytes to merge or add so many 16-bit ``numbers`` to a state: in blocks (kernels/merge.py)."""
    if sizes.item == sizes.work:
        return 0
    return min(MERGE_WORKSPACE_BYTES, 3 * numbers * sizes.work)


def _tile(extent: Extent) -> tuple[int, int]:
    return min(_TILE_QUERIES, extent.max_queries), min(_TILE_KEYS, extent.max_keys)


# Grouped heads, without expanding keys.
#
# In a forward without a causal mask, the query heads that share a key/value head become further
# rows of one head. Otherwise each key/value head becomes a batch entry: the query heads of its
# group are the entry's heads, and all of them read its keys through a stride of 0. Where (batch,
# key heads) cannot become one dimension without a copy, batch entries run one after the other.


def grouped_forward(
    run: Callable[[Call], tuple[torch.Tensor, torch.Tensor]], call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` of a call with fewer key heads than query heads, by calls with as many."""
    query, key, bias = call.query, call.key, call.bias
    batch, key_heads = key.shape[:2]
    if not call.causal and (bias is None or bias.shape[1:3] == (1, 1)):
        rows = query.reshape(batch, key_heads, -1, query.shape[-1])
        out, lse = run(replace(call, query=rows))
    elif _flattens(call):
        out, lse = run(_by_group_of(call))
    else:
        parts = [grouped_forward(run, one) for _, one in _entries(call)]
        out, lse = (torch.cat(some) for some in zip(*parts, strict=True))
    return out.reshape(*query.shape[:-1], -1), lse.reshape(query.shape[:-1])


def grouped_backward(run: Callable[[Call, Saved], Three], call: Call, saved: Saved) -> Three:
    """The gradients of query, key and value, summed over the query heads that share a key head."""
    query, key, value = call.inputs
    if _flattens(call):
        found = run(_by_group_of(call), saved.mapped(lambda tensor: _by_group(tensor, key)))
        return (
            found[0].reshape(query.shape),
            found[1].sum(1).view(key.shape),
            found[2].sum(1).view(value.shape),
        )
    parts = [grouped_backward(run, one, saved.mapped(itemgetter(at))) for at, one in _entries(call)]
    dq, dk, dv = (torch.cat(some) for some in zip(*parts, strict=True))
    return dq, dk, dv


def _entries(call: Call) -> Iterator[tuple[slice, Call]]:
    """Each batch entry, and what selects it."""
    for entry in range(call.key.shape[0]):
        at, bias = slice(entry, entry + 1), call.bias
        bias = bias if bias is None or bias.shape[0] == 1 else bias[at]
        yield at, call.mapped(itemgetter(at), itemgetter(at), bias=bias)


def _by_group_of(call: Call) -> Call:
    """Each key head as a batch entry, whose heads are the query heads of its group."""
    key, bias, shared = call.key, call.bias, call.query.shape[1] // call.key.shape[1]
    return call.mapped(
        lambda tensor: _by_group(tensor, key),
        lambda tensor: tensor.flatten(0, 1).unsqueeze(1).expand(-1, shared, -1, -1),
        bias=bias if bias is None or bias.shape[1] == 1 else _by_group(bias, key),
    )


def _flattens(call: Call) -> bool:
    """Whether (batch, key heads) can become one dimension without a copy."""
    query, key, value, bias = *call.inputs, call.bias
    batch, heads = key.shape[:2]
    if batch == 1:
        return True
    if heads > 1 and any(t.stride(0) != heads * t.stride(1) for t in (key, value)):
        return False
    flat_queries = query.stride(0) == query.shape[1] * query.stride(1)
    return flat_queries and (bias is None or bias.shape[:2] == (1, 1))


def _by_group(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(b, h, ...) as (b * hk, h / hk, ...); copied where its strides allow no view."""
    batch, heads = key.shape[:2]
    return tensor.reshape(batch * heads, tensor.shape[1] // heads, *tensor.shape[2:])
