"""Forty kinds of models give the same logits and tokens with a cache in segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.generated import N_GENERATED
from helpers.models import LINEAR_EXPERTS

from quorum_attention.integrations.transformers import register
from quorum_attention.integrations.transformers.prompt_cache import PromptCache
from quorum_attention.long_prompts import segmented_cache as segmented_cache_module

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MIXED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
LATENT = {
    **ROUTED,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
SMALL_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
KINDS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "attn_layer_indices": [1, 3],
    },
    "biogpt": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "codegen": {**SMALL_GPT, "rotary_dim": 8},
    "cohere": {},
    "cohere2": {"sliding_window": 9},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "q_lora_rank": 16},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 9},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "gemma": {},
    "gemma3n_text": {
        **MIXED,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **MIXED,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "global_head_dim": 12,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED,
    "gpt2": SMALL_GPT,
    "gpt_bigcode": SMALL_GPT,
    "gpt_neox": {},
    "gptj": {**SMALL_GPT, "rotary_dim": 8, "n_inner": None},
    "granite": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "lfm2": {},
    "ministral": {"sliding_window": 9},
    "mixtral": EXPERTS,
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 9},
    "persimmon": {},
    "phi3": {"rope_parameters": None},
    "qwen2": {},
    "qwen3_moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
    },
    "qwen3_next": LINEAR_EXPERTS,
    "recurrent_gemma": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {"sliding_window": 9},
    "xglm": {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 48},
}
# Weights that make scores differ from token to token.
SHARP = ("q_proj", "k_proj", "query", "key", "qkv", "c_attn")


def model_of(kind: str) -> Any:
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **KINDS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager"
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and any(part in name for part in SHARP):
                weight.mul_(6.0)
    model.generation_config.eos_token_id = None
    return model.eval()


def padding_of(ids: torch.Tensor) -> torch.Tensor:
    """The first entry of a batch has seven tokens of padding."""
    padding = torch.ones_like(ids)
    if len(ids) > 1:
        padding[0, :7] = 0
    return padding


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    """The greedy tokens after a prompt, with the logits of each."""
    return model.generate(
        ids,
        attention_mask=padding_of(ids),
        max_new_tokens=N_GENERATED,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def assert_same(result: Any, expected: Any) -> None:
    """Tokens are equal, logits up to rounding in float32."""
    assert torch.equal(result.sequences, expected.sequences)
    for logits, exact in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def blocks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens fill several blocks of memory."""
    monkeypatch.setattr(segmented_cache_module, "_MIN_BLOCK_TOKENS", 8)
    monkeypatch.setattr(segmented_cache_module, "_TOKEN_STEP", 8)


def skip_if_unknown(kind: str) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of Transformers does not have it")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_plain_cache(kind: str, tmp_path: Path) -> None:
    """Shared layers, compressed keys, recurrences, biases of positions, one key head,
    experts."""
    skip_if_unknown(kind)
    register(min_tokens=0)
    torch.manual_seed(0)
    model = model_of(kind)
    ids = torch.randint(3, 96, (2, 33))
    expected = generate(model, ids)
    model.set_attn_implementation("quorum")
    for device_memory in (None, 9000, 0):
        cache = PromptCache(model.config, device_memory=device_memory, folder=tmp_path)
        assert_same(generate(model, ids, past_key_values=cache), expected)


def repeat_entries(cache: PromptCache) -> list[int]:
    cache.batch_repeat_interleave(2)
    return [0, 0, 1, 1]


def swap_entries(cache: PromptCache) -> list[int]:
    cache.batch_select_indices(torch.tensor([1, 0]))
    return [1, 0]


def keep_last_entry(cache: PromptCache) -> list[int]:
    cache.batch_select_indices(torch.tensor([False, True]))
    return [1]


@pytest.mark.parametrize("change", [repeat_entries, swap_entries, keep_last_entry])
@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_entries_of_layers_with_states(kind: str, change: Any) -> None:
    """States of a recurrence stayed in the order that they had, beside keys in another
    one (Falcon-H1), or their layer had no such method (Qwen3-Next)."""
    skip_if_unknown(kind)
    torch.manual_seed(0)
    model = model_of(kind)
    ids = torch.randint(3, 96, (2, 33))
    cache = PromptCache(model.config)
    change(cache)  # there is nothing to change yet
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 30:]
        model(ids[:, :30], past_key_values=cache)
        entries = change(cache)
        logits = model(ids[entries, 30:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected[entries], rtol=1e-4, atol=1e-4)


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    """T5: the decoder's own tokens in segments, a bias for every pair, beams."""
    register(min_tokens=0)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=1,
    )
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 96, (2, 21))
    for beams in (1, 3):
        options = {"max_new_tokens": 24, "do_sample": False, "num_beams": beams}
        expected = model.generate(ids, **options)
        own = PromptCache(config, device_memory=4000, folder=tmp_path)
        across = transformers.DynamicCache(config=config)
        cache = transformers.EncoderDecoderCache(own, across)
        assert torch.equal(
            model.generate(ids, past_key_values=cache, **options), expected
        )
        assert own.get_seq_length() == 24


def generate_in_mode(
    mode: str, model: Any, ids: torch.Tensor, cache: Any, folder: Path
) -> Any:
    """Let a model generate in one of ``MODES``, with a cache or a saved one."""
    if mode == "beams":
        return generate(model, ids, past_key_values=cache, num_beams=3)
    if mode == "chunked":
        return generate(model, ids, past_key_values=cache, prefill_chunk_size=8)
    if mode == "assisted":
        ids = ids[1:]
        options = {"prompt_lookup_num_tokens": 3}
        # Transformers 5.6 looks for ends in prompts, also where there are none: here is
        # one that is in no vocabulary.
        options["eos_token_id"] = 1000
        return generate(model, ids, past_key_values=cache, **options)
    with torch.no_grad():
        model(
            ids[:, :20], attention_mask=padding_of(ids)[:, :20], past_key_values=cache
        )
    if mode == "forked" and isinstance(cache, PromptCache):
        generate(model, ids.flip(1), past_key_values=cache.fork())
        cache = cache.fork()
    if mode == "saved" and isinstance(cache, PromptCache):
        try:
            cache.save(folder / "saved")
        except NotImplementedError as error:
            # Recurrences, by name.
            pytest.skip(str(error))
        cache = PromptCache(model.config)
        cache.load(folder / "saved")
    return generate(model, ids, past_key_values=cache)


MODES = ("beams", "chunked", "assisted", "forked", "saved")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_plain_cache_in_each_mode(
    kind: str, mode: str, tmp_path: Path
) -> None:
    """What a kind of model cannot do with the plain cache is left out."""
    skip_if_unknown(kind)
    if kind == "recurrent_gemma" and mode in ("forked", "saved"):
        pytest.skip("its state lies in its modules, not in a cache")
    register(min_tokens=0)
    torch.manual_seed(0)
    model = model_of(kind)
    ids = torch.randint(3, 96, (2, 33))
    plain = transformers.DynamicCache(config=model.config)
    try:
        expected = generate_in_mode(mode, model, ids, plain, tmp_path)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        pytest.skip(f"{kind} with the plain cache: {error}")
    model.set_attn_implementation("quorum")
    cache = PromptCache(model.config, device_memory=9000, folder=tmp_path / "files")
    assert_same(generate_in_mode(mode, model, ids, cache, tmp_path), expected)
