"""Gradients of saturated attention on a GPU, with ``exact_delta``, against float64."""

from __future__ import annotations

import pytest
import torch
from helpers.fa4 import FA4
from helpers.saturated import (
    MOST_OVER_UNFUSED,
    distance,
    gradients,
    rounding_of_fp32,
    saturated,
    unfused,
)

import quorum_attention as qa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CALL = {"is_causal": True, "enable_gqa": True}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward", ["auto", "native", FA4])
@pytest.mark.parametrize("n_tokens", [24, 130, 300])
def test_saturated_attention_is_as_exact_as_the_unfused_call(  # type: ignore[no-untyped-def]
    dtype, backward, n_tokens
) -> None:
    tensors = saturated((8, n_tokens, 128), n_tokens, dtype, kv_heads=2)
    tensors = [t.cuda() for t in tensors]
    truth = gradients(unfused, tensors, torch.float64, **CALL)
    of_unfused = distance(gradients(unfused, tensors, **CALL), truth)
    if backward == "auto":
        grads = gradients(qa.attention, tensors, **CALL, exact_delta=True)
    else:
        q, k, v, grad_out = tensors
        wide = {"out_dtype": torch.float32, "exact_delta": True}
        out, lse = qa.attention_with_lse(q, k, v, **CALL, **wide)
        grads = qa.attention_backward(
            grad_out, q, k, v, out, lse, **CALL, kernel=backward
        )
    most = MOST_OVER_UNFUSED * of_unfused + rounding_of_fp32(tensors)
    assert distance(grads, truth) <= most
