"""A changed model is given back as it was, and a change that is lost is said once."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.models import VOCABULARY, tiny

from quorum_attention.integrations import transformers_private
from quorum_attention.recipes import long_context, long_prompt, undo_long_prompt
from quorum_attention.recipes.changes import ModelPiece
from quorum_attention.recipes.patching import PatchedForwards

IDS = torch.arange(60).reshape(2, 30) * 7 % VOCABULARY


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, for which torch has one kernel for norms."""
    monkeypatch.setattr(
        "quorum_attention.recipes.fused_norms._is_fused", lambda weight: True
    )


def described(model: Any) -> dict[str, Any]:
    """Classes, attributes and hooks of all modules, and the configuration."""
    parts: dict[str, Any] = {
        "config": (model.config.to_dict(), model.config._attn_implementation)
    }
    for name, module in model.named_modules():
        attributes = {
            key for key in vars(module) if not key.startswith("_require_grads")
        }
        parts[name] = (type(module), attributes, len(module._forward_hooks))
    return parts


def step(model: Any) -> list[torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())]


def assert_as_before(model: Any, before: dict[str, Any], wanted: list[Any]) -> None:
    assert described(model) == before
    assert all(map(torch.equal, step(model), wanted))
    assert type(pickle.loads(pickle.dumps(model))) is type(model)


def test_undo_gives_the_model_back() -> None:
    """Classes, attributes, hooks, results and pickle; a second undo does nothing."""
    model = tiny("llama").train()
    before, wanted, state = described(model), step(model), list(model.state_dict())
    changed = long_context(model, budget="64MiB", mlp_tile=8)
    assert len(changed.done) == 5
    assert str(changed).count("(checked: ") == 5
    step(model)
    for _ in range(2):
        changed.undo()
        assert_as_before(model, before, wanted)
        assert list(model.state_dict()) == state


def test_a_context_ends_with_an_undo() -> None:
    model = tiny("qwen3").train()
    before, wanted = described(model), step(model)
    with suppress(KeyError), long_context(model, mlp_tile=8):
        step(model)
        raise KeyError
    assert_as_before(model, before, wanted)


def test_checkpoints_that_were_on_before_are_on_again() -> None:
    model = tiny("llama").train()
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    function = model.model.layers[0]._gradient_checkpointing_func
    long_context(model).undo()
    assert model.model.layers[0].gradient_checkpointing
    assert model.model.layers[0]._gradient_checkpointing_func is function


def test_a_copy_is_undone_alone() -> None:
    model = tiny("llama").train()
    before, wanted = described(model), step(model)
    long_context(model, mlp_tile=8)
    changed, twin = described(model), copy.deepcopy(model)
    long_context(twin).undo()
    assert_as_before(twin, before, wanted)
    assert described(model) == changed


def test_prompts_and_steps_are_undone_in_order() -> None:
    """A long prompt leaves the changes of a step; their undo takes a later prompt's
    with them."""
    model = tiny("llama").train()
    before, wanted = described(model), step(model)
    changed = long_context(model, mlp_tile=8)
    between = described(model)
    long_prompt(model)
    undo_long_prompt(model)
    assert described(model) == between
    long_prompt(model)
    changed.undo()
    assert_as_before(model, before, wanted)


def test_a_step_is_changed_after_prompts() -> None:
    """``long_context`` took the change of prompts for one of its own, and failed."""
    model = tiny("llama").train()
    before, wanted = described(model), step(model)
    long_prompt(model)
    between = described(model)
    changed = long_context(model, mlp_tile=8)
    for result, exact in zip(step(model), wanted, strict=True):
        torch.testing.assert_close(result, exact)
    changed.undo()
    assert described(model) == between
    undo_long_prompt(model)
    assert_as_before(model, before, wanted)


