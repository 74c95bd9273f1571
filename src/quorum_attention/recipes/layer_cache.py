"""What each layer of a model keeps in a cache: all tokens, the last ones, states of a
recurrence, or nothing where it reads the keys of a layer before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quorum_attention.recipes.prompt_inputs import cache_in, cache_name

if TYPE_CHECKING:
    from quorum_attention.integrations.transformers.cache_bytes import CachedBytes

# The tokens of two prompts that tell numbers of a token from numbers of all tokens
# together. They are few: some recurrences are computed token by token. They are
# multiples of 128: DeepSeek V4 makes one summary of so many tokens, and keeps the
# tokens until then.
_FEW_TOKENS = 128
_MORE_TOKENS = 256


class LayerCache(NamedTuple):
    """The numbers, of the model's dtype, that one layer keeps in a cache.

    Attributes:
        key_and_value: numbers of a token's key and value.
        window: how many tokens have these at most; None: all.
        summaries: numbers of each token beside its key and value, without a limit.
        states: numbers of all tokens together.
    """

    key_and_value: int
    window: int | None = None
    summaries: int = 0
    states: int = 0

    def numbers(self, n_tokens: int) -> int:
        """How many numbers are kept of ``n_tokens`` tokens."""
        n_kept = n_tokens if self.window is None else min(n_tokens, self.window)
        return n_kept * self.key_and_value + n_tokens * self.summaries + self.states


def read_layer_caches(model: Any) -> tuple[LayerCache, ...]:
    """Run two short prompts through a model without memory, and see what layers keep.

    Args:
        model: a decoder of Transformers on torch's meta device.

    Returns:
        What each layer keeps. One more behind them, if the model keeps tensors that lie
        in no layer's cache, but beside them or in its modules.

    Raises:
        Exception: whatever a model raises that cannot run without memory.
    """
    with _without_advice():
        at_rest_bytes = _module_bytes(model)
        few = _kept_behind(model, _FEW_TOKENS, at_rest_bytes)
        many = _kept_behind(model, _MORE_TOKENS, at_rest_bytes)
    return tuple(
        _layer_cache(*layer, model.dtype.itemsize)
        for layer in zip(few, many, strict=True)
    )


@contextmanager
def _without_advice() -> Iterator[None]:
    """Let Transformers not say which packages would run a model faster."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _kept_behind(model: Any, n_tokens: int, at_rest_bytes: int) -> list[CachedBytes]:
    """Return what a model keeps behind a prompt: each layer of its cache; and beside
    these, if that is more than nothing, all other tensors together.

    Args:
        at_rest_bytes: what modules hold beside weights and buffers before any prompt.
    """
    from quorum_attention.integrations.transformers.cache_bytes import (
        CachedBytes,
        cached_bytes,
        n_bytes_in,
    )

    # A model that knows a token of padding may look for it among ids, which have no
    # numbers.
    model.config.pad_token_id = None
    ids = torch.ones(1, n_tokens, dtype=torch.long, device="meta")
    cache = _filled_cache(model, ids)
    layers = [cached_bytes(layer) for layer in cache.layers]
    beside_bytes = n_bytes_in(vars(cache)) + _module_bytes(model) - at_rest_bytes
    if beside_bytes:
        layers.append(CachedBytes(rows=0, further=beside_bytes, window=None))
    return layers


def _filled_cache(model: Any, ids: torch.Tensor) -> Any:
    """Return a cache behind a prompt: the usual one, or the model's own if it takes no
    other."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        try:
            model(ids, **{cache_name(model.forward): cache})
        except Exception:  # of another class of cache, by any name
            return cache_in(model(ids, use_cache=True))
    return cache


def _module_bytes(model: Any) -> int:
    """Bytes of all tensors that modules hold beside weights and buffers: states of a
    recurrence."""
    from quorum_attention.integrations.transformers.cache_bytes import n_bytes_in

    n_bytes = 0
    for module in model.modules():
        attributes = dict(vars(module))
        del attributes["_parameters"], attributes["_buffers"]
        n_bytes += n_bytes_in(attributes)
    return n_bytes


def _layer_cache(few: CachedBytes, many: CachedBytes, itemsize: int) -> LayerCache:
    """Tell what a layer keeps by what it holds of few tokens and of more."""
    n_kept = min(_FEW_TOKENS, few.window or _FEW_TOKENS)
    summary_bytes = (many.further - few.further) // (_MORE_TOKENS - _FEW_TOKENS)
    return LayerCache(
        key_and_value=few.rows // n_kept // itemsize,
        window=few.window,
        summaries=summary_bytes // itemsize,
        states=(few.further - _FEW_TOKENS * summary_bytes) // itemsize,
    )
