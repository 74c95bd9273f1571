"""The recipe: the same loss and the same gradients in less memory, and what it left out
is said."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.memory import usage
from helpers.models import SIZES, VOCABULARY, distance, tiny

import quorum_attention as qa
from quorum_attention.execution.report import Report
from quorum_attention.integrations.transformers import register
from quorum_attention.recipes import Training, long_context, read_shape, step_memory
from quorum_attention.recipes.deferred_logits import DeferredLogits
from quorum_attention.recipes.layer_bytes import returned_bytes
from quorum_attention.recipes.switches import ATTENTION


def step(
    model: Any, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[float, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.item(), {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def both(model: Any, ids: torch.Tensor, **asked: Any) -> Any:
    """Loss and gradients as the model comes and after the recipe; and the summary."""
    labels = ids.clone()
    labels[:, :3] = -100
    plain = step(copy.deepcopy(model).double(), ids, labels)
    changed = copy.deepcopy(model).double().train()
    summary = long_context(changed, **asked)
    ours = step(changed, ids, labels)
    # The models' own losses, norms and weights of attention are in float32 whatever
    # they are.
    assert ours[0] == pytest.approx(plain[0], rel=1e-6)
    assert ours[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert distance(ours[1][name], gradient) < 5e-6, name
    return summary


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "phi", "gemma2"])
def test_loss_and_gradients_are_the_same(kind: str) -> None:
    ids, model = torch.randint(VOCABULARY, (2, 150)), tiny(kind)
    if kind == "gemma2":  # caps its logits
        model.config.final_logit_softcapping = 2.0
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(20)
    summary = both(model, ids, mlp_tile=32)
    assert ATTENTION in summary.done
    assert "chunked loss" in summary.done
    assert "checkpoints" in summary.done
    if kind == "phi":
        assert "tiled MLP" in summary.left_out


@pytest.mark.slow
def test_memory_is_less_and_as_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide vocabulary and four layers: logits, then activations, are most of it."""
    monkeypatch.setattr("quorum_attention.recipes.step_estimate.LOSS_BYTES", 2 << 20)
    monkeypatch.setattr("quorum_attention.recipes.step_estimate.MLP_TILE", 64)
    sizes = {"vocab_size": 8192, "num_hidden_layers": 4, "intermediate_size": 256}
    model = tiny("llama", sizes).train()
    model.set_attn_implementation("sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shape, ids, peaks = (
        read_shape(model.config.to_dict()),
        torch.randint(8192, (1, 4096)),
        [],
    )
    training = Training(4096, dtype=torch.float32, optimizer="none", device="cpu")
    budget = (7 << 20) + returned_bytes(shape, training, backward=True)
    for on in ((), ("quorum attention", "chunked loss", "tiled MLP")):
        if on:
            long_context(model, budget=budget, mlp_tile=64)
            training = replace(training, budget=budget, on=on)
        step(model, ids[:, :64], ids[:, :64])
        model.zero_grad()
        weights = sum(weight.nbytes for weight in model.parameters())
        peaks.append(weights + usage(lambda: step(model, ids, ids)).peak)
        assert step_memory(shape, training).peak_bytes == pytest.approx(
            peaks[-1], rel=0.1
        )
    assert peaks[1] < 0.1 * peaks[0], peaks


IDS = torch.arange(60).reshape(2, 30) * 7 % VOCABULARY
MASK = torch.ones_like(IDS)
MASK[:, 26:] = 0