def put_back_mlp(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = transformers.models.llama.modeling_llama.LlamaMLP.forward.__get__(mlp)


def put_back_checkpoints(model: Any) -> None:
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint


def put_back_norm(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    kind = transformers.models.llama.modeling_llama.LlamaRMSNorm
    norm.forward = kind.forward.__get__(norm)


def put_back_forward(model: Any) -> None:
    model.forward = transformers.LlamaForCausalLM.forward.__get__(model)


LOST: dict[str, Any] = {
    "tiled MLP": put_back_mlp,
    "fused norms": put_back_norm,
    "checkpoints": put_back_checkpoints,
    "quorum attention": lambda model: model.set_attn_implementation("sdpa"),
    "chunked loss": lambda model: setattr(
        model, "forward", type(model).__mro__[1].forward.__get__(model)
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_a_change_that_is_lost_is_said_once(name: str) -> None:
    model = tiny("llama").train()
    long_context(model, mlp_tile=8)
    LOST[name](model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
    texts = [
        str(one.message)
        for one in caught
        if "does not hold any more" in str(one.message)
    ]
    assert len(texts) == 1
    assert f"its {name} does not hold any more" in texts[0]


def test_layers_that_are_taken_out_are_no_lost_change() -> None:
    """Of a model that was cut to its first layer, MLPs were said to run another
    forward."""
    model = tiny("llama").train()
    changed = long_context(model, mlp_tile=8)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not hold any more")
        model(input_ids=IDS, labels=IDS).loss.backward()
    changed.undo()
    names = {type(module).__module__ for module in model.modules()}
    assert not any(name.startswith("quorum_attention") for name in names)


def put_back_layer(model: Any) -> None:
    layer = model.model.layers[1]
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    layer.forward = kind.forward.__get__(layer)


def replace_weight(model: Any) -> None:
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().clone())


LOST_OF_PROMPTS = {
    "prompts": put_back_layer,
    "weights in host memory": replace_weight,
}


@pytest.mark.parametrize("name", LOST_OF_PROMPTS)
def test_a_change_for_prompts_that_is_lost_is_said(name: str) -> None:
    model = tiny("llama")
    long_prompt(model, weights="host")
    LOST_OF_PROMPTS[name](model)
    with pytest.warns(UserWarning, match=f"its {name} does not hold any more"):
        model(input_ids=IDS)


def test_every_change_looks_whether_it_holds() -> None:
    """Each kind of change has a case here in which it is lost."""
    kinds = [*ModelPiece.__subclasses__(), *PatchedForwards.__subclasses__()]
    names = {kind.name for kind in kinds if hasattr(kind, "name")}
    assert names == LOST.keys() | LOST_OF_PROMPTS.keys()


def test_a_private_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own checkpoints ran, and the summary did not say so."""
    model = tiny("llama").train()
    wanted = step(model)
    monkeypatch.delattr(transformers.PreTrainedModel, "_set_gradient_checkpointing")
    changed = long_context(model, mlp_tile=None, attention=False, chunked_loss=False)
    assert "checkpoints" in changed.left_out
    assert "has no PreTrainedModel._set_gradient_checkpointing" in str(changed)
    assert "use long_context(checkpoints=None)" in str(changed)
    for ours, own in zip(step(model), wanted, strict=True):
        torch.testing.assert_close(ours, own)


def test_attention_works_where_records_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rename, and every attention of every model failed."""
    from transformers.utils import output_capturing

    monkeypatch.delattr(output_capturing, "_active_collector")
    transformers_private._warn_of_unseen_records.cache_clear()
    with pytest.warns(UserWarning, match="cannot notice that output_attentions=True"):
        assert transformers_private.recorded_outputs() == ()
    assert transformers_private.recorded_outputs() == ()


@pytest.mark.parametrize("change", [long_context, long_prompt])
def test_an_interrupted_trial_leaves_the_model_as_it_was(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention stayed changed, because it was no change yet."""
    model = tiny("llama").train()
    before = described(model)
    wanted = step(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quorum_attention.recipes.attention.some_ids", interrupt)
    with pytest.raises(KeyboardInterrupt):
        change(model)
    assert_as_before(model, before, wanted)
