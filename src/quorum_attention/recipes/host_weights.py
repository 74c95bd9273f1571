"""Weights of decoder layers in page-locked host memory; each layer's are copied ahead
of its use.

The device holds the weights of two layers: while one computes, the next one's arrive.
After the last layer comes the first one again, for the next token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from quorum_attention.arithmetic import round_up
from quorum_attention.integrations.accelerate_private import fetches_weights
from quorum_attention.kernels.torch_private import lock_pages_with_threads
from quorum_attention.recipes.tile_storage import SideStream

# Weights begin at multiples of this many bytes.
_ALIGNMENT = 256


@dataclass
class _LayerWeights:
    """The weights of one layer, side by side in one piece of host memory.

    Attributes:
        weights: the layer's parameters.
        host: (n_bytes,) uint8.
        views: each parameter's part of ``host``.
        originals: the device that each parameter was on.
    """

    weights: list[torch.nn.Parameter]
    host: torch.Tensor
    views: list[torch.Tensor] = field(default_factory=list)
    originals: list[torch.device] = field(default_factory=list)

    @classmethod
    def moved(cls, layer: torch.nn.Module, device: torch.device) -> _LayerWeights:
        """Move the weights of a layer to host memory, for copies to ``device``."""
        weights = list(layer.parameters())
        is_locked = device.type == "cuda"
        memory = torch.empty(
            _bytes_of(weights), dtype=torch.uint8, pin_memory=is_locked
        )
        views = views_in(memory, weights)
        moved = cls(weights, memory, views, [weight.device for weight in weights])
        for weight, view in zip(weights, views, strict=True):
            view.copy_(weight.data)
            weight.data = view
        for buffer in layer.buffers():
            buffer.data = buffer.data.to(device)
        return moved

    def place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the layer compute with these tensors as its weights."""
        for weight, tensor in zip(self.weights, tensors, strict=True):
            weight.data = tensor

    def restore(self) -> None:
        """Give the layer its weights where they were at first."""
        for weight, view, device in zip(
            self.weights, self.views, self.originals, strict=True
        ):
            weight.data = view.to(device, copy=True)


def _bytes_of(weights: Sequence[torch.Tensor]) -> int:
    return sum(round_up(weight.nbytes, _ALIGNMENT) for weight in weights)


def views_in(
    memory: torch.Tensor, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return tensors like ``weights``, one behind the other in ``memory`` (n_bytes,)
    uint8."""
    views = []
    start = 0
    for weight in weights:
        part = memory[start : start + weight.nbytes]
        views.append(part.view(weight.dtype).view(weight.shape))
        start += round_up(weight.nbytes, _ALIGNMENT)
    return views


class HostWeights:
    """The weights of all decoder layers of a model, in host memory.

    Args:
        layers: the decoder's layers, in the order in which they run.
        device: where they compute.

    Attributes:
        nbytes: bytes in host memory.
        device_bytes: bytes on the device.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], device: torch.device) -> None:
        lock_pages_with_threads()
        self._layers = [_LayerWeights.moved(layer, device) for layer in layers]
        sizes = [layer.host.nbytes for layer in self._layers]
        largest = max(sizes)
        self._slots = [
            torch.empty(largest, dtype=torch.uint8, device=device),
            torch.empty(largest, dtype=torch.uint8, device=device),
        ]
        self._stream = SideStream(device)
        # The layer whose weights are in each slot, or on their way there, with the
        # copy's event.
        self._contents: list[tuple[int, Any] | None] = [None, None]
        self._active: int | None = None
        self.nbytes = sum(sizes)
        self.device_bytes = 2 * largest

    @contextmanager
    def on_device(self, number: int) -> Iterator[None]:
        """Let a layer compute with its weights on the device. The next layer's are
        fetched."""
        if self._active == number:
            yield
            return
        slot = self._fetch(number, busy=None)
        contents = self._contents[slot]
        assert contents is not None
        self._stream.wait(contents[1])
        layer = self._layers[number]
        layer.place(views_in(self._slots[slot], layer.weights))
        self._fetch((number + 1) % len(self._layers), busy=slot)
        outside = self._active
        self._active = number
        try:
            yield
        finally:
            self._active = outside
            layer.place(layer.views)

    def _fetch(self, number: int, busy: int | None) -> int:
        """Begin to copy a layer's weights, unless they are there, and return their
        slot.

        Args:
            number: of the layer.
            busy: the slot that a layer computes with.
        """
        for slot, contents in enumerate(self._contents):
            if contents is not None and contents[0] == number:
                return slot
        slot = 0 if busy is None else 1 - busy
        source = self._layers[number].host
        target = self._slots[slot][: source.nbytes]
        event = self._stream.copy([target], [source])
        self._contents[slot] = (number, event)
        return slot

    def restore(self) -> None:
        """Give all layers their weights where they were at first."""
        self._stream.synchronize()
        for layer in self._layers:
            layer.restore()


@contextmanager
def weights_on_device(weights: HostWeights | None, number: int) -> Iterator[None]:
    """``weights.on_device(number)``; nothing where each layer has its weights
    (None)."""
    if weights is None:
        yield
        return
    with weights.on_device(number):
        yield


def why_not(layers: Sequence[torch.nn.Module]) -> str | None:
    """Return why weights of layers cannot be kept in host memory, or None."""
    for layer in layers:
        for module in layer.modules():
            if fetches_weights(module):
                return "Accelerate's hooks offload them already"
        for weight in layer.parameters():
            if type(weight) is not torch.nn.Parameter or weight.is_meta:
                return (
                    f"a weight is a {type(weight).__name__} that cannot be moved byte "
                    "by byte"
                )
    shared = [id(weight) for layer in layers for weight in layer.parameters()]
    if len(set(shared)) < len(shared):
        return "layers share weights"
    return None


class MovedTensors:
    """Tensors of a model beside its layers, such as embeddings, moved to a device.

    Args:
        model: the model.
        layers: whose tensors stay where they are.
        device: where the others go.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[torch.nn.Module],
        device: torch.device,
    ) -> None:
        in_layers = {id(tensor) for layer in layers for tensor in _tensors_of(layer)}
        self._origins: list[tuple[torch.Tensor, torch.device]] = []
        for tensor in _tensors_of(model):
            if id(tensor) in in_layers or tensor.device == device:
                continue
            self._origins.append((tensor, tensor.device))
            tensor.data = tensor.data.to(device)

    def restore(self) -> None:
        """Move them back."""
        for tensor, device in self._origins:
            tensor.data = tensor.data.to(device)


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
