"""``long_prompt(model)``: prompts of any length for inference, one layer at a time."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quorum_attention.argument_checks import one_of, whole_number
from quorum_attention.execution.device.cuda_graphs import CudaGraphs
from quorum_attention.execution.device.lookup import backend_of, best_device, on_host
from quorum_attention.keywords import helps_with_names
from quorum_attention.recipes.attention import QuorumAttention
from quorum_attention.recipes.changes import (
    ChangeSet,
    base_model,
    changes_by,
    changing,
    undo_changes,
)
from quorum_attention.recipes.layer_calls import decoder_layers
from quorum_attention.recipes.model_shape import ModelShape, shape_of_model
from quorum_attention.recipes.patching import plain_class
from quorum_attention.recipes.prompt_changes import (
    OWNER,
    PromptForward,
    WeightsInHostMemory,
    prompt_forward_in,
)
from quorum_attention.recipes.prompt_memory import MARGIN, TokenBytes, working_bytes
from quorum_attention.units import counted, format_bytes, parse_memory

if TYPE_CHECKING:
    from quorum_attention.recipes.prefill_trial import PromptTrial
    from quorum_attention.recipes.prompt_runner import PromptRunner

# Where the weights of layers may lie.
WEIGHTS = ("device", "host")


@helps_with_names
def long_prompt(
    model: Any,
    *,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    folder: str | os.PathLike[str] | None = None,
    weights: str = "device",
    cache: Any = None,
    tile: int | None = None,
    progress: Any = None,
) -> Any:
    """Change a decoder of Transformers in place so that it runs prompts of any length,
    and return a cache for one prompt. Results stay the same.

    ``model.generate(ids, past_key_values=cache, max_new_tokens=...)`` then computes the
    prompt one layer at a time. Hidden states, queries and outputs are in host memory if
    the device has no room; keys and values go into the cache. If a model cannot run
    layer by layer, its prompts run in chunks, or as a whole if chunks would change
    results. A warning says why. Calls with gradients run as before.

    Args:
        model: a ``PreTrainedModel`` for causal language modelling, or PEFT's around
            one, with its weights loaded.
        device_memory: bytes of the device that the model may take in all: weights,
            cache and working memory, as a number or text such as "16GiB"; None: what is
            free, less a margin.
        host_memory: bytes of page-locked host memory that the cache may take; None:
            what is free, less a margin; 0: none.
        folder: a folder for mapped files, for the part of the cache that fits neither
            the device nor host memory; None: no files.
        weights: "device" leaves weights where they are. "host" keeps the weights of
            layers in page-locked host memory, and copies those of each layer to the
            device before it runs.
        cache: a folder that a cache was saved to, or a cache; None: a new cache.
        tile: outside of attention, this many tokens are computed at a time; None: a
            number that fits the memory.
        progress: False shows no progress; a callable gets (layers done, layers, label);
            None: a bar (lines in files), except for short prompts.

    Returns:
        A cache of Transformers. Print it to see which part lies where.

    Raises:
        ImportError: Transformers is not installed, or its version is not supported.
        TypeError, ValueError: an argument is wrong.
        NotImplementedError: the model has an encoder beside its decoder, or takes no
            cache of keys and values; or its weights cannot be kept in host memory.
    """
    one_of(weights, "weights", WEIGHTS)
    if tile is not None:
        whole_number(tile, "tile", 1)
    limit = (
        None if device_memory is None else parse_memory(device_memory, "device_memory")
    )
    if host_memory is not None:
        host_memory = parse_memory(host_memory, "host_memory", or_zero=True)
    base = base_model(model)
    changes = changes_by(base, OWNER)
    if changes is None or _keeps_weights(changes) != weights or not changes.hold(base):
        changes = _change(base, weights)
    forward = prompt_forward_in(changes)
    runner = forward.runner
    runner.tile = tile
    runner.progress = progress
    free = _free_beside_weights(base, forward, limit)
    runner.working = working_bytes(free)
    if cache is not None and not isinstance(cache, (str, os.PathLike)):
        return cache
    new_cache = _new_cache(base, forward, free, host_memory, folder)
    if cache is not None:
        _load(new_cache, cache)
    return new_cache


@helps_with_names
def undo_long_prompt(model: Any) -> None:
    """Undo ``long_prompt``: the model gets its own forward and attention back, and its
    weights are where they were. A model that was not changed stays as it is."""
    undo_changes(base_model(model), OWNER)


def _keeps_weights(changes: ChangeSet) -> str:
    """Return where a changed model keeps its weights, one of ``WEIGHTS``."""
    return "device" if prompt_forward_in(changes).weights is None else "host"


def _change(model: Any, weights: str) -> ChangeSet:
    """Change a model, after undoing what an earlier call changed.

    Raises:
        NotImplementedError: it has an encoder, or does not take the cache; or its
            weights cannot be kept in host memory.
    """
    from quorum_attention.recipes.prompt_runner import PromptRunner

    _check_is_decoder(model)
    with changing(model, OWNER) as changes:
        device = model.device
        host_weights = None
        if weights == "host":
            device = best_device() if device.type == "cpu" else device
            placement = WeightsInHostMemory(device)
            changes.make(model, placement)
            host_weights = placement.weights
        shape = shape_of_model(model) or _guessed_shape(model)
        token = TokenBytes.from_shape(shape, model.dtype.itemsize)
        runner = PromptRunner(device, token, 0, None)
        forward = PromptForward(runner, host_weights)
        changes.make(model, forward)
        reason = _choose_way(model, changes, forward)
    if reason is not None:
        way = "in chunks" if runner.runs_chunks else "whole, as without long_prompt"
        warnings.warn(
            f"{type(model).__name__} gets its prompts {way}, not one layer at a time: "
            f"{reason}",
            stacklevel=4,
        )
    return changes


def _check_is_decoder(model: Any) -> None:
    """Refuse models whose cache has keys of an encoder, too.

    Raises:
        NotImplementedError: the model has an encoder beside its decoder.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"{type(model).__name__} has an encoder and a decoder, and long_prompt "
            "runs models that are one decoder"
        )


