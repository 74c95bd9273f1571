"""The sizes of a decoder, read from its configuration.

Parameters are counted on a model without memory (torch's meta device) where
Transformers is installed and knows the model. Elsewhere a formula counts them, which
knows decoders with grouped heads or latent attention, experts, shared experts and dense
layers before experts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.recipes.layer_cache import LayerCache, read_layer_caches

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
_MLP_WIDTHS = ("n_inner", "ffn_dim", "ffn_hidden_size")  # intermediate_size elsewhere
# Kinds of models whose MLPs are four times as wide as hidden states, if their
# configurations do not say otherwise.
_FOUR_TIMES_AS_WIDE = (
    "bloom",
    "codegen",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "openai-gpt",
)
_WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")
# Types of layers without attention: recurrences, convolutions, and MLPs that are layers
# of their own. Transformers 5 has no other names; "mamba" and "recurrent" are older.
_OTHER_LAYERS = ("conv", "linear_attention", "mamba", "mlp", "moe", "recurrent")
# Types of layers with a recurrence beside attention.
_HYBRID_LAYERS = ("hybrid", "hybrid_sliding")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only model.

    Attributes:
        kind: ``model_type`` of its configuration.
        layers: the number of layers.
        hidden: width of the hidden states.
        heads: query heads. In latent attention, the heads after they are expanded.
        kv_heads: key/value heads.
        head_dim: width of a head.
        vocabulary: the number of tokens of the vocabulary, which is the number of
            logits of a token.
        intermediate: width of an MLP, or of one expert.
        experts: experts of an MLP; 0 if it has none.
        experts_per_token: experts that compute a token; 1 without experts.
        parameters: the number of all parameters.
        mlp_width: the width of the widest MLP that a token goes through: of a dense
            MLP, or of a token's experts together, with those that all tokens share.
        layer_caches: what each layer keeps in a cache, and one more for what the model
            keeps beside that; empty: not measured.
        other_layers: the numbers of layers that have no attention: recurrences,
            convolutions, and MLPs that are layers of their own.
        hybrid_layers: how many layers have a recurrence beside attention.
        by_formula: parameters were counted by a formula, as Transformers did not build
            the model.
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
    layer_caches: tuple[LayerCache, ...] = ()
    other_layers: tuple[int, ...] = ()
    hybrid_layers: int = 0
    by_formula: bool = False

    @property
    def attention_layers(self) -> int:
        """How many layers have attention."""
        return self.layers - len(self.other_layers)

    def caches(self) -> tuple[LayerCache, ...]:
        """Return what each layer keeps in a cache. Where that was not measured, layers
        with attention keep keys and values of all tokens, and others nothing."""
        if self.layer_caches:
            return self.layer_caches
        key_and_value = LayerCache(2 * self.kv_heads * self.head_dim)
        return tuple(
            LayerCache(0) if number in self.other_layers else key_and_value
            for number in range(self.layers)
        )

    def attention_windows(self) -> Counter[int | None]:
        """Count the layers with attention, by how many tokens a query sees before it;
        None: all."""
        return Counter(
            cache.window
            for number, cache in enumerate(self.caches()[: self.layers])
            if number not in self.other_layers
        )

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys have norms of their own."""
        return self.kind in _HEAD_NORMS

    @property
    def torch_norms(self) -> bool:
        """Whether torch has a kernel for the model's norms. (It has none for Gemma's,
        which multiply by 1 + weight.)"""
        return not self.kind.startswith("gemma")


def read_shape(
    config: Configuration | str | Path,
    parameters: int | None = None,
    *,
    with_caches: bool = False,
) -> ModelShape:
    """Return the shape of a model, read from its configuration.

    Args:
        config: the path of a ``config.json`` or of its folder, or its contents as a
            mapping. For a model of images and text, its ``text_config`` is read.
        parameters: the number of parameters of the model; None: they are counted.
        with_caches: also find out what each layer keeps in a cache. That takes two to
            four seconds, for a model that Transformers knows.

    Raises:
        ValueError: ``config`` is no such file, or lacks a size (the message names it);
            or the model has an encoder beside its decoder, or no attention.
        OSError: the file cannot be read.
    """
    contents = config if isinstance(config, Mapping) else _read_file(Path(config))
    inner = contents.get("text_config")
    sizes: Configuration = inner if isinstance(inner, Mapping) else contents
    _check_is_estimated(contents)
    built = _build_configuration(sizes)
    shape = _read_sizes(_with_common_names(sizes, built))
    if parameters is not None and not with_caches:
        return replace(shape, parameters=parameters)
    model = _build(built)
    if parameters is None:
        shape = replace(shape, by_formula=model is None)
        parameters = _count_parameters(sizes, shape, model)
    if with_caches and model is not None:
        shape = replace(shape, layer_caches=_layer_caches(model))
    return replace(shape, parameters=parameters)


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
        contents = json.loads(file.read_text(encoding="utf-8"), object_hook=_decoded)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a config.json: {error}") from None
    if not isinstance(contents, Mapping):
        raise ValueError(
            f"a model's configuration must be an object of JSON, got {shown(contents)}"
        )
    return contents


