"""``long_context(model)``: what well-kept libraries have for long texts, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quorum_attention.argument_checks import one_of, whole_number
from quorum_attention.keywords import helps_with_names
from quorum_attention.recipes import step
from quorum_attention.recipes.attention import set_attention
from quorum_attention.recipes.checkpoints import LayerCheckpoints
from quorum_attention.recipes.chunked_loss import chunk_loss
from quorum_attention.recipes.fused_norms import fuse_norms
from quorum_attention.recipes.model_shape import read_shape
from quorum_attention.recipes.patching import Change
from quorum_attention.recipes.tiled_mlp import tile_mlps
from quorum_attention.units import parse_bytes

CHECKPOINTS = "checkpoints"
_PLACES = {
    "auto": "on the device while there is room, then in host memory", "host": "in host memory",
    "device": "on the device",
}  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """All changes, in the order in which they were tried."""

    changes: tuple[Change, ...]

    @property
    def done(self) -> tuple[str, ...]:
        """Names of the changes that were made."""
        return tuple(change.name for change in self.changes if change.done)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the changes that were not made."""
        return tuple(change.name for change in self.changes if not change.done)

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes))


@helps_with_names
def long_context(
    model: Any,
    *,
    attention: bool = True,
    budget: int | str | None = None,
    checkpoints: str | None = "auto",
    mlp_tile: int | None = step.MLP_TILE,
    chunked_loss: bool = True,
    fused_norms: bool = True,
) -> Summary:
    """Change a decoder of Transformers in place so that long texts fit; its results stay the same.

    A change that does not suit the model is left out, and the summary says why.

    Args:
        model: a ``PreTrainedModel`` for causal language modelling, or PEFT's around one, with its
            weights loaded.
        attention: set ``attn_implementation="quorum"``, with the options of an earlier
            ``register``, if there was one.
        budget: of each attention call, for this model alone; see
            ``quorum_attention.integrations.transformers.register``. The model's implementation then
            gets its own name (``quorum_2147483648``).
        checkpoints: keep only the layers' inputs and attention's results. "auto" keeps them on the
            device while there is room, and then in page-locked host memory; "host" and "device"
            name one place; None switches this off. Results without room are computed again.
        mlp_tile: tokens of an MLP at a time; None leaves MLPs as they are.
        chunked_loss: a call with labels computes its loss for some tokens at a time, and logits
            only if somebody reads them.
        fused_norms: compute RMS norms by torch's kernel, if it has one for the model's device.

    Returns:
        What was changed and what was left out, with reasons; print it.

    Raises:
        ImportError: Transformers is not installed, or its version is not supported.
        TypeError, ValueError: an argument is wrong.
    """
    from quorum_attention.integrations.transformers import name_for

    if mlp_tile is not None:
        whole_number(mlp_tile, "mlp_tile", 1)
    one_of(checkpoints, "checkpoints", (*_PLACES, None))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "set_attn_implementation"):
        raise TypeError(f"model must be a PreTrainedModel of Transformers, got {type(model)}")
    name, budget = name_for(budget)  # with what ``register`` was given, if nothing is given here
    none = "switched off"
    done = [Change(step.ATTENTION, False, none)]
    if attention:
        done = [set_attention(base, name, f"budget {budget or 'of the free memory'}")]
    done.append(chunk_loss(base) if chunked_loss else Change(step.LOSS, False, none))
    done.append(tile_mlps(base, mlp_tile) if mlp_tile else Change(step.MLP, False, none))
    done.append(fuse_norms(base) if fused_norms else Change(step.NORMS, False, none))
    training = step.Training(
        1, dtype=base.dtype, lora=None if all(p.requires_grad for p in base.parameters()) else 1,
        budget=None if budget is None else parse_bytes(budget), device=base.device.type,
        on=tuple(change.name for change in done if change.done),
    )  # fmt: skip
    done.append(_checkpoint_layers(base, checkpoints, training))
    return Summary(tuple(done))


def _checkpoint_layers(model: Any, where: str | None, training: step.Training) -> Change:
    """Keep of every layer its input and attention's results alone."""
    if where is None:
        return Change(CHECKPOINTS, False, "switched off")
    if not getattr(model, "supports_gradient_checkpointing", False):
        return Change(CHECKPOINTS, False, f"{type(model).__name__} does not support them")
    try:
        parameters = sum(weight.numel() for weight in model.parameters())
        shape = read_shape(model.config.to_dict(), parameters)
    except ValueError:  # sizes by other names: then all goes to host memory
        shape = None
    if not LayerCheckpoints(model, where, shape, training).install():
        return Change(CHECKPOINTS, True, "Transformers' own, on the device")
    words = f"torch's, with attention's results, {_PLACES[where]}"
    if not model.training:
        words += (
            "; this model is in eval mode, in which nothing is kept: that is right for generating; "
            "to train it, call model.train()"
        )
    return Change(CHECKPOINTS, True, words)
