"""A kernel run as it is against the same kernel recovered: what cutting its call changes."""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.bench.spec import Spec
from quorum_attention.kernels import InnerKernel, get_kernel
from quorum_attention.kernels.kit import LongNetKernel
from quorum_attention.planner import plan

RESULTS = ("out", "dQ", "dK", "dV")
INPUTS_TIMES = 0.05  # the paper's
KERNELS: dict[str, str | InnerKernel] = {
    "dense": "dense",
    "LongNet": LongNetKernel([(512, 1), (1024, 2), (2048, 4)], full_precision=True),
}


def differences(spec: Spec) -> dict[str, list[tuple[float, float]]]:
    """By result, the largest and the mean absolute difference of every draw and depth."""
    dtype = getattr(torch, spec.dtype)
    kernel = KERNELS[spec.method]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in RESULTS}
    for draw in range(spec.draws):
        generator = torch.Generator(spec.device).manual_seed(spec.seed + draw)
        shape = (1, spec.heads, spec.tokens, spec.head_dim)
        tensors = [
            (torch.randn(shape, generator=generator, device=spec.device)
             * (INPUTS_TIMES if i < 3 else 1.0)).to(dtype)
            for i in range(4)
        ]  # fmt: skip
        whole = _both(spec, kernel, tensors, ())
        for levels in ((7,), (7, 7)):
            cut = _both(spec, kernel, tensors, levels)
            for name, mine, wanted in zip(RESULTS, cut, whole, strict=True):
                apart = (mine.double() - wanted.double()).abs()
                found[name].append((float(apart.max()), float(apart.mean())))
    return found


def _both(
    spec: Spec,
    kernel: str | InnerKernel,
    tensors: list[torch.Tensor],
    levels: tuple[int, ...],
) -> list[torch.Tensor]:
    query, key, value, grad = tensors
    common: dict[str, Any] = {
        "heads": spec.heads, "head_dim": spec.head_dim, "dtype": query.dtype,
        "is_causal": True, "levels": levels, "kernel": get_kernel(kernel), "inputs": "device",
        "device": spec.device,
    }  # fmt: skip
    options: dict[str, Any] = {
        "is_causal": True, "kernel": kernel, "devices": spec.device,
    }  # fmt: skip
    n = query.shape[2]
    out, lse = attention_with_lse(query, key, value, plan=plan(n, **common), **options)
    grads = attention_backward(
        grad, query, key, value, out, lse, plan=plan(n, backward=True, **common), **options
    )
    return [out, *grads]
