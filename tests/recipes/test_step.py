"""A model's sizes out of its config.json; a step's memory by part, and what switches do to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_docs import QWEN3_8B

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.recipes.step import (
    SWITCHES,
    Training,
    read_shape,
    step_memory,
    switch_until_it_fits,
)

GIB = 1 << 30
SHAPE = read_shape(QWEN3_8B)


def test_qwen3_8b_has_its_published_number_of_parameters(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    shape = read_shape(path)
    assert shape.parameters == 8_190_735_360
    assert (shape.layers, shape.kv_heads) == (36, 8)
    assert read_shape({"text_config": QWEN3_8B}) == read_shape(tmp_path) == shape


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral", "gemma3_text", "gpt_oss"])
def test_parameters_are_those_of_the_model(kind: str) -> None:
    """But for biases."""
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 16, "head_dim": 96,
        "num_key_value_heads": 2, "intermediate_size": 2560, "vocab_size": 13000,
    }  # fmt: skip
    if kind in ("gpt_oss", "qwen3_moe", "mixtral"):
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = read_shape(config.to_dict()).parameters
    assert count == pytest.approx(model.num_parameters(), rel=1e-3)


def test_what_is_missing_or_senseless_is_named(tmp_path: Path) -> None:
    senseless = {"hidden_size": None, "vocab_size": "many", "num_key_value_heads": 0}
    for name, value in senseless.items():
        with pytest.raises(ValueError, match=name):
            read_shape({**QWEN3_8B, name: value})
    path = tmp_path / "config.json"
    for text, message in (("weights", r"json is not a config\.json"), ("[]", "object of JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_shape(path)


def test_all_weights_trained_are_summed_up_over_tiles_in_float32() -> None:
    """Of the MLP of one layer: 3 * 4096 * 12288 numbers, 4 + 4 + 2 bytes; in float32 nothing."""
    sums = []
    for dtype in (torch.bfloat16, torch.float32):
        parts = [
            {part.name: part.bytes for part in step_memory(SHAPE, training).parts}
            for training in (
                Training(262_144, dtype=dtype, lora=lora, on=("tiled MLP",)) for lora in (16, None)
            )
        ]
        adapted, full = (one["MLP intermediates"] for one in parts)
        sums.append(full - adapted)
    assert sums == [1440 << 20, 0]


def test_every_switch_makes_its_part_smaller_and_no_other() -> None:
    training = Training(262_144, lora=16, budget=5 * GIB)
    plain = step_memory(SHAPE, training)
    for name in SWITCHES:
        on = step_memory(SHAPE, replace(training, on=(name,)))
        for before, after in zip(plain.parts, on.parts, strict=True):
            assert (after.bytes < before.bytes) == (before.switch == name), (name, before.name)
            assert after.plain_bytes == before.plain_bytes
    # The layers' inputs, and attention's output and lse.
    host = step_memory(SHAPE, replace(training, on=SWITCHES)).host_bytes
    assert host == (72 + 72) * GIB + 36 * (32 << 20)
    roomy, _ = switch_until_it_fits(SHAPE, replace(training, on=SWITCHES), "139GiB")
    assert 60 * GIB < host - roomy.host_bytes == 139 * GIB - roomy.peak_bytes


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


def test_a_budget_is_of_one_call_as_the_model_will_give_it() -> None:
    """With the gradients that the call returns, 3 GiB here: what it works in is the rest."""
    on = Training(262_144, lora=16, budget=5 * GIB, on=("quorum attention",))
    (part,) = (p for p in step_memory(SHAPE, on).parts if p.switch == "quorum attention")
    assert part.bytes <= 2 * GIB
    with pytest.raises(qa.BudgetError, match="is too small for this call"):
        step_memory(SHAPE, replace(on, budget=3 * GIB))


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    asked = ["estimate", "--model", str(path), "--tokens", "256K", "--lora", "16", "--device"]
    assert main([*asked, "cuda", "--memory", "80GiB", "--budget", "5GiB"]) == 0
    said = capsys.readouterr().out
    assert "148.38 GiB" in said
    assert "fits in 80.00 GiB with: " in said
    assert main([*asked, "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["switched_on"] == list(SWITCHES)
    assert found["model"]["parameters"] == 8_190_735_360
    assert found["peak_bytes"] < found["plain_bytes"]
    assert main([*asked, "cuda", "--heads", "8"]) == 2
    assert "--heads" in capsys.readouterr().err
    assert main(["estimate", "--tokens", "1K", "--memory", "1GiB"]) == 2
    assert "--model" in capsys.readouterr().err
