"""Delta, its gap and norms of rows by their Triton kernel, beside torch."""

from __future__ import annotations

import torch

from quorum_attention.kernels.delta import rounding_gap
from quorum_attention.kernels.native.sums import launch_sums


def test_sums_of_rows_are_those_of_torch(device) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    rows = torch.randn(2, 70, 4, 24, dtype=torch.float16).transpose(1, 2).to(device)
    rows[1, 2, 5] = torch.nan  # which has no part in norms
    factors = torch.randn(2, 4, 70, 24, device=device)
    delta = torch.empty(2, 4, 70, device=device)
    norms = torch.zeros(4, device=device)
    launch_sums(rows, factors=factors, products=delta, norms=norms, group=2)
    expected = (rows.float() * factors).sum(-1)
    torch.testing.assert_close(delta, expected, equal_nan=True)
    squares = rows.float().square().sum(-1).nan_to_num(0.0)
    torch.testing.assert_close(norms, squares.view(4, -1).amax(1))


def test_the_gap_is_what_rounding_adds_to_delta(device) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    out = torch.randn(1, 3, 130, 40)
    grad_out = torch.randn(1, 3, 130, 40).bfloat16().half()
    gap = torch.empty(1, 3, 130, device=device)
    on_device = grad_out.to(device)
    launch_sums(on_device, factors=out.to(device), products=gap, is_rounding=True)
    torch.testing.assert_close(gap.cpu(), rounding_gap(out, grad_out))
