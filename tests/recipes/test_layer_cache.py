"""An estimate of a prompt counts the bytes that a real cache takes, whatever the layers
of a model keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers.models import LINEAR_EXPERTS
from helpers.prompt_models import CHUNKED, LAYERED, N_PROMPT, OLD, new_model, prompt

from quorum_attention.integrations.transformers.segmented_layer import SegmentedLayer
from quorum_attention.recipes import long_prompt
from quorum_attention.recipes.layer_cache import LayerCache
from quorum_attention.recipes.model_shape import read_shape
from quorum_attention.recipes.prompt_estimate import PromptRequest, estimate_prompt

GIB = 1 << 30
UNNAMED = {"intermediate_size": None, "num_key_value_heads": None}
KINDS: dict[str, dict[str, Any]] = {
    # Keys and values of grouped heads; windows; latents; keys of the layers before.
    **{
        kind: LAYERED[kind]
        for kind in (
            "qwen3", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3",
            "gemma3n_text", "gemma4_text",
        )
    },
    # Sizes by other names.
    "gpt2": {**OLD, **UNNAMED},
    "bloom": {**CHUNKED["bloom"], "num_hidden_layers": None, "num_attention_heads": None, **UNNAMED},
    # Its heads are not as wide as hidden states over heads.
    "jetmoe": {
        "kv_channels": 24, "num_key_value_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "num_attention_heads": None, "head_dim": None,
    },
    # States of recurrences.
    "qwen3_next": {**LINEAR_EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
        "num_experts_per_tok": 1, "mamba_d_state": 4, "head_dim": None,
    },
}  # fmt: skip
# Kinds that do not run without memory.
BY_FORMULA = ("jetmoe",)


def bytes_of(layer: Any) -> int:
    """The bytes that a layer of a cache takes for its tokens."""
    if isinstance(layer, SegmentedLayer):
        return layer.tokens.n_tokens * layer.tokens.token_bytes
    states = [
        *getattr(layer, "conv_states", {}).values(),
        *getattr(layer, "recurrent_states", {}).values(),
    ]
    tensors = [getattr(layer, "keys", None), getattr(layer, "values", None), *states]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*gets its prompts")
def test_a_cache_takes_as_many_bytes_as_its_estimate_says(kind: str) -> None:
    """Layers of a window, of latents or without keys were counted as if they kept keys
    and values of all heads and tokens: up to eight times too many bytes."""
    model = new_model(kind, KINDS[kind])
    shape = read_shape(model.config.to_dict(), with_caches=True)
    n_layers = model.config.num_hidden_layers
    assert len(shape.layer_caches) == (0 if kind in BY_FORMULA else n_layers)
    cache = long_prompt(model)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    asked = PromptRequest(N_PROMPT, 0, GIB, dtype=torch.float32, device="cpu")
    estimate = estimate_prompt(shape, asked)
    taken_bytes = sum(bytes_of(layer) for layer in cache.layers)
    # States in float32 count as two numbers of a model in 16 bits.
    assert estimate.parts[1].device == pytest.approx(taken_bytes, rel=0.1)


def test_a_model_that_does_not_run_without_memory_is_counted_by_formula() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": [48, 64], "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    shape = read_shape({**sizes, **heads}, with_caches=True)
    assert shape.caches() == (LayerCache(2 * 2 * 8),) * 3
    assert shape.intermediate == 64
