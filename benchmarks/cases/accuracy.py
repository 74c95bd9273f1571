"""Errors against float64 of a long causal call, ours and other kernels', on sampled
rows.

One head, because heads are alike. Everything is drawn from a normal distribution. Rows
are sampled twice over: at random from the whole call, and from its last 8,192, where a
row sums the most (queries) or the fewest (keys) products. An error is the norm of the
difference over the norm of what is right, over all sampled rows together. Needs a CUDA
device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from cases import plain
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import quorum_attention as qa

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
NAMES = ("out", "dQ", "dK", "dV")
LAST_ROWS = 8192
# Scores in float64 at a time.
SCORES_AT_A_TIME = 1 << 28
Results = tuple[torch.Tensor, ...]
"""Out, dQ, dK and dV."""


class ExactCall(NamedTuple):
    """A causal call in float64; all tensors are (n, d)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_out: torch.Tensor
    scale: float

    def attend(self, rows: torch.Tensor) -> Results:
        """Probabilities of ascending rows, (rows, keys up to the last row's); their
        output, and delta, (rows, 1).
        """
        stop = int(rows[-1]) + 1
        query = self.query[rows]
        key = self.key[:stop]
        value = self.value[:stop]
        scores = query @ key.mT * self.scale
        positions = torch.arange(stop, device=rows.device)
        is_later = positions > rows[:, None]
        probabilities = scores.masked_fill_(is_later, -torch.inf).softmax(1)
        out = probabilities @ value
        grad_out = self.grad_out[rows]
        delta = (out * grad_out).sum(1, keepdim=True)
        return probabilities, out, delta


def exact_rows(call: ExactCall, rows: torch.Tensor) -> Results:
    """Rows of out, dQ, dK and dV; ``rows`` ascend."""
    probabilities, out, delta = call.attend(rows)
    n_keys = probabilities.shape[1]
    key = call.key[:n_keys]
    value = call.value[:n_keys]
    grad_probabilities = call.grad_out[rows] @ value.mT
    grad_scores = probabilities.mul_(grad_probabilities - delta)
    grad_query = grad_scores @ key * call.scale
    del probabilities, grad_probabilities, grad_scores
    key_rows = exact_key_rows(call, rows)
    return out, grad_query, *key_rows


