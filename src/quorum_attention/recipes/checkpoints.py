"""Layers computed again in the backward: Transformers' checkpoints, in host memory if it can."""

from __future__ import annotations

import inspect
from typing import Any

from quorum_attention.counts import one_of
from quorum_attention.execution.device.lookup import best_device, on_host
from quorum_attention.recipes.summary import Ingredient, left_out

NAME = "checkpoints"
PLACES = ("host", "device", None)


def checkpoint_layers(model: Any, where: str | None) -> Ingredient:
    """Keep of every layer its input alone, on the device or in host memory."""
    one_of(where, "checkpoints", PLACES)
    if where is None:
        return left_out(NAME, "not asked for")
    if not getattr(model, "supports_gradient_checkpointing", False):
        return left_out(NAME, f"{type(model).__name__} has none")
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None or "offload" not in inspect.signature(enable).parameters:
        older = model.gradient_checkpointing_enable
        older(gradient_checkpointing_kwargs={"use_reentrant": False})
        if where == "host":
            return Ingredient(NAME, True, "on the device: this Transformers has none elsewhere")
        return Ingredient(NAME, True, "Transformers', on the device")
    # Without an accelerator torch has no memory to copy them to that is not where they are.
    away = where == "host" and not on_host(best_device())
    enable({"use_reentrant": False}, offload=away)
    place = "in host memory" if where == "host" else "on the device"
    return Ingredient(NAME, True, f"Transformers', {place}")


__all__ = ["NAME", "PLACES", "checkpoint_layers"]
