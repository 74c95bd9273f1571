"""An estimate of a prompt counts the bytes that a real cache takes, whatever the layers
of a model keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers.models import LINEAR_EXPERTS
from helpers.prompt_models import (
    CHUNKED,
    FALCON_H1,
    LAYERED,
    N_PROMPT,
    OLD,
    new_model,
    prompt,
)
from transformers import DynamicCache

from quorum_attention.cli import main
from quorum_attention.integrations.transformers.segmented_layer import SegmentedLayer
from quorum_attention.recipes import long_prompt
from quorum_attention.recipes.cpu_rates import CpuRates, measure_cpu
from quorum_attention.recipes.layer_bytes import kept_bytes
from quorum_attention.recipes.layer_cache import LayerCache
from quorum_attention.recipes.left_out import left_out_of_prompt, left_out_of_step
from quorum_attention.recipes.model_shape import read_shape
from quorum_attention.recipes.prompt_estimate import PromptRequest, estimate_prompt
from quorum_attention.recipes.step_estimate import step_beside_attention
from quorum_attention.recipes.switches import HOST
from quorum_attention.recipes.training import Training

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
HALVES = {"layer_types": ["linear_attention", "full_attention"]}
# Layers with attention, and others; and how many layers have none. MiniMax has a cache
# of its own, RecurrentGemma states in its modules, Nemotron-H layers without states.
HYBRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "minimax": ({**HALVES, "num_local_experts": 2, "num_experts_per_tok": 1}, 1),
    "recurrent_gemma": (
        {"num_hidden_layers": 3, "attention_window_size": 9, "lru_width": 32, "head_dim": None},
        2,
    ),
    "nemotron_h": (
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": None, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1,
            "ssm_state_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
        },
        3,
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"], "head_dim": None}, 1),
    "qwen3_next": ({**LINEAR_EXPERTS, **HALVES}, 1),
    "jamba": (KINDS["jamba"], 1),
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


def bytes_behind(kind: str, model: Any) -> int:
    """The bytes that a model of a kind keeps of a prompt, in its cache and in its
    modules."""
    cache: Any = None if kind == "minimax" else DynamicCache(config=model.config)
    with torch.no_grad():
        output = model(prompt(), past_key_values=cache, use_cache=True)
    if kind == "minimax":
        cache = output.past_key_values
    states = [state for state in getattr(cache, "linear_cache", []) if len(state)]
    for module in model.modules():
        for name in ("conv1d_state", "recurrent_states"):
            states.append(getattr(module, name, None))
    n_bytes: int = sum(state.nbytes for state in states if state is not None)
    return n_bytes + sum(bytes_of(layer) for layer in cache.layers)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_without_attention_are_counted_as_they_are(
    kind: str, tmp_path: Path
) -> None:
    """MiniMax's were counted as if they had keys and values, RecurrentGemma's states as
    nothing, and Nemotron-H was refused, the more so as its file has an infinite number. Each was given the time
    of attention."""
    sizes, n_without = HYBRIDS[kind]
    model = new_model(kind, sizes).to(torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, with_caches=True)
    assert not shape.by_formula
    assert shape.parameters == model.num_parameters()
    assert shape.attention_layers == shape.layers - n_without
    assert shape.attention_windows().total() == shape.attention_layers
    n_bytes = 2 * sum(layer.numbers(N_PROMPT) for layer in shape.caches())
    assert n_bytes == pytest.approx(bytes_behind(kind, model), rel=0.01)


def test_what_an_estimate_leaves_out_is_said() -> None:
    """A step of hybrid models took two to five times as much as was estimated, and
    nothing said so; nor that a cache was counted without a run."""
    sizes, _ = HYBRIDS["minimax"]
    config = new_model("minimax", sizes).config.to_dict()
    measured = read_shape(config, with_caches=True)
    (words,) = left_out_of_prompt(measured)
    assert "1 of 2 layers of minimax without attention" in words
    assert "1 of 2 layers of minimax" in left_out_of_step(measured)[0]
    # A recurrence beside attention in each layer.
    config = new_model("falcon_h1", FALCON_H1).config.to_dict()
    assert "2 of 2 layers of falcon_h1" in left_out_of_step(read_shape(config))[0]
    config = new_model("minimax", sizes).config.to_dict()
    by_formula = read_shape(config)
    assert by_formula.caches() == (LayerCache(0), LayerCache(2 * 2 * 16))
    assert "not measured" in left_out_of_prompt(by_formula)[0]
    plain = read_shape(new_model("qwen3", LAYERED["qwen3"]).config.to_dict())
    assert left_out_of_step(plain) == []
    assert "by a formula" in left_out_of_step(replace(plain, by_formula=True))[0]


HOST_MEMORY = ["--memory", "1GiB", "--host-memory", "1GiB", "--device", "cuda"]
STEP = ["--tokens", "64", *HOST_MEMORY]
PROMPT = ["--prompt", "64", *HOST_MEMORY]


@pytest.mark.parametrize("asked", [STEP, PROMPT], ids=["step", "prompt"])
@pytest.mark.parametrize("kind", ["minimax", "qwen3"])
def test_a_verdict_says_that_the_estimate_leaves_out_something(
    kind: str, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command said "fits" below a warning that a step may take several times as
    much."""
    sizes = HYBRIDS[kind][0] if kind in HYBRIDS else LAYERED[kind]
    new_model(kind, sizes).config.save_pretrained(tmp_path)
    command = ["estimate", "--model", str(tmp_path), *asked]
    assert main(command) == 0
    words = capsys.readouterr().out
    leaves_out = kind in HYBRIDS
    assert ("without what is not estimated: fits in 1.00 GiB" in words) is leaves_out
    assert ("\nfits in 1.00 GiB" in words) is not leaves_out
    assert main([*command, "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["fits"] is (None if leaves_out else True)
    assert bool(estimate["left_out"]) is leaves_out


def test_only_layers_with_attention_keep_its_results_in_host_memory() -> None:
    sizes, _ = HYBRIDS["minimax"]
    hybrid = read_shape(new_model("minimax", sizes).config.to_dict())
    step = Training(1024, on=(HOST,))
    n_bytes = step_beside_attention(hybrid, step).host_bytes
    all_attend = step_beside_attention(replace(hybrid, other_layers=()), step)
    assert all_attend.host_bytes - n_bytes == kept_bytes(hybrid, step).result


@pytest.mark.parametrize("slower", [1, 4])
def test_seconds_on_a_cpu_follow_its_measured_rates(
    slower: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were those of an H200's host: a token was 30 times as fast as it is."""
    rates = CpuRates(weight_bytes=8e9 / slower, flops=1e9 / slower)
    monkeypatch.setattr(
        "quorum_attention.recipes.prompt_estimate.measure_cpu", lambda _: rates
    )
    shape = read_shape(new_model("qwen3", LAYERED["qwen3"]).config.to_dict())
    estimate = estimate_prompt(shape, PromptRequest(64, 0, GIB, device="cpu"))
    weights, cache, _ = estimate.parts
    assert (
        estimate.token_seconds == (weights.device + cache.device) / rates.weight_bytes
    )


def test_rates_of_a_cpu_are_measured() -> None:
    rates = measure_cpu(torch.float32)
    assert 1e8 < rates.weight_bytes < 1e12
    assert 1e8 < rates.flops < 1e14
