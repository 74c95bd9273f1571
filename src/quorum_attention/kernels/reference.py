"""The reference: attention in torch's operators, tile by tile, for any dtype and
device.

It runs what no fused kernel here can: the kernels ``dense`` and ``tiles``, score
modifications without a compiler, dropout where an operator has none, or drops other
pairs in every call, and rows of a CPU's call that are not finite. With scores S = scale
Q K^T, changed and masked, and Z of kernels/dropout.py,

    lse = logsumexp(S),   P = exp(S - lse),   O = (Z P) V,
    dV = (Z P)^T dO,   dS = P * (Z * (dO V^T) - rowsum(dO * O)),   dQ = scale dS K,
    dK = scale dS^T Q.

The recurrences are FlashAttention-2's, in fp32 (fp64 for fp64 inputs): a block of
queries walks its tiles of keys, in the forward with a running maximum and sum, in the
backward with the log-sum-exp of the whole rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.call_shape import CallShape, Extent
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, merge_
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.kernels.operator_sizes import SLACK_BYTES
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.score_tiles import (
    PLAIN,
    WHOLE_ROWS,
    BackwardRows,
    QueryBlock,
    ScoreTransform,
    TileSizes,
    query_blocks,
)
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors


def forward_block(block: QueryBlock) -> OutLse:
    """Return the output (b, hk, g * rows, dv) and lse (b, hk, g * rows, 1) of a
    block."""
    task = block.task
    rows = block.query.shape[:3]
    row_max = block.query.new_full((*rows, 1), -torch.inf)
    row_sum = block.query.new_zeros((*rows, 1))
    out = block.query.new_zeros((*rows, task.value.shape[-1]))
    for keys in block.tiles():
        key = block.of_keys(task.key, keys)
        p, _ = block.scores(key, keys, derivative=False)
        tile_max = p.amax(dim=-1, keepdim=True)
        new_max = torch.maximum(row_max, tile_max)
        # The maximum of a row without keys so far is -inf, and its differences would be
        # NaN.
        base = new_max.masked_fill(new_max == -torch.inf, 0.0)
        p.sub_(base)
        p.exp_()
        rescale = row_max.sub_(base)
        rescale.exp_()
        row_sum.mul_(rescale)
        row_sum.add_(p.sum(dim=-1, keepdim=True))
        drops = block.dropped(p, keys)
        if drops is not None:
            p.masked_fill_(drops, 0.0)
        value = block.of_keys(task.value, keys)
        out.mul_(rescale)
        out.add_(p @ value)
        row_max = new_max
        del p, drops, value
    # Divided by the sum instead of taking exp(S - lse): a large lse has too few digits
    # left.
    lse = row_sum.log()
    lse.add_(row_max)
    lse = torch.where(row_max == torch.inf, row_max, lse)
    row_sum.masked_fill_(row_sum == 0.0, 1.0)
    out.div_(row_sum)
    out.masked_fill_(lse == -torch.inf, 0.0)
    if task.dropout is not None:
        out.mul_(task.dropout.rescale)
    return out, lse


def _backward_block(block: QueryBlock, grads: Gradients) -> None:
    """Add the gradients of a block into ``grads``, in place."""
    task = block.task
    rows = BackwardRows(block, grads)
    rescale = 1.0 if task.dropout is None else task.dropout.rescale
    grad_query = torch.zeros_like(block.query)  # (b, hk, g * rows, d)
    for keys in block.tiles():
        tile_keys = (block.entries, block.key_heads, keys)
        key = block.of_keys(task.key, keys)
        p, ds, derivative, drops = rows.pairs(key, keys, derivative=True)
        if drops is not None:
            p.masked_fill_(drops, 0.0)
        grad_value = grads.grad_value[tile_keys]
        grad_value.add_(p.mT @ rows.grad_out, alpha=rescale)
        del p, drops
        if derivative is not None:
            ds.mul_(derivative)
        grad_query.add_(ds @ key)
        grad_key = grads.grad_key[tile_keys]
        grad_key.add_(ds.mT @ block.query, alpha=task.scale)
        del derivative, ds
    target = block.of_rows(grads.grad_query)
    target.add_(grad_query.view(target.shape), alpha=task.scale)


class TiledKernel(Kernel):
    """The tiled loop as a kernel, with a change of scores: any device, any floating
    dtype.

    Args:
        scores: the change.
    """

    name = "tiles"
    grouped = True
    rates = (0.3, 0.3)
    fp32_products = True
    dropout = True
    wide_masks = True
    wide_out = True
    reads_wide_out = True

    def __init__(self, scores: ScoreTransform = PLAIN) -> None:
        self.scores = scores

    def refusal(self, shape: CallShape) -> str | None:
        """Return None: it runs every call."""
        return None

    def _prepared(self, task: TaskTensors) -> tuple[TaskTensors, ScoreTransform]:
        """Return the task with the pairs to compute, and what is done to scores."""
        return task, self.scores

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        task, transform = self._prepared(task)
        for block in query_blocks(task, state.out, transform):
            out, lse = forward_block(block)
            state_out = block.of_rows(state.out)  # (b, h, rows, dv)
            state_lse = block.of_rows(state.lse)
            out = out.view(state_out.shape)
            lse = lse.view(state_lse.shape)
            with task.timed("merge"):
                merge_(state_out, state_lse, out, lse)
            del out, lse  # freed before the next block is computed

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place. (They are never
        scaled.)"""
        task, transform = self._prepared(task)
        for block in query_blocks(task, grads.grad_query, transform):
            _backward_block(block, grads)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = TileSizes(shape, extent, self.scores)
        by_query = shape.head_dim + 4 * shape.value_dim + 8
        computing = sizes.nbytes(by_query, shape.width, by_pair=1)
        merging = sizes.rows * by_query * sizes.itemsize + MERGE_WORKSPACE_BYTES
        n_bytes = max(computing, merging) + SLACK_BYTES
        if extent.direct:
            # In the dtype computed in, and in another that may be asked for.
            computed_bytes = (shape.value_dim + 1) * sizes.itemsize
            cast_bytes = shape.value_dim * 8
            n_bytes += extent.rows * (computed_bytes + cast_bytes)
        return n_bytes

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = TileSizes(shape, extent, self.scores)
        widths = shape.kv_width
        by_pair = 3 if shape.dropout else 2
        n_bytes = sizes.nbytes(4 * widths + 8, 2 * widths, by_pair) + SLACK_BYTES
        if extent.direct:
            # In the dtype computed in, and in another that may be asked for.
            n_results = extent.rows * shape.head_dim + extent.key_rows * widths
            n_bytes += n_results * (sizes.itemsize + 8)
        return n_bytes


