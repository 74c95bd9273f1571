"""The cache of one layer of Transformers, whose keys and values lie in segments."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from quorum_attention.integrations.transformers.segmented_tensor import LayerSegments
from quorum_attention.long_prompts.attend import compile_kernels
from quorum_attention.long_prompts.host_sharing import HostSharing
from quorum_attention.long_prompts.places import CachePlaces, Place
from quorum_attention.long_prompts.segmented_cache import SegmentedCache
from quorum_attention.long_prompts.segments import Segment
from quorum_attention.threads import try_start


class SegmentedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The cache of one layer of full attention.

    Attributes:
        tokens: its keys and values.
        shared: what the layers of a model share.
        next_layer: the layer of full attention behind it, weakly; behind the last layer
            comes the first. A cycle of strong references would keep the memory of a
            cache that nobody uses.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, tokens: SegmentedCache, shared: SharedReader) -> None:
        self.tokens = tokens
        self.shared = shared
        self.next_layer = weakref.ref(self)
        self.device = shared.places.device
        super().__init__()

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Note where attention is computed."""
        self.device = key_states.device
        self.dtype = key_states.dtype
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values (b, h_kv, n, d), and return all: tensors where they
        lie in one piece, else tensors that stand for them (``SegmentedTensor``).

        Raises:
            NotImplementedError: keys or values need gradients.
        """
        if torch.is_grad_enabled() and (
            key_states.requires_grad or value_states.requires_grad
        ):
            raise NotImplementedError(
                "a PromptCache keeps no gradients of keys and values: call the model "
                "under torch.no_grad(), or give another cache, such as DynamicCache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        is_first = self.tokens.n_tokens == 0
        self.tokens.append(key_states, value_states)
        if is_first:
            return key_states, value_states
        segments = self.tokens.segments()
        is_here = segments[0].key.device == key_states.device
        if len(segments) == 1 and is_here and segments[0].place is Place.DEVICE:
            return segments[0].expanded()
        return self._standing_for(segments).tensors()

    def _standing_for(self, segments: Sequence[Segment]) -> LayerSegments:
        sharing = self.shared.sharing_of(segments)
        return LayerSegments(segments, self.device, sharing, self._next_segments)

    def _next_segments(self) -> list[Segment]:
        """The segments of the next layer that has any outside of the device: they are
        copied ahead while the layers between compute."""
        layer = self.next_layer()
        while layer is not None and layer is not self:
            if not layer.tokens.is_on_device:
                return layer.tokens.segments()
            layer = layer.next_layer()
        return [] if layer is None else layer.tokens.segments()

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys (b, h_kv, n, d), as a tensor that stands for them; None if there are
        none."""
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
            raise TypeError(
                "keys and values of this cache cannot be replaced: use update()"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there will be after ``query_length`` more, and the
        first's place."""
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
        """Remove ``-tokens_to_remove`` tokens; a positive number is how many are kept,
        as in older versions of Transformers."""
        self.shared.forget_copies()
        n_tokens = self.tokens.n_tokens
        n_kept = (
            tokens_to_remove if tokens_to_remove > 0 else n_tokens + tokens_to_remove
        )
        self.tokens.crop(max(0, n_kept))

    def reorder_cache(self, beam_idx: torch.Tensor | Sequence[int]) -> None:
        """Make batch entry i what entry ``beam_idx[i]`` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry, without a copy."""
        self.shared.forget_copies()
        if self.tokens.batch:  # also one without tokens, after a crop
            self.tokens.repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep some batch entries."""
        self.shared.forget_copies()
        if self.tokens.batch:  # also one without tokens, after a crop
            self.tokens.select(indices)

    def fork(self) -> SegmentedLayer:
        """Return a second layer cache with the same tokens, which shares their
        memory."""
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
        self._has_kernels = False

    def sharing_of(self, segments: Sequence[Segment]) -> HostSharing | None:
        """Return how segments in host memory are shared; None if none is there, or no
        GPU."""
        if all(segment.place is not Place.HOST for segment in segments):
            return None
        self.take_memory()
        return self._sharing

    def take_memory(self) -> None:
        """Take the device's memory for copies from host memory, if it is not there yet.

        A prompt takes it before its first attention call. Later it would lie within
        memory that the allocator kept of that call, and the next layer's call would not
        find as much in one piece.
        """
        if self._sharing is not None:
            return
        memory = self.places.staging_memory()
        self._sharing = None if memory is None else HostSharing(memory)

    def compile_ahead(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Let a thread compile the kernels for tokens in host memory, once, while a
        prompt is computed; see ``compile_kernels``."""
        if self._has_kernels or not query.is_cuda:
            return
        self._has_kernels = True
        arguments = (query[:, :, :1], key[:, :, :1])
        thread = threading.Thread(target=compile_kernels, args=arguments, daemon=True)
        # Without a thread they are compiled when they are needed.
        try_start(thread)

    def forget_copies(self) -> None:
        """Forget copies that were made ahead of attention: tokens are about to
        change."""
        if self._sharing is not None:
            self._sharing.forget()
