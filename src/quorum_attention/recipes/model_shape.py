"""The sizes of a decoder, read from its configuration.

Parameters are counted on a model without memory (torch's meta device) where
Transformers is installed and knows the model. Elsewhere a formula counts them, which
knows decoders with grouped heads or latent attention, experts, shared experts and dense
layers before experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quorum_attention.argument_checks import shown

Configuration = Mapping[str, Any]
"""What a ``config.json`` holds."""

# Kinds of models whose queries and keys have norms; whose output projection is the
# embedding.
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "gemma3")
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")
# The names that configurations have for one size; the first that is there counts.
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
)
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model.

    Attributes:
        kind: ``model_type`` of its configuration.
        layers, hidden, heads, kv_heads, head_dim, vocabulary: counts and widths. Latent
            attention counts as attention of expanded heads, as its layers compute it.
        intermediate: width of an MLP, or of one expert.
        experts, experts_per_token: 0 and 1 if the MLP has no experts.
        parameters: how many, all together.
        mlp_width: the widest MLP that a token goes through: a dense one, or its experts
            with those that all tokens share.
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
    parameters: int
    mlp_width: int

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys have norms of their own."""
        return self.kind in _HEAD_NORMS

    @property
    def torch_norms(self) -> bool:
        """Whether torch has a kernel for its norms: Gemma's multiply by 1 + weight."""
        return not self.kind.startswith("gemma")


def read_shape(
    config: Configuration | str | Path, parameters: int | None = None
) -> ModelShape:
    """The shape of a model from its configuration.

    Args:
        config: the path of a ``config.json`` or of its folder, or its contents as a
            mapping. Of a model with images and text the ``text_config`` is read.
        parameters: how many the model has, if that is known; None: they are counted.

    Raises:
        ValueError: it is not such a file, or lacks a size; the message names it.
        OSError: the file cannot be read.
    """
    contents = config if isinstance(config, Mapping) else _read_file(Path(config))
    inner = contents.get("text_config")
    sizes: Configuration = inner if isinstance(inner, Mapping) else contents
    decoder = _DecoderSizes.of_config(sizes)
    if parameters is None:
        parameters = _count_built(sizes)
    if parameters is None:
        parameters = decoder.count_parameters()
    return replace(decoder.shape, parameters=parameters)


def shape_of_model(model: Any) -> ModelShape | None:
    """The shape of a model of Transformers; None where its configuration has sizes by
    other names."""
    n_parameters = sum(weight.numel() for weight in model.parameters())
    try:
        return read_shape(model.config.to_dict(), n_parameters)
    except ValueError:
        return None


def _read_file(path: Path) -> Configuration:
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(
            f"{file}: give the path of a config.json, or of its folder"
        )
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a config.json: {error}") from None
    if not isinstance(contents, Mapping):
        raise ValueError(
            f"a model's configuration must be an object of JSON, got {shown(contents)}"
        )
    return contents


def _count_built(config: Configuration) -> int | None:
    """The parameters of the model that Transformers builds, or None if it does not."""
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    except ImportError:
        return None
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    try:
        with torch.device("meta"):
            built = CONFIG_MAPPING[kind].from_dict(dict(config))
            model = AutoModelForCausalLM.from_config(built)
    except Exception:  # whatever it lacks, the formula counts
        return None
    return int(model.num_parameters())


