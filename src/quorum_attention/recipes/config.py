"""A model's sizes, read from its ``config.json`` as Hugging Face publishes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorum_attention.counts import shown

_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "gemma3")
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")


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
        parameters: how many, all together, counted as Llama's: without biases, which are less than
            a thousandth.
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

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys have norms of their own."""
        return self.kind in _HEAD_NORMS

    @property
    def torch_norms(self) -> bool:
        """Whether torch has a kernel for its norms: Gemma's multiply by 1 + weight."""
        return not self.kind.startswith("gemma")

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
    found: Any = config
    if isinstance(config, (str, Path)):
        file = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
        if not file.exists():
            raise FileNotFoundError(f"{file}: give the path of a config.json, or of its folder")
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a config.json: {error}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"a model's configuration must be an object of JSON, got {shown(found)}")
    inner = found.get("text_config")
    config = inner if isinstance(inner, Mapping) else found
    kind = str(config.get("model_type", "unknown"))
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", hidden // heads)
    layers, vocabulary = _size(config, "num_hidden_layers"), _size(config, "vocab_size")
    experts = _size(config, "num_local_experts", _size(config, "num_experts", 0))
    of_expert = config.get("moe_intermediate_size") if experts else None
    width = _size(config, "intermediate_size" if of_expert is None else "moe_intermediate_size")
    tied = bool(config.get("tie_word_embeddings", kind in _TIED))
    sliding = config.get("use_sliding_window") is not False and config.get("sliding_window")
    attention = 2 * hidden * (heads + kv_heads) * head_dim + 2 * head_dim * (kind in _HEAD_NORMS)
    mlp = 3 * hidden * width
    if experts:
        mlp = experts * (mlp + hidden)  # and a row of the router
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return ModelShape(
        kind, layers, hidden, heads, kv_heads, head_dim, vocabulary, width, experts,
        _size(config, "num_experts_per_tok") if experts else 1, tied,
        _size(config, "sliding_window") if sliding else None,
        parameters=embeddings + layers * (attention + mlp + 2 * hidden) + hidden,
    )  # fmt: skip


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise ValueError(f"the model's configuration has no {name!r}: it is needed")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name!r} of the configuration must be a number above 0, got {value!r}")
    return value


__all__ = ["ModelShape", "read_shape"]
