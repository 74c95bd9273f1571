"""Whether a model's layers can run one after the other over a whole prompt, tried on a few tokens.

Layers of some models hand each other more than hidden states, or have no attention. Their results
change, or they fail; such a model gets its prompts in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quorum_attention.recipes.attention import agree
from quorum_attention.recipes.host_weights import HostWeights
from quorum_attention.recipes.layer_calls import LayerCall, layers_replaced_by
from quorum_attention.recipes.patching import evaluating
from quorum_attention.recipes.prefill import LayeredModel, LayerwisePrefill
from quorum_attention.recipes.prompt_inputs import PromptInputs
from quorum_attention.recipes.tile_storage import DeviceTiles

_TRIAL_TOKENS = 48
_TRIAL_TILE = 20
# Tokens behind the prompt, which see what is in the cache.
_NEXT_TOKENS = 3
# Ids of the trial: large ones may stand for images.
_TRIAL_VALUES = 11


def try_layers(
    model: Any,
    run_model: Callable[..., Any],
    layers: Sequence[Any],
    new_cache: Callable[[], Any],
    weights: HostWeights | None,
) -> LayeredModel | str:
    """Try a model's layers one after the other against the model as it is.

    Args:
        model: the model, whose layers are replaceable.
        run_model: its own forward.
        layers: of its decoder.
        new_cache: makes an empty cache.
        weights: of the layers, if they are in host memory.

    Returns:
        The model for ``LayerwisePrefill``, or why its layers cannot run so.
    """
    if not layers:
        return "it has no decoder layers that are known"
    try:
        with torch.no_grad(), evaluating(model):
            layered = _try(model, run_model, layers, new_cache, weights)
    except Exception as error:  # whatever it is, the model gets its prompts in chunks
        return f"it failed on a few tokens: {type(error).__name__}: {error}"
    return layered or "it had other results for parts of the tokens"


def _try(
    model: Any,
    run_model: Callable[..., Any],
    layers: Sequence[Any],
    new_cache: Callable[[], Any],
    weights: HostWeights | None,
) -> LayeredModel | None:
    """The layered model, if its results are those of the model as it is."""
    table = model.get_input_embeddings().weight
    values = min(_TRIAL_VALUES, len(table))
    ids = torch.arange(_TRIAL_TOKENS + _NEXT_TOKENS, device=table.device)[None] % values
    prompt_ids = ids[:, :_TRIAL_TOKENS]
    next_ids = ids[:, _TRIAL_TOKENS:]
    tuple_lengths: list[int] = []

    def observe(number: int, call: LayerCall) -> Any:
        if number != len(tuple_lengths):
            raise NotImplementedError("it does not run its layers in their order")
        with layers_replaced_by(None):
            result = call.run(layers[number])
        tuple_lengths.append(_tuple_length(result))
        return result

    cache = new_cache()
    with layers_replaced_by(observe):
        expected = run_model(model, input_ids=prompt_ids, past_key_values=cache, use_cache=True)
    expected_next = run_model(model, input_ids=next_ids, past_key_values=cache, use_cache=True)

    layered = LayeredModel(model, run_model, layers, tuple_lengths, weights)
    cache = new_cache()
    inputs = PromptInputs.from_arguments({"input_ids": prompt_ids, "use_cache": True}, past=0)
    assert inputs is not None
    tiles = DeviceTiles(table.device)
    result = LayerwisePrefill(layered, inputs, cache, tiles, _TRIAL_TILE).run()
    result_next = run_model(model, input_ids=next_ids, past_key_values=cache, use_cache=True)
    results = [result.logits, result_next.logits]
    return layered if agree(results, [expected.logits, expected_next.logits]) else None


def _tuple_length(result: Any) -> int:
    """How many results a layer's forward returned as a tuple; 0: a tensor.

    Raises:
        NotImplementedError: there is more in the tuple than hidden states.
    """
    if isinstance(result, torch.Tensor):
        return 0
    if not isinstance(result, tuple) or any(rest is not None for rest in result[1:]):
        raise NotImplementedError("its layers return more than hidden states")
    return len(result)
