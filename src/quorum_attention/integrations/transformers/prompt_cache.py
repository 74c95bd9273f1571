"""A cache of Transformers whose keys and values lie in segments, in several places.

Layers of full attention keep their tokens in segments. All other layers (sliding
windows, states of recurrences, compressed keys) are small or have a layout of their
own; they stay what the model's configuration makes them.
"""

from __future__ import annotations

import copy
import math
import os
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from quorum_attention.integrations.substitutes import substitutes
from quorum_attention.integrations.transformers.saved_layers import (
    fingerprint,
    restore_layer,
    saved_layer,
)
from quorum_attention.integrations.transformers.segmented_layer import (
    SegmentedLayer,
    SharedReader,
)
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.save import load_layers, save_layers
from quorum_attention.long_prompts.segmented_cache import SegmentedCache
from quorum_attention.units import counted, format_bytes

_Layer = TypeVar("_Layer")


class PromptCache(DynamicCache):  # type: ignore[misc]
    """A cache for prompts of any length: on the device, then in host memory, then in
    files.

    It is given to ``model.generate`` or a model's forward as ``past_key_values``. With
    ``attn_implementation="quorum"`` attention reads keys and values where they lie;
    other implementations get copies of everything, for each token.

    Args:
        config: the model's configuration.
        device: where the model computes.
        device_memory, host_memory, folder: see ``CachePlaces``.

    Attributes:
        places: the memory that it may take. Forks share it.
        notes: lines about the model that it is for, which are printed with it.

    Raises:
        TypeError, ValueError: an argument that makes no sense, by name.
        OSError: the folder cannot be used.
    """

    notes: tuple[str, ...] = ()
    _n_behind = 0

    def __init__(
        self,
        config: Any,
        device: torch.device | str = "cpu",
        *,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(config=config)
        self._fingerprint = fingerprint(config)
        plain_layers: list[Any] = self.layers
        places = CachePlaces(
            device,
            device_memory=device_memory,
            host_memory=host_memory,
            folder=folder,
        )
        self._shared = SharedReader(places)
        self.layers: list[Any] = [self._layer_like(layer) for layer in plain_layers]
        if not self.layers:
            self.layer_class_to_replicate = partial(_new_layer, self._shared)
        self._link_layers()

    @property
    def places(self) -> CachePlaces:
        """The memory that this cache and its forks may take."""
        return self._shared.places

    def _layer_like(self, layer: Any) -> Any:
        """Return a layer in segments for a layer of full attention; others stay."""
        return _new_layer(self._shared) if type(layer) is DynamicLayer else layer

    def _link_layers(self) -> None:
        segmented = self._segmented_layers()
        for layer, next_layer in zip(
            segmented, segmented[1:] + segmented[:1], strict=True
        ):
            layer.next_layer = weakref.ref(next_layer)

    def _segmented_layers(self) -> list[SegmentedLayer]:
        return [layer for layer in self.layers if _is_segmented(layer)]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Append keys and values (b, h_kv, n, d) to a layer's, and return all."""
        tokens = (key_states, value_states, layer_idx, *args)
        if substitutes.append is None:
            return super().update(*tokens, **kwargs)
        return substitutes.append(super().update, *tokens, **kwargs)

    def reset(self) -> None:
        """Remove all tokens."""
        remove_tokens(self.layers)

    def reserve(self, n_tokens: int, n_behind: int = 0) -> None:
        """Say how many tokens the prompt has, so that each layer's lie in one piece.

        Args:
            n_tokens: of the prompt.
            n_behind: tokens behind it that the piece has room for too, if there is
                memory for that in all layers.

        Raises:
            TypeError, ValueError: ``n_tokens`` is no number of tokens.
        """
        for layer in self._segmented_layers():
            layer.tokens.reserve(n_tokens + n_behind)
        self._n_behind = n_behind

    def fit_reserve(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Reserve no room behind the prompt if it does not fit in all layers: the first
        ones would take it, and the last ones would have no memory for the prompt.

        Args:
            key, value: the first tokens.
        """
        n_behind = self._n_behind
        if n_behind == 0:
            return
        self._n_behind = 0
        layers = [layer.tokens for layer in self._segmented_layers()]
        n_bytes = sum(tokens.bytes_to_take(key, value) for tokens in layers)
        if n_bytes > sum(self.places.remaining(place) for place in Place):
            for tokens in layers:
                tokens.reserve(tokens.n_reserved - n_behind)

    def prepare_device(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Take the memory of all layers' reserved tokens that the device has room for.
        If that is not all, take the memory for copies from the host, and begin to
        compile what attends over host memory.

        Args:
            query, key, value: tokens of one layer. Those of the others are probably
                like them.
        """
        with torch.inference_mode(False):
            for layer in _spread(self._segmented_layers()):
                if layer.tokens.taken_bytes:
                    continue
                if not layer.tokens.prepare(key, value, Place.DEVICE):
                    self._shared.take_memory()
                    self._shared.compile_ahead(query, key)
                    return

    def prepare_host(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Take host memory for the reserved tokens of a layer that has no memory yet.

        Args:
            layer_idx: the layer.
            key, value: tokens like those that it will get.
        """
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, SegmentedLayer):
            with torch.inference_mode(False):
                layer.tokens.prepare(key, value, Place.HOST)

    def promote(self, n_bytes: int, n_behind: int) -> None:
        """Move tokens from host memory to the device, after a prompt was computed.

        The memory that computing took is free then, and new tokens read the device
        faster than host memory. Whole layers move as long as they fit, then the last
        tokens of one more layer.

        Args:
            n_bytes: free bytes of the device, besides what is left of the cache's own
                part.
            n_behind: tokens after the prompt, which get room on the device first.
        """
        n_bytes += self.places.remaining(Place.DEVICE)
        layers = [layer.tokens for layer in _spread(self._segmented_layers())]
        outside = [tokens for tokens in layers if not tokens.is_on_device]
        token_bytes = sum(tokens.token_bytes for tokens in outside)
        n_behind = min(n_behind, max(0, n_bytes) // max(1, token_bytes))
        n_bytes -= n_behind * token_bytes
        with torch.inference_mode(False), torch.no_grad():
            for tokens in outside:
                n_bytes -= tokens.promote(n_bytes, n_behind)
        self._shared.forget_copies()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. A positive number says how many
        tokens are kept, as in older versions of Transformers."""
        self._change_layers("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry, without a copy of what lies in segments."""
        self._change_layers("batch_repeat_interleave", repeats)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make batch entry i what entry ``beam_idx[i]`` was."""
        self._change_entries(beam_idx, "reorder_cache")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some batch entries."""
        self._change_entries(indices, "batch_select_indices")

    def _change_entries(self, indices: torch.Tensor, method: str) -> None:
        # The host waits for the device once, not for each layer.
        on_host = indices.cpu() if isinstance(indices, torch.Tensor) else indices
        self._change_layers(method, indices, on_host)

    def _change_layers(
        self, method: str, argument: Any, in_segments: Any = None
    ) -> None:
        """Call a method of each layer. Layers that are not in segments come first: they
        may refuse, and then no layer is changed.

        Behind an interrupt, or an error of another layer than the first, the cache has
        no tokens: some layers would be changed, and others not.

        Args:
            method: the method's name.
            argument: what it is given.
            in_segments: what layers in segments are given instead, or None.
        """
        if in_segments is None:
            in_segments = argument
        n_changed = 0
        try:
            for layer in sorted(self.layers, key=_is_segmented):
                chosen = in_segments if _is_segmented(layer) else argument
                getattr(layer, method)(chosen)
                n_changed += 1
        except BaseException as error:
            if n_changed > 0 or not isinstance(error, Exception):
                self.reset()
            raise

    def fork(self) -> PromptCache:
        """Return a second cache with the same tokens, for another question about the
        same text.

        Tokens in segments are shared and not copied. Each of both caches goes on by
        itself.
        """
        forked = copy.copy(self)
        forked.layers = [
            layer.fork() if _is_segmented(layer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        forked._link_layers()
        return forked

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptCache:
        """Return a fork: it may be changed without changing this cache."""
        return self.fork()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the cache, for another day. What was saved in the folder before is
        replaced at the end; an interrupted save leaves it.

        Raises:
            NotImplementedError: a layer of a kind that cannot be saved.
            FileExistsError: the folder holds other files.
            OSError: the files cannot be written.
        """
        layers = [saved_layer(layer) for layer in self.layers]
        self.places.finish_copies()
        save_layers(folder, layers, model=self._fingerprint)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Continue from a saved cache, which replaces what this one holds.

        Keys and values of full attention stay in the folder's files, which are mapped:
        loading takes no time. On a GPU as many of them are copied to it as places
        allow.

        Raises:
            FileNotFoundError: there is no saved cache.
            ValueError: it is of another model or dtype, or a file is torn; by name.

        Behind an error or an interrupt the cache is as it was, or has no tokens.
        """
        saved = load_layers(folder, model=self._fingerprint)
        if len(saved) != len(self.layers):
            n_layers = counted(len(saved), "layer")
            raise ValueError(
                f"{folder} holds a cache of {n_layers}, not of {len(self)}"
            )
        self.reset()
        try:
            for layer, saved_state in zip(self.layers, saved, strict=True):
                restore_layer(layer, saved_state, self.places)
        except BaseException:
            # Some layers would have the tokens, and others none.
            self.reset()
            raise

    def __repr__(self) -> str:
        """Say how many tokens there are, and what lies where."""
        layers = self._segmented_layers()
        n_tokens = layers[0].get_seq_length() if layers else 0
        n_bytes = dict.fromkeys(Place, 0)
        for layer in layers:
            for segment in layer.tokens.segments():
                n_bytes[segment.place] += segment.nbytes
        used = [
            f"{format_bytes(n_bytes[place])} in {_NAMES[place]}"
            for place in Place
            if n_bytes[place]
        ]
        where = ", ".join(used) if used else "no tokens"
        kinds = f"{len(layers)} of {counted(len(self.layers), 'layer')} in segments"
        return f"PromptCache({counted(n_tokens, 'token')}, {kinds}: {where})"

    def __str__(self) -> str:
        """Say what lies where, of the model too."""
        return "\n".join([repr(self), *self.notes])


def _is_segmented(layer: Any) -> bool:
    return isinstance(layer, SegmentedLayer)


def remove_tokens(layers: Iterable[Any]) -> None:
    """Remove the tokens of a cache's layers.

    ``DynamicLayer.reset`` of older versions of Transformers sets keys and values to 0,
    and keeps them as tokens.
    """
    for layer in layers:
        if isinstance(layer, DynamicLayer):
            layer.keys = None
            layer.values = None
            layer.is_initialized = False
        layer.reset()


def _spread(layers: Sequence[_Layer]) -> list[_Layer]:
    """Return layers in an order whose first ones, however many, lie spread evenly among
    all.

    What the last ones have in host memory is copied ahead while others compute.
    """
    numbers = sorted(range(len(layers)), key=lambda number: number * _GOLDEN_RATIO % 1)
    return [layers[number] for number in numbers]


def _new_layer(shared: SharedReader) -> SegmentedLayer:
    return SegmentedLayer(SegmentedCache(shared.places), shared)


# Multiples of it, modulo 1, are spread as evenly as any sequence is at each length.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_NAMES = {Place.DEVICE: "device memory", Place.HOST: "host memory", Place.FILE: "files"}
