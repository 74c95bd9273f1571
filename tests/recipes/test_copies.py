"""A changed model is changed in its copies too, and each copy computes with its own
weights."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers.models import VOCABULARY, tiny

from quorum_attention.recipes import long_context
from quorum_attention.recipes.deferred_logits import DeferredLogits
from quorum_attention.recipes.patching import patch

# A function of its package has the module's name.
replicas: Any = importlib.import_module("torch.nn.parallel.replicate")
IDS = torch.arange(60).reshape(2, 30) * 7 % VOCABULARY


def scaled(model: Any) -> dict[str, torch.Tensor]:
    """Other weights for a model."""
    return {name: weight.detach() * 1.25 for name, weight in model.named_parameters()}


def changed_model(checkpoints: str | None = "auto") -> tuple[Any, Any]:
    """A model as it comes, with other weights; and a changed one with its first
    weights."""
    changed = tiny("llama").train()
    plain = copy.deepcopy(changed)
    plain.load_state_dict(scaled(changed), strict=False)
    done = long_context(changed, mlp_tile=8, checkpoints=checkpoints).done
    assert {"chunked loss", "tiled MLP", "fused norms"} <= set(done)
    return plain, changed


def by_shallow_copies(model: Any) -> Any:
    """As libraries copy a model whose weights they replace: each module by
    ``copy.copy``."""
    twin = copy.copy(model)
    twin._modules = {
        name: by_shallow_copies(part) for name, part in model._modules.items()
    }
    twin._parameters = {
        name: None if weight is None else torch.nn.Parameter(weight.detach() * 1.25)
        for name, weight in model._parameters.items()
    }
    return twin


def by_deep_copy(model: Any) -> Any:
    twin = copy.deepcopy(model)
    twin.load_state_dict(scaled(model), strict=False)
    return twin


def by_pickle(model: Any) -> Any:
    twin = pickle.loads(pickle.dumps(model))
    twin.load_state_dict(scaled(model), strict=False)
    return twin


def by_replicas(model: Any) -> Any:
    """As ``DataParallel`` makes one for each device. The weights of each are given out
    here."""
    (replica,) = replicas.replicate(model, [0])
    return replica


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy.copy": by_shallow_copies,
    "copy.deepcopy": by_deep_copy,
    "pickle": by_pickle,
    "DataParallel": by_replicas,
}


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, for which torch has one kernel for norms."""
    monkeypatch.setattr(
        "quorum_attention.recipes.fused_norms._is_fused", lambda weight: True
    )


@pytest.fixture(autouse=True)
def broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch broadcasts weights to GPUs alone. These are other ones, so that they can be
    told."""
    monkeypatch.setattr(
        replicas,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [
            [tensor * 1.25 if tensor.requires_grad else tensor for tensor in tensors]
        ],
    )
    monkeypatch.setattr(replicas, "_get_device_index", lambda device, _: device)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_computes_with_its_own_weights(way: str) -> None:
    """A replica of ``DataParallel`` had the loss of the original's weights. A model
    with checkpoints could not be pickled."""
    plain, changed = changed_model("auto")
    twin = WAYS[way](changed)
    losses = [model(IDS, labels=IDS).loss for model in (plain, twin)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    if way == "DataParallel":  # its weights are computed of the original's
        twin, scale = changed, 1 / 1.25
    else:
        scale = 1.0
    for ours, own in zip(twin.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad * scale, own.grad, atol=1e-6, rtol=1e-4)


def test_a_whole_model_is_saved_and_loaded(tmp_path: Path) -> None:
    """As ``torch.save(model)`` does between steps."""
    _, changed = changed_model("auto")
    changed(IDS, labels=IDS).loss.backward()
    torch.save(changed, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    losses = []
    for model in (changed, loaded):
        model.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    for ours, theirs in zip(changed.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=0, atol=0)


def test_layers_above_frozen_ones_get_their_gradients() -> None:
    """No hook lets embeddings require gradients: the first layer has none to give."""
    plain, changed = changed_model("auto")
    plain.load_state_dict(changed.state_dict(), strict=False)
    for model in (plain, changed):
        model.requires_grad_(False)
        model.model.layers[-1].mlp.requires_grad_()
        model(IDS, labels=IDS).loss.backward()
    for ours, own in zip(changed.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (own.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(ours.grad, own.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_changed_as_its_original(way: str) -> None:
    """An unpickled model had its own forwards again, and computed all logits without a
    word."""
    _, changed = changed_model(None)
    twin = WAYS[way](changed)
    pairs = list(zip(changed.modules(), twin.modules(), strict=True))
    assert all(type(theirs) is type(ours) for theirs, ours in pairs)
    logits = twin(IDS, labels=IDS).logits
    assert (
        logits is None if way == "DataParallel" else isinstance(logits, DeferredLogits)
    )


@pytest.mark.parametrize("checkpoints", [None, "auto"])
def test_a_call_with_other_weights(checkpoints: str | None) -> None:
    """``torch.func.functional_call``; the backward comes when the model has its own
    again: checkpoints computed layers again with those."""
    plain, changed = changed_model(checkpoints)
    weights = {
        name: weight.requires_grad_() for name, weight in scaled(changed).items()
    }
    asked = {"input_ids": IDS, "labels": IDS}
    output = torch.func.functional_call(changed, weights, (), asked)
    wanted = plain(**asked)
    torch.testing.assert_close(output.loss, wanted.loss)
    grads = torch.autograd.grad(output.loss, list(weights.values()))
    wanted.loss.backward()
    for grad, own in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, own.grad, atol=1e-6, rtol=1e-4)


def test_replicas_in_evaluation_have_logits() -> None:
    """Their weights are gone when the call is over."""
    plain, changed = changed_model()
    changed.eval()
    with torch.no_grad():
        output = by_replicas(changed)(IDS, labels=IDS)
        wanted = plain.eval()(IDS, labels=IDS)
    assert type(output.logits) is torch.Tensor
    torch.testing.assert_close(output.logits, wanted.logits)


def plus(
    number: int, plain: Callable[..., Any], module: torch.nn.Module, x: torch.Tensor
) -> Any:
    return plain(module, x) + number


def test_changes_of_many_kinds_are_compiled() -> None:
    """torch's compiler gives up on a piece of code after eight kinds of it."""
    torch._dynamo.reset()
    x = torch.randn(2, 4)
    for number in range(10):
        module = torch.nn.Linear(4, 4)
        patch(module, "forward", plus, number)
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), module(x))
