"""The paper's appendix: dense and LongNet kernels recovered, against the same kernels uncut.

The largest and the mean absolute difference of every result, of causal calls, at depths 1 and 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

import quorum_attention as qa

INPUTS_TIMES = 0.05  # the paper's
KERNELS: dict[str, Any] = {
    "dense": "dense",
    "longnet": qa.LongNetKernel([(512, 1), (1024, 2), (2048, 4)], full_precision=True),
}


def results(tensors: list[torch.Tensor], **how: Any) -> list[torch.Tensor]:
    """Output and gradients."""
    *inputs, grad = tensors
    out, lse = qa.attention_with_lse(*inputs, is_causal=True, **how)
    return [out, *qa.attention_backward(grad, *inputs, out, lse, is_causal=True, **how)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--draws", type=int, default=20)


def run(options: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each kernel and dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, kernel in KERNELS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            apart: dict[str, list[tuple[float, float]]] = {n: [] for n in ("out", "dQ", "dK", "dV")}
            for seed in range(options.draws):
                torch.manual_seed(seed)
                shape = (1, 8, options.tokens, 64)
                tensors = [torch.randn(shape, device=device) * INPUTS_TIMES for _ in range(3)]
                tensors = [t.to(dtype) for t in (*tensors, torch.randn(shape, device=device))]
                whole, *cut = (results(tensors, kernel=kernel, depth=d) for d in (0, 1, 2))
                for mine in cut:
                    for label, a, b in zip(apart, mine, whole, strict=True):
                        off = (a.double() - b.double()).abs()
                        apart[label].append((float(off.max()), float(off.mean())))
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            found[key] = apart
            print(key, {label: max(pairs)[0] for label, pairs in apart.items()}, flush=True)
            yield {"draws": options.draws, "differences": found}
