"""Drawn calls with few pairs in a head, and how far rounding may move their results
from float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

import quorum_attention as qa

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_LOWEST = -torch.inf


@dataclass
class Drawn:
    """A drawn call: query, key, value, upstream gradient and bias, and its options."""

    tensors: list[torch.Tensor]
    grad_out: torch.Tensor
    bias: torch.Tensor | None
    causal: bool
    scale: float

    @property
    def leaves(self) -> list[torch.Tensor]:
        """All tensors that get a gradient."""
        biases = [] if self.bias is None else [self.bias]
        return [tensor.detach().requires_grad_() for tensor in self.tensors + biases]


def drawn_call(number: int, device: str = "cpu") -> Drawn:
    """Grouped heads, values of another width, rows in any order of dimensions, biases
    that leave rows no key, scales of either sign and 0."""
    draw = random.Random(number)
    generator = torch.Generator().manual_seed(number)
    dtype = draw.choice(DTYPES)
    batch, key_heads = draw.choice([1, 2, 33]), draw.choice([1, 2, 3])
    heads = key_heads * draw.choice([1, 2, 4])
    n = draw.randint(1, 24)
    m = n if draw.random() < 0.5 else draw.randint(1, 24)
    head_dim = draw.randint(1, 40)
    value_dim = head_dim if draw.random() < 0.5 else draw.randint(1, 40)
    spread = draw.choice([1.0, 1.0, 6.0])

    def rows(n_heads: int, length: int, width: int) -> torch.Tensor:
        if draw.random() < 0.3:
            by_token = (batch, length, n_heads, width)
            tensor = torch.randn(by_token, generator=generator).transpose(1, 2)
        else:
            tensor = torch.randn((batch, n_heads, length, width), generator=generator)
        return tensor.to(device, dtype)

    tensors = [
        rows(heads, n, head_dim) * spread,
        rows(key_heads, m, head_dim),
        rows(key_heads, m, value_dim),
    ]
    bias = None
    if draw.random() < 0.7:
        sizes = [size if draw.random() < 0.6 else 1 for size in (batch, heads, n, m)]
        bias = torch.randn(sizes, generator=generator)
        if draw.random() < 0.4:
            is_masked = torch.rand(sizes, generator=generator) < 0.4
            bias.masked_fill_(is_masked, _LOWEST)
        # A bias of fp32 is added to scores of 16-bit inputs as it is.
        bias = bias.to(device, draw.choice([dtype, torch.float32]))
    return Drawn(
        tensors,
        rows(heads, n, value_dim),
        bias,
        causal=n == m and draw.random() < 0.4,
        scale=draw.choice([head_dim**-0.5, 0.3, -0.4, 0.0]),
    )


@dataclass
class _Exact:
    """The textbook of a call in float64, in the shapes of query heads.

    Attributes:
        q, k, v, grad_out: (b, h, n or m, width).
        s, p, dp, ds: (b, h, n, m), scores, probabilities and gradients of both.
        lse, delta: (b, h, n, 1).
        out: (b, h, n, dv).
        added: the bias.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    s: torch.Tensor
    p: torch.Tensor
    dp: torch.Tensor
    ds: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    out: torch.Tensor
    added: torch.Tensor


def _exact(drawn: Drawn) -> _Exact:
    q, k, v = (tensor.double().cpu() for tensor in drawn.tensors)
    grad_out = drawn.grad_out.double().cpu()
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    added = torch.zeros(())
    if drawn.bias is not None:
        added = drawn.bias.double().cpu()
    s = drawn.scale * (q @ k.mT) + added
    if drawn.causal:
        s = s.masked_fill(torch.ones(s.shape[2:]).triu(1).bool(), _LOWEST)
    lse = s.logsumexp(-1, keepdim=True)
    p = (s - lse.masked_fill(lse == _LOWEST, 0.0)).exp()
    out = p @ v
    dp = grad_out @ v.mT
    delta = (grad_out * out).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    return _Exact(q, k, v, grad_out, s, p, dp, ds, lse, delta, out, added)


