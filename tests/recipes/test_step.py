"""A model's sizes out of its config.json; a step's memory by part, and what switches do
to it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.docs import QWEN3_8B

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.recipes import step_estimate
from quorum_attention.recipes.model_shape import read_shape
from quorum_attention.recipes.remedies import longest_that_fits, switch_until_it_fits
from quorum_attention.recipes.step_estimate import step_memory
from quorum_attention.recipes.switches import HOST, MLP, SWITCHES, TILES
from quorum_attention.recipes.training import Training
from quorum_attention.units import parse_count

GIB = 1 << 30
SHAPE = read_shape(QWEN3_8B)


def test_qwen3_8b_has_its_published_number_of_parameters(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    shape = read_shape(path)
    assert shape.parameters == 8_190_735_360
    assert (shape.layers, shape.kv_heads) == (36, 8)
    assert read_shape({"text_config": QWEN3_8B}) == read_shape(tmp_path) == shape


PLAIN: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 16, "head_dim": 96,
    "num_key_value_heads": 2, "intermediate_size": 2560, "vocab_size": 13000,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 8, "moe_intermediate_size": 384, "num_experts_per_tok": 2,
          "n_shared_experts": 2, "first_k_dense_replace": 2, "n_group": 1,
          "topk_group": 1}  # fmt: skip
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
          "v_head_dim": 80, "head_dim": 32}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma3_text": {}, "mixtral": EXPERTS, "gpt_oss": EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
                  "moe_intermediate_size": 384, "shared_expert_intermediate_size": 640,
                  "head_dim": None},
    "llama4_text": {**EXPERTS, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 2560},
    "deepseek_v3": {**ROUTED, **LATENT}, "deepseek_v2": {**ROUTED, **LATENT, "q_lora_rank": None},
    "glm4_moe": ROUTED,
}  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("kind", SIZES)
def test_parameters_are_those_of_the_model(
    kind: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them where Transformers builds the model; but for biases where a formula
    counts."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        name: size for name, size in (PLAIN | SIZES[kind]).items() if size is not None
    }
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if not built:
        monkeypatch.setattr(
            "quorum_attention.recipes.model_shape._build", lambda _: None
        )
    contents = json.loads(config.to_json_string(use_diff=False))
    count = read_shape(contents).parameters
    assert count == pytest.approx(model.num_parameters(), rel=0 if built else 2e-3)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "vocab_size": 129280, "tie_word_embeddings": False,
}  # fmt: skip
GLM_4_5_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "head_dim": 128,
    "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "n_shared_experts": 1, "n_routed_experts": 128, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "vocab_size": 151552,
    "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("built", [True, False])
def test_published_numbers_of_parameters(
    built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """671 billion and 106 billion with their layers that predict more tokens, which are
    not built: 11.5 and 3.5 billion less."""
    if not built:
        monkeypatch.setattr(
            "quorum_attention.recipes.model_shape._build", lambda _: None
        )
    deepseek, glm = read_shape(DEEPSEEK_V3), read_shape(GLM_4_5_AIR)
    assert deepseek.parameters == pytest.approx(671.0e9, rel=1e-3)
    assert glm.parameters == pytest.approx(106.9e9, rel=5e-3)
    assert (deepseek.head_dim, deepseek.kv_heads) == (192, 128)
    assert deepseek.mlp_width == 9 * 2048
    assert glm.mlp_width == 9 * 1408


def test_what_is_missing_or_senseless_is_named(tmp_path: Path) -> None:
    senseless = {"hidden_size": None, "vocab_size": "many", "num_key_value_heads": 0}
    for name, value in senseless.items():
        with pytest.raises(ValueError, match=name):
            read_shape({**QWEN3_8B, name: value})
    path = tmp_path / "config.json"
    for text, message in (
        ("weights", r"json is not a config\.json"),
        ("[]", "object of JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_shape(path)


@pytest.mark.slow
def test_all_weights_trained_are_summed_up_over_tiles_in_float32() -> None:
    """Of the MLP of one layer: 3 * 4096 * 12288 numbers, 4 + 4 + 2 bytes; in float32
    nothing."""
    sums = []
    for dtype in (torch.bfloat16, torch.float32):
        parts = [
            {part.name: part.bytes for part in step_memory(SHAPE, training).parts}
            for training in (
                Training(262_144, dtype=dtype, lora=lora, on=("tiled MLP",))
                for lora in (16, None)
            )
        ]
        adapted, full = (one["MLP intermediates"] for one in parts)
        sums.append(full - adapted)
    assert sums == [1440 << 20, 0]


@pytest.mark.slow
def test_every_switch_makes_its_part_smaller_and_no_other() -> None:
    training = Training(262_144, lora=16, budget=5 * GIB)
    plain = step_memory(SHAPE, training)
    for name in SWITCHES:
        on = step_memory(SHAPE, replace(training, on=(name,)))
        for before, after in zip(plain.parts, on.parts, strict=True):
            assert (after.bytes < before.bytes) == (before.switch == name), (
                name,
                before.name,
            )
            assert after.plain_bytes == before.plain_bytes
    # The layers' inputs, and attention's output and lse.
    host = step_memory(SHAPE, replace(training, on=SWITCHES)).host_bytes
    assert host == (72 + 72) * GIB + 36 * (32 << 20)
    roomy, _ = switch_until_it_fits(SHAPE, replace(training, on=SWITCHES), "139GiB")
    assert 60 * GIB < host - roomy.host_bytes == 139 * GIB - roomy.peak_bytes


@pytest.mark.slow
def test_what_is_switched_on_makes_it_fit() -> None:
    training = Training(262_144, lora=16)
    found, fits = switch_until_it_fits(SHAPE, training, "45GiB")
    assert fits
    assert found.peak_bytes <= 45 * GIB
    assert "quorum attention" in found.on
    assert found.budget is not None
    enough, fits = switch_until_it_fits(SHAPE, training, "2000GiB")
    assert fits
    assert enough.on == ()
    _, fits = switch_until_it_fits(SHAPE, training, "20GiB")
    assert not fits


def test_a_part_that_only_tiles_make_smaller_names_them() -> None:
    """The table of `estimate` left "changed by" empty for such parts."""
    training = Training(16_384)
    for on in ((TILES,), (TILES, MLP)):
        step = step_memory(SHAPE, replace(training, on=on))
        changes = {part.name: step.changed_by(part) for part in step.parts}
        smaller = {part.name for part in step.parts if part.bytes < part.plain_bytes}
        assert {name for name, change in changes.items() if change} >= smaller
        assert changes["MLP intermediates"] == (MLP if MLP in on else TILES)
        assert changes["logits and gradient"] == ""


def test_the_longest_text_that_fits() -> None:
    """A step of it fits, and one that is a little longer does not."""
    shape = read_shape({**QWEN3_8B, "num_hidden_layers": 2, "vocab_size": 1000})
    training = Training(16_384, lora=16, device="cpu")
    longest = longest_that_fits(shape, training, "1500MiB")
    assert 1024 < longest < 16_384
    for tokens, fits in ((longest, True), (longest + 256, False)):
        step = switch_until_it_fits(shape, replace(training, tokens=tokens), "1500MiB")
        assert step[1] == fits
    assert longest_that_fits(shape, training, "100MiB") == 0


def test_attention_is_not_planned_for_steps_that_never_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights alone take more than the device has. Each plan of a million tokens takes
    a second, and the command was silent for twenty."""
    n_plans = 0
    make_plan = step_estimate.plan

    def counting(*args: Any, **named: Any) -> Any:
        nonlocal n_plans
        n_plans += 1
        return make_plan(*args, **named)

    monkeypatch.setattr(step_estimate, "plan", counting)
    step_estimate._attention_peak.cache_clear()
    training = Training(32_768)
    assert longest_that_fits(SHAPE, training, "8GiB") == 0
    assert n_plans == 0
    step, fits = switch_until_it_fits(SHAPE, training, "8GiB")
    assert not fits
    # Forward and backward, of the step as it would be and as it is: both are shown.
    assert n_plans <= 4
    assert step.plain_bytes > step.peak_bytes


