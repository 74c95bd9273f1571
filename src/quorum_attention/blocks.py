"""``compute_block``: one block of a call is computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quorum_attention.call.block import (
    AttnMask,
    Block,
    BlockResults,
    WholeCall,
    request_of_block,
)
from quorum_attention.call.options import CallOptions
from quorum_attention.passes import run_backward, run_forward


def compute_block(
    call: WholeCall,
    block: Block,
    inputs: Mapping[str, torch.Tensor],
    written: CallOptions,
    results: BlockResults | None = None,
    masked: tuple[AttnMask, bool] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute a block in this process, on ``written.devices``.

    Args:
        inputs, masked: as for ``request_of_block``.
        results: where results go; None: all are made.

    Returns:
        of a forward (out, lse); of a backward the gradients of query, key and value, then those of
        bias and sinks where they are wanted.
    """
    results = results or BlockResults()
    tensors, request, given = request_of_block(call, block, inputs, written, results, masked)
    if given is None:
        return run_forward(tensors, request)
    return run_backward(tensors, request, given)


__all__ = ["compute_block"]