@dataclass(frozen=True)
class _DecoderSizes:
    """The sizes that the formula counts parameters from.

    Attributes:
        shape: the sizes that others read too, without a number of parameters.
        dense_width: of an MLP without experts.
        expert_width, shared_width: of one expert; of what all tokens share beside
            experts.
        dense_layers: how many layers have an MLP without experts.
        query_rank, kv_rank: of latent attention; 0: queries, or keys and values, have
            no latents.
        rotated_dim, value_dim: of latent attention, the rotated part of a head and its
            values.
        tied: whether the output layer is the embedding.
    """

    shape: ModelShape
    dense_width: int
    expert_width: int
    shared_width: int
    dense_layers: int
    query_rank: int
    kv_rank: int
    rotated_dim: int
    value_dim: int
    tied: bool

    @classmethod
    def of_config(cls, config: Configuration) -> _DecoderSizes:
        """The sizes that a configuration says.

        Raises:
            ValueError: a size is missing or makes no sense.
        """
        kind = str(config.get("model_type", "unknown"))
        hidden = _size(config, "hidden_size")
        heads = _size(config, "num_attention_heads")
        layers = _size(config, "num_hidden_layers")
        latent = config.get("kv_lora_rank") is not None
        rotated_dim = _size(config, "qk_rope_head_dim") if latent else 0
        if latent:
            head_dim = _size(config, "qk_nope_head_dim") + rotated_dim
        else:
            head_dim = _size(config, "head_dim", max(1, hidden // heads))
        experts = _first(config, _EXPERTS, 0)
        has_expert_width = experts and config.get("moe_intermediate_size") is not None
        expert_width = _size(
            config, "moe_intermediate_size" if has_expert_width else "intermediate_size"
        )
        dense_width = _size(config, "intermediate_size", expert_width)
        shared_width = _shared_width(config, expert_width)
        dense_layers = _dense_layers(config, layers) if experts else layers
        experts_per_token = _experts_per_token(config) if experts else 1
        width_of_experts = experts_per_token * expert_width + shared_width
        shape = ModelShape(
            kind=kind,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads if latent else _size(config, "num_key_value_heads", heads),
            head_dim=head_dim,
            vocabulary=_size(config, "vocab_size"),
            intermediate=expert_width if experts else dense_width,
            experts=experts,
            experts_per_token=experts_per_token,
            parameters=0,
            mlp_width=_widest(
                (dense_layers, dense_width), (layers - dense_layers, width_of_experts)
            ),
        )
        return cls(
            shape=shape,
            dense_width=dense_width,
            expert_width=expert_width,
            shared_width=shared_width,
            dense_layers=dense_layers,
            query_rank=_first(config, ("q_lora_rank",), 0) if latent else 0,
            kv_rank=_size(config, "kv_lora_rank") if latent else 0,
            rotated_dim=rotated_dim,
            value_dim=_size(config, "v_head_dim", head_dim) if latent else head_dim,
            tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        )

    def count_parameters(self) -> int:
        """All parameters but biases, which are less than a thousandth."""
        layers = self.shape.layers
        hidden = self.shape.hidden
        embeddings = self.shape.vocabulary * hidden * (1 if self.tied else 2)
        norms = (2 * layers + 1) * hidden
        attention = layers * self._attention_parameters()
        dense = self.dense_layers * 3 * hidden * self.dense_width
        with_experts = layers - self.dense_layers
        # Each expert, with its row of the router; and what all tokens share.
        experts = self.shape.experts * hidden * (3 * self.expert_width + 1)
        shared = 3 * hidden * self.shared_width
        return (
            embeddings + norms + attention + dense + with_experts * (experts + shared)
        )

    def _attention_parameters(self) -> int:
        """Count the parameters of one layer's attention."""
        if self.kv_rank:
            return self._latent_attention_parameters()
        # A head of queries comes with one of the output, a head of keys with values.
        shape = self.shape
        n_heads = 2 * (shape.heads + shape.kv_heads)
        projections = shape.hidden * n_heads * shape.head_dim
        norms = 2 * shape.head_dim if shape.head_norms else 0
        return projections + norms

    def _latent_attention_parameters(self) -> int:
        """Count the parameters of one layer's latent attention, with its norms."""
        heads = self.shape.heads
        hidden = self.shape.hidden
        query_width = heads * self.shape.head_dim
        query = hidden * query_width
        if self.query_rank:
            query = self.query_rank * (hidden + query_width + 1)
        latent_width = self.kv_rank + self.rotated_dim
        compressed = hidden * latent_width + self.kv_rank
        plain_dim = self.shape.head_dim - self.rotated_dim
        expanded_width = heads * (plain_dim + self.value_dim)
        expanded = self.kv_rank * expanded_width
        output = heads * self.value_dim * hidden
        return query + compressed + expanded + output


def _widest(*layers: tuple[int, int]) -> int:
    """The largest width of layers of several kinds: (how many, width) of each."""
    return max(width for n_layers, width in layers if n_layers)


def _experts_per_token(config: Configuration) -> int:
    present = [name for name in _EXPERTS_PER_TOKEN if config.get(name) is not None]
    return _size(config, (present or _EXPERTS_PER_TOKEN)[0])


def _shared_width(config: Configuration, expert_width: int) -> int:
    """The width of what all tokens go through, beside a layer's experts."""
    width = config.get("shared_expert_intermediate_size")
    if width is not None:
        return int(width)
    if config.get("model_type") == "llama4_text":  # has one, and does not say so
        return expert_width
    return _first(config, _SHARED_EXPERTS, 0) * expert_width


def _dense_layers(config: Configuration, layers: int) -> int:
    """How many layers of a model with experts have none."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, (list, tuple)):
        return sum(kind == "dense" for kind in kinds)
    numbers = config.get("moe_layers")
    if isinstance(numbers, (list, tuple)):
        return layers - len(numbers)
    first = _first(config, _DENSE_LAYERS, 0)
    apart = set(config.get("mlp_only_layers") or ())
    period = _first(config, ("decoder_sparse_step", "interleave_moe_layer_step"), 1)
    frequency = config.get("moe_layer_freq")
    frequency = frequency if isinstance(frequency, int) and frequency > 0 else 1
    sparse = [
        layer
        for layer in range(first, layers)
        if (layer + 1) % period == 0 and layer % frequency == 0 and layer not in apart
    ]
    return layers - len(sparse)


def _first(config: Configuration, names: tuple[str, ...], default: int) -> int:
    """The first of these numbers that a configuration says, which may be 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return default


def _size(config: Configuration, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the model's configuration needs a number above 0 as {name!r}: {value!r}"
        )
    return value
