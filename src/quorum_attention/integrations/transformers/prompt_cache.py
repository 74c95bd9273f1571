"""A cache of Transformers whose keys and values lie in segments, in several places.

Layers of full attention keep their tokens in segments. All other layers (sliding windows, states of
recurrences, compressed keys) are small or have a layout of their own; they stay what the model's
configuration makes them.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from quorum_attention.errors import OutOfMemoryError
from quorum_attention.integrations.transformers.segmented_tensor import LayerSegments
from quorum_attention.long_prompts.host_sharing import HostSharing
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.segments import Segment, SegmentedCache
from quorum_attention.units import counted, format_bytes


class SegmentedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer of full attention.

    Attributes:
        tokens: its keys and values.
        shared: what the layers of a model share.
        next_tokens: the tokens of the layer of full attention behind it, weakly; behind the last
            layer comes the first. A cycle of strong references would keep the memory of a cache
            that nobody uses.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, tokens: SegmentedCache, shared: SharedReader) -> None:
        self.tokens = tokens
        self.shared = shared
        self.next_tokens = weakref.ref(tokens)
        self.device = shared.places.device
        super().__init__()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note where attention is computed."""
        self.device = key_states.device
        self.dtype = key_states.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values (b, h_kv, n, d), and return all: tensors where they lie in one
        piece, else tensors that stand for them (``SegmentedTensor``)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        is_first = self.tokens.n_tokens == 0
        self.tokens.append(key_states, value_states)
        if is_first:
            return key_states, value_states
        segments = self.tokens.segments()
        if len(segments) == 1 and segments[0].place is Place.DEVICE:
            key, value = segments[0].expanded()
            return key, value
        return self._standing_for(segments).tensors()

    def _standing_for(self, segments: Sequence[Segment]) -> LayerSegments:
        sharing = self.shared.sharing_of(segments)
        return LayerSegments(segments, self.device, sharing, self._next_segments)

    def _next_segments(self) -> list[Segment]:
        tokens = self.next_tokens()
        return [] if tokens is None else tokens.segments()

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys (b, h_kv, n, d), as a tensor that stands for them; None if there are none."""
        segments = self.tokens.segments()
        return self._standing_for(segments).tensors()[0] if segments else None

    @keys.setter
    def keys(self, tensor: None) -> None:
        self._refuse(tensor)

    @property
    def values(self) -> torch.Tensor | None:
        """All values (b, h_kv, n, d_v), in the same way."""
        segments = self.tokens.segments()
        return self._standing_for(segments).tensors()[1] if segments else None

    @values.setter
    def values(self, tensor: None) -> None:
        self._refuse(tensor)

    def _refuse(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            raise TypeError("keys and values of this cache cannot be replaced: use update()")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there will be after ``query_length`` more, and the first's place."""
        return self.tokens.n_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.tokens.n_tokens

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        """Do nothing: places are chosen when tokens arrive."""

    def prefetch(self) -> None:
        """Do nothing: attention copies ahead."""

    def reset(self) -> None:
        """Remove all tokens."""
        self.shared.forget_copies()
        self.tokens.reset()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens; a positive number is how many are kept, as in older
        versions of Transformers."""
        self.shared.forget_copies()
        n_tokens = self.tokens.n_tokens
        n_kept = tokens_to_remove if tokens_to_remove > 0 else n_tokens + tokens_to_remove
        self.tokens.crop(max(0, n_kept))

    def reorder_cache(self, beam_idx: torch.Tensor | Sequence[int]) -> None:
        """Make batch entry i what entry ``beam_idx[i]`` was."""
        self.shared.forget_copies()
        if self.tokens.n_tokens:
            self.tokens.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry, without a copy."""
        self.shared.forget_copies()
        if self.tokens.n_tokens:
            self.tokens.repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep some batch entries."""
        self.shared.forget_copies()
        if self.tokens.n_tokens:
            self.tokens.select(indices)

    def fork(self) -> SegmentedLayer:
        """Return a second layer cache with the same tokens, which shares their memory."""
        forked = SegmentedLayer(self.tokens.fork(), self.shared)
        forked.device = self.device
        forked.is_initialized = self.is_initialized
        if self.is_initialized:
            forked.dtype = self.dtype
        return forked


class SharedReader:
    """The places of a model's caches, and the buffers for copies from host memory.

    Attributes:
        places: the memory that caches may take.
    """

    def __init__(self, places: CachePlaces) -> None:
        self.places = places
        self._sharing: HostSharing | None = None

    def sharing_of(self, segments: Sequence[Segment]) -> HostSharing | None:
        """Return how segments in host memory are shared; None if none is there, or no GPU."""
        if all(segment.place is not Place.HOST for segment in segments):
            return None
        if self._sharing is None:
            memory = self.places.staging_memory()
            self._sharing = None if memory is None else HostSharing(memory)
        return self._sharing

    def forget_copies(self) -> None:
        """Forget copies that were made ahead of attention: tokens are about to change."""
        if self._sharing is not None:
            self._sharing.forget()


class PromptCache(DynamicCache):  # type: ignore[misc]
    """A cache for prompts of any length: on the device, then in host memory, then in files.

    It is given to ``model.generate`` or a model's forward as ``past_key_values``. With
    ``attn_implementation="quorum"`` attention reads keys and values where they lie; other
    implementations get copies of everything, for each token.

    Args:
        config: the model's configuration.
        device: where the model computes.
        device_memory, host_memory, folder: see ``CachePlaces``.

    Attributes:
        places: the memory that it may take. Forks share it.

    Raises:
        TypeError, ValueError: an argument that makes no sense, by name.
        OSError: the folder cannot be used.
    """

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
        plain_layers: list[Any] = self.layers
        places = CachePlaces(
            device, device_memory=device_memory, host_memory=host_memory, folder=folder
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
        for layer, next_layer in zip(segmented, segmented[1:] + segmented[:1], strict=True):
            layer.next_tokens = weakref.ref(next_layer.tokens)

    def _segmented_layers(self) -> list[SegmentedLayer]:
        return [layer for layer in self.layers if isinstance(layer, SegmentedLayer)]

    def reserve(self, n_tokens: int) -> None:
        """Say how many tokens the prompt has, so that each layer's lie in one piece.

        Raises:
            TypeError, ValueError: ``n_tokens`` is no number of tokens.
        """
        for layer in self._segmented_layers():
            layer.tokens.reserve(n_tokens)

    def prepare(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the memory of a layer's reserved tokens ahead, which will be like ``key`` and
        ``value``. Nothing is taken if no place has memory left: the first tokens will say so."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, SegmentedLayer):
            with suppress(OutOfMemoryError), torch.inference_mode(False):
                layer.tokens.prepare(key, value)

    def promote(self, n_bytes: int) -> None:
        """Move layers from host memory to the device, as many as ``n_bytes`` of it hold.

        A prompt was computed: the memory that this took may hold what is read for each token.
        """
        for layer in self._segmented_layers():
            taken = layer.tokens.taken_bytes
            if taken > n_bytes:
                continue
            with torch.inference_mode(False), torch.no_grad():
                was_moved = layer.tokens.promote()
            if was_moved:
                n_bytes -= taken
        self._shared.forget_copies()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make batch entry i what entry ``beam_idx[i]`` was."""
        self._change_entries(beam_idx, "reorder_cache")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some batch entries."""
        self._change_entries(indices, "batch_select_indices")

    def _change_entries(self, indices: torch.Tensor, method: str) -> None:
        # The host waits for the device once, not for each layer.
        on_host = indices.cpu() if isinstance(indices, torch.Tensor) else indices
        for layer in self.layers:
            chosen = on_host if isinstance(layer, SegmentedLayer) else indices
            getattr(layer, method)(chosen)

    def fork(self) -> PromptCache:
        """Return a second cache with the same tokens, for another question about the same text.

        Tokens in segments are shared and not copied. Each of both caches goes on by itself.
        """
        forked = copy.copy(self)
        forked.layers = [
            layer.fork() if isinstance(layer, SegmentedLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        forked._link_layers()
        return forked

    def __repr__(self) -> str:
        """Say how many tokens there are, and what lies where."""
        layers = self._segmented_layers()
        n_tokens = layers[0].get_seq_length() if layers else 0
        used = [
            f"{format_bytes(self.places.used(place))} in {_NAMES[place]}"
            for place in Place
            if self.places.used(place)
        ]
        where = ", ".join(used) if used else "no memory taken"
        kinds = f"{len(layers)} of {counted(len(self.layers), 'layer')} in segments"
        return f"PromptCache({counted(n_tokens, 'token')}, {kinds}: {where})"


def _new_layer(shared: SharedReader) -> SegmentedLayer:
    return SegmentedLayer(SegmentedCache(shared.places), shared)


_NAMES = {Place.DEVICE: "device memory", Place.HOST: "host memory", Place.FILE: "files"}
