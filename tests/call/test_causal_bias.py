"""torch's own causal masks: tensors of numbers that nobody wrote, so they have to be recognised."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = [(20, 50), (50, 20), (1, 7)]
MAKES = [causal_lower_right, causal_upper_left]


def made(make, n_queries: int, n_keys: int) -> CausalBias:  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lower right with more queries than keys
        bias: CausalBias = make(n_queries, n_keys)
    bias.fill_(7.0)
    return bias


def tensors(n_queries: int, n_keys: int) -> list[torch.Tensor]:
    return [torch.randn(2, 2, n, 16) for n in (n_queries, n_keys, n_keys)]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_calls_take_them_for_what_they_say(make, lengths) -> None:
    query, key, value = tensors(*lengths)
    bias = made(make, *lengths)
    kept = torch.ones(lengths, dtype=torch.bool)
    kept = kept.tril(lengths[1] - lengths[0] if make is causal_lower_right else 0)
    exact = torchs(query.double(), key.double(), value.double(), kept)
    exact[:, :, ~kept.any(-1)] = 0
    for more in ({}, {"depth": 1}):
        out, lse = qa.attention_with_lse(query, key, value, bias, **more)
        torch.testing.assert_close(out, exact.float())
        torch.testing.assert_close(qa.attention(query, key, value, bias, **more), out)
        grads = qa.attention_backward(out, query, key, value, out, lse, bias, **more)
        plain = qa.attention_backward(out, query, key, value, out, lse, kept, **more)
        torch.testing.assert_close(grads, plain)


@pytest.mark.parametrize("min_tokens", [1, 10_000])
@pytest.mark.parametrize("make", MAKES)
def test_a_patched_function_takes_them_as_torchs_own_does(make, min_tokens: int) -> None:
    """Torch's own recognises them by the function's name, which is ours while it is patched."""
    query, key, value = tensors(20, 50)
    bias = made(make, 20, 50)
    expected = torchs(query, key, value, bias)
    for enabled in (True, False):
        with qa.patched_sdpa(min_tokens=min_tokens, enabled=enabled):
            patched = torch.nn.functional.scaled_dot_product_attention
            torch.testing.assert_close(patched(query, key, value, bias), expected)
            torch.testing.assert_close(patched(query, key, value, attn_mask=bias), expected)
            with pytest.raises(ValueError, match="CausalBias should not be used with causal"):
                patched(query, key, value, bias, 0.0, True)


def test_in_compiled_code_of_other_lengths_and_within_a_mask() -> None:
    three = tensors(20, 50)
    bias = made(causal_lower_right, 20, 50)
    compiled = torch.compile(lambda *three: qa.attention(*three, bias), backend="eager")
    torch.testing.assert_close(compiled(*three), torchs(*three, bias))
    with pytest.raises(ValueError, match=r"\(20, 50\) tokens, got a CausalBias of \(19, 50\)"):
        qa.attention(*three, made(causal_lower_right, 19, 50))
    with pytest.raises(NotImplementedError, match="attn_mask must be a plain tensor, got a Causal"):
        qa.attention(*three, qa.Mask(bias=bias))
