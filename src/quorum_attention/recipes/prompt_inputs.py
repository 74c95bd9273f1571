"""The arguments of a model's forward of a prompt, and those of a tile of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.plain_types import Keywords

# Tensors with a value for each token, by the dimension of tokens.
_TOKEN_DIMS = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,
    "cache_position": -1,
}
_TOKEN_NAMES = ("input_ids", "inputs_embeds")
_MASK = "attention_mask"
_LOGITS = "logits_to_keep"
# Names of a cache in arguments and results of forwards: the first one is that of
# Transformers 5.24 and later.
CACHE_NAMES = ("cache", "past_key_values")
# Requests for what is only there if layers run as they are.
COLLECTED = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(frozen=True)
class PromptInputs:
    """A prompt as a model's forward is given it.

    Attributes:
        tensors: the arguments with a value for each token, by name.
        padding: (batch, past + tokens), the ``attention_mask``; None: no token is
            padding.
        options: other arguments, which are the same for each tile.
        n_tokens: tokens of the prompt.
        past: tokens that are in the cache already.
        logits_to_keep: logits are asked for of so many last tokens; 0: of all.
    """

    tensors: NamedTensors
    padding: torch.Tensor | None
    options: Mapping[str, Any]
    n_tokens: int
    past: int
    logits_to_keep: int

    @classmethod
    def from_arguments(cls, named: Mapping[str, Any], past: int) -> PromptInputs | None:
        """The prompt in arguments of a forward; None if they do not all come in tiles.

        Args:
            named: arguments without the cache.
            past: tokens in the cache.
        """
        tensors: NamedTensors = {}
        options: Keywords = {}
        padding = named.get(_MASK)
        for name, value in named.items():
            if value is None or name == _MASK:
                continue
            if name in _TOKEN_DIMS:
                tensors[name] = value
            else:
                options[name] = value
        tokens = tokens_in(tensors)
        if tokens is None:
            return None
        n_tokens = int(tokens.shape[1])
        if padding is not None and not _is_padding(padding, past + n_tokens):
            return None
        if not _have_tokens(tensors, n_tokens):
            return None
        if not all(_is_option(name, value) for name, value in options.items()):
            return None
        logits_to_keep = options.get(_LOGITS, 0)
        return cls(tensors, padding, options, n_tokens, past, logits_to_keep)

    @property
    def batch(self) -> int:
        """The number of texts."""
        return int(next(iter(self.tensors.values())).shape[0])

    def of_tile(self, span: Interval) -> Keywords:
        """Return the arguments of the tokens of a span: of no later token."""
        arguments = dict(self.options)
        for name, tensor in self.tensors.items():
            dim = _TOKEN_DIMS[name]
            arguments[name] = tensor.narrow(dim, span.start, span.length)
        if self.padding is not None:
            n_keys = self.past + span.stop
            arguments[_MASK] = self.padding[:, :n_keys]
        if self.logits_to_keep:
            n_behind = self.n_tokens - span.stop
            n_kept = min(span.length, self.logits_to_keep - n_behind)
            # 0 would be all.
            arguments[_LOGITS] = max(1, n_kept)
        return arguments

    def of_all_logits(self) -> PromptInputs:
        """The same prompt, with logits of all tokens asked for."""
        return replace(self, options={**self.options, _LOGITS: 0}, logits_to_keep=0)

    def has_logits(self, span: Interval) -> bool:
        """Whether logits are asked for of a token in a span."""
        if self.logits_to_keep == 0:
            return True
        first = self.n_tokens - self.logits_to_keep
        return span.stop > first


def _have_tokens(tensors: NamedTensors, n_tokens: int) -> bool:
    """Whether all tensors have a value for each token."""
    lengths = [tensor.shape[_TOKEN_DIMS[name]] for name, tensor in tensors.items()]
    return all(length == n_tokens for length in lengths)


def _is_padding(mask: Any, n_keys: int) -> bool:
    return (
        isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] == n_keys
    )


def _is_option(name: str, value: Any) -> bool:
    """Whether an argument is the same for each tile, and does not ask for results of
    layers."""
    if name in COLLECTED:
        return not value
    if name == "return_dict":
        return bool(value)
    return isinstance(value, (bool, int, float, str))


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name, one of ``CACHE_NAMES``, that a forward's own argument has."""
    newer, older = CACHE_NAMES
    return newer if newer in inspect.signature(forward).parameters else older


def takes_cache(forward: Callable[..., Any]) -> bool:
    """Whether a forward has an argument for a cache. One that takes any other keywords
    too would be given a cache, and not use it."""
    return not inspect.signature(forward).parameters.keys().isdisjoint(CACHE_NAMES)


def cache_in(named: Mapping[str, Any]) -> Any:
    """Return the cache among a forward's arguments, or None if there is none."""
    return _first_given(named, CACHE_NAMES)


def tokens_in(named: Mapping[str, Any]) -> Any:
    """Return the ids (batch, tokens) or the embeddings (batch, tokens, width) among a
    forward's arguments, or None if there are none."""
    return _first_given(named, _TOKEN_NAMES)


def _first_given(named: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if named.get(name) is not None:
            return named[name]
    return None


def without_cache(named: Mapping[str, Any]) -> Keywords:
    """Return a forward's arguments, but not its cache."""
    return {name: value for name, value in named.items() if name not in CACHE_NAMES}
