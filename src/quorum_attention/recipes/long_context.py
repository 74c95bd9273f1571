"""``long_context(model)``: what well-kept libraries have for long texts, put together."""

from __future__ import annotations

import inspect
from typing import Any

from quorum_attention.counts import one_of, whole_number
from quorum_attention.execution.device.lookup import best_device, on_host
from quorum_attention.recipes.loss import NAME as LOSS
from quorum_attention.recipes.loss import chunk_loss
from quorum_attention.recipes.mlp import NAME as MLP
from quorum_attention.recipes.mlp import tile_mlps
from quorum_attention.recipes.step import MLP_TILE
from quorum_attention.recipes.summary import Change, Summary, left_out

ATTENTION, CHECKPOINTS = "quorum attention", "checkpoints"


def long_context(
    model: Any,
    *,
    attention: bool = True,
    budget: int | str | None = None,
    checkpoints: str | None = "host",
    mlp_tile: int | None = MLP_TILE,
    chunked_loss: bool = True,
) -> Summary:
    """Change a decoder of Transformers in place so that long texts fit; its results stay the same.

    Attention and the tiled MLP are this package's. Checkpoints are Transformers' own (in host
    memory by torch's ``save_on_cpu``), the chunked loss is Liger's or torch's. What is not
    installed, or does not suit the model, is left out, and the summary says so.

    Args:
        model: a ``PreTrainedModel`` for causal language modelling, or PEFT's around one, with its
            weights loaded.
        attention: set ``attn_implementation="quorum"``, with the options that ``register`` was
            given for that name, if it was called.
        budget: of attention; see ``quorum_attention.integrations.transformers.register``. It is of
            this model alone, which gets a name of its own then (``quorum_2147483648``).
        checkpoints: keep only the layers' inputs, in "host" memory or on the "device"; None does
            not.
        mlp_tile: tokens of an MLP at a time; None leaves it as it is.
        chunked_loss: a call with labels computes its loss some tokens at a time and returns no
            logits.

    Returns:
        What was done and what was left out, with reasons; print it.

    Raises:
        ImportError: Transformers is not installed, or of a version that is not known.
        TypeError, ValueError: arguments that make no sense.
    """
    from quorum_attention.integrations.transformers.names import name_for

    if mlp_tile is not None:
        whole_number(mlp_tile, "mlp_tile", 1)
    one_of(checkpoints, "checkpoints", ("host", "device", None))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "set_attn_implementation"):
        raise TypeError(f"model must be a PreTrainedModel of Transformers, got {type(model)}")
    done: list[Change] = []
    if attention:
        done.append(_attend(base, *name_for(budget)))
    else:
        done.append(left_out(ATTENTION, "not asked for"))
    done.append(chunk_loss(base) if chunked_loss else left_out(LOSS, "not asked for"))
    done.append(tile_mlps(base, mlp_tile) if mlp_tile else left_out(MLP, "not asked for"))
    done.append(_checkpoint_layers(base, checkpoints))
    return Summary(tuple(done))


def _attend(model: Any, name: str, budget: int | str | None) -> Change:
    """Set the model's attention, if it takes that by name; of those that do not Transformers only
    logs it."""
    from quorum_attention.integrations.transformers.whose import names_of

    model.set_attn_implementation(name)
    if name not in names_of(model.config):
        return left_out(ATTENTION, f"{type(model).__name__} does not take its attention by name")
    return Change(ATTENTION, True, f"budget {budget or 'of what is free'}")


def _checkpoint_layers(model: Any, where: str | None) -> Change:
    """Keep of every layer its input alone, on the device or in host memory."""
    if where is None:
        return left_out(CHECKPOINTS, "not asked for")
    if not getattr(model, "supports_gradient_checkpointing", False):
        return left_out(CHECKPOINTS, f"{type(model).__name__} has none")
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None or "offload" not in inspect.signature(enable).parameters:
        older = model.gradient_checkpointing_enable
        older(gradient_checkpointing_kwargs={"use_reentrant": False})
        if where == "host":
            return Change(CHECKPOINTS, True, "on the device: this Transformers has none elsewhere")
        return Change(CHECKPOINTS, True, "Transformers', on the device")
    # Without an accelerator torch has no memory to copy them to that is not where they are.
    away = where == "host" and not on_host(best_device())
    enable({"use_reentrant": False}, offload=away)
    place = "in host memory" if where == "host" else "on the device"
    return Change(CHECKPOINTS, True, f"Transformers', {place}")


__all__ = ["ATTENTION", "long_context"]
