"""Computes a block of a call, and checks a block's log-sum-exp that comes from
elsewhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.call.block import (
    BlockResults,
    CallBlock,
    Masked,
    WholeCall,
    request_of_block,
)
from quorum_attention.call.options import CallOptions
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.errors import BudgetError
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.passes.run import run_backward, run_forward

# Rows of a forward that are computed again, one of each of this many equal parts. In a
# call of many blocks it is one row of each block, because a row reads all keys of its
# block.
_CHECKED_ROWS = 4


def compute_block(
    call: WholeCall,
    block: CallBlock,
    inputs: Mapping[str, torch.Tensor],
    options: CallOptions,
    results: BlockResults | None = None,
    masked: Masked | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute a block in this process, on ``options.devices``.

    Args:
        inputs, masked: as for ``request_of_block``.
        results: where results go; None: all are made.

    Returns:
        (out, lse) of a forward; the gradients of query, key and value of a backward,
        then those of bias and sinks where they are wanted.
    """
    tensors, request, backward_inputs = request_of_block(
        call, block, inputs, options, results or BlockResults(), masked
    )
    if backward_inputs is None:
        return run_forward(tensors, request)
    return run_backward(tensors, request, backward_inputs)


def check_forward(
    call: WholeCall,
    block: CallBlock,
    inputs: Mapping[str, torch.Tensor],
    options: CallOptions,
    blocks: int = 1,
) -> None:
    """Check that a log-sum-exp from elsewhere is that of this call.

    A few rows of a backward's block, drawn anew each time, are computed again. Errors
    in other rows are not seen, nor in the output. Not checked are kernels that compute
    another attention, and budgets too small for the forward of a row.

    Args:
        blocks: how many blocks of the call are checked.

    Raises:
        ValueError: some rows, computed again, have another log-sum-exp.
    """
    if _computes_other_attention(options) or 0 in (
        inputs["query"].numel(),
        inputs["value"].numel(),
    ):
        return
    # The log-sum-exp is the same without dropout.
    call = replace(call, dropout=None)
    options = CallOptions(options.budget, devices=options.devices)
    head_dim = inputs["query"].shape[-1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    # Scores are at most as large as products of norms.
    largest_key = max(abs(float(end)) for end in torch.aminmax(inputs["key"]))
    key_norm = largest_key * head_dim**0.5
    for row in _drawn_rows(block.rows.length, blocks):
        try:
            differs = _row_differs(
                call, block, inputs, options, row, abs(scale) * key_norm
            )
        except BudgetError:
            return  # where the backward fits none the less, it is not checked
        if differs:
            how = "causal" if call.shape.is_causal else "not causal"
            raise ValueError(
                "out and lse are from another forward: the lse of a few rows, "
                f"computed again ({how}, scale {scale:.6g}), differs; give the "
                "backward the forward's inputs, mask and options"
            )


def _computes_other_attention(options: CallOptions) -> bool:
    """Tell whether the kernel that the options name computes another attention than the
    exact."""
    return options.kernel != "auto" and not get_kernel(options.kernel).is_exact


def _drawn_rows(n_rows: int, blocks: int) -> list[int]:
    """Draw a row of each part of a block, by a generator that leaves the program's
    alone."""
    generator = random.SystemRandom()
    parts = min(n_rows, ceil_div(_CHECKED_ROWS, blocks))
    return [
        generator.randrange(n_rows * part // parts, n_rows * (part + 1) // parts)
        for part in range(parts)
    ]


def _row_differs(
    call: WholeCall,
    block: CallBlock,
    inputs: Mapping[str, torch.Tensor],
    options: CallOptions,
    row: int,
    key_bound: float,
) -> bool:
    """Tell whether the log-sum-exp of a row, computed again, differs from the given
    one.

    Args:
        row: counted from the block's first row.
        key_bound: by which a query's norm bounds its scores.
    """
    position = block.rows.start + row
    stop = block.keys.stop
    if call.shape.is_causal:
        stop = min(position + 1, stop)
    row_block = block._replace(
        rows=Interval(position, position + 1), keys=Interval(block.keys.start, stop)
    )
    query = inputs["query"][:, :, row : row + 1]
    row_inputs = {
        "query": query,
        "key": inputs["key"][:, :, : row_block.keys.length],
        "value": inputs["value"][:, :, : row_block.keys.length],
    }
    _, lse = compute_block(call, row_block, row_inputs, options)
    given_lse = inputs["lse"][:, :, row : row + 1].to(lse)
    # A GPU's TF32 products are right to ten bits. Where scores overflow, nothing can be
    # told.
    bound = 1e-3 + key_bound * query.to(lse).norm(dim=-1) * 2.0**-9
    return bool(((lse - given_lse).abs() > bound).any())
