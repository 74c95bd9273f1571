"""Calls of many small entries: views of them, and random ones whose masks are made of
tokens (ids, lengths and padding)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

import quorum_attention as qa
from helpers.masks import check
from quorum_attention.mask import map_tensors

# (entries, heads, 8, 16), or (4, entries / 4, heads, 8, 16), by what is unusual.
VIEWS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "plain": lambda n, heads: torch.randn(n, heads, 8, 16),
    "expanded": lambda n, heads: torch.randn(1, heads, 8, 16).expand(n, heads, 8, 16),
    "inside": lambda n, heads: torch.randn(heads, 8, 16, n).permute(3, 0, 1, 2),
    "misaligned": lambda n, heads: torch.randn(n, heads, 8, 17)[..., 1:],
    "two batches": lambda n, heads: torch.randn(n // 4, 4, heads, 16, 8).permute(
        1, 0, 2, 4, 3
    ),
}


def count_operators(run: Callable[[], Any]) -> int:
    """The calls of torch's operators by ``run``, which has run before."""
    run()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sum(event.count for event in profiler.key_averages())


def any_mask(draw: random.Random, batch: int, n: int, m: int) -> qa.Mask:
    """Ids, lengths and padding, in any order, with rules of positions beside them."""
    fields: dict[str, Any] = {}
    names = draw.choice([1, 2, 4])
    kind = draw.randrange(5)
    if kind in (0, 3):
        fields["key_lengths"] = torch.randint(0, m + 1, (batch,))
    if kind in (1, 4):
        fields["key_padding"] = torch.rand(draw.choice([1, batch]), m) < 0.6
    if kind in (2, 3, 4):
        of_query = torch.randint(0, names, (draw.choice([1, batch]), n))
        of_key = torch.randint(0, names, (draw.choice([1, batch]), m))
        same = n == m and draw.random() < 0.6
        fields["documents"] = of_query if same else (of_query, of_key)
    positions = draw.randrange(6)
    if positions in (1, 2):
        fields["causal"] = True
    if positions in (2, 3):
        fields["window"] = (draw.randint(0, 9), draw.randint(-1, 9))
    if positions == 4:
        fields["chunk"] = draw.randint(1, 7)
    if positions == 5:
        fields["causal"] = "lower_right"
    elif draw.random() < 0.2:
        fields["offset"] = draw.randint(-3, 6)
    if draw.random() < 0.2:
        fields["softcap"] = 3.0
    return qa.Mask(**fields)


def masked_call(
    number: int,
    *,
    dtype: torch.dtype = torch.float32,
    limits: tuple[float, float] = (1e-5, 3e-5),
    device: str = "cpu",
    head_dim: int = 8,
    plain: bool = False,
    mask_device: str = "cpu",
    compiles: bool = True,
    **options: Any,
) -> None:
    """A call under a mask of tokens, and its gradients, are those of the textbook.

    Args:
        number: of the draw.
        limits: for results, and for gradients.
        plain: whether nothing but the mask changes the scores.
        mask_device: where the tensors of the mask are.
        compiles: whether there are soft caps and biases wider than the inputs, for
            which Triton compiles on a GPU.
        options: of the call, besides those that are drawn.
    """
    draw = random.Random(number)
    torch.manual_seed(number)
    batch, (heads, shared) = (
        draw.choice([1, 2, 7, 20]),
        draw.choice([(1, 1), (2, 2), (4, 2)]),
    )
    n = draw.randint(1, 24)
    m = n if draw.random() < 0.6 else draw.randint(1, 24)
    mask = any_mask(draw, batch, n, m)
    if plain or not compiles:
        mask = replace(mask, softcap=None)
    if draw.random() < 0.3 and not plain:
        sizes = (batch, heads, n, m)
        bias = torch.randn([size if draw.random() < 0.6 else 1 for size in sizes])
        bias = bias if compiles else bias.to(dtype)
        mask = replace(mask, bias=bias.requires_grad_())
    if draw.random() < 0.2:
        mask = replace(mask, sinks=torch.randn(heads))
    rows = [(heads, n), (shared, m), (shared, m), (heads, n)]
    inputs = [
        torch.randn(batch, n_heads, length, head_dim).to(dtype)
        for n_heads, length in rows
    ]
    options["is_causal"] = draw.random() < 0.15
    if device == "cpu" and "kernel" not in options and draw.random() < 0.2:
        options["budget"] = draw.choice(["7MiB", "9MiB"])
    if mask_device != "cpu":
        on_device = map_tensors(mask, lambda tensor, _: tensor.to(mask_device))
        bias = None if mask.bias is None else mask.bias.to(mask_device)
        options["given"] = replace(on_device, bias=bias)
    check(inputs, mask, head_dim**-0.5, limits, device=device, **options)