@pytest.mark.parametrize(
    ("asked", "chunked"),
    [
        ({}, True),
        ({"num_items_in_batch": 7, "attention_mask": MASK}, True),
        ({"ignore_index": 7}, True),
        (
            {
                "shift_labels": torch.nn.functional.pad(IDS, (0, 1), value=-100)[
                    :, 1:
                ].clone()
            },
            True,
        ),
        ({"labels": IDS[:, -6:], "logits_to_keep": 6}, True),
        ({"return_dict": False}, True),
        ({"labels": None}, False),
    ],
)
def test_every_call_returns_what_the_model_returns(
    asked: dict[str, Any], chunked: bool
) -> None:
    """Logits too, though they went into a loss in chunks: they are computed when they
    are read."""
    model = tiny("llama")
    changed = copy.deepcopy(model)
    long_context(changed, checkpoints=None)
    plain, ours = (
        one(**{"input_ids": IDS, "labels": IDS, **asked}) for one in (model, changed)
    )
    if isinstance(plain, tuple):
        plain, ours = dict(enumerate(plain)), dict(enumerate(ours))
    assert plain.keys() == ours.keys()
    deferred = [one for one in ours.values() if isinstance(one, DeferredLogits)]
    assert len(deferred) == chunked
    assert not any(one.is_computed for one in deferred)
    for name, own in plain.items():
        if isinstance(own, torch.Tensor):
            torch.testing.assert_close(ours[name] + 0, own)


class Adapted(torch.nn.Module):
    """As an adapter of PEFT around the head."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.head, self.weight, self.bias = head, head.weight, head.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * self.head(x)


def another_class(model: Any, forward: Any) -> None:
    model.__class__ = type("Other", (type(model),), {"forward": forward})


def own_loss(self: Any, input_ids: Any, labels: Any = None, **more: Any) -> Any:
    """As Granite's: of scaled logits, computed by itself."""
    found = super(type(self), self).forward(input_ids, **more)
    logits = (found.logits / 4).flatten(0, 1)
    found.loss = torch.nn.functional.cross_entropy(
        logits, labels.flatten(), label_smoothing=0.1
    )
    return found


