"""A tensor that stands for all keys or all values of a cache in segments.

It has their shape, dtype and device, and no memory. The attention of this package takes
the segments from it. Any other operation gets a copy of all segments as one tensor:
right and slow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from quorum_attention.long_prompts.host_sharing import HostSharing
from quorum_attention.long_prompts.segments import Segment, concatenate


@dataclass(eq=False)
class LayerSegments:
    """The segments of a layer at one time, with what attention over them needs.

    Attributes:
        segments: in order of position, at least one.
        device: where attention is computed.
        sharing: how keys in host memory are shared between the device and the cores, or
            None.
        next_segments: returns the segments that the next layer will attend over.
    """

    segments: Sequence[Segment]
    device: torch.device
    sharing: HostSharing | None
    next_segments: Callable[[], Sequence[Segment]]
    _concatenated: tuple[torch.Tensor, ...] | None = None

    def concatenated(self) -> tuple[torch.Tensor, ...]:
        """Return (key, value) as tensors; a warning says once that this is slow."""
        if self._concatenated is None:
            _warn_of_copies()
            self._concatenated = concatenate(self.segments, self.device)
        return self._concatenated

    def tensors(self) -> tuple[SegmentedTensor, SegmentedTensor]:
        """Return tensors that stand for key and value."""
        key = SegmentedTensor(self, is_value=False)
        value = SegmentedTensor(self, is_value=True)
        return key, value


@cache
def _warn_of_copies() -> None:
    warnings.warn(
        "this model computes with the keys of its cache outside of attention, or its "
        "attention is not quorum_attention's: each layer copies its whole cache for "
        'every token. With attn_implementation="quorum" '
        "(quorum_attention.integrations.transformers.register) attention reads the "
        "cache where it lies",
        stacklevel=4,
    )


class SegmentedTensor(torch.Tensor):
    """All keys, or all values, of a layer: (b, h_kv, n, d).

    Attributes:
        layer: the segments.
        is_value: whether it stands for values, not keys.
    """

    layer: LayerSegments
    is_value: bool

    @staticmethod
    def __new__(cls, layer: LayerSegments, *, is_value: bool) -> SegmentedTensor:
        """Make a tensor without memory."""
        first = layer.segments[0]
        part = first.value if is_value else first.key
        n_tokens = sum(segment.n_tokens for segment in layer.segments)
        shape = (first.batch, part.shape[1], n_tokens, part.shape[3])
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=layer.device
        )
        tensor.layer = layer
        tensor.is_value = is_value
        return tensor

    def concatenated(self) -> torch.Tensor:
        """Return a tensor with memory: a copy of all segments."""
        key, value = self.layer.concatenated()
        return value if self.is_value else key

    # Functions of torch run as of any tensor, down to the operators that need memory.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on copies."""
        args, kwargs = tree_map_only(
            SegmentedTensor, SegmentedTensor.concatenated, (args, kwargs or {})
        )
        return operator(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        segments = self.layer.segments
        return f"SegmentedTensor(shape={tuple(self.shape)}, {len(segments)} segments)"
