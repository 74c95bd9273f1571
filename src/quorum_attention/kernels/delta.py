"""Delta of operators that read outputs of 16 bits alone.

The gradient of a row's scores is dS = P (dP - delta + g), with delta = rowsum(dO * O)
and the gradient g of the row's log-sum-exp. An operator that takes g, but rounds O, has
the delta of the O that it did not get if g is raised by what rounding adds to delta.
"""

from __future__ import annotations

import torch

from quorum_attention.kernels.native.sums import launch_sums


def rounding_gap(out: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """Return by how much rounding ``out`` to the dtype of ``grad_out`` raises delta.

    Args:
        out: (b, h, n, dv), fp32.
        grad_out: (b, h, n, dv), fp16 or bf16. The last dimension of both is dense.

    Returns:
        (b, h, n), fp32, dense.
    """
    gap = torch.empty(
        out.shape[:3],
        dtype=torch.float32,
        device=out.device,
    )
    if out.is_cuda:
        launch_sums(grad_out, factors=out, products=gap, is_rounding=True)
        return gap
    rounded = out.to(grad_out.dtype)
    rounding = rounded.float().sub_(out)
    products = rounding.mul_(grad_out)
    return torch.sum(products, dim=-1, out=gap)
