"""The check that recover makes: right results pass, a planted error of each kind is seen."""

from __future__ import annotations

import pytest
import torch

import quorum_attention as qa
from quorum_attention.verification import sampled_errors

NAMES = ("grad_query", "grad_key", "grad_value")


@pytest.mark.parametrize(
    "planted", ["nothing", "out", "lse", "grad_query", "grad_key", "grad_value"]
)
def test_planted_errors_are_seen(planted: str) -> None:
    query, grad = torch.randn(1, 4, 200, 8), torch.randn(1, 4, 200, 8)
    key, value = torch.randn(1, 2, 200, 8), torch.randn(1, 2, 200, 8)
    call = {"is_causal": True, "enable_gqa": True, "depth": 1, "devices": "cpu"}
    out, lse = qa.attention_with_lse(query, key, value, **call)
    grads = qa.attention_backward(grad, query, key, value, out, lse, **call)
    results = dict(zip(NAMES, grads, strict=True))
    results |= {"out": out.clone(), "lse": lse.clone()}
    if planted != "nothing":
        results[planted][0, 0, 0] += 1.0
    found = sampled_errors(
        (query, key, value), results["out"], results["lse"], grad,
        [results[name] for name in NAMES], is_causal=True,
    )  # fmt: skip
    # Keys and values are held against the result's own output and log-sum-exp.
    follows = {"out": {"grad_key"}, "lse": {"grad_key", "grad_value"}}.get(planted, set())
    for name in results.keys() - follows:
        assert (found[name] > 1e-3) == (name == planted)
