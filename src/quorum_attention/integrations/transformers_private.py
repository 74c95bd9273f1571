"""All private names of Transformers that this package uses.

Each name stands in one function here, with what happens if a version of Transformers
has it no longer: ``PrivateNameError`` says which name is gone and what to use instead,
or a warning says what is not noticed any more.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import cache
from importlib import metadata
from typing import Any

import torch

# Entries of a configuration that say nothing about the sizes of a model.
CONFIG_NOTES = ("_name_or_path", "_attn_implementation")


class PrivateNameError(RuntimeError):
    """A private name of Transformers is gone.

    Args:
        name: the name.
        remedy: what to do without it.
    """

    def __init__(self, name: str, remedy: str) -> None:
        version = metadata.version("transformers")
        super().__init__(
            f"Transformers {version} has no {name}, which this needs: {remedy}"
        )


def attention_name(config: Any) -> str | None:
    """Return the name of the attention that a configuration asks for, or None if it
    names none.

    Raises:
        PrivateNameError: configurations keep it elsewhere.
    """
    if not hasattr(config, "_attn_implementation"):
        raise PrivateNameError(
            "PreTrainedConfig._attn_implementation",
            "use model.set_attn_implementation(register()) in place of long_context "
            "and long_prompt, or an earlier version",
        )
    name: str | None = config._attn_implementation
    return name


def configurations_in(config: Any) -> Iterator[Any]:
    """Yield a configuration of Transformers and those within it, outer ones first."""
    if not hasattr(config, "sub_configs"):  # no configuration of Transformers
        return
    yield config
    for name in config.sub_configs:
        yield from configurations_in(getattr(config, name, None))


def set_attention_name(config: Any, name: str | None) -> None:
    """Let a configuration, and those within it, ask for an attention.

    ``set_attn_implementation`` does not take all names that it replaces, such as None.
    """
    config._attn_implementation = name


def recorded_outputs() -> Collection[str]:
    """Return the names of what the model that runs now records of its layers, such as
    "attentions"; none if that is unknown."""
    try:
        from transformers.utils.output_capturing import _active_collector

        return _active_collector.get() or ()
    except (ImportError, AttributeError):
        _warn_of_unseen_records()
        return ()


def is_output_recorder(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook is one that Transformers leaves in a model after a call
    with ``output_hidden_states=True`` and the like. It does nothing while there are no
    ``recorded_outputs``."""
    name = "transformers.utils.output_capturing"
    if getattr(hook, "__module__", None) != name:
        return False
    is_seen = hasattr(sys.modules[name], "_active_collector")
    return is_seen and hook.__name__ == "output_capturing_hook"


@cache
def _warn_of_unseen_records() -> None:
    version = metadata.version("transformers")
    warnings.warn(
        f"Transformers {version} has no utils.output_capturing._active_collector: "
        "quorum attention cannot notice that output_attentions=True is asked for, and "
        "returns no weights",
        stacklevel=4,
    )


def layer_checkpoint(layer: torch.nn.Module) -> Any:
    """Return the function that computes a layer under gradient checkpointing.

    Raises:
        PrivateNameError: layers keep it elsewhere.
    """
    function = getattr(layer, "_gradient_checkpointing_func", None)
    if function is None:
        raise PrivateNameError(
            "GradientCheckpointingLayer._gradient_checkpointing_func",
            "use long_context(checkpoints=None), or an earlier version",
        )
    return function


def set_layer_checkpoint(layer: Any, function: Callable[..., Any]) -> None:
    """Let ``function(forward, *inputs)`` compute a layer under gradient
    checkpointing."""
    layer_checkpoint(layer)
    layer._gradient_checkpointing_func = function


def replace_checkpoint_setter(model: Any, setter: Callable[..., None]) -> None:
    """Let ``setter`` run whenever somebody switches the model's checkpoints on or off.

    Raises:
        PrivateNameError: Transformers calls no such method.
    """
    _check_checkpoint_setter(model)
    model._set_gradient_checkpointing = setter


def set_checkpoints_as_before(model: Any, *args: Any, **named: Any) -> None:
    """Switch checkpoints on or off as the model's class does."""
    type(model)._set_gradient_checkpointing(model, *args, **named)


def _check_checkpoint_setter(model: Any) -> None:
    if not hasattr(type(model), "_set_gradient_checkpointing"):
        raise PrivateNameError(
            "PreTrainedModel._set_gradient_checkpointing",
            "use long_context(checkpoints=None), or an earlier version",
        )