def squares(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    return logits[..., :5].square().mean() + logits.float().view(-1, VOCABULARY).std()


def doubled(_: Any, __: Any, out: torch.Tensor) -> None:
    if isinstance(out, torch.Tensor):
        out *= 2


def turned(_: Any, grad: Any, __: Any) -> Any:
    return tuple(-one for one in grad)


CHANGES: dict[str, Any] = {
    "an adapter": lambda model: setattr(model, "lm_head", Adapted(model.lm_head)),
    "a hook": lambda model: model.lm_head.register_forward_hook(
        lambda _, __, out: out / 2
    ),
    "a hook of tensors": lambda model: model.lm_head.register_forward_hook(doubled),
    "a backward hook": lambda model: model.lm_head.register_full_backward_hook(turned),
    "a loss": lambda model: setattr(model, "loss_function", squares),
    "experts' balance": lambda model: setattr(
        model.config, "output_router_logits", True
    ),
    "its own loss": lambda model: another_class(model, own_loss),
}


@pytest.mark.parametrize(
    ("change", "after"),
    [
        *((name, False) for name in CHANGES),
        *((name, True) for name in list(CHANGES)[:-1]),
    ],
)
def test_what_else_a_model_does_with_its_logits(change: str, after: bool) -> None:
    """Before the recipe and after it: the loss and the gradients are its own."""
    model = tiny("gpt_oss" if "experts" in change else "llama")
    changed = copy.deepcopy(model)
    if after:
        long_context(changed, checkpoints=None, attention=False)
    for one in (model, changed):
        CHANGES[change](one)
    if not after:
        long_context(changed, checkpoints=None, attention=False)
    losses = []
    for one in (model, changed):
        losses.append(one(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for ours, own in zip(changed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, own.grad)


def test_a_model_that_takes_no_attention_by_name_keeps_its_own() -> None:
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.FalconForCausalLM(config)
    summary = long_context(model, checkpoints=None)
    assert ATTENTION in summary.left_out
    assert "FalconForCausalLM does not take its attention by name" in str(summary)
    model(torch.randint(VOCABULARY, (1, 9)))


def test_images_are_seen() -> None:
    """The decoder within a model of images and text knows nothing of images."""
    vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24,
              "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
              "patch_size": 4}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config={"model_type": "gemma3_text", **SIZES}, vision_config=vision,
        image_token_index=VOCABULARY - 1, mm_tokens_per_image=4,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    ids = torch.randint(VOCABULARY - 1, (1, 20))
    ids[:, 3:7] = VOCABULARY - 1
    asked = {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(1, 3, 8, 8),
             "token_type_ids": (ids == VOCABULARY - 1).long()}  # fmt: skip
    changed = copy.deepcopy(model)
    summary = long_context(changed, attention=False)
    # Transformers 5.6 computes this model's loss within its forward, of all logits.
    has_loss_function = "loss_function" in inspect.getsource(type(model).forward)
    assert ("chunked loss" in summary.done) == has_loss_function
    assert has_loss_function or "chunked loss" in summary.left_out
    losses = []
    for one in (model, changed):
        losses.append(one(**asked).loss)
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    pairs = list(zip(changed.parameters(), model.parameters(), strict=True))
    assert all((ours.grad is None) == (own.grad is None) for ours, own in pairs)
    grads = [(ours.grad, own.grad) for ours, own in pairs if own.grad is not None]
    largest = max(own.abs().max() for _, own in grads)
    assert all((ours - own).abs().max() < 1e-4 * largest for ours, own in grads)


def test_modes_of_a_models_parts_stay() -> None:
    model = tiny("llama").eval()
    assert "call model.train()" in str(long_context(model))
    model.train().model.layers[0].eval()
    assert "call model.train()" not in str(long_context(model))
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].mlp.training


def test_a_chunked_loss_in_sixteen_bits_is_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tiny("llama").bfloat16(), torch.randint(VOCABULARY, (1, 1000))
    monkeypatch.setattr(
        "quorum_attention.recipes.step_estimate.LOSS_BYTES", 400 * VOCABULARY * 10
    )
    wanted = model(ids, labels=ids).loss
    long_context(model, checkpoints=None)
    found = model(ids, labels=ids)
    assert not found.logits.is_computed
    assert found.loss.dtype == torch.float32
    # torch 2.8 rounds logits of some rows unlike those of all.
    torch.testing.assert_close(found.loss, wanted, rtol=1e-5, atol=0.0)


def test_under_autocast() -> None:
    model = tiny("llama")
    changed = copy.deepcopy(model)
    long_context(changed, checkpoints=None, attention=False)
    with torch.autocast("cpu", torch.bfloat16):
        plain, whole = (
            one(IDS, labels=IDS, return_dict=False) for one in (model, changed)
        )
        loss = changed(IDS, labels=IDS).loss
    assert whole[1].dtype == plain[1].dtype == torch.bfloat16
    for found in (whole[0], loss):
        torch.testing.assert_close(found, plain[0])


# The compiler follows each layer anew.
ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.slow
def test_compiled_calls_with_and_without_labels() -> None:
    """Without labels in one graph; what is compiled for one is not taken for the
    other."""
    model, ids = tiny("llama", ONE_LAYER), torch.randint(VOCABULARY, (1, 30))
    wanted = model(ids, labels=ids)
    long_context(model, checkpoints=None, attention=False, mlp_tile=None)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    broken = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(whole(ids).logits, wanted.logits)
        found = broken(ids, labels=ids)
        assert not found.logits.is_computed
        torch.testing.assert_close(found.loss, wanted.loss)
        torch.testing.assert_close(broken(ids).logits, wanted.logits)


@pytest.mark.parametrize("of_class", [False, True])
def test_what_was_given_another_forward_is_left_as_it_is(
    of_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, or by a library for all models (Liger, Unsloth): its own forward is
    another one."""
    model, ids = tiny("llama").train(), torch.randint(VOCABULARY, (1, 30))
    mlp, plain = model.model.layers[0].mlp, type(model).forward
    mlp.forward = lambda x: -2 * type(mlp).forward(mlp, x)
    wanted = model(ids, labels=ids).loss

    def fused(self: Any, *args: Any, **named: Any) -> Any:  # has no logits either
        found = plain(self, *args, **named)
        found.logits = None
        return found

    fused.__module__ = "liger_kernel.transformers.model.llama"
    if of_class:
        monkeypatch.setattr(type(model), "forward", fused)
    else:
        model.forward = MethodType(fused, model)
    summary = long_context(model, checkpoints=None, mlp_tile=8)
    assert {"chunked loss", "tiled MLP"} <= set(summary.left_out)
    assert "another forward" in str(summary)
    torch.testing.assert_close(model(ids, labels=ids).loss, wanted)


def test_called_again_or_on_an_unpickled_model() -> None:
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (1, 30))
    wanted = model(ids, labels=ids).loss
    done = long_context(model, checkpoints=None, mlp_tile=8).done
    assert long_context(model, checkpoints=None, mlp_tile=7).done == done
    other = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(other(ids, labels=ids).loss, wanted)
    assert long_context(other, checkpoints=None, mlp_tile=7).done == done
    other = copy.deepcopy(model)  # has forwards of its own
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    assert other(ids, labels=ids).loss.item() == pytest.approx(
        math.log(VOCABULARY), rel=1e-5
    )
    torch.testing.assert_close(model(ids, labels=ids).loss, wanted)


def test_labels_of_another_number_of_tokens_are_refused() -> None:
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (2, 30))
    for changed in (False, True):
        if changed:
            long_context(model, checkpoints=None)
        for labels in (
            ids[:, :20],
            ids[:1],
            torch.cat([ids, ids[:, :4]], 1),
            ids.repeat(2, 1),
        ):
            with pytest.raises(
                ValueError, match=r"batch_size|as many as there are tokens"
            ):
                model(ids, labels=labels)


def test_a_budget_is_of_one_model_and_what_was_registered_stays() -> None:
    def options(model: Any) -> Any:
        names = transformers.AttentionInterface()
        return names[model.config._attn_implementation].args[0]

    report = Report()
    register(budget="64MiB", report=report, min_tokens=0)
    try:
        first, second, third = (tiny("llama") for _ in range(3))
        long_context(first, checkpoints=None, budget="32MiB")
        summary = long_context(second, checkpoints=None)
        long_context(third, checkpoints=None, budget=48 << 20)
        budgets = [options(model).budget for model in (first, second, third)]
        assert budgets == ["32MiB", "64MiB", 48 << 20]
        assert "budget 64MiB" in str(summary)
        for model in (first, second, third):
            assert options(model).report is report
            before = report.total.forwards
            model(torch.randint(VOCABULARY, (1, 30)))
            assert report.total.forwards == before + 2
    finally:
        register()


def test_arguments_that_make_no_sense_are_named() -> None:
    with pytest.raises(ValueError, match="checkpoints"):
        long_context(tiny("llama"), checkpoints="disk")
    with pytest.raises(ValueError, match="mlp_tile"):
        long_context(tiny("llama"), mlp_tile=0)
    with pytest.raises(qa.BudgetError, match="budget of"):
        long_context(tiny("llama"), budget=1024)


def test_the_way_that_is_named_for_another_model_takes_its_attention() -> None:
    """Who has a model of plain torch is told what to do, and that does something."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with pytest.raises(TypeError, match="PreTrainedModel") as raised:
        long_context(layer)
    match = re.search(r"`with quorum_attention\.(\w+)\(\):`", str(raised.value))
    assert match is not None, raised.value
    block = getattr(qa, match[1])
    report = Report()
    with block(min_tokens=16, report=report):
        layer(torch.randn(1, 64, 16)).square().mean().backward()
    assert report.total is not None
    assert (report.total.forwards, report.total.backwards) == (1, 1)
