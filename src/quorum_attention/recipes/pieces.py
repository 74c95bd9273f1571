"""The changes of ``long_context`` one by one, for models that need one of them.

Each function makes one change and returns a handle of its own. Changes of several
functions stand beside each other, and beside those of ``long_context`` and of other
libraries, as long as these leave the changed forwards in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quorum_attention.argument_checks import one_of, whole_number
from quorum_attention.keywords import helps_with_names
from quorum_attention.recipes.changes import (
    ModelPiece,
    base_model,
    changing,
)
from quorum_attention.recipes.checkpoints import PLACES, LayerCheckpoints
from quorum_attention.recipes.chunked_loss import ChunkedLoss
from quorum_attention.recipes.fused_norms import FusedNorms
from quorum_attention.recipes.long_context import LongContext, training_of
from quorum_attention.recipes.step_estimate import MLP_TILE
from quorum_attention.recipes.tiled_mlp import TiledMLPs
from quorum_attention.units import check_budget


@helps_with_names
def chunk_loss(model: Any) -> LongContext:
    """Let ``model(..., labels=...)`` compute its loss for some tokens at a time.

    Args:
        model: a ``PreTrainedModel`` for causal language modelling, or PEFT's around
            one, with its weights loaded.

    Returns:
        A summary that says whether the change was made, or why not. Print it. Its
        ``undo()`` undoes the change. Changes that other functions made later are undone
        first.

    Raises:
        TypeError: ``model`` is another object.
        RuntimeError: an earlier call cannot be undone, because a library (such as FSDP)
            has made other classes of changed modules since.
    """
    return _changed(model, "chunk_loss", lambda _: ChunkedLoss())


@helps_with_names
def tile_mlps(model: Any, tokens: int = MLP_TILE) -> LongContext:
    """Compute gated MLPs for some tokens at a time.

    Args:
        model: as in ``chunk_loss``.
        tokens: of a tile.

    Returns, errors: as in ``chunk_loss``; ValueError for ``tokens`` below 1.
    """
    whole_number(tokens, "tokens", 1)
    return _changed(model, "tile_mlps", lambda _: TiledMLPs(tokens))


@helps_with_names
def fuse_norms(model: Any) -> LongContext:
    """Compute RMS norms by torch's kernel, if it has one for the model's device.

    Args:
        model: as in ``chunk_loss``.

    Returns, errors: as in ``chunk_loss``.
    """
    return _changed(model, "fuse_norms", lambda _: FusedNorms())


@helps_with_names
def checkpoint_layers(
    model: Any, place: str = "auto", *, budget: int | str | None = None
) -> LongContext:
    """Keep only the layers' inputs and attention's results between the passes.

    Args:
        model: as in ``chunk_loss``; its attention is named "quorum", so that results
            can be kept (``register``).
        place: "auto" keeps them on the device while there is room, and then in
            page-locked host memory; "host" and "device" name one place.
        budget: the budget that ``register`` was given. With it "auto" predicts the peak
            memory of a step. Checkpoints stay on the device if there is room beside
            this peak.

    Returns, errors: as in ``chunk_loss``; ValueError for another ``place``.
    """
    one_of(place, "place", tuple(PLACES))
    check_budget(budget)

    def new_piece(base: Any) -> ModelPiece:
        return LayerCheckpoints(place, training_of(base, budget))

    return _changed(model, "checkpoint_layers", new_piece)


def _changed(
    model: Any, owner: str, new_piece: Callable[[Any], ModelPiece]
) -> LongContext:
    base = base_model(model)
    with changing(base, owner) as changes:
        outcome = changes.make(base, new_piece(base))
    return LongContext(base, (outcome,), owner)
