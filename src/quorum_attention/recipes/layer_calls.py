"""Decoder layers of a model whose calls can be recorded and answered by somebody else.

The forward of each layer asks first whether this thread replaces layers for now. While
a prompt runs layer by layer, the model's own code around its layers (embedding,
positions, masks, last norm, output layer) runs tile by tile; the layers' arguments are
recorded, and stored results are returned in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from quorum_attention.integrations.substitutes import substitutes
from quorum_attention.plain_types import Keywords
from quorum_attention.recipes.host_weights import HostWeights, weights_on_device

_HIDDEN = "hidden_states"


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a decoder layer's forward.

    Attributes:
        forward: the layer's own.
        hidden: (batch, tokens, width).
        args: positional arguments behind the hidden states.
        named: keyword arguments.
    """

    forward: Callable[..., Any]
    hidden: torch.Tensor
    args: tuple[Any, ...]
    named: Keywords

    @classmethod
    def from_arguments(
        cls, forward: Callable[..., Any], args: tuple[Any, ...], named: Keywords
    ) -> LayerCall:
        """The call of a layer's forward with these arguments."""
        if args:
            return cls(forward, args[0], args[1:], named)
        rest = dict(named)
        hidden = rest.pop(_HIDDEN)
        return cls(forward, hidden, (), rest)

    def with_hidden(self, hidden: torch.Tensor) -> LayerCall:
        """The call of other hidden states."""
        return replace(self, hidden=hidden)

    def map_tensors(
        self, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> LayerCall:
        """The call with ``function`` of all tensors, and without hidden states."""
        args, named = tree_map_only(torch.Tensor, function, (self.args, self.named))
        # A view would keep the memory of a tile of the prompt.
        nothing = self.hidden.new_empty(0)
        return replace(self, hidden=nothing, args=args, named=named)

    def replace_arguments(
        self, is_replaced: Callable[[Any], bool], replacement: Any
    ) -> LayerCall:
        """The call with ``replacement`` in place of some arguments."""
        args = [
            replacement if is_replaced(argument) else argument for argument in self.args
        ]
        named = {
            name: replacement if is_replaced(argument) else argument
            for name, argument in self.named.items()
        }
        return replace(self, args=tuple(args), named=named)

    def run(self, function: Callable[..., Any]) -> Any:
        """Call ``function`` with these arguments."""
        return function(self.hidden, *self.args, **self.named)

    def run_own(self) -> Any:
        """Return what the layer's own forward returns."""
        return self.run(self.forward)


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the layers of a model's decoder in their order; none if it has no known
    ones."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    modules = model.get_decoder().modules()
    return [
        module for module in modules if isinstance(module, GradientCheckpointingLayer)
    ]


def run_layer(
    number: int,
    weights: HostWeights | None,
    plain: Callable[..., Any],
    layer: torch.nn.Module,
    *args: Any,
    **named: Any,
) -> Any:
    """The forward of a changed layer: ``substitutes.layer`` may run in its place.

    Args:
        number: of the layer.
        weights: of all layers, in host memory; None: each layer has its weights.
        plain: the forward of the layer's class.
        layer: the layer.
        args, named: the arguments of its forward.
    """
    if substitutes.layer is not None:
        call = LayerCall.from_arguments(partial(plain, layer), args, named)
        return substitutes.layer(number, call)
    with weights_on_device(weights, number):
        return plain(layer, *args, **named)


def run_attention_module(
    output_name: str,
    plain: Callable[..., Any],
    module: torch.nn.Module,
    *args: Any,
    **named: Any,
) -> Any:
    """The forward of a changed attention module: it returns its output, and no weights.

    All but its output projection is skipped for ``substitutes.attention_rows``.

    Args:
        output_name: the name of the output projection among its children.
        plain: the forward of the module's class.
        module: the module.
        args, named: the arguments of its forward.
    """
    rows = substitutes.attention_rows
    if rows is None:
        return plain(module, *args, **named)
    project = getattr(module, output_name)
    # (batch, tokens, heads * value_dim)
    output = project(rows.transpose(1, 2).flatten(2))
    return output, None