@pytest.mark.slow
def test_a_budget_is_of_one_call_as_the_model_will_give_it() -> None:
    """With the gradients that the call returns, 3 GiB here: what it works in is the
    rest."""
    on = Training(262_144, lora=16, budget=5 * GIB, on=("quorum attention",))
    (part,) = (
        p for p in step_memory(SHAPE, on).parts if p.switch == "quorum attention"
    )
    assert part.bytes <= 2 * GIB
    with pytest.raises(qa.BudgetError, match="is too small for this call"):
        step_memory(SHAPE, replace(on, budget=3 * GIB))


@pytest.mark.slow
def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    asked = [
        "estimate",
        "--model",
        str(path),
        "--tokens",
        "256K",
        "--lora",
        "16",
        "--device",
    ]
    roomy = [*asked, "cuda", "--memory", "80GiB", "--budget", "5GiB", "--host-memory"]
    assert main([*roomy, "2TiB"]) == 0
    said = capsys.readouterr().out
    verdict = r"fits in 80.00 GiB; [\d.]+ GiB free; host [\d.]+ GiB of 1.67 TiB"
    assert re.search(verdict, said)
    assert "switched on: chunked loss, checkpoints in host memory" in said
    assert "longest" not in said
    assert "148.38 GiB" in said
    assert main([*asked, "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["switched_on"] == list(SWITCHES)
    assert found["model"]["parameters"] == 8_190_735_360
    assert found["peak_bytes"] < found["plain_bytes"]
    assert found["host_memory_bytes"] > 0
    assert found["longest_tokens"] is None
    small = [
        "estimate",
        "--model",
        str(path),
        "--tokens",
        "16K",
        "--lora",
        "16",
        "--device",
        "cuda",
    ]
    assert main([*small, "--memory", "18GiB", "--host-memory", "1GiB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "GiB of 853.33 MiB: with less, attention is computed again" in said
    (longest,) = re.findall(r"but the host has no room: longest ([\d,]+K?)", said)
    assert 1000 < parse_count(longest) < 16_384
    assert "of this machine" not in said
    assert main([*small, "--memory", "18GiB"]) == 0
    assert "of this machine" in " ".join(capsys.readouterr().out.split())
    second_gpu = [*small[:-1], "cuda:1", "--memory", "18GiB", "--json"]
    assert main(second_gpu) == 0
    step = json.loads(capsys.readouterr().out)
    assert HOST in step["switched_on"]  # a CPU has no other memory
    assert main([*asked, "gpu"]) == 2
    assert "--device must be 'cpu' or 'cuda'" in capsys.readouterr().err
    assert main([*asked, "cuda", "--heads", "8"]) == 2
    assert "--heads" in capsys.readouterr().err
    assert main(["estimate", "--tokens", "1K", "--memory", "1GiB"]) == 2
    assert "--model" in capsys.readouterr().err
