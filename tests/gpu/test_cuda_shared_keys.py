"""Prompts on a GPU through layers that read keys and values of the layers before
them."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from helpers.prompt_models import GEMMAS, new_model, prompt, runner_of

from quorum_attention.recipes import long_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
MIB = 1 << 20


@pytest.mark.parametrize("working", [24 * MIB, 48 * MIB])
@pytest.mark.parametrize("kind", GEMMAS)
def test_rows_in_host_memory_and_on_the_device(kind: str, working: int) -> None:
    """Of 20,000 tokens. The keys and values that layers share lie where rows do."""
    model = new_model(kind, {**GEMMAS[kind], "max_position_embeddings": 32_768}).cuda()
    plain = copy.deepcopy(model)
    ids = prompt(20_000).cuda()
    cache = long_prompt(model, progress=False)
    runner_of(model).working = working
    n_before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        ours = model(ids, past_key_values=cache, logits_to_keep=1).logits
        n_bytes = torch.cuda.max_memory_allocated() - n_before
        expected = plain(ids, logits_to_keep=1).logits
    print(kind, working // MIB, f"peak {n_bytes / MIB:.1f} MiB")
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
    token = prompt(1).cuda()
    with torch.no_grad():
        next_logits = model(token, past_key_values=cache).logits
        ids = torch.cat([ids, token], 1)
        expected = plain(ids, logits_to_keep=1).logits
    torch.testing.assert_close(next_logits, expected, rtol=1e-3, atol=1e-4)
