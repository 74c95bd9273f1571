"""The equations that results are compared with are themselves right, and share nothing
with the package."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import helpers.equations as equations
import numpy as np
import pytest
import torch

from quorum_attention import Mask

DOUBLE = torch.float64


def drawn(*batch: int, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    shapes = ((heads, 7), (kv_heads, 9), (kv_heads, 9), (heads, 7))
    return [torch.randn(*batch, *shape, 5, dtype=DOUBLE) for shape in shapes]


def test_nothing_is_imported_from_the_package() -> None:
    text = Path(equations.__file__).read_text(encoding="utf-8")
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert names == {"__future__", "math", "dataclasses", "typing", "numpy", "torch"}


def test_they_are_torchs_attention_in_float64() -> None:
    query, key, value, grad_out = drawn(2, 3)
    for mask, is_causal in (
        (None, False), (None, True), (torch.randn(3, 1, 7, 9, dtype=DOUBLE), False),
        (torch.rand(7, 9) < 0.8, False),
    ):  # fmt: skip
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, mask, is_causal=is_causal, scale=0.3, enable_gqa=True
        )
        wanted = torch.autograd.grad(out, leaves, grad_out)
        done = equations.forward(
            query, key, value, mask, is_causal=is_causal, scale=0.3
        )
        found = equations.backward(done, grad_out)
        of_keys = [equations.summed_by_key_head(t, 2) for t in (found.key, found.value)]
        for mine, theirs in zip(
            (done.out, found.query, *of_keys), (out.detach(), *wanted), strict=True
        ):
            torch.testing.assert_close(
                mine.reshape(theirs.shape), theirs, atol=1e-12, rtol=1e-12
            )


RULES = Mask(
    causal=True,
    offset=3,
    window=(4, 2),
    softcap=1.5,
    sinks=torch.randn(4, dtype=DOUBLE),
)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("rules", [Mask(), RULES], ids=["plain", "rules"])
def test_gradients_are_differences_of_results(rules: Mask, dropout: float) -> None:
    """Along a random direction, by the output and by the log-sum-exp."""
    query, key, value, grad_out = drawn(2)
    bias = torch.randn(4, 1, 9, dtype=DOUBLE)
    grad_lse = torch.randn(2, 4, 7, dtype=DOUBLE)
    tensors: list[Any] = [query, key, value, bias]
    if rules.sinks is not None:
        tensors.append(rules.sinks)
    steps = [torch.randn_like(t) for t in tensors]

    def run(step: float) -> equations.Forward:
        q, k, v, b, *rest = (
            t + step * by for t, by in zip(tensors, steps, strict=True)
        )
        mask = Mask(
            bias=b, causal=rules.causal, offset=rules.offset, window=rules.window,
            softcap=rules.softcap, sinks=rest[0] if rest else None,
        )  # fmt: skip
        how = {"dropout_p": dropout, "dropout_seed": 2**40 + 3}
        return equations.forward(q, k, v, mask, scale=0.4, **how)

    def loss(done: equations.Forward) -> float:
        lse = done.lse.masked_fill(done.lse == -torch.inf, 0.0)
        return float((done.out * grad_out).sum() + (lse * grad_lse).sum())

    found = equations.backward(run(0.0), grad_out, grad_lse)
    grads = [
        found.query, equations.summed_by_key_head(found.key, 2),
        equations.summed_by_key_head(found.value, 2),
        equations.summed_like(found.scores, bias, (2, 4, 7, 9)),
    ]  # fmt: skip
    if rules.sinks is not None:
        assert found.sinks is not None
        grads.append(found.sinks)
    along = sum(float((g * by).sum()) for g, by in zip(grads, steps, strict=True))
    step = 1e-5
    assert abs((loss(run(step)) - loss(run(-step))) / (2 * step) - along) < 1e-7


def test_philox_is_as_published() -> None:
    """The known answers of Random123, by the authors of Philox (philox4x32, 7
    rounds)."""
    answers = {
        (0, 0, 0, 0, 0): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        (0xFFFFFFFF,) * 4 + (2**64 - 1,): (
            0x5207DDC2,
            0x45165E59,
            0x4D8EE751,
            0x8C52F662,
        ),
    }
    for (*counter, seed), words in answers.items():
        found = equations.philox_4x32_7(
            [np.array([word], dtype=np.uint64) for word in counter], seed
        )
        assert tuple(int(word[0]) for word in found) == words
    dropped = equations.dropped(0.3, 7, (2, 3, 50, 61))
    assert dropped.shape == (2, 3, 50, 61)
    assert equations.dropped(0.3, 7, (0, 3, 50, 0)).shape == (0, 3, 50, 0)
    assert abs(float(dropped.double().mean()) - 0.3) < 0.02