def _choose_way(model: Any, changes: ChangeSet, forward: PromptForward) -> str | None:
    """Let a model's prompts run by layers if that is right, and return None. They run
    by chunks or whole otherwise, for the reason that is returned."""
    from quorum_attention.integrations.transformers import name_for
    from quorum_attention.recipes.prefill_trial import PromptTrial
    from quorum_attention.recipes.token_layers import TokenLayers

    runner = forward.runner
    device = runner.device
    layers = decoder_layers(model)
    trial = PromptTrial(
        model,
        plain_class(model).forward,
        layers,
        partial(_trial_cache, model, device),
        forward.weights,
    )
    refusal = trial.why_no_cache()
    if refusal is not None:
        raise NotImplementedError(
            f"{type(model).__name__} does not take the cache of a long prompt: "
            f"{refusal}"
        )
    name, _ = name_for(None)
    change = changes.make(model, QuorumAttention(name, "for prompts"))
    if not change.done:
        return _try_chunks(runner, trial, change.how)
    forward.reads_segments = True
    if device.type == "cuda":
        runner.token_layers = TokenLayers(layers, CudaGraphs(device), forward.weights)
    result = trial.try_layers()
    if isinstance(result, str):
        return _try_chunks(runner, trial, result)
    runner.layered = result
    return None


def _try_chunks(runner: PromptRunner, trial: PromptTrial, reason: str) -> str:
    """Let prompts run by chunks if that is right, or whole.

    Returns:
        The reason why they do not run by layers; and why not by chunks.
    """
    failure = trial.try_chunks()
    runner.runs_chunks = failure is None
    return reason if failure is None else f"{reason}; in chunks: {failure}"