class DenseKernel(TiledKernel):
    """``dense``: attention under the CQS mask of a task, as the paper writes it
    (section 3).

    Scores of whole rows are in memory, in fp32 (fp64 for fp64 inputs), and the pairs
    that a task does not keep are masked one by one, on any device. Every other kernel
    is compared with it.
    """

    name = "dense"
    rates = (1.0, 1.0)
    scores = WHOLE_ROWS

    def __init__(self) -> None:
        """Make the kernel; it has no options."""

    def _prepared(self, task: TaskTensors) -> tuple[TaskTensors, ScoreTransform]:
        """Return all pairs as one rectangle, under the CQS mask and the causal mask, if
        any."""
        n_queries = task.query.shape[2]
        n_keys = task.key.shape[2]
        cqs_mask = torch.from_numpy(task.task.mask())
        mask = cqs_mask[:n_queries, :n_keys].to(task.query.device)
        if task.is_causal:
            # The tokens of a task are in ascending order, so local positions order them
            # as global ones.
            mask = mask.tril()
        transform = replace(
            WHOLE_ROWS, keeps=lambda block, keys: mask[block.rows, keys]
        )
        if task.rectangles:
            all_pairs = Rectangle(0, n_queries, 0, n_keys)
            task = replace(task, rectangles=(all_pairs,))
        return task, transform

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time;
        quadratic in tokens."""
        n_bytes = super().forward_workspace_bytes(shape, _all_pairs(extent))
        return n_bytes + _mask_bytes(extent)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time;
        quadratic in tokens."""
        n_bytes = super().backward_workspace_bytes(shape, _all_pairs(extent))
        return n_bytes + _mask_bytes(extent)


def _all_pairs(extent: Extent) -> Extent:
    return replace(extent, max_queries=extent.n_tokens, max_keys=extent.n_tokens)


def _mask_bytes(extent: Extent) -> int:
    """Return the bytes of the CQS mask, of its causal half, and of what says which
    pairs of a tile are masked."""
    return 4 * extent.n_tokens * extent.n_tokens
