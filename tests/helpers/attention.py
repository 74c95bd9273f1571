"""Random inputs and the float64 textbook that results are held against."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import helpers.equations as equations

# Largest error, as a share of the largest element (at least 1).
TOLERANCE = {
    torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2,
}  # fmt: skip
GRADIENT_TOLERANCE = {
    torch.float64: 1e-11, torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2,
}  # fmt: skip


def fresh_generator() -> torch.Generator:
    """Random inputs, others at each call; which ones, the seed of the test says
    (conftest.py)."""
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


def softmax(
    scores: Tensor, value: Tensor, factors: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable. A row without a key is 0 and -inf; columns beyond the
    rows of ``value`` are sinks; ``factors`` of probabilities come from dropout."""
    dead = (scores == -torch.inf).all(-1)
    lse = scores.masked_fill(dead.unsqueeze(-1), 0.0).logsumexp(-1)
    p = torch.exp(scores - lse.unsqueeze(-1))[..., : value.shape[-2]]
    return (p * factors) @ value, lse.masked_fill(dead, -torch.inf)


def masked(scores: Tensor, is_causal: bool, diagonal: int = 1) -> Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(
        diagonal
    )
    return scores.masked_fill(later, -torch.inf) if is_causal else scores


def attention(query, key, value, *, is_causal, scale, bias=0.0):  # type: ignore[no-untyped-def]
    """(out, lse) by the textbook, in the dtype of the inputs."""
    return softmax(masked(scale * (query @ key.mT) + bias, is_causal), value)


def gradients(grad_out, query, key, value, out, lse, *, is_causal, scale, bias=0.0):  # type: ignore[no-untyped-def]
    """As FlashAttention's: with the whole row's out and lse."""
    scores = masked(scale * (query @ key.mT) + bias, is_causal)
    p = torch.exp(scores - lse.to(scores.dtype).unsqueeze(-1))
    ds = p * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True))
    return scale * (ds @ key), scale * (ds.mT @ query), p.mT @ grad_out


@dataclass
class Exact:
    """Results in float64; gradients of query, key and value, of sinks if there are any,
    and of a bias that asks for its own."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...] | None = None

    def of(self, backward: bool) -> tuple[torch.Tensor, ...]:
        """Of one pass."""
        return self.grads if backward else (self.out, self.lse)


def exact(
    given: Inputs, *, mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, gradients: bool = False, keep: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, dropout: Any = None,
) -> Exact:  # fmt: skip
    """The textbook in float64, from inputs and mask in the dtypes that they are given
    in; gradients are torch's.

    Args:
        keep: the pairs that are kept; beside ``mask``, which may be a bias.
        dropout: a ``Dropout``.
    """
    leaves = [t.detach().double().requires_grad_(gradients) for t in given.three]
    q, k, v = leaves
    shared = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
    k, v = (t.repeat_interleave(shared, dim=-3) for t in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    biases = []
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.detach().double().requires_grad_(mask.requires_grad)
        biases = [bias] if mask.requires_grad else []
        s, mask = s + bias, None
    for kept in (keep, mask):
        s = s if kept is None else s.masked_fill(~kept, -torch.inf)
    s = masked(s, is_causal)
    if sinks is not None:
        leaves.append(sinks.detach().double().requires_grad_())
        s = torch.cat([s, leaves[3][:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    factors: Tensor | float = 1.0
    if dropout is not None:
        sizes = (*s.shape[:3], k.shape[2])
        firsts = dropout.first_head, dropout.first_entry
        gone = equations.dropped(dropout.p, dropout.seed, sizes, *firsts)
        factors = (~gone).to(s) * (0.0 if dropout.p == 1 else 1 / (1 - dropout.p))
    out, lse = softmax(s, v, factors)
    learned = [*leaves, *biases]
    grads = (
        torch.autograd.grad(out, learned, given.grad_out.double())
        if gradients
        else None
    )
    return Exact(out.detach(), lse.detach(), grads)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest element (at least 1); equal
    infinities are equal, a NaN or an infinity that should not be there is an infinite
    error."""
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(
            f"shape {tuple(actual.shape)}, wanted {tuple(expected.shape)}"
        )
    actual, expected = actual.detach().double().cpu(), expected.double().cpu()
    if actual.numel() == 0:
        return 0.0
    if actual.isnan().any() and not expected.isnan().any():
        return math.inf
    difference = torch.where(actual == expected, 0.0, (actual - expected).abs())
    finite = expected[expected.isfinite()]
    size = finite.abs().max().item() if finite.numel() else 1.0
    return difference.max().item() / max(size, 1.0)


def assert_close(
    actual: torch.Tensor | Iterable[torch.Tensor],
    expected: torch.Tensor | Iterable[torch.Tensor],
    tolerance: float,
) -> None:
    """Of two tensors, or of as many on either side."""
    if not isinstance(actual, torch.Tensor):
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, tolerance)
        return
    found = error(actual, expected)
    assert found <= tolerance, (
        f"off by {found:.2e} of the largest element, allowed {tolerance}"
    )