def _decoded(value: dict[str, Any]) -> Any:
    """An object of JSON, or the number that Transformers writes as one, such as
    ``{"__float__": "Infinity"}``."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _check_is_estimated(config: Configuration) -> None:
    """Refuse models of which the sizes of a decoder do not say what they take.

    Raises:
        ValueError: the model has an encoder beside its decoder, or no attention.
    """
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise ValueError(
            f"{kind} has an encoder and a decoder, and only models that are one "
            "decoder are estimated. For one of its attention calls, leave the model "
            "out and give --tokens, --heads and --head-dim"
        )
    if kind in _WITHOUT_ATTENTION:
        raise ValueError(
            f"{kind} has no attention, and only models with attention are estimated. "
            "Its layers keep states of one size, however long a prompt is. For the "
            "rest, measure a short prompt: what it takes grows with its tokens"
        )


def _configuration_class(config: Configuration) -> Any:
    """Transformers' class of a configuration, or None if it has none."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[kind]  # its ``get`` finds nothing: classes are loaded late


def _build_configuration(config: Configuration) -> Any:
    """The configuration that Transformers makes of a ``config.json``, or None if it
    makes none."""
    configuration_class = _configuration_class(config)
    if configuration_class is None:
        return None
    try:
        return configuration_class.from_dict(dict(config))
    except Exception:  # whatever it lacks, sizes are read as they are written
        return None


def _with_common_names(config: Configuration, built: Any) -> Configuration:
    """A configuration whose sizes have the names of most kinds of models, too: GPT-2's
    ``n_embd`` is ``hidden_size`` of others. Transformers knows these names.

    Args:
        built: the configuration of Transformers, which knows what each layer is; None:
            it made none.
    """
    configuration_class = _configuration_class(config)
    if configuration_class is None:
        return config
    names = configuration_class.attribute_map
    sizes = {common: config.get(name) for common, name in names.items()}
    layer_types = getattr(built, "layer_types", None) or sizes.get("layer_types")
    return {**sizes, **config, "layer_types": layer_types or config.get("layer_types")}


def _build(built: Any) -> Any:
    """The model without memory that Transformers builds of a configuration, or None if
    it builds none."""
    if built is None:
        return None
    try:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            # Products of experts are not defined in other dtypes without memory.
            return AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)
    except Exception:  # whatever it lacks, formulas count
        return None


def _count_parameters(config: Configuration, shape: ModelShape, model: Any) -> int:
    if model is None:
        return _count_by_formula(config, shape)
    return int(model.num_parameters())


def _layer_caches(model: Any) -> tuple[LayerCache, ...]:
    """Tell what layers keep in a cache; empty: the model needs memory to run."""
    try:
        return read_layer_caches(model)
    except Exception:  # as of a model that asks tensors for their numbers
        return ()


