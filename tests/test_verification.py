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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_a_gradient_that_is_zero_has_the_rounding_of_its_terms(
    dtype: torch.dtype, wrong: float
) -> None:
    """Of one key, dQ and dK are differences of equal numbers: nothing to be relative to."""
    query, key, value, grad = (torch.randn(1, 2, 1, 64).to(dtype) for _ in range(4))
    out, lse = qa.attention_with_lse(query, key, value, devices="cpu")
    grads = qa.attention_backward(grad, query, key, value, out, lse, devices="cpu")
    grads = (grads[0] + wrong, grads[1] - wrong, grads[2])
    found = sampled_errors((query, key, value), out, lse, grad, grads, is_causal=False)
    accepted = {torch.float16: 5e-3, torch.bfloat16: 4e-2}.get(dtype, 1e-4)
    assert (found["grad_query"] < accepted, found["grad_key"] < accepted) == (not wrong, not wrong)
    assert found["out"] < accepted
    assert found["grad_value"] < accepted
