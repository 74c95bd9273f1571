"""A model's sizes, read from its ``config.json`` as Hugging Face publishes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorum_attention.counts import shown

# Kinds whose parameters are counted exactly, and how their layers differ from Llama's:
# norms of a layer; a norm of queries and of keys; biases of q, k, v; bias of o; a sink per head.
_NORMS = {"gemma2": 4, "gemma3_text": 4, "gemma3": 4}
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "gemma3")
_INPUT_BIASES = ("qwen2",)
_NO_BIASES = ("mistral", "mixtral")  # whatever their configuration says
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")
KINDS = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3_text",
    "gemma3", "gpt_oss",
)  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model.

    Attributes:
        kind: ``model_type`` of its configuration.
        layers, hidden, heads, kv_heads, head_dim, vocabulary: counts and widths.
        intermediate: width of an MLP (of one expert, where there are experts).
        experts, experts_per_token: 0 and 1 where the MLP is a plain one.
        tied: whether the output projection is the embedding.
        window: tokens of the sliding layers, None without.
        parameters: how many, all together.
        exact: whether ``kind`` is one whose parameters are counted one by one; others are counted
            as Llama's.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    experts: int
    experts_per_token: int
    tied: bool
    window: int | None
    parameters: int
    exact: bool

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys have norms of their own."""
        return self.kind in _HEAD_NORMS

    @property
    def attention_width(self) -> int:
        """Numbers that q, k, v and o hold for each token."""
        return 2 * (self.heads + self.kv_heads) * self.head_dim


def read_shape(config: Mapping[str, Any] | str | Path) -> ModelShape:
    """The shape of a model from its configuration.

    Args:
        config: the path of a ``config.json`` or of its folder, or what it holds. A model of several
            parts (images and text) is read as its ``text_config``.

    Raises:
        ValueError: it is no such file, or lacks a size: named.
        OSError: the file cannot be read.
    """
    return _shape(_read(config) if isinstance(config, (str, Path)) else config)


def _read(path: str | Path) -> Any:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise FileNotFoundError(f"{file}: give the path of a config.json, or of its folder")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a config.json: {error}") from None


def _shape(config: Any) -> ModelShape:
    if not isinstance(config, Mapping):
        raise ValueError(f"a model's configuration must be an object of JSON, got {shown(config)}")
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    kind = str(config.get("model_type", "unknown"))
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    experts = _first(config, "num_local_experts", "num_experts") or 0
    shape: dict[str, int] = {
        "layers": _size(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _first(config, "num_key_value_heads") or heads,
        "head_dim": _first(config, "head_dim") or hidden // heads,
        "vocabulary": _size(config, "vocab_size"),
        "intermediate": (_first(config, "moe_intermediate_size") if experts else None)
        or _size(config, "intermediate_size"),
        "experts": experts,
        "experts_per_token": (_size(config, "num_experts_per_tok") if experts else 1),
    }
    tied = bool(config.get("tie_word_embeddings", kind in _TIED))
    count = _parameters(kind, config, tied, shape)
    window = _first(config, "sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    return ModelShape(
        kind, **shape, tied=tied, window=window, parameters=count, exact=kind in KINDS
    )


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if value is not None:
            return _whole(name, value)
    return None


def _size(config: Mapping[str, Any], name: str) -> int:
    if config.get(name) is None:
        raise ValueError(f"the model's configuration has no {name!r}: it is needed")
    return _whole(name, config[name])


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name!r} of the configuration must be a number above 0, got {value!r}")
    return value


def _parameters(kind: str, config: Mapping[str, Any], tied: bool, shape: Mapping[str, int]) -> int:
    """All of a model's parameters."""
    layers, hidden, heads, kv_heads, head_dim, vocabulary, intermediate, experts, _ = shape.values()
    inputs, outputs = (heads + 2 * kv_heads) * head_dim, heads * head_dim
    attention = hidden * (inputs + outputs)
    default = kind == "gpt_oss"
    biased = config.get("attention_bias", default) and kind not in _NO_BIASES
    if biased or kind in _INPUT_BIASES:
        attention += inputs + (0 if kind in _INPUT_BIASES else hidden)
    if kind in _HEAD_NORMS:
        attention += 2 * head_dim
    mlp = 3 * hidden * intermediate
    if config.get("mlp_bias") or kind == "gpt_oss":
        mlp += 2 * intermediate + hidden
    if experts:
        mlp = experts * (mlp + hidden)  # and a row of the router
    if kind == "gpt_oss":
        attention += heads
        mlp += experts  # the router's bias
    layer = attention + mlp + _NORMS.get(kind, 2) * hidden
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return embeddings + layers * layer + hidden


__all__ = ["KINDS", "ModelShape", "read_shape"]
