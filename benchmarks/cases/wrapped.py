"""The paper's appendix: dense and LongNet kernels recovered, against the same kernels
uncut.

The largest and the mean absolute difference of every result, of causal calls, at depths
1 and 2.
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
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESULTS = ("out", "dQ", "dK", "dV")
Difference = tuple[float, float]
"""The largest and the mean absolute difference."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--draws", type=int, default=20)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each kernel and dtype."""
    for name, kernel in KERNELS.items():
        for dtype in DTYPES:
            differences = measure(kernel, dtype, options.tokens, options.draws)
            row = f"{name} {str(dtype).removeprefix('torch.')}"
            largest = {result: max(pairs)[0] for result, pairs in differences.items()}
            print(row, largest, flush=True)
            yield {row: differences}


def measure(
    kernel: Any, dtype: torch.dtype, tokens: int, draws: int
) -> dict[str, list[Difference]]:
    """The differences of each result, by draw and depth."""
    differences: dict[str, list[Difference]] = {name: [] for name in RESULTS}
    for seed in range(draws):
        tensors = draw_tensors(tokens, dtype, seed)
        uncut = compute(tensors, kernel=kernel, depth=0)
        for depth in (1, 2):
            recovered = compute(tensors, kernel=kernel, depth=depth)
            for name, result, expected in zip(RESULTS, recovered, uncut, strict=True):
                difference = (result.double() - expected.double()).abs()
                differences[name].append(
                    (float(difference.max()), float(difference.mean()))
                )
    return differences


def draw_tensors(tokens: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    shape = (1, 8, tokens, 64)
    inputs = [torch.randn(shape, device=device) * INPUTS_TIMES for _ in range(3)]
    grad_out = torch.randn(shape, device=device)
    return [tensor.to(dtype) for tensor in (*inputs, grad_out)]


def compute(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Output and gradients."""
    *inputs, grad_out = tensors
    out, lse = qa.attention_with_lse(*inputs, is_causal=True, **options)
    grads = qa.attention_backward(
        grad_out, *inputs, out, lse, is_causal=True, **options
    )
    return [out, *grads]