def _guessed_shape(model: Any) -> ModelShape:
    """A shape with the width of the embeddings: MLPs are four times as wide, heads are
    not grouped."""
    vocabulary, width = model.get_input_embeddings().weight.shape
    n_layers = max(1, len(decoder_layers(model)))
    return ModelShape(
        kind=model.config.model_type,
        layers=n_layers,
        hidden=width,
        heads=1,
        kv_heads=1,
        head_dim=width,
        vocabulary=vocabulary,
        intermediate=4 * width,
        experts=0,
        experts_per_token=1,
        parameters=0,
        mlp_width=4 * width,
    )


def _trial_cache(model: Any, device: torch.device) -> Any:
    """An empty cache for a few tokens."""
    from quorum_attention.integrations.transformers.prompt_cache import PromptCache

    return PromptCache(model.config, device)


def _free_beside_weights(model: Any, forward: PromptForward, limit: int | None) -> int:
    """Bytes of the device that cache and working memory may take.

    Raises:
        ValueError: the limit is below what the weights take.
    """
    device = forward.runner.device
    free: int = backend_of(device).free_bytes(device)
    if limit is None:
        return int(free * (1 - MARGIN))
    n_bytes: int = sum(
        weight.nbytes for weight in model.parameters() if weight.device == device
    )
    if forward.weights is not None:
        n_bytes += forward.weights.device_bytes
    if on_host(device):
        n_bytes = 0
    usable = int(limit * (1 - MARGIN))
    if usable <= n_bytes:
        raise ValueError(
            f"device_memory must be more than the {format_bytes(n_bytes)} of weights "
            f"that lie on {device}, got {format_bytes(limit)}: "
            'weights="host" leaves two layers there'
        )
    return min(free, usable - n_bytes)


def _new_cache(
    model: Any,
    forward: PromptForward,
    free: int,
    host_memory: int | str | None,
    folder: str | os.PathLike[str] | None,
) -> Any:
    """An empty cache, in what computing layers leaves of the device."""
    from transformers import DynamicCache

    from quorum_attention.integrations.transformers.prompt_cache import PromptCache

    runner = forward.runner
    if not forward.reads_segments:
        return DynamicCache(config=model.config)
    cache = PromptCache(
        model.config,
        runner.device,
        device_memory=free - runner.working,
        host_memory=host_memory,
        folder=folder,
    )
    cache.notes = (
        _weights_words(model, forward),
        _way_words(model, runner),
        _room_words(runner, free),
    )
    return cache


def _load(cache: Any, folder: str | os.PathLike[str]) -> None:
    """Load a saved cache.

    Raises:
        NotImplementedError: the model's cache is one that cannot be saved.
    """
    if not hasattr(cache, "load"):
        raise NotImplementedError(
            f"cache={os.fspath(folder)!r}: the cache of this model lies in no "
            "segments, and is not saved"
        )
    cache.load(folder)


def _weights_words(model: Any, forward: PromptForward) -> str:
    """Say where the weights lie, for people."""
    n_bytes = Counter[str]()
    for weight in model.parameters():
        n_bytes[str(weight.device)] += weight.nbytes
    words = [f"{format_bytes(size)} on {place}" for place, size in n_bytes.items()]
    text = "weights: " + ", ".join(words)
    if forward.weights is not None:
        buffers = format_bytes(forward.weights.device_bytes)
        text += (
            f"; two layers at a time are copied to {forward.runner.device} ({buffers})"
        )
    return text


def _way_words(model: Any, runner: Any) -> str:
    """Say how prompts run, for people."""
    if not runner.runs_chunks:
        return "prompts: whole, as the model runs them"
    if runner.layered is None:
        return "prompts: in chunks of tokens through all layers"
    n_layers = len(decoder_layers(model))
    return f"prompts: one layer after the other, {counted(n_layers, 'layer')}"


def _room_words(runner: Any, free: int) -> str:
    """Say what the device holds beside weights, for people."""
    cache_bytes = format_bytes(free - runner.working)
    working = format_bytes(runner.working)
    return (
        f"on {runner.device}: up to {cache_bytes} of cache, {working} to compute "
        "layers with"
    )
