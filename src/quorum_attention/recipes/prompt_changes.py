"""Changes of a model for long prompts: where its weights lie, and how its forward runs
prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quorum_attention.kernels.torch_private import compiled_run_eagerly, uncompiled
from quorum_attention.plain_types import Keywords
from quorum_attention.recipes.changes import ChangeSet, ModelPiece, changes_by
from quorum_attention.recipes.host_weights import HostWeights, why_not
from quorum_attention.recipes.layer_calls import (
    decoder_layers,
    run_attention_module,
    run_layer,
)
from quorum_attention.recipes.patching import patch, runs, unpatch_all
from quorum_attention.units import counted

OWNER = "long_prompt"


class WeightsInHostMemory(ModelPiece):
    """Keep the weights of decoder layers in host memory, and all other tensors on the
    device.

    Args:
        device: where layers compute.
    """

    name = "weights in host memory"
    checked = "each layer's are the model's"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.weights: HostWeights | None = None

    def make(self, model: Any) -> str:
        """Move the weights.

        Raises:
            NotImplementedError: they cannot be kept in host memory.
        """
        layers = decoder_layers(model)
        reason = (
            why_not(layers) if layers else "it has no decoder layers that are known"
        )
        if reason is not None:
            raise NotImplementedError(
                f'weights="host" cannot be used with this {type(model).__name__}: '
                f"{reason}"
            )
        self.weights = HostWeights(model, layers, self._device)
        return "two layers at a time are copied to the device"

    def why_lost(self, model: Any) -> str | None:
        """Look for weights that the model has no longer."""
        assert self.weights is not None
        n_foreign = self.weights.count_foreign(model)
        if not n_foreign:
            return None
        return f"the model has {counted(n_foreign, 'weight')} of them no longer"

    def undo(self, model: Any) -> None:
        """Move all tensors back."""
        if self.weights is not None:
            self.weights.restore()


class PromptForward(ModelPiece):
    """Let a model's forward run prompts by its runner.

    Args:
        runner: a ``PromptRunner``.
        weights: of the layers, if they are in host memory.

    Attributes:
        reads_segments: whether attention reads keys and values where the cache has
            them.
    """

    name = "prompts"
    checked = "the forwards of the model and its layers run them"

    def __init__(self, runner: Any, weights: HostWeights | None) -> None:
        self.runner = runner
        self.weights = weights
        self.reads_segments = False

    def make(self, model: Any) -> str:
        """Change the forward of the model, and those of its decoder layers."""
        for number, layer in enumerate(decoder_layers(model)):
            patch(layer, "forward", run_layer, number, self.weights)
        patch(model, "forward", _run_model)
        return "some tokens at a time"

    def why_lost(self, model: Any) -> str | None:
        """Look for other forwards of the model and its layers, and for its device."""
        if not runs(model, _run_model):
            return "the model got another forward"
        device = self.runner.device
        if self.weights is None and model.device != device:
            return f"the model is on {model.device}, and was on {device}"
        layers = decoder_layers(model)
        n_others = sum(not runs(layer, run_layer) for layer in layers)
        if not n_others:
            return None
        return f"{counted(n_others, 'layer')} got another forward"

    def undo(self, model: Any) -> None:
        """Give all modules their forward back."""
        for function in (_run_model, run_layer, run_attention_module):
            unpatch_all(model, function)


def prompt_forward_in(changes: ChangeSet) -> PromptForward:
    """Return the piece that runs a model's prompts."""
    return next(piece for piece in changes.pieces if isinstance(piece, PromptForward))


def _run_model(plain: Callable[..., Any], model: Any, *args: Any, **named: Any) -> Any:
    """The forward of a changed model. A prompt runs outside the graphs of torch's
    compiler, which would break in each of its tiles and segments."""
    from quorum_attention.recipes.prompt_runner import named_arguments, needs_no_runner

    changes = changes_by(model, OWNER)
    if changes is None:  # a new model of a changed one's class
        return plain(model, *args, **named)
    forward = prompt_forward_in(changes)
    arguments = named_arguments(plain, args, named)
    can_be_in_graph = forward.weights is None and needs_no_runner(arguments)
    if torch.compiler.is_compiling() and can_be_in_graph:
        return plain(model, **arguments)
    return _run_prompt(plain, model, changes, arguments)


@uncompiled
def _run_prompt(
    plain: Callable[..., Any], model: Any, changes: ChangeSet, arguments: Keywords
) -> Any:
    """Run a forward by the model's runner. Parts of the model that are compiled run as
    they were written: graphs know no keys and values in segments, and no layers that
    somebody replaces.

    Args:
        plain: the forward of the model's class.
        model: the model.
        changes: of the model.
        arguments: of the forward.
    """
    from quorum_attention.recipes.prompt_runner import is_next_token, needs_no_runner

    forward = prompt_forward_in(changes)
    if not is_next_token(arguments):
        # Between prompts somebody may have changed weights and forwards.
        if forward.weights is not None:
            forward.weights.read_again()
        changes.warn_if_lost(model)
    if needs_no_runner(arguments):
        return forward.runner.run(plain, model, arguments)
    with compiled_run_eagerly():
        return forward.runner.run(plain, model, arguments)
