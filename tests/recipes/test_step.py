"""A step's memory by part: the figures of a published shape, and what switches do to them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPE = read_shape(QWEN3_8B)


def test_a_quarter_million_tokens_of_qwen3_8b() -> None:
    """GiB by hand: 262,144 tokens times width times two bytes."""
    found = step_memory(SHAPE, Training(262_144, lora=16))
    parts = {part.name: part.bytes / GIB for part in found.parts}
    assert parts["logits and gradient"] == pytest.approx(2 * 74.19, abs=0.01)
    assert parts["layer checkpoints"] == 72
    assert parts["MLP intermediates of a layer"] == 18
    assert parts["q, k, v, o of a layer"] == 5
    assert parts["weights"] == pytest.approx(8.19 * 2 / 1.0737, rel=0.01)
    assert found.peak_bytes == found.plain_bytes


def test_four_times_the_tokens_are_four_times_the_activations() -> None:
    short, long = (step_memory(SHAPE, Training(n, lora=16)) for n in (262_144, 1_048_576))
    for a, b in zip(short.parts, long.parts, strict=True):
        factor = 1 if a.name in ("weights", "gradients of weights", "optimizer") else 4
        if a.name != "attention's working memory":
            assert b.bytes == factor * a.bytes, a.name


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
        adapted, full = (one["MLP intermediates of a layer"] for one in parts)
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


@pytest.mark.parametrize("budget", [5 * GIB, None])
def test_what_is_switched_on_makes_it_fit(budget: int | None) -> None:
    training = Training(262_144, lora=16, budget=budget)
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


def test_what_a_configuration_says_cannot_be_said_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    assert main(["estimate", "--model", str(path), "--tokens", "1K", "--heads", "8"]) == 2
    assert "--heads" in capsys.readouterr().err
    assert main(["estimate", "--tokens", "1K", "--memory", "1GiB"]) == 2
    assert "--model" in capsys.readouterr().err
