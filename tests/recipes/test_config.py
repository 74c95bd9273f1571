"""A model's sizes out of its config.json, parameters one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quorum_attention.recipes.step import read_shape

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
}  # fmt: skip


def test_qwen3_8b_has_its_published_number_of_parameters(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    shape = read_shape(path)
    assert shape.parameters == 8_190_735_360
    assert (shape.layers, shape.kv_heads, shape.window) == (36, 8, None)
    assert read_shape({"text_config": QWEN3_8B}) == read_shape(tmp_path) == shape


@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text",
     "gpt_oss"],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ],
)
def test_what_is_missing_or_senseless_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_shape({**QWEN3_8B, **change})


@pytest.mark.parametrize(
    ("text", "message"), [("weights", r"json is not a config\.json"), ("[]", "object of JSON")]
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_shape(path)
