"""Layers that compute a text's next tokens by graphs of their device.

To launch a layer's kernels one by one takes the host 1 to 2.5 ms, longer than a GPU
needs to compute them. A layer's call is recorded when it was made for the second time
with arguments of the same kind. Graphs are compared with the layer's own code for one
more token before they take its place, and whenever the layer has changed since, its
code runs again.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from quorum_attention.errors import first_line
from quorum_attention.integrations.transformers.prompt_cache import PromptCache
from quorum_attention.integrations.transformers_private import recorded_outputs
from quorum_attention.recipes.host_weights import (
    N_SLOTS,
    HostWeights,
    weights_on_device,
)
from quorum_attention.recipes.layer_calls import LayerCall
from quorum_attention.recipes.layer_parts import LayerParts, has_own_code
from quorum_attention.recipes.layer_recording import (
    MASK,
    LayerRecording,
    WatchedCall,
    leaves_of,
)
from quorum_attention.recipes.patching import plain_class

_KNOWN_LEAVES = (torch.Tensor, bool, int, float, str, type(None))
_KNOWN_WEIGHTS = (torch.nn.Parameter, torch.Tensor)
# Modules of others may compute otherwise from token to token, without a trace in their
# tensors: adapters that are switched, weights that are decoded.
_KNOWN_MODULES = ("torch.nn.", "transformers.")


class TokenLayers:
    """Runs in place of a model's decoder layers, for one token of each text.

    Args:
        layers: of the decoder, in their order.
        graphs: makes graphs, ``CudaGraphs``.
        weights: of the layers, if they are in host memory.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        graphs: Any,
        weights: HostWeights | None = None,
    ) -> None:
        self._modules = layers
        self._graphs = graphs
        self._weights = weights
        # By layer, and the place of its weights: graphs read them where they lay.
        self._layers = [
            [_TokenLayer(layer, graphs) for _ in range(N_SLOTS)] for layer in layers
        ]
        # The thread that computes a token: graphs of all layers share memory.
        self._running: dict[str, int] = {}
        self._n_prompts = 0

    def __reduce__(self) -> Any:
        """Copy and pickle without graphs."""
        return TokenLayers, (self._modules, self._graphs, self._weights)

    def begin_answer(self) -> None:
        """Compare graphs with the layers' code for the next token: since the last
        answer, numbers of layers and settings of torch may have changed, which are not
        looked at for each token."""
        self._n_prompts += 1

    def run(self, number: int, call: LayerCall) -> Any:
        """Return what a layer's forward returns.

        Args:
            number: of the layer.
            call: of its forward.
        """
        with weights_on_device(self._weights, number):
            slot = 0 if self._weights is None else self._weights.slot_of(number)
            thread = threading.get_ident()
            try:
                # A lock could stay taken behind an interrupt, also for its own thread.
                if self._running.setdefault("thread", thread) != thread:
                    return call.run_own()
                if recorded_outputs():
                    return call.run_own()  # hooks in layers record them
                return self._layers[number][slot].run(call, self._n_prompts)
            finally:
                if self._running.get("thread") == thread:
                    self._running.clear()


class _TokenLayer:
    """One layer on its way to graphs, with weights in one place."""

    def __init__(self, layer: torch.nn.Module, graphs: Any) -> None:
        self._layer = layer
        self._graphs = graphs
        self._kind: Any = None
        self._n_prompts = 0
        self._parts = LayerParts(layer)
        self._recording: LayerRecording | None = None
        self._step: Callable[[LayerCall], Any] = LayerCall.run_own

    def run(self, call: LayerCall, n_prompts: int) -> Any:
        """Run the layer, by graphs if they are there.

        Args:
            call: the layer's.
            n_prompts: how many prompts there were.
        """
        kind = (self._graphs.stream(), _kind_of(call))
        if kind != self._kind or not self._parts.are_unchanged():
            # In this order: an interrupt must not leave the old graphs to a new kind.
            self._step = self._wait
            self._recording = None
            self._parts = LayerParts(self._layer)
            self._kind = kind
        elif n_prompts != self._n_prompts and self._recording is not None:
            self._step = self._check
        self._n_prompts = n_prompts
        return self._step(call)

    def _wait(self, call: LayerCall) -> Any:
        """Run the layer's code: short answers are not worth a recording."""
        self._step = self._record
        return call.run_own()

    def _record(self, call: LayerCall) -> Any:
        """Run the layer's code, and record the call."""
        self._step = LayerCall.run_own
        if not _can_be_recorded(self._layer, call):
            return call.run_own()
        watched = self._watch(call)
        if watched.refusal is None:
            try:
                self._recording = LayerRecording(call, watched, self._graphs.new)
                self._step = self._check
            except Exception as error:  # the device is full, or it cannot record
                warnings.warn(
                    f"a layer computes tokens by its own code: {first_line(error)}",
                    stacklevel=2,
                )
        return watched.result

    def _watch(self, call: LayerCall) -> WatchedCall:
        """Run the layer's code, and note what it does."""
        weights = chain(self._layer.parameters(), self._layer.buffers())
        return WatchedCall(call, weights)

    def _check(self, call: LayerCall) -> Any:
        """Run the layer's code, and compare the graphs with it."""
        assert self._recording is not None
        watched = self._watch(call)
        if watched.refusal is None and self._recording.agrees(call, watched):
            self._step = self._recording.replay
        else:
            self._recording = None
            self._step = LayerCall.run_own
        return watched.result


def _kind_of(call: LayerCall) -> list[Any]:
    """The kinds of a call's arguments: a recording serves calls of one kind."""
    kind: list[Any] = [torch.is_inference_mode_enabled()]
    for name, leaf in leaves_of(call):
        if isinstance(leaf, PromptCache) or name == MASK:
            kind.append(type(leaf))
        elif isinstance(leaf, torch.Tensor):
            kind += (name, leaf.shape, leaf.dtype, leaf.device)
        elif isinstance(leaf, _KNOWN_LEAVES):
            kind += (name, leaf)
        else:  # it is not recorded, and may not be comparable
            kind += (name, type(leaf))
    return kind


def _can_be_recorded(layer: torch.nn.Module, call: LayerCall) -> bool:
    """Whether a layer's modules and arguments are of kinds whose every part is seen
    when it changes."""
    has_cache = False
    for name, leaf in leaves_of(call):
        if type(leaf) is PromptCache:
            has_cache = True
        elif name != MASK and not isinstance(leaf, _KNOWN_LEAVES):
            return False
    return has_cache and all(map(_is_known, layer.modules()))


def _is_known(module: torch.nn.Module) -> bool:
    if module.training or has_own_code(module):
        return False
    weights = chain(module._parameters.values(), module._buffers.values())
    is_known = plain_class(module).__module__.startswith(_KNOWN_MODULES)
    return is_known and all(map(_is_known_weight, weights))


def _is_known_weight(weight: torch.Tensor | None) -> bool:
    return weight is None or (
        type(weight) in _KNOWN_WEIGHTS and weight.layout is torch.strided
    )
