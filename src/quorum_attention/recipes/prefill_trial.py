"""Whether a model's layers can run one after the other over a whole prompt, tried on a
few tokens.

Layers of some models hand each other more than hidden states, or have no attention.
Their results change, or they fail; such a model gets its prompts in chunks. Models that
read texts in both directions, or keep no tokens in a cache, get them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quorum_attention.integrations.substitutes import substituting
from quorum_attention.integrations.transformers.layer_kinds import layer_kind
from quorum_attention.recipes.attention import agree
from quorum_attention.recipes.attention_skips import AttentionWatch, skip_attention
from quorum_attention.recipes.host_weights import HostWeights
from quorum_attention.recipes.layer_calls import LayerCall, run_attention_module
from quorum_attention.recipes.patching import unpatch_all
from quorum_attention.recipes.prefill import LayeredModel, LayerwisePrefill
from quorum_attention.recipes.prompt_inputs import (
    CACHE_NAMES,
    PromptInputs,
    cache_name,
    takes_cache,
)
from quorum_attention.recipes.tile_storage import DeviceTiles
from quorum_attention.recipes.trials import failure_words, some_ids, trying

_TRIAL_TOKENS = 48
_TRIAL_TILE = 20
# Tokens behind the prompt, which see what is in the cache.
_NEXT_TOKENS = 3
# Tokens have no effect on logits if it is below this share of the effect that others
# have. Measured with 59 kinds of models on a CPU: 0.13 and more where there is one, at
# most a millionth where there is none. Errors of chunks are below this share, too: in
# bf16 up to 0.01 where chunks are right.
_NO_EFFECT = 1 / 16
_OTHER_RESULTS = "it had other results for parts of the tokens"


@dataclass
class PromptTrial:
    """A trial of one model.

    Attributes:
        model: the model, whose layers are replaceable.
        run_model: its own forward.
        layers: of its decoder.
        new_cache: makes an empty cache.
        weights: of the layers, if they are in host memory.
    """

    model: Any
    run_model: Callable[..., Any]
    layers: Sequence[Any]
    new_cache: Callable[[], Any]
    weights: HostWeights | None
    _tuple_lengths: list[int] = field(default_factory=list)
    _watches: list[AttentionWatch] = field(default_factory=list)

    def try_layers(self) -> LayeredModel | str:
        """Run the layers one after the other, and compare with the model as it is.

        Returns:
            The model for ``LayerwisePrefill``, or why its layers cannot run so.
        """
        if not self.layers:
            return "it has no decoder layers that are known"
        for layer in self.new_cache().layers:
            # A layer runs twice for each tile, and would advance its state twice.
            if layer_kind(layer) is None:
                kind = type(layer).__name__
                return f"a {kind} of its cache keeps more than keys and values"
        try:
            with trying(self.model):
                layered = self._try()
        except Exception as error:  # the model gets its prompts in chunks
            return failure_words(error)
        return layered or _OTHER_RESULTS

    def _try(self) -> LayeredModel | None:
        """The layered model, if its results are those of the model as it is."""
        prompt_ids, next_ids = self._some_ids()
        expected = self._run_as_it_is(prompt_ids, next_ids)
        layered = LayeredModel(
            self.model,
            self.run_model,
            self.layers,
            self._tuple_lengths,
            self.weights,
        )
        if skip_attention(self._watches):
            try:
                results = self._run_layers(layered, prompt_ids, next_ids)
                is_right = agree(results, expected)
            except Exception:  # whatever it is, nothing is skipped
                is_right = False
            if is_right:
                return layered
            unpatch_all(self.model, run_attention_module)
        results = self._run_layers(layered, prompt_ids, next_ids)
        return layered if agree(results, expected) else None

    def why_no_cache(self) -> str | None:
        """Return why the model cannot run with the cache that it would be given, or
        None. A model that does not run without a cache either is not looked at."""
        if not takes_cache(self.run_model):
            newest, oldest = CACHE_NAMES
            return f"its forward has no argument {newest} or {oldest}"
        ids = some_ids(self.model, _NEXT_TOKENS)
        with trying(self.model):
            try:
                self._run_model(ids, self.new_cache())
                return None
            except Exception as error:  # whatever the model says of the cache
                reason = f"{type(error).__name__}: {error}"
            try:
                self.run_model(self.model, input_ids=ids, use_cache=False)
            except Exception:  # not because of the cache
                return None
        return reason

    def try_chunks(self) -> str | None:
        """Run a prompt in two chunks through all layers, and compare with the model as
        it is.

        Returns:
            Why prompts cannot run so, or None.
        """
        try:
            with trying(self.model):
                is_right = self._chunks_are_right()
        except Exception as error:  # the model gets its prompts whole
            return failure_words(error)
        return None if is_right else _OTHER_RESULTS

    def _chunks_are_right(self) -> bool:
        """Whether logits of two chunks are those of all tokens at once.

        A model of small weights looks at other tokens so little that any tolerance of
        its own would let it pass, and its results in 16 bits may differ by rounding
        alone. So other tokens are tried in each chunk. Prompts of one shape are rounded
        alike: of two of them, logits differ at all only where tokens see the others.
        """
        ids = some_ids(self.model, 2 * _TRIAL_TILE)
        first = ids[:, :_TRIAL_TILE] // 2  # unlike the second chunk
        second = ids[:, _TRIAL_TILE:]
        other_first = ids.max() - first
        other_second = ids.max() - second
        expected = self._logits_of([torch.cat([first, second], dim=1)])
        logits = self._logits_of([first, second])
        if not agree([logits], [expected]):
            return False
        after_others = self._logits_of([torch.cat([other_first, second], dim=1)])
        before_others = self._logits_of([torch.cat([first, other_second], dim=1)])
        chunk_after_others = self._logits_of([other_first, second])
        effect = _size((after_others - expected)[:, _TRIAL_TILE:])
        effect_backwards = _size((before_others - expected)[:, :_TRIAL_TILE])
        effect_in_chunks = _size((chunk_after_others - logits)[:, _TRIAL_TILE:])
        no_effect = effect * _NO_EFFECT
        if effect_backwards > no_effect or effect_in_chunks < no_effect:
            return False
        rounding = 4 * torch.finfo(logits.dtype).eps * _size(expected)
        return _size(logits - expected) <= max(no_effect, rounding)

    def _logits_of(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The logits of a prompt that is run in these chunks."""
        cache = self.new_cache()
        logits = [self._run_model(ids, cache).logits for ids in chunks]
        return torch.cat(logits, dim=1)

    def _some_ids(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of a prompt, and of tokens behind it, (1, tokens)."""
        ids = some_ids(self.model, _TRIAL_TOKENS + _NEXT_TOKENS)
        return ids[:, :_TRIAL_TOKENS], ids[:, _TRIAL_TOKENS:]

    def _run_as_it_is(
        self, prompt_ids: torch.Tensor, next_ids: torch.Tensor
    ) -> list[torch.Tensor]:
        """The logits of the model as it is. What its layers return is noted."""
        cache = self.new_cache()
        with substituting(layer=self._observe):
            result = self._run_model(prompt_ids, cache)
        return [result.logits, self._run_model(next_ids, cache).logits]

    def _observe(self, number: int, call: LayerCall) -> Any:
        """Run a layer, and note what it returns, and what its attention module runs."""
        if number != len(self._tuple_lengths):
            raise NotImplementedError("it does not run its layers in their order")
        watch = AttentionWatch()
        try:
            with substituting(layer=None, attention=watch.attend):
                result = call.run(self.layers[number])
        finally:
            watch.stop()
        self._watches.append(watch)
        self._tuple_lengths.append(_tuple_length(result))
        return result

    def _run_layers(
        self, layered: LayeredModel, prompt_ids: torch.Tensor, next_ids: torch.Tensor
    ) -> list[torch.Tensor]:
        """The logits of the model whose layers run one after the other."""
        cache = self.new_cache()
        arguments = {"input_ids": prompt_ids, "use_cache": True}
        inputs = PromptInputs.from_arguments(arguments, past=0)
        assert inputs is not None
        tiles = DeviceTiles(prompt_ids.device)
        result = LayerwisePrefill(layered, inputs, cache, tiles, _TRIAL_TILE).run()
        return [result.logits, self._run_model(next_ids, cache).logits]

    def _run_model(self, ids: torch.Tensor, cache: Any) -> Any:
        arguments = {cache_name(self.run_model): cache, "use_cache": True}
        return self.run_model(self.model, input_ids=ids, **arguments)


def _size(difference: torch.Tensor) -> float:
    """The norm of a difference."""
    return float(difference.double().norm())


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
