"""The changes of ``long_context`` one by one: right results, and each is undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers.models import VOCABULARY, tiny

from quorum_attention.recipes import (
    checkpoint_layers,
    chunk_loss,
    fuse_norms,
    long_context,
    long_prompt,
    tile_mlps,
)
from quorum_attention.recipes.changes import ModelPiece
from quorum_attention.recipes.switches import CHECKPOINTS, LOSS, MLP, NORMS

PIECES: dict[str, Callable[[Any], Any]] = {
    LOSS: chunk_loss,
    MLP: lambda model: tile_mlps(model, 7),
    NORMS: fuse_norms,
    CHECKPOINTS: checkpoint_layers,
}
# torch has a kernel for RMS norms on GPUs alone.
NAMES = [name for name in PIECES if name != NORMS]


def step(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def assert_same_step(model: Any, plain: Any) -> None:
    ids = torch.randint(VOCABULARY, (1, 50))
    for ours, expected in zip(step(model, ids), step(plain, ids), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.fixture
def plain() -> Any:
    model = tiny("llama").train()
    model.config.use_cache = False
    return model


@pytest.mark.parametrize("name", NAMES)
def test_one_change_alone(name: str, plain: Any) -> None:
    model = copy.deepcopy(plain)
    attributes = set(vars(model))
    with PIECES[name](model) as change:
        assert change.done == (name,)
        assert str(change).startswith(name)
        assert_same_step(model, plain)
    assert set(vars(model)) == attributes
    assert type(model) is type(plain)
    assert_same_step(model, plain)


def test_norms_without_a_kernel_are_left_out(plain: Any) -> None:
    assert fuse_norms(plain).left_out == (NORMS,)


@pytest.mark.parametrize(
    "change_before", [long_prompt, partial(long_context, checkpoints=None)]
)
def test_checkpoints_after_other_changes(
    change_before: Callable[[Any], Any], plain: Any
) -> None:
    """The plan of a step took each change that the model carries for a switch."""
    model = copy.deepcopy(plain)
    change_before(model)
    with checkpoint_layers(model) as change:
        assert change.done == (CHECKPOINTS,)
        assert_same_step(model, plain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_change_that_another_function_made_holds(
    name: str, is_first: bool, plain: Any
) -> None:
    """A second one took the place of the first, and its undo took both away."""
    model = copy.deepcopy(plain)
    functions = [PIECES[name], long_context]
    first, second = functions if is_first else reversed(functions)
    summary = first(model)
    later = second(model)
    assert name in summary.done
    assert name in later.left_out
    assert "made this change already" in str(later)
    later.undo()
    assert_same_step(model, plain)
    assert all(piece.why_lost(model) is None for piece in pieces_of(model))
    summary.undo()
    assert type(model) is type(plain)


def pieces_of(model: Any) -> list[ModelPiece]:
    sets = vars(model)["_quorum_attention_changes"]
    return [piece for changes in sets for piece in changes.pieces]


def test_all_beside_each_other_and_beside_long_context(plain: Any) -> None:
    """Undoing one undoes first what was changed after it."""
    model = copy.deepcopy(plain)
    loss = chunk_loss(model)
    tiles = tile_mlps(model, 7)
    assert checkpoint_layers(model, "device").done == (CHECKPOINTS,)
    assert_same_step(model, plain)
    tiles.undo()
    assert not model.is_gradient_checkpointing
    assert_same_step(model, plain)
    others = long_context(model, chunked_loss=False, attention=False)
    assert others.done == (MLP, CHECKPOINTS)
    assert_same_step(model, plain)
    loss.undo()
    assert type(model) is type(plain)
    assert_same_step(model, plain)


def test_arguments_are_checked_before_anything_is_changed(plain: Any) -> None:
    with pytest.raises(ValueError, match="tokens"):
        tile_mlps(plain, 0)
    with pytest.raises(ValueError, match="place"):
        checkpoint_layers(plain, "disk")
    with pytest.raises(ValueError, match="budget must be at least"):
        checkpoint_layers(plain, budget=16)
    with pytest.raises(TypeError, match="PreTrainedModel"):
        chunk_loss(torch.nn.Linear(2, 2))
    assert "_quorum_attention_changes" not in vars(plain)
