"""Calls whose attention is saturated, and the errors of their gradients."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# Most errors of dQ and dK over those of torch's unfused call.
MOST_OVER_UNFUSED = 3.0


def saturated(shape, n_keys, dtype, kv_heads=None):  # type: ignore[no-untyped-def]
    """Query, key, value and an upstream gradient; the first three times 9."""
    heads, n_queries, head_dim = shape
    kv_heads = kv_heads or heads
    sizes = [(heads, n_queries), (kv_heads, n_keys), (kv_heads, n_keys)]
    tensors = [(9 * torch.randn(1, *size, head_dim)).to(dtype) for size in sizes]
    return [*tensors, torch.randn(1, *shape).to(dtype)]


def unfused(q, k, v, **options):  # type: ignore[no-untyped-def]
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def gradients(call, tensors, dtype=None, **options):  # type: ignore[no-untyped-def]
    """Of query, key and value by ``call``, computed in ``dtype``."""
    q, k, v, grad_out = (t.detach().to(dtype or t.dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = call(*leaves, **options)
    return torch.autograd.grad(out, leaves, grad_out.to(out.dtype))


def errors(grads, truth):  # type: ignore[no-untyped-def]
    """Of dQ and dK, as a share of the larger norm of the two."""
    size = max(float(t.norm()) for t in truth[:2])
    return distance(grads, truth) / size


def distance(grads, truth):  # type: ignore[no-untyped-def]
    """The larger error of dQ and dK."""
    pairs = list(zip(grads, truth, strict=True))[:2]
    return max(float((g.double() - t).norm()) for g, t in pairs)


def rounding_of_fp32(tensors):  # type: ignore[no-untyped-def]
    """What a row's dS is off by where its true value is far below: fp32 fused kernels
    have that too."""
    q, k, v, grad_out = (t.double() for t in tensors)
    group = q.shape[1] // k.shape[1]
    v = v.repeat_interleave(group, 1)
    products = (grad_out.abs() @ v.abs().mT).amax(-1)
    rows = max(float(t.norm(dim=-1).max()) for t in (q, k))
    return 2**-22 * q.shape[-1] ** -0.5 * rows * float(products.norm())
