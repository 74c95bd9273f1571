"""Small models for prompts of some tokens, and what they generate.

Import after ``pytest.importorskip("transformers")``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import transformers

from helpers.generated import N_GENERATED
from helpers.models import DECODERS, EXPERTS, MIXED, SHARP, SIZES, VOCABULARY
from quorum_attention.recipes.changes import changes_by
from quorum_attention.recipes.prompt_changes import OWNER, prompt_forward_in

LATENT: dict[str, Any] = {
    "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
MANY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EIGHT = {"head_dim": None}  # the width over the heads
OLD: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    **EIGHT,
}
# Their last layers read keys and values of the layers before them. Gemma 4 also leaves
# tokens out of these layers, if their logits are not asked for.
SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 9,
    "layer_types": [*MIXED, *MIXED], "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
GEMMAS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        **SHARED_KEYS, "laurel_rank": 8, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**SHARED_KEYS, "global_head_dim": 24},
    "gemma4_unified_text": {**SHARED_KEYS, "global_head_dim": 24},
}  # fmt: skip
# Kinds of models whose layers run one after the other. None takes a size away.
LAYERED: dict[str, dict[str, Any]] = {
    "gpt_oss": DECODERS["gpt_oss"],
    **DECODERS,
    "apertus": {},
    "arcee": {},
    "cohere": {},
    "cohere2": {"sliding_window": 9, "layer_types": MIXED},
    "deepseek_v3": LATENT,
    "ernie4_5": {},
    "exaone4": {"sliding_window": 9, "layer_types": MIXED},
    "gemma": {},
    **GEMMAS,
    "glm": {},
    "glm4": {},
    "gpt2": OLD,
    "gpt_bigcode": OLD,
    "gpt_neox": {"num_key_value_heads": None, **EIGHT},
    "granite": {},
    "granitemoe": EXPERTS,
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {},
    "mixtral": EXPERTS,
    "olmo": EIGHT,
    "olmo2": EIGHT,
    "olmo3": {"sliding_window": 9, "layer_types": MIXED},
    "persimmon": EIGHT,
    "phi3": EIGHT,
    "qwen2": EIGHT,
    "qwen2_moe": {**MANY_EXPERTS, "shared_expert_intermediate_size": 24, **EIGHT},
    "qwen3_moe": MANY_EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "stablelm": EIGHT,
    "starcoder2": {"sliding_window": 9, **EIGHT},
}  # fmt: skip
# Kinds that are given their prompts in chunks, or as they were.
CHUNKED: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4, **EIGHT},
    "falcon": {
        "ffn_hidden_size": 48,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        **EIGHT,
    },
}
# Kinds that are given their prompts whole: tokens see those behind them.
WHOLE: dict[str, dict[str, Any]] = {
    "bert": EIGHT,
    "big_bird": EIGHT,
    "megatron-bert": EIGHT,
    # As in BigBird and RoFormer, its small weights hide that it reads both ways.
    "rembert": EIGHT,
    "roberta": {"max_position_embeddings": 160, **EIGHT},
    "roformer": EIGHT,
}
# Kinds that take no cache of keys and values.
WITHOUT_CACHE: dict[str, dict[str, Any]] = {
    "falcon_mamba": EIGHT,
    "mamba": EIGHT,
    "minimax": EXPERTS,
    "openai-gpt": OLD,
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
}
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
# Their attention has a name in some versions of Transformers, and none in others.
NAMED_IN_SOME: dict[str, dict[str, Any]] = {
    "codegen": {**OLD, "rotary_dim": 8},
    "gptj": {**OLD, "rotary_dim": 8},
    "nemotron": {},
}
for kind, sizes in NAMED_IN_SOME.items():
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    kinds = LAYERED if hasattr(module, "ALL_ATTENTION_FUNCTIONS") else CHUNKED
    kinds[kind] = sizes
N_PROMPT = 67
TILE = 20


def new_model(kind: str, sizes: dict[str, Any]) -> Any:
    """A small decoder in float32, whose scores differ from token to token."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {kind}")
    chosen = {**SIZES, **sizes}
    chosen = {name: size for name, size in chosen.items() if size is not None}
    config = transformers.CONFIG_MAPPING[kind](
        **chosen, bos_token_id=None, eos_token_id=None
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and any(part in name for part in SHARP):
                weight.mul_(8.0)
            if "sinks" in name:
                weight.normal_(0.0, 1.0)
    return model.eval()


def prompt(n_tokens: int = N_PROMPT, batch: int = 1) -> torch.Tensor:
    """Ids of a prompt, the same each time."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, VOCABULARY, (batch, n_tokens), generator=generator)


def generated(
    model: Any, ids: torch.Tensor, n_tokens: int = N_GENERATED, **named: Any
) -> Any:
    """The greedy tokens after a prompt, with the logits of each."""
    named.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, max_new_tokens=n_tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **named,
    )  # fmt: skip


def assert_same(result: Any, expected: Any) -> None:
    """Tokens are equal, logits up to rounding."""
    assert torch.equal(result.sequences, expected.sequences)
    for logits, exact in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-5)


def runner_of(model: Any) -> Any:
    changes = changes_by(model, OWNER)
    assert changes is not None
    return prompt_forward_in(changes).runner