def _read_sizes(config: Configuration) -> ModelShape:
    """The sizes that a configuration says, without a number of parameters.

    Raises:
        ValueError: a size is missing or makes no sense.
    """
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    head_dim = max(1, hidden // heads)
    kv_heads = heads
    if _has_latents(config):
        rotated_dim = _size(config, "qk_rope_head_dim")
        head_dim = _size(config, "qk_nope_head_dim") + rotated_dim
    else:
        head_dim = _size(config, "head_dim", head_dim)
        kv_heads = _size(config, "num_key_value_heads", heads)
    experts = _first(config, _EXPERTS, 0)
    kind = str(config.get("model_type", "unknown"))
    default_width = 4 * hidden if kind in _FOUR_TIMES_AS_WIDE else 0
    layer_types = config.get("layer_types") or ()
    width = _first(config, _MLP_WIDTHS, default_width) or None
    has_expert_width = experts and config.get("moe_intermediate_size") is not None
    width_name = "moe_intermediate_size" if has_expert_width else "intermediate_size"
    shape = ModelShape(
        kind=kind,
        layers=_size(config, "num_hidden_layers", len(layer_types)),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=_size(config, "vocab_size"),
        intermediate=_size(config, width_name, width),
        experts=experts,
        experts_per_token=_experts_per_token(config) if experts else 1,
        parameters=0,
        mlp_width=0,
        other_layers=_numbers_of(_OTHER_LAYERS, layer_types),
        hybrid_layers=len(_numbers_of(_HYBRID_LAYERS, layer_types)),
    )
    mlps = _mlps_of(config, shape)
    widths = []
    if mlps.dense_layers:
        widths.append(mlps.dense_width)
    if mlps.dense_layers < shape.layers:
        width_of_experts = shape.experts_per_token * shape.intermediate
        widths.append(width_of_experts + mlps.shared_width)
    return replace(shape, mlp_width=max(widths))


def _numbers_of(types: tuple[str, ...], layer_types: Sequence[str]) -> tuple[int, ...]:
    """The numbers of the layers of these types."""
    return tuple(number for number, name in enumerate(layer_types) if name in types)


def _has_latents(config: Configuration) -> bool:
    """Whether keys and values are made of latents."""
    return config.get("kv_lora_rank") is not None


class _MlpSizes(NamedTuple):
    """The sizes of MLPs beside those of experts.

    Attributes:
        dense_layers: how many layers have an MLP without experts.
        dense_width: of such an MLP.
        shared_width: of what all tokens share beside experts.
    """

    dense_layers: int
    dense_width: int
    shared_width: int


def _mlps_of(config: Configuration, shape: ModelShape) -> _MlpSizes:
    dense_layers = shape.layers
    if shape.experts:
        dense_layers = _dense_layers(config, shape.layers)
    dense_width = _size(config, "intermediate_size", shape.intermediate)
    shared_width = _shared_width(config, shape.intermediate)
    return _MlpSizes(dense_layers, dense_width, shared_width)


def _count_by_formula(config: Configuration, shape: ModelShape) -> int:
    """Count all parameters but biases, which are less than a thousandth."""
    hidden = shape.hidden
    layers = shape.layers
    mlps = _mlps_of(config, shape)
    is_tied = config.get("tie_word_embeddings", shape.kind in _TIED)
    embeddings = shape.vocabulary * hidden * (1 if is_tied else 2)
    norms = (2 * layers + 1) * hidden
    count_attention = _count_latent if _has_latents(config) else _count_attention
    attention = layers * count_attention(config, shape)
    dense = mlps.dense_layers * 3 * hidden * mlps.dense_width
    # Each expert, with its row of the router; and what all tokens share.
    experts = shape.experts * hidden * (3 * shape.intermediate + 1)
    shared = 3 * hidden * mlps.shared_width
    with_experts = layers - mlps.dense_layers
    return embeddings + norms + attention + dense + with_experts * (experts + shared)


def _count_attention(config: Configuration, shape: ModelShape) -> int:
    """Count the parameters of one layer's attention."""
    # A head of queries comes with one of the output, a head of keys with values.
    n_heads = 2 * (shape.heads + shape.kv_heads)
    projections = shape.hidden * n_heads * shape.head_dim
    norms = 2 * shape.head_dim if shape.head_norms else 0
    return projections + norms


def _count_latent(config: Configuration, shape: ModelShape) -> int:
    """Count the parameters of one layer's latent attention, with its norms."""
    hidden = shape.hidden
    query_rank = _first(config, ("q_lora_rank",), 0)
    kv_rank = _size(config, "kv_lora_rank")
    rotated_dim = _size(config, "qk_rope_head_dim")
    value_dim = _size(config, "v_head_dim", shape.head_dim)
    query_width = shape.heads * shape.head_dim
    query = hidden * query_width
    if query_rank:
        query = query_rank * (hidden + query_width + 1)
    compressed = hidden * (kv_rank + rotated_dim) + kv_rank
    plain_dim = shape.head_dim - rotated_dim
    expanded = kv_rank * shape.heads * (plain_dim + value_dim)
    output = shape.heads * value_dim * hidden
    return query + compressed + expanded + output


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
    listed = _listed_dense_layers(config, layers)
    if listed is not None:
        return listed
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


def _listed_dense_layers(config: Configuration, layers: int) -> int | None:
    """The same, of a configuration that lists its layers; None: it does not."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, (list, tuple)):
        return list(kinds).count("dense")
    layer_types: list[str] = list(config.get("layer_types") or ())
    if "moe" in layer_types or "mlp" in layer_types:
        return layers - layer_types.count("moe")
    numbers = config.get("moe_layers")
    return layers - len(numbers) if isinstance(numbers, (list, tuple)) else None


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
    if isinstance(value, list) and all(type(size) is int for size in value):
        value = max(value, default=0)  # of the layers
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the model's configuration needs a number above 0 as {name!r}: {value!r}"
        )
    return value
