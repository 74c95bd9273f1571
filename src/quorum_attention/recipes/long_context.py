"""``long_context(model)``: what well-kept libraries have for long texts, put together.

One layer of a training step, with all changes made::

    forward of layer n                                  file
    ------------------                                  ----
    checkpoint: keep the layer's input             ...  checkpoints
       |        (on the device, or on its way           kept_layer, offload
       |         to host memory)
       v
    norm: torch's kernel                           ...  fused_norms
       |
    attention in a budget                          ...  attention
       |        keep its output and lse                 kept_layer
    norm
       |
    MLP, tile by tile; each tile is a checkpoint   ...  tiled_mlp
       v
    output
       |
    loss, chunk by chunk, after the last layer     ...  chunked_loss

    backward of layer n
    -------------------
    fetch what layer n keeps; begin to fetch what layer n - 1 keeps
       |
    run the layer's forward again, where attention is given its output and lse
       |
    gradients of MLP (tile by tile), norms and attention

A layer that does not fit is computed in tiles, in the forward and in the backward
(``tiled_layer``, tried by ``tiled_layer_trial``): up to attention tile by tile,
attention of all tokens with q, k, v in host memory, then the rest tile by tile.

A change replaces methods of a module's class (``patching``) and is a ``ModelPiece``
that the model carries (``changes``). What a forward runs in place of a part of the
model stands in one object of its thread (``integrations.substitutes``); a checkpoint
reaches attention by ``autograd.result_hook``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quorum_attention.argument_checks import one_of, whole_number
from quorum_attention.keywords import helps_with_names
from quorum_attention.recipes.attention import QuorumAttention
from quorum_attention.recipes.changes import (
    Change,
    ChangeSet,
    ModelPiece,
    base_model,
    changing,
    names_of_changes,
    undo_changes,
)
from quorum_attention.recipes.checkpoints import PLACES, LayerCheckpoints
from quorum_attention.recipes.chunked_loss import ChunkedLoss
from quorum_attention.recipes.fused_norms import FusedNorms
from quorum_attention.recipes.step_estimate import MLP_TILE
from quorum_attention.recipes.switches import (
    ATTENTION,
    CHECKPOINTS,
    LOSS,
    MLP,
    NORMS,
    SWITCHES,
)
from quorum_attention.recipes.tiled_mlp import TiledMLPs
from quorum_attention.recipes.training import Training
from quorum_attention.units import parse_bytes

_OWNER = "long_context"


@dataclass(frozen=True)
class LongContext:
    """The changes of a model. Print it to see what was changed. At the end of a
    ``with`` block the changes are undone.

    Attributes:
        model: the model.
        changes: all changes, in the order in which they were tried.
        owner: the function that made them.
    """

    model: Any
    changes: tuple[Change, ...]
    owner: str = _OWNER

    @property
    def done(self) -> tuple[str, ...]:
        """Names of the changes that were made."""
        return tuple(change.name for change in self.changes if change.done)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the changes that were not made."""
        return tuple(change.name for change in self.changes if not change.done)

    def undo(self) -> None:
        """Undo all changes, so that the model is as it was before ``long_context``.
        Later changes (``long_prompt``) are undone first. A second ``undo`` changes
        nothing.

        Raises:
            RuntimeError: a library (such as FSDP) has made other classes of changed
                modules since.
        """
        undo_changes(self.model, self.owner)

    def __enter__(self) -> LongContext:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes))


@helps_with_names
def long_context(
    model: Any,
    *,
    attention: bool = True,
    budget: int | str | None = None,
    checkpoints: str | None = "auto",
    mlp_tile: int | None = MLP_TILE,
    chunked_loss: bool = True,
    fused_norms: bool = True,
) -> LongContext:
    """Change a decoder of Transformers in place so that long texts fit; its results
    stay the same.

    A change that does not suit the model is left out, and the summary says why. A
    second call first undoes the changes of the first.

    Args:
        model: a ``PreTrainedModel`` for causal language modelling, or PEFT's around
            one, with its weights loaded.
        attention: set ``attn_implementation="quorum"``, with the options of an earlier
            ``register``, if there was one.
        budget: the budget of each attention call, for this model only; see
            ``quorum_attention.integrations.transformers.register``. The model's
            implementation then gets a name of its own (``quorum_2147483648``).
        checkpoints: keep only the layers' inputs and attention's results. "auto" keeps
            them on the device while there is room, and then in page-locked host memory;
            "host" and "device" name one place; None switches this off. Attention's
            results for which there is no room are computed again.
        mlp_tile: an MLP computes this many tokens at a time; None leaves MLPs as they
            are.
        chunked_loss: a call with labels computes its loss for some tokens at a time. It
            computes all logits only if somebody reads them.
        fused_norms: compute RMS norms by torch's kernel, if it has one for the model's
            device.

    Returns:
        A summary of what was changed and what was left out, with reasons. Print it. Its
        ``undo()`` gives the model back as it was; so does the end of a ``with`` block.

    Raises:
        ImportError: Transformers is not installed, or its version is not supported.
        TypeError, ValueError: an argument is wrong.
        RuntimeError: an earlier call cannot be undone, because a library (such as FSDP)
            has made other classes of changed modules since.
    """
    from quorum_attention.integrations.transformers import name_for

    if mlp_tile is not None:
        whole_number(mlp_tile, "mlp_tile", 1)
    one_of(checkpoints, "checkpoints", (*PLACES, None))
    base = base_model(model)
    name, budget = name_for(
        budget
    )  # with what ``register`` was given, if nothing is given here
    how = f"budget {budget or 'by default, nine tenths of the free memory'}"
    with changing(base, _OWNER) as changes:
        pieces = {
            ATTENTION: QuorumAttention(name, how) if attention else None,
            LOSS: ChunkedLoss() if chunked_loss else None,
            MLP: TiledMLPs(mlp_tile) if mlp_tile else None,
            NORMS: FusedNorms() if fused_norms else None,
        }
        outcomes = []
        for switch, piece in pieces.items():
            outcomes.append(_make(changes, base, switch, piece))
        layer_checkpoints = None
        if checkpoints is not None:
            training = training_of(base, budget)
            layer_checkpoints = LayerCheckpoints(checkpoints, training)
        outcomes.append(_make(changes, base, CHECKPOINTS, layer_checkpoints))
    return LongContext(base, tuple(outcomes))


def _make(
    changes: ChangeSet, base: Any, switch: str, piece: ModelPiece | None
) -> Change:
    """Make a change of a model, or say that it is switched off."""
    if piece is None:
        return Change(switch, False, "switched off")
    return changes.make(base, piece)


def training_of(model: Any, budget: int | str | None) -> Training:
    """Return how a model is trained, as far as it says: checkpoints plan steps by
    it."""
    has_frozen_weights = not all(weight.requires_grad for weight in model.parameters())
    return Training(
        tokens=1,
        dtype=model.dtype,
        lora=1 if has_frozen_weights else None,
        budget=None if budget is None else parse_bytes(budget),
        device=model.device.type,
        on=tuple(name for name in names_of_changes(model) if name in SWITCHES),
    )
