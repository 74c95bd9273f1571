"""Random inputs and the float64 textbook that results are held against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Largest error, as a share of the largest element (at least 1).
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
GRADIENT_TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 5e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}


def fresh_generator() -> torch.Generator:
    """Random inputs, others at each call; which ones, the seed of the test says (conftest.py)."""
    seed = int(torch.randint(1 << 31, (), device="cpu"))
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


@dataclass
class Inputs:
    """Query, key and value, and an upstream gradient."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor

    @property
    def three(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value


def inputs(
    n_queries: int,
    n_keys: int | None = None,
    *,
    batch: tuple[int, ...] = (1,),
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spread: float = 1.0,
) -> Inputs:
    generator = fresh_generator()
    n_keys = n_queries if n_keys is None else n_keys
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim

    def normal(h: int, n: int, d: int) -> torch.Tensor:
        made = torch.randn((*batch, h, n, d), generator=generator, dtype=torch.float64)
        return made.to(dtype).to(device)

    return Inputs(
        normal(heads, n_queries, head_dim) * spread,
        normal(kv_heads, n_keys, head_dim),
        normal(kv_heads, n_keys, value_dim),
        normal(heads, n_queries, value_dim),
    )


def sink(n: int, heads: int = 1) -> Inputs:
    """Every query attends to one key alone, and every gradient points the same way."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, n, 64, generator=generator) for _ in range(3))
    u = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    q, k[:, :, n // 8] = q / 2 + 6 * u, 20 * u
    # Values are small, so the bound of the scaling leaves the gradients large.
    return Inputs(q.half(), k.half(), (v / 8).half(), torch.full_like(q, 1 / n).half())


@dataclass
class Exact:
    """Results in float64."""

    out: torch.Tensor
    lse: torch.Tensor
    grads: tuple[torch.Tensor, ...] | None = None


def exact(
    given: Inputs,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    gradients: bool = False,
) -> Exact:
    """The textbook in float64, from the inputs as rounded to their dtype."""
    q, k, v, do = (t.detach().double() for t in (*given.three, given.grad_out))
    shared = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
    k, v = (t.repeat_interleave(shared, dim=-3) for t in (k, v))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = scale * (q @ k.mT)
    if mask is not None and mask.dtype == torch.bool:
        s = s.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        s = s + mask.to(given.query.dtype).double()
    if is_causal:
        below = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~below, -torch.inf)
    lse = s.logsumexp(dim=-1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = p @ v
    if not gradients:
        return Exact(out, lse)
    ds = p * (do @ v.mT - (do * out).sum(-1, keepdim=True))

    def grouped(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-3, (-1, shared)).sum(-3)

    grads = (scale * (ds @ k), grouped(scale * (ds.mT @ q)), grouped(p.mT @ do))
    return Exact(out, lse, grads)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest element (at least 1); equal infinities are
    equal, a NaN or an infinity that should not be there is an infinite error."""
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(f"shape {tuple(actual.shape)}, wanted {tuple(expected.shape)}")
    actual, expected = actual.detach().double().cpu(), expected.double().cpu()
    if actual.numel() == 0:
        return 0.0
    if actual.isnan().any() and not expected.isnan().any():
        return math.inf
    difference = torch.where(actual == expected, 0.0, (actual - expected).abs())
    finite = expected[expected.isfinite()]
    size = finite.abs().max().item() if finite.numel() else 1.0
    return difference.max().item() / max(size, 1.0)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    found = error(actual, expected)
    assert found <= tolerance, f"off by {found:.2e} of the largest element, allowed {tolerance}"
