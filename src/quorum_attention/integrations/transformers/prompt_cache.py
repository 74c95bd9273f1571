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
from quorum_attention.integrations.transformers.batch_entries import change_layer
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

    Give it to ``model.generate``, or to a model's forward, as ``past_key_values``. With
    ``attn_implementation="quorum"`` attention reads keys and values where they are.
    Other implementations get a copy of the whole cache for each token.

    Args:
        config: the model's configuration.
        device: where the model computes.
        device_memory, host_memory, folder: see ``CachePlaces``.

    Attributes:
        places: the memory that the cache and its forks may take together.
        notes: lines about the model, which are printed with the cache.

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
        """Append keys and values (b, h_kv, n, d) to those of a layer, and return all of
        them."""
        tokens = (key_states, value_states, layer_idx, *args)
        if substitutes.append is None:
            return super().update(*tokens, **kwargs)
        return substitutes.append(super().update, *tokens, **kwargs)

    def reset(self) -> None:
        """Remove all tokens."""
        remove_tokens(self.layers)

    def reserve(self, n_tokens: int, n_behind: int = 0) -> None:
        """Reserve room for the tokens of a prompt, so that those of a layer lie in one
        piece.

        Args:
            n_tokens: of the prompt.
            n_behind: also reserve room for this many tokens after the prompt, if all
                layers have memory for that.

        Raises:
            TypeError, ValueError: ``n_tokens`` is not a number of tokens.
        """
        for layer in self._segmented_layers():
            layer.tokens.reserve(n_tokens + n_behind)
        self._n_behind = n_behind

    def fit_reserve(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Reserve no room after the prompt if this room does not fit in all layers.
        Otherwise the first layers would take it, and the last layers would have no
        memory for the prompt.

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
        """Allocate device memory for the reserved tokens of as many layers as fit. If
        some do not fit, allocate the buffer for copies from host memory, and begin to
        compile the function that attends over host memory.

        Args:
            query, key, value: tokens of one layer; the other layers are assumed to have
                the same shapes.
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
        """Allocate host memory for the reserved tokens of a layer that has no memory
        yet.

        Args:
            layer_idx: the layer.
            key, value: tokens with the shapes that the layer will get.
        """
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, SegmentedLayer):
            with torch.inference_mode(False):
                layer.tokens.prepare(key, value, Place.HOST)

    def promote(self, n_bytes: int, n_behind: int) -> None:
        """Move tokens from host memory to the device, after a prompt was computed.

        The working memory of the prompt is free then, and a new token reads device
        memory faster than host memory. Whole layers move as long as they fit. Then the
        last tokens of one more layer move.

        Args:
            n_bytes: free bytes of the device, without what is left of the cache's own
                memory.
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
        """Repeat each batch entry, without a copy of tokens in segments."""
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
                if _is_segmented(layer):
                    getattr(layer, method)(in_segments)
                else:
                    change_layer(layer, method, argument)
                n_changed += 1
        except BaseException as error:
            if n_changed > 0 or not isinstance(error, Exception):
                self.reset()
            raise

    def fork(self) -> PromptCache:
        """Return a second cache with the same tokens, for another question about the
        same text.

        Tokens in segments are shared and not copied. Later tokens of one cache are not
        in the other.
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
        """Save the cache in a folder. An earlier save in this folder is replaced at the
        end. If the save is interrupted, the earlier one stays.

        Raises:
            NotImplementedError: a layer cannot be saved.
            FileExistsError: the folder holds other files.
            OSError: the files cannot be written.
        """
        layers = [saved_layer(layer) for layer in self.layers]
        self.places.finish_copies()
        save_layers(folder, layers, model=self._fingerprint)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a saved cache, which replaces the tokens of this one.

        Keys and values of full attention stay in the folder's files, which are mapped:
        loading takes no time. As many of them as fit are copied to the GPU.

        Raises:
            FileNotFoundError: there is no saved cache.
            ValueError: the saved cache is of another model or dtype, or a file is
                incomplete; the error names it.

        After an error or an interrupt the cache is as it was, or has no tokens.
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