def exact_key_rows(call: ExactCall, rows: torch.Tensor) -> Results:
    """Rows of dK and dV. Queries before the first of ``rows`` have no part in any of
    them."""
    grad_key = torch.zeros_like(call.key[rows])
    grad_value = torch.zeros_like(call.value[rows])
    n_tokens = call.query.shape[0]
    queries = torch.arange(int(rows[0]), n_tokens, device=rows.device)
    for block in queries.split(max(1, SCORES_AT_A_TIME // n_tokens)):
        probabilities, _, delta = call.attend(block)
        is_seen = rows <= block[-1]
        keys = rows[is_seen]
        probabilities = probabilities[:, keys]
        grad_out = call.grad_out[block]
        grad_scores = probabilities * (grad_out @ call.value[keys].mT - delta)
        grad_value[is_seen] += probabilities.mT @ grad_out
        grad_key[is_seen] += grad_scores.mT @ call.query[block] * call.scale
    return grad_key, grad_value


def monolithic(backend: SDPBackend, tensors: list[torch.Tensor]) -> Results:
    """Out, dQ, dK and dV of a kernel of torch's, on the device."""
    *inputs, grad_out = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    query, key, value = leaves
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return out.detach(), *grads


def flash_attention_4(tensors: list[torch.Tensor]) -> Results:
    """Out, dQ, dK and dV of FlashAttention-4 alone, on the device."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    token_major = [leaf.transpose(1, 2) for leaf in leaves]
    out = plain.flash_attention_4(*token_major).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    return out.detach(), *grads


def recovered(budget: str, kernel: str, tensors: list[torch.Tensor]) -> Results:
    """The same by quorum attention, host to host."""
    on_host = [tensor.cpu().pin_memory() for tensor in tensors]
    *inputs, grad_out = on_host
    options: dict[str, Any] = {"is_causal": True, "budget": budget, "kernel": kernel}
    out, lse = qa.attention_with_lse(*inputs, **options)
    grads = qa.attention_backward(grad_out, *inputs, out, lse, **options)
    return out, *grads


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--budget", default="256MiB", help="of one head")
    parser.add_argument("--kernel", default="auto", help="our inner kernel")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument(
        "--beside",
        default="flash,cudnn",
        help="kernels alone, by commas: flash, cudnn, fa4",
    )


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each sample and method."""
    torch.manual_seed(0)
    n_tokens = options.tokens
    shape = (1, 1, n_tokens, options.head_dim)
    tensors = [torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(4)]
    samples = sampled_rows(n_tokens, options.rows)
    exact = exact_samples(tensors, samples)
    torch.cuda.empty_cache()
    errors: dict[str, dict[str, list[float]]] = {sample: {} for sample in samples}
    rivals = options.beside.split(",")
    for method, attend in methods_of(options, rivals).items():
        results = attend(tensors)
        for sample, rows in samples.items():
            errors[sample][method] = relative_errors(results, exact[sample], rows)
            print(describe(sample, method, errors[sample], rivals[0]), flush=True)
        del results
        torch.cuda.empty_cache()
    yield {f"{sample} of {n_tokens}": by_method for sample, by_method in errors.items()}


def sampled_rows(n_tokens: int, n_rows: int) -> dict[str, torch.Tensor]:
    """Ascending rows from anywhere, and from the last ones."""
    anywhere = torch.randperm(n_tokens, device="cuda")[:n_rows]
    last = n_tokens - LAST_ROWS + torch.randperm(LAST_ROWS, device="cuda")[:n_rows]
    return {"random": anywhere.sort().values, "last": last.sort().values}


def exact_samples(
    tensors: list[torch.Tensor], samples: dict[str, torch.Tensor]
) -> dict[str, Results]:
    """Rows of the right results, by sample; rows of all samples are computed at
    once."""
    query, key, value, grad_out = (tensor[0, 0].double() for tensor in tensors)
    call = ExactCall(query, key, value, grad_out, query.shape[1] ** -0.5)
    all_rows = torch.unique(torch.cat(list(samples.values())))
    results = exact_rows(call, all_rows)
    return {
        sample: tuple(result[torch.searchsorted(all_rows, rows)] for result in results)
        for sample, rows in samples.items()
    }


def methods_of(
    options: argparse.Namespace, rivals: list[str]
) -> dict[str, Callable[[list[torch.Tensor]], Results]]:
    methods: dict[str, Callable[[list[torch.Tensor]], Results]] = {}
    for name in rivals:
        if name == "fa4":
            methods[name] = flash_attention_4
        else:
            methods[name] = partial(monolithic, BACKENDS[name])
    return {**methods, "quorum": partial(recovered, options.budget, options.kernel)}


def relative_errors(
    results: Results, exact: Results, rows: torch.Tensor
) -> list[float]:
    errors = []
    for result, expected in zip(results, exact, strict=True):
        sampled = result[0, 0].to(expected.device)[rows].double()
        errors.append(float((sampled - expected).norm() / expected.norm()))
    return errors


def describe(
    sample: str, method: str, errors: dict[str, list[float]], rival: str
) -> str:
    """The errors of a method, and their ratios to the first rival's."""
    cells = []
    pairs = zip(NAMES, errors[method], errors[rival], strict=True)
    for name, error, rival_error in pairs:
        ratio = math.nan
        if rival_error:
            ratio = error / rival_error
        cells.append(f"{name} {error:.3g} ({ratio:.3f})")
    text = ", ".join(cells)
    return f"{sample:8} {method:8} {text} of {rival}'s"
