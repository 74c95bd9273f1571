"""Errors against float64 of a long causal call, ours and other kernels', on sampled rows.

One head, because heads are alike. Everything is drawn from a normal distribution. Rows are sampled
twice over: at random from the whole call, and from its last 8,192, where a row sums the most
(queries) or the fewest (keys) products. An error is the norm of the difference over the norm of
what is right, over all sampled rows together. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import quorum_attention as qa

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
NAMES = ("out", "dQ", "dK", "dV")
_BLOCK = 8192


def expected(
    tensors: list[torch.Tensor], rows: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """Float64 rows of out, dQ, dK and dV of a causal call, tensors (n, d); ``rows`` ascend.

    Rows before the first of ``rows`` have no part in any of that.
    """
    query, key, value, grad = (t.double() for t in tensors)
    grad_key = torch.zeros(len(rows), query.shape[1], dtype=torch.float64, device=query.device)
    grad_value = torch.zeros(len(rows), value.shape[1], dtype=torch.float64, device=query.device)

    def attended(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Probabilities of rows, up to the key of the last; their output, and delta."""
        stop = int(at[-1]) + 1
        scores = query[at] @ key[:stop].mT * scale
        later = torch.arange(stop, device=at.device) > at[:, None]
        p = scores.masked_fill_(later, float("-inf")).softmax(1)
        out = p @ value[:stop]
        return p, out, (out * grad[at]).sum(1, keepdim=True)

    p, out, delta = attended(rows)
    seen = slice(0, p.shape[1])
    grad_query = p.mul_(grad[rows] @ value[seen].mT - delta) @ key[seen] * scale
    del p
    n = query.shape[0]
    for at in torch.arange(int(rows[0]), n, device=rows.device).split(max(1, (1 << 28) // n)):
        p, _, delta = attended(at)
        earlier = rows <= at[-1]
        chosen = rows[earlier]
        p = p[:, chosen]
        ds = p * (grad[at] @ value[chosen].mT - delta)
        grad_value[earlier] += p.mT @ grad[at]
        grad_key[earlier] += ds.mT @ query[at] * scale
    return out, grad_query, grad_key, grad_value


def monolithic(backend: SDPBackend, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Out, dQ, dK and dV of a kernel of torch's, on the device."""
    *inputs, grad = tensors
    query, key, value = leaves = [t.detach().requires_grad_() for t in inputs]
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def ours(budget: str, kernel: str, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same by quorum attention, host to host."""
    *inputs, grad = (t.cpu().pin_memory() for t in tensors)
    options: dict[str, Any] = {"is_causal": True, "budget": budget, "kernel": kernel}
    out, lse = qa.attention_with_lse(*inputs, **options)
    return out, *qa.attention_backward(grad, *inputs, out, lse, **options)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--budget", default="256MiB", help="of one head")
    parser.add_argument("--kernel", default="auto", help="our inner kernel")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--beside", default="flash,cudnn", help="kernels alone, by commas")


def run(args: argparse.Namespace, _: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each sample and method."""
    torch.manual_seed(0)
    n, scale = args.tokens, args.head_dim**-0.5
    shape = (1, 1, n, args.head_dim)
    tensors = [torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(4)]
    samples = {
        "random": torch.randperm(n, device="cuda")[: args.rows].sort().values,
        "last": n - _BLOCK + torch.randperm(_BLOCK, device="cuda")[: args.rows].sort().values,
    }
    flat = [t[0, 0] for t in tensors]
    every = torch.unique(torch.cat(list(samples.values())))
    of_every = expected(flat, every, scale)
    right = {
        name: tuple(part[torch.searchsorted(every, rows)] for part in of_every)
        for name, rows in samples.items()
    }
    torch.cuda.empty_cache()
    beside = args.beside.split(",")
    methods = {name: partial(monolithic, BACKENDS[name]) for name in beside}
    methods["quorum"] = partial(ours, args.budget, args.kernel)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in samples}
    for method, attend in methods.items():
        got = attend(tensors)
        for name, rows in samples.items():
            pairs = [(t[0, 0].to(w.device)[rows].double(), w) for t, w in zip(got, right[name])]  # noqa: B905
            found[name][method] = mine = [float((a - w).norm() / w.norm()) for a, w in pairs]
            first = found[name][beside[0]]
            cells = [
                f"{label} {a:.3g} ({a / b if b else math.nan:.3f})"
                for label, a, b in zip(NAMES, mine, first, strict=True)
            ]
            print(f"{name:8} {method:8} {', '.join(cells)} of {beside[0]}'s", flush=True)
        del got
        torch.cuda.empty_cache()
    yield {"tokens": n, "errors": found}
