"""Weights of decoder layers in page-locked host memory; each layer's are copied ahead
of its use.

The device holds the weights of two layers: while one computes, the next one's arrive.
After the last layer comes the first one again, for the next token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from quorum_attention.integrations.accelerate_private import fetches_weights
from quorum_attention.kernels.carving import bytes_of, views_of
from quorum_attention.plain_types import Keywords
from quorum_attention.recipes.tile_storage import SideStream

# The device has room for the weights of this many layers.
N_SLOTS = 2


@dataclass
class _LayerWeights:
    """The weights of one layer, side by side in one piece of host memory.

    Attributes:
        weights: the layer's parameters.
        host: (n_bytes,) uint8.
        views: each parameter's part of ``host``.
    """

    weights: list[torch.nn.Parameter]
    host: torch.Tensor
    views: list[torch.Tensor]

    @classmethod
    def moved(cls, layer: torch.nn.Module, stream: SideStream) -> _LayerWeights:
        """Move the weights of a layer to host memory, for copies by ``stream``."""
        weights = list(layer.parameters())
        memory = stream.empty_on_host([bytes_of(weights)], torch.uint8)
        views = views_of(memory, weights)
        for weight, view in zip(weights, views, strict=True):
            view.copy_(weight.data)
            weight.data = view
        return cls(weights, memory, views)

    def place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the layer compute with these tensors as its weights."""
        for weight, tensor in zip(self.weights, tensors, strict=True):
            weight.data = tensor

    def __setstate__(self, state: Keywords) -> None:
        """Take what was pickled. Tensors that shared memory are copies then, and share
        it again here."""
        vars(self).update(state)
        if self.views and self.views[0].data_ptr() != self.host.data_ptr():
            self.views = views_of(self.host, self.weights)
            self.take_assigned()

    def take_assigned(self) -> None:
        """Copy other data that somebody gave to weights into host memory.

        Raises:
            RuntimeError: it has another dtype or shape.
        """
        for weight, view in zip(self.weights, self.views, strict=True):
            if weight.data_ptr() == view.data_ptr():
                continue
            if weight.shape != view.shape or weight.dtype != view.dtype:
                raise RuntimeError(
                    f"a weight in host memory was {view.dtype} {tuple(view.shape)} and "
                    f"is now {weight.dtype} {tuple(weight.shape)}: call "
                    "undo_long_prompt(model) before such changes, and long_prompt after"
                )
            view.copy_(weight.data)
            weight.data = view


class HostWeights:
    """The weights of all decoder layers of a model, in host memory. All other tensors
    of the model are on the device.

    Args:
        model: the model.
        layers: the decoder's layers, in the order in which they run.
        device: where they compute.

    Attributes:
        device_bytes: bytes on the device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[torch.nn.Module],
        device: torch.device,
    ) -> None:
        self._origins = _move_others(model, layers, device)
        self._stream = SideStream(device)
        self._layers = [_LayerWeights.moved(layer, self._stream) for layer in layers]
        sizes = [layer.host.nbytes for layer in self._layers]
        largest = max(sizes)  # a multiple of the alignment
        self._slots = torch.empty((N_SLOTS, largest), dtype=torch.uint8, device=device)
        # The layer whose weights are in each slot, or on their way there, with the
        # copy's event.
        self._contents: list[tuple[int, Any] | None] = [None, None]
        self._active: int | None = None
        # Forks of a cache may be used in several threads.
        self._computing = threading.RLock()
        self.device_bytes = N_SLOTS * largest

    def __getstate__(self) -> Keywords:
        """Return what is copied and pickled, which a lock cannot be."""
        state = dict(vars(self))
        del state["_computing"]
        return state

    def __setstate__(self, state: Keywords) -> None:
        """Take what was copied or pickled."""
        vars(self).update(state)
        self._computing = threading.RLock()

    @contextmanager
    def on_device(self, number: int) -> Iterator[None]:
        """Let a layer compute with its weights on the device. The next layer's are
        fetched. Another thread waits: its layer would take this one's place there."""
        with self._computing:
            if self._active == number:
                yield
                return
            with self._in_slot(number):
                yield

    @contextmanager
    def _in_slot(self, number: int) -> Iterator[None]:
        """Let a layer compute with its weights in a slot."""
        slot = self._fetch(number, busy=None)
        contents = self._contents[slot]
        assert contents is not None
        self._stream.wait(contents[1])
        layer = self._layers[number]
        layer.place(views_of(self._slots[slot], layer.weights))
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

    def slot_of(self, number: int) -> int:
        """Return where on the device a layer that computes has its weights, 0 or 1. In
        a model with an odd number of layers each has them in the other place for the
        next token."""
        last = self._contents[1]
        return int(last is not None and last[0] == number)

    def read_again(self) -> None:
        """Fetch all weights anew: somebody may have changed them since.

        Raises:
            RuntimeError: a weight has another dtype or shape now.
        """
        for layer in self._layers:
            layer.take_assigned()
        self._contents = [None, None]

    def count_foreign(self, model: torch.nn.Module) -> int:
        """Return how many of these weights a model has no longer."""
        present = {id(weight) for weight in model.parameters()}
        n_foreign = 0
        for layer in self._layers:
            n_foreign += sum(id(weight) not in present for weight in layer.weights)
        return n_foreign

    def restore(self) -> None:
        """Move all tensors to where they were at first."""
        self._stream.synchronize()
        for tensor, device in self._origins:
            tensor.data = tensor.data.to(device, copy=True)


def _move_others(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], device: torch.device
) -> list[tuple[torch.Tensor, torch.device]]:
    """Move all tensors of a model to a device, but for the weights of its layers.

    Returns:
        These weights, and what was moved, each with the device that it was on.
    """
    in_layers = {id(weight) for layer in layers for weight in layer.parameters()}
    origins: list[tuple[torch.Tensor, torch.device]] = []
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) in in_layers:
            origins.append((tensor, tensor.device))
        elif tensor.device != device:
            origins.append((tensor, tensor.device))
            tensor.data = tensor.data.to(device)
    return origins


def weights_on_device(
    weights: HostWeights | None, number: int
) -> AbstractContextManager[None]:
    """``weights.on_device(number)``; nothing where each layer has its weights
    (None)."""
    return nullcontext() if weights is None else weights.on_device(number)


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
