"""Float64 at scores of 1,000 and more: no further from the truth than torch's.

The truth is NumPy's long double. A score of 1,000 has lost three digits of its exponential, so
what counts is that forward and backward round a score alike, and that probabilities add up to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import quorum_attention as qa

wide = np.longdouble
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(np.finfo(wide).eps > 1e-18, reason="long double is no wider than double"),
]
CALLS = 25
Results = tuple[torch.Tensor, ...]
Attention = Callable[..., torch.Tensor]


@lru_cache(maxsize=64)
def drawn(seed: int, n: int, width: int, size: float) -> tuple[Results, tuple[np.ndarray, ...]]:
    """Query, key, value and upstream gradient, (h, n, d) each; output and gradients in long
    double."""
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn((2, n, width), generator=generator, dtype=torch.float64) for _ in range(4)]
    given[0] *= size
    q, k, v, do = (t.numpy().astype(wide) for t in given)
    scale = wide(width) ** wide(-0.5)
    s = q @ k.transpose(0, 2, 1) * scale
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = do @ v.transpose(0, 2, 1)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    back = ds.transpose(0, 2, 1)
    results = (p @ v, ds @ k * scale, back @ q * scale, p.transpose(0, 2, 1) @ do, ds)
    return tuple(given), results


def rms(found: torch.Tensor, right: np.ndarray) -> float:
    """The error as a share of the result."""
    apart = found.detach().numpy() - right
    return float(np.sqrt((apart**2).mean() / (right**2).mean()))


def errors(attention: Attention, n: int, width: int, size: float) -> np.ndarray:
    """Errors of output and gradients, the geometric mean over calls: rows of two keys that weigh
    nearly the same make a few of them large."""
    every = []
    for seed in range(CALLS if n < 100 else 3):
        (*three, do), right = drawn(seed, n, width, size)
        leaves = [t.clone().requires_grad_() for t in three]
        out = attention(*leaves)
        found = (out, *torch.autograd.grad(out, leaves, do))
        every.append([rms(mine, true) for mine, true in zip(found, right, strict=False)])
    return np.exp(np.log(every).mean(axis=0))


def materialised(*three: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(*(t.unsqueeze(0) for t in three)).squeeze(0)


def fused(*three: torch.Tensor) -> torch.Tensor:
    return sdpa(*(t.unsqueeze(0) for t in three)).squeeze(0)


@pytest.mark.parametrize("width", [16, 37])
@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("kernel", ["auto", "dense"])
def test_uncut_as_materialised_by_torch(width: int, size: float, kernel: str) -> None:
    """Half as much again is what rounding in another order makes of a few calls."""
    mine = errors(lambda *three: qa.attention(*three, kernel=kernel), 40, width, size)
    assert (mine <= 1.6 * errors(materialised, 40, width, size)).all()


@pytest.mark.parametrize("width", [16, 37])
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_cut_as_fused_by_torch(width: int, kernel: str) -> None:
    """A row whose keys are in several tasks cannot be made to add up to 1; torch's operator does
    not do that either."""
    mine = errors(lambda *three: qa.attention(*three, depth=1, kernel=kernel), 140, width, 300.0)
    assert (mine <= 1.6 * errors(fused, 140, width, 300.0)).all()


def test_the_gradient_of_a_mask_as_materialised_by_torch() -> None:
    found = []
    for attention in (qa.attention, sdpa):
        every = []
        for seed in range(CALLS):
            (*three, do), (*_, right) = drawn(seed, 40, 37, 300.0)
            bias = torch.zeros(2, 40, 40, dtype=torch.float64, requires_grad=True)
            attention(*three, bias).backward(do)
            every.append(rms(bias.grad, right))
        found.append(np.exp(np.log(every).mean()))
    mine, torchs = found
    assert mine <= 1.6 * torchs
