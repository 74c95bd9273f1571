"""The cache that a model of Transformers is given while a prompt runs through it tile
by tile.

A tile is what Transformers calls a chunk of a prefill: some tokens whose past is in the
cache. Each layer sees a cache that is as long as the tile's past.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from quorum_attention.integrations.transformers.prompt_cache import PromptCache


class TileCache(Cache):  # type: ignore[misc]
    """A cache for one tile at a time: keys and values go to ``cache``, and none come
    back.

    Args:
        cache: the cache of the prompt, which is empty at first.

    Attributes:
        past: tokens before the tile.
        is_storing: whether keys and values are appended to ``cache``.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__(layers=cache.layers)
        self._cache = cache
        self.past = 0
        self.is_storing = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a tile's keys and values, if they are to be stored, and return
        them."""
        if self.is_storing:
            if isinstance(self._cache, PromptCache):
                self._cache.fit_reserve(key_states, value_states)
            self._cache.update(key_states, value_states, layer_idx, *args, **named)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the tile, for each layer."""
        return self.past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the tile's first token."""
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys, and the position of the first: masks are those of the
        prompt."""
        return self.past + query_length, 0
