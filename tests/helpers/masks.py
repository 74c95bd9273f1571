"""Masks by their definition, pair by pair, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import helpers.equations as equations
import quorum_attention as qa
from helpers.attention import Exact, Inputs
from helpers.attention import error as off
from helpers.attention import exact as textbook
from quorum_attention import Mask
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.native import rule_blocks

if TYPE_CHECKING:
    import pytest


def dense(
    mask: Mask, batch: int, heads: int, n_queries: int, n_keys: int
) -> torch.Tensor:
    """Which pairs ``mask`` keeps, (batch, heads, n_queries, n_keys) bool; its bias
    aside."""
    return equations.kept_by(mask, batch, heads, n_queries, n_keys)


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_out: torch.Tensor,
    mask: Mask, scale: float, *, is_causal: bool = False, dropout: Dropout | None = None,
) -> Exact:  # fmt: skip
    """The textbook in float64 under a mask, and all gradients."""
    return textbook(
        Inputs(query, key, value, grad_out), mask=mask.bias, is_causal=is_causal, scale=scale,
        gradients=True, keep=dense(mask, *query.shape[:3], key.shape[2]), softcap=mask.softcap,
        sinks=mask.sinks, dropout=dropout,
    )  # fmt: skip


def check(
    inputs: Sequence[torch.Tensor], mask: Mask, scale: float, limits: tuple[float, float], *,
    dropout: Dropout | None = None, device: str = "cpu", given: Mask | str | None = "mask",
    alone: bool = False, **options: Any,
) -> None:  # fmt: skip
    """A call and its gradients are those of the textbook.

    Args:
        inputs: query, key, value and the upstream gradient.
        limits: for results, and for gradients.
        device: where the tensors are.
        given: what the call is given for the mask, if that is another.
        alone: the output and its gradients are those of ``attention``.
    """
    is_causal = options.get("is_causal", False)
    if mask.sinks is not None:
        mask = replace(mask, sinks=mask.sinks.requires_grad_())
    want = exact(*inputs, mask, scale, is_causal=is_causal, dropout=dropout)
    print(mask, options)
    size = 1.0
    if dropout is not None:
        size = dropout.rescale
        options |= {"dropout_p": dropout.p, "dropout_seed": dropout.seed}
    leaves = [t.detach().to(device).requires_grad_() for t in inputs[:3]]
    learned = [t for t in (mask.sinks, mask.bias) if t is not None and t.requires_grad]
    if given == "mask":
        given = replace(mask, bias=None if mask.bias is None else mask.bias.to(device))
    options |= {"attn_mask": given, "scale": scale, "enable_gqa": True}
    out, lse = qa.attention_with_lse(*leaves, **options)
    if alone:
        assert off(out, want.out) <= size * limits[0]
        out = qa.attention(*leaves, **options)
    grads = torch.autograd.grad(out, [*leaves, *learned], inputs[3].to(device))
    assert off(out, want.out) <= size * limits[0]
    assert off(lse, want.lse) <= limits[0]
    for grad, wanted in zip(grads, want.grads, strict=True):
        assert off(grad, wanted) <= size * limits[1]


def _runs(draw: random.Random, n: int) -> list[int]:
    """Document ids: mostly ascending, some come back."""
    ids: list[int] = []
    here = 0
    while len(ids) < n:
        ids += [here] * draw.choice([1, 2, 5, 17, 60, 200])
        here += 1 if draw.random() < 0.8 else draw.randint(-1, 3)
    return ids[:n]


def _documents(draw: random.Random, batch: int, n: int) -> torch.Tensor:
    if draw.random() < 0.4:
        return torch.tensor(_runs(draw, n))
    return torch.tensor([_runs(draw, n) for _ in range(batch)])


def _offsets(
    draw: random.Random, batch: int, n_queries: int, n_keys: int
) -> torch.Tensor:
    """Of each query, of runs of queries, or of each entry."""
    ids = _documents(draw, batch, n_queries)
    of_entry = torch.tensor([[draw.randint(-10, n_keys)] for _ in range(batch)])
    return draw.choice([ids * 7 - 5, of_entry, of_entry - ids])


def _padding(draw: random.Random, batch: int, n: int) -> torch.Tensor:
    edges = torch.tensor([[draw.randint(0, n)] for _ in range(batch)])
    at = torch.arange(n)[None]
    return draw.choice([at >= edges, at < edges, torch.rand(batch, n) < 0.7])


def thirds(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k) % 3 != 0


def fifths(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q * 7 + k * 3 + h + b) % 5 < 3


def nearly_causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q + 2


# Of a module, so that other processes can import them.
RULES = (thirds, fifths, nearly_causal)


def random_mask(
    draw: random.Random,
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int,
    *,
    inner: bool = False,
) -> Mask:
    """A mask of a few fields, without bias, soft cap and sinks."""
    fields: dict[str, Any] = {}
    sizes = (batch, heads, n_queries, n_keys)
    windows = [0, 1, 10, 40, (5, -1), (-1, 7), (20, 0), (100, 30), (257, 0)]

    def documents() -> Any:
        if n_queries == n_keys and draw.random() < 0.5:
            return _documents(draw, batch, n_queries)
        return _documents(draw, batch, n_queries), _documents(draw, batch, n_keys)

    def offset() -> Any:
        if draw.random() < 0.5:
            return draw.randint(-10, max(1, n_keys))
        return (
            "lower_right"
            if draw.random() < 0.5
            else _offsets(draw, batch, n_queries, n_keys)
        )

    def two() -> tuple[Mask, ...]:
        return tuple(random_mask(draw, *sizes, inner=True) for _ in range(2))

    chances: dict[str, tuple[float, Any]] = {
        "causal": (
            0.6,
            lambda: draw.choice([True, "upper_left", "lower_right", "lower_right"]),
        ),
        "offset": (0.25, offset),
        "window": (0.4, lambda: draw.choice(windows)),
        "chunk": (0.15, lambda: draw.choice([1, 7, 32, 100, 1000])),
        "documents": (0.35, documents),
        "key_lengths": (
            0.15,
            lambda: torch.tensor([draw.randint(0, n_keys) for _ in range(batch)]),
        ),
        "key_padding": (0.2, lambda: _padding(draw, batch, n_keys)),
        "keeps": (0.12, lambda: draw.choice(RULES)),
        "either": (0 if inner else 0.12, two),
        "every": (0 if inner else 0.12, two),
    }
    for name, (chance, make) in chances.items():
        if draw.random() < chance:
            fields[name] = make()
    return Mask(**fields)


def few_at_a_time(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    """Room for the bits of so many partial blocks, and for evaluating one."""
    monkeypatch.setattr(rule_blocks, "_MAX_BYTES", words * rule_blocks.BIT_BYTES)