def _with_allowances(drawn: Drawn) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (out, lse, *gradients) in float64, and how far each element may be off.

    The allowance follows the equations of the kernel: scores and all sums are off by a
    few roundings of fp32 (fp64) of what they add up, and delta by the rounding of the
    output besides.
    """
    exact = _exact(drawn)
    dtype = drawn.tensors[0].dtype
    work = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    group = drawn.tensors[0].shape[1] // drawn.tensors[1].shape[1]
    n, head_dim = exact.q.shape[2:]
    m, value_dim = exact.v.shape[2:]
    size = abs(drawn.scale)
    terms = work * (head_dim + value_dim + m + 8)
    sums = work * (n * group + m + 8)

    sizes_of_scores = size * (exact.q.abs() @ exact.k.abs().mT) + exact.added.abs()
    s_off = terms * sizes_of_scores.masked_fill(exact.s == _LOWEST, 0.0)
    row_off = s_off.amax(-1, keepdim=True) + terms * (1 + exact.lse.abs())
    row_off = row_off.masked_fill(exact.lse == _LOWEST, 0.0)
    p_off = exact.p * (2 * row_off)
    out_off = p_off @ exact.v.abs() + terms * (exact.p @ exact.v.abs())
    out_off += torch.finfo(dtype).eps * exact.out.abs()
    products = (exact.grad_out * exact.out).abs().sum(-1, keepdim=True)
    delta_off = (exact.grad_out.abs() * out_off).sum(-1, keepdim=True)
    delta_off += terms * products
    dp_off = terms * (exact.grad_out.abs() @ exact.v.abs().mT)
    ds_off = exact.p * (dp_off + delta_off) + work * exact.ds.abs()
    ds_off += p_off * (exact.dp - exact.delta).abs()
    summed_off = ds_off + sums * exact.ds.abs()

    def of_keys(by_query_head: torch.Tensor) -> torch.Tensor:
        return by_query_head.unflatten(1, (-1, group)).sum(2)

    pairs = [
        (exact.out, out_off),
        (exact.lse[..., 0], row_off[..., 0]),
        (drawn.scale * exact.ds @ exact.k, size * summed_off @ exact.k.abs()),
        (
            of_keys(drawn.scale * exact.ds.mT @ exact.q),
            of_keys(size * summed_off.mT @ exact.q.abs()),
        ),
        (
            of_keys(exact.p.mT @ exact.grad_out),
            of_keys((p_off + sums * exact.p).mT @ exact.grad_out.abs()),
        ),
    ]
    if drawn.bias is not None:
        shape = drawn.bias.shape
        n_summed = exact.ds.numel() // drawn.bias.numel()
        bias_off = ds_off + work * (8 + min(n_summed, 128)) * exact.ds.abs()
        if dtype.itemsize == 2:
            # Tile by tile, beside the kernel: delta is computed in another way.
            bias_off = bias_off + 4 * ds_off
        pairs.append((exact.ds.sum_to_size(shape), bias_off.sum_to_size(shape)))
    return pairs


def largest_excess(drawn: Drawn, results: list[torch.Tensor]) -> float:
    """The largest error of (out, lse, *gradients) as a share of what rounding allows,
    element by element; infinite where a number is not finite and should be."""
    excess = 0.0
    for result, (exact, off) in zip(results, _with_allowances(drawn), strict=True):
        rounding = torch.finfo(result.dtype)
        # The result is rounded once.
        allowed = off + rounding.eps * exact.abs() + rounding.tiny
        difference = (result.detach().double().cpu() - exact).abs()
        difference = difference.masked_fill(result.cpu() == exact, 0.0)
        share = (difference / allowed).nan_to_num(nan=torch.inf)
        excess = max(excess, share.max().item())
    return excess


def results_of(drawn: Drawn, **options: Any) -> list[torch.Tensor]:
    """Out, lse and gradients of a call by this package."""
    leaves = drawn.leaves
    out, lse = qa.attention_with_lse(
        *leaves[:3],
        None if drawn.bias is None else leaves[3],
        is_causal=drawn.causal,
        scale=drawn.scale,
        enable_gqa=True,
        **options,
    )
    grads = torch.autograd.grad(out, leaves, drawn.grad_out)
    return [out, lse, *grads]
