"""Launches of the Triton kernel for sums over the columns of rows: delta, its gap, and
norms."""

from __future__ import annotations

import torch

from quorum_attention.arithmetic import ceil_div
from quorum_attention.kernels.native.config import padded

# Elements of a program's block.
_BLOCK_ELEMENTS = 4096


def launch_sums(
    rows: torch.Tensor,
    *,
    factors: torch.Tensor | None = None,
    products: torch.Tensor | None = None,
    is_rounding: bool = False,
    norms: torch.Tensor | None = None,
    group: int = 1,
) -> None:
    """Write sums over the columns of ``rows`` by a Triton kernel, on their device.

    Args:
        rows: (b, h, n, d), last dimension contiguous.
        factors: like ``rows``, of any floating dtype.
        products: (b * h * n) fp32, dense: rowsum(rows * factors); None: not wanted.
        is_rounding: ``products`` are what rounding ``factors`` to the dtype of ``rows``
            adds to these sums.
        norms: (b * h / group,) fp32: raised to the largest squared norm of a finite
            row; None: not wanted.
        group: neighbouring heads that share a norm.
    """
    from quorum_attention.kernels.native.sums_triton import sums_kernel

    batch, heads, n_rows, width = rows.shape
    padded_width = padded(width)
    block = max(16, _BLOCK_ELEMENTS // padded_width)
    n_programs = ceil_div(n_rows, block) * batch * heads
    if n_programs == 0:
        return
    # The kernel reads nothing of what is not there: any pointer will do.
    factors = rows if factors is None else factors
    with torch.cuda.device_of(rows):
        sums_kernel[(n_programs,)](
            rows,
            factors,
            rows if products is None else products,
            rows if norms is None else norms,
            heads,
            group,
            n_rows,
            rows.stride()[:3],
            factors.stride()[:3],
            width,
            padded_width,
            block,
            products is not None,
            is_rounding,
            norms is not None,
        )
