"""Decoder layers of a model whose calls can be recorded and answered by somebody else.

The forward of each layer asks first whether this thread replaces layers for now. While
a prompt runs layer by layer, the model's own code around its layers (embedding,
positions, masks, last norm, output layer) runs tile by tile; the layers' arguments are
recorded, and stored results are returned in their place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from quorum_attention.recipes.host_weights import HostWeights
from quorum_attention.recipes.patching import is_patched, patch, unpatch

_HIDDEN = "hidden_states"


class _Replacement(threading.local):
    """The function that this thread runs in place of layers, with a layer's number and
    call."""

    function: Callable[[int, LayerCall], Any] | None = None


_REPLACEMENT = _Replacement()


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a decoder layer's forward.

    Attributes:
        hidden: (batch, tokens, width).
        args: positional arguments behind the hidden states.
        named: keyword arguments.
        is_named: whether the hidden states were given by keyword.
    """

    hidden: torch.Tensor
    args: tuple[Any, ...]
    named: dict[str, Any]
    is_named: bool = False

    @classmethod
    def from_arguments(cls, args: tuple[Any, ...], named: dict[str, Any]) -> LayerCall:
        """The call with these arguments."""
        if args:
            return cls(args[0], args[1:], named)
        rest = dict(named)
        hidden = rest.pop(_HIDDEN)
        return cls(hidden, (), rest, is_named=True)

    def with_hidden(self, hidden: torch.Tensor) -> LayerCall:
        """The call of other hidden states."""
        return replace(self, hidden=hidden)

    def map_tensors(
        self, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> LayerCall:
        """The call with ``function`` of all tensors, and without hidden states."""
        args, named = tree_map_only(torch.Tensor, function, (self.args, self.named))
        nothing = self.hidden[:0]
        return LayerCall(nothing, args, named, self.is_named)

    def run(self, function: Callable[..., Any]) -> Any:
        """Call ``function`` with these arguments."""
        if self.is_named:
            return function(**{_HIDDEN: self.hidden}, **self.named)
        return function(self.hidden, *self.args, **self.named)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the layers of a model's decoder in their order; none if it has no known
    ones."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = model.get_decoder().modules()
    return [
        module for module in modules if isinstance(module, GradientCheckpointingLayer)
    ]


def make_replaceable(
    layers: list[torch.nn.Module], weights: HostWeights | None
) -> None:
    """Change layers so that ``layers_replaced_by`` reaches them.

    Args:
        layers: the decoder's layers.
        weights: of the layers, in host memory; None: each layer has its weights.
    """
    for number, layer in enumerate(layers):
        patch(layer, "forward", _run_layer, number, weights)


def make_plain(layers: list[torch.nn.Module]) -> None:
    """Undo ``make_replaceable``."""
    for layer in layers:
        if is_patched(layer, _run_layer):
            unpatch(layer, _run_layer)


def _run_layer(
    number: int,
    weights: HostWeights | None,
    plain: Callable[..., Any],
    layer: torch.nn.Module,
    *args: Any,
    **named: Any,
) -> Any:
    """The forward of a changed layer."""
    if _REPLACEMENT.function is not None:
        return _REPLACEMENT.function(number, LayerCall.from_arguments(args, named))
    if weights is None:
        return plain(layer, *args, **named)
    with weights.on_device(number):
        return plain(layer, *args, **named)


class _AttentionRows(threading.local):
    """The rows that attention modules of this thread return the output projection of.

    Attributes:
        rows: (batch, heads, tokens, value_dim); None: modules run as they are.
    """

    rows: torch.Tensor | None = None


_ATTENTION_ROWS = _AttentionRows()


def make_skippable(module: torch.nn.Module, output_name: str) -> None:
    """Let ``attention_skipped`` skip all of an attention module but its output
    projection.

    Args:
        module: of one layer.
        output_name: the name of the output projection among its children.
    """
    patch(module, "forward", _run_attention_module, output_name)


def make_unskippable(module: torch.nn.Module) -> None:
    """Undo ``make_skippable``."""
    if is_patched(module, _run_attention_module):
        unpatch(module, _run_attention_module)


def _run_attention_module(
    output_name: str,
    plain: Callable[..., Any],
    module: torch.nn.Module,
    *args: Any,
    **named: Any,
) -> Any:
    """The forward of a changed attention module: it returns its output, and no
    weights."""
    rows = _ATTENTION_ROWS.rows
    if rows is None:
        return plain(module, *args, **named)
    project = getattr(module, output_name)
    # (batch, tokens, heads * value_dim)
    output = project(rows.transpose(1, 2).flatten(2))
    return output, None


@contextmanager
def attention_skipped(rows: torch.Tensor) -> Iterator[None]:
    """Let skippable attention modules return the output projection of ``rows``, (batch,
    heads, tokens, value_dim)."""
    _ATTENTION_ROWS.rows = rows
    try:
        yield
    finally:
        _ATTENTION_ROWS.rows = None


@contextmanager
def layers_replaced_by(
    function: Callable[[int, LayerCall], Any] | None,
) -> Iterator[None]:
    """Run ``function(number, call)`` in place of each decoder layer of this thread's
    forwards."""
    outside = _REPLACEMENT.function
    _REPLACEMENT.function = function
    try:
        yield
    finally:
        _REPLACEMENT.function = outside
