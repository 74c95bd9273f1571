"""The recipe: the same loss and the same gradients in less memory, and what it left out is said."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers_memory import usage
from helpers_models import SIZES, VOCABULARY, distance, tiny

import quorum_attention as qa
from quorum_attention.execution.report import Report
from quorum_attention.integrations.transformers import register
from quorum_attention.recipes import long_context
from quorum_attention.recipes.long_context import ATTENTION


def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def both(model: Any, ids: torch.Tensor, **asked: Any) -> Any:
    """Loss and gradients as the model comes and after the recipe; and the summary."""
    labels = ids.clone()
    labels[:, :3] = -100
    plain = step(copy.deepcopy(model).double(), ids, labels)
    changed = copy.deepcopy(model).double().train()
    summary = long_context(changed, **asked)
    ours = step(changed, ids, labels)
    # The models' own losses, norms and weights of attention are in float32 whatever they are.
    assert ours[0] == pytest.approx(plain[0], rel=1e-6)
    assert ours[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert distance(ours[1][name], gradient) < 5e-6, name
    return summary


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "phi"])
def test_loss_and_gradients_are_the_same(kind: str) -> None:
    ids = torch.randint(VOCABULARY, (2, 150))
    summary = both(tiny(kind), ids, mlp_tile=32)
    assert ATTENTION in summary.done
    assert "chunked loss" in summary.done
    assert "checkpoints" in summary.done
    if kind == "phi":
        assert "tiled MLP" in summary.left_out


def test_memory_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide vocabulary and four layers: logits, then activations, are most of it."""
    monkeypatch.setattr("quorum_attention.recipes.step.LOSS_BYTES", 64 * 8192 * 12)
    sizes = {"vocab_size": 8192, "num_hidden_layers": 4, "intermediate_size": 256}
    model = tiny("llama", sizes).train()
    ids = torch.randint(8192, (1, 512))
    changed = copy.deepcopy(model)
    long_context(changed, mlp_tile=64)
    plain, ours = (usage(lambda m=m: step(m, ids, ids)).peak for m in (model, changed))
    assert ours < 0.6 * plain, (ours, plain)


def test_a_model_that_does_more_to_its_logits_keeps_its_loss() -> None:
    """Gemma 2 caps them."""
    model = tiny("gemma2", {"final_logit_softcapping": 2.0})
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)
    ids = torch.randint(VOCABULARY, (2, 40))
    summary = both(model, ids)
    assert "chunked loss" in summary.left_out
    assert "not this model's own" in str(summary)


def test_a_cap_is_found_while_logits_are_small() -> None:
    """Those of a fresh model are, and after some training they are not."""
    summary = long_context(tiny("gemma2"), checkpoints=None)
    assert "chunked loss" in summary.left_out


def test_a_call_that_asks_for_more_is_the_models_own() -> None:
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (1, 30))
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    wanted = model(ids, labels=ids).loss
    ignoring = model(ids, labels=ids, ignore_index=7).loss
    long_context(model, checkpoints=None)
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, wanted)
    torch.testing.assert_close(model(ids, labels=ids, ignore_index=7).loss, ignoring)
    torch.testing.assert_close(model(ids, labels=ids, return_dict=False)[0], wanted)
    # Labels of the last tokens alone go with their logits alone.
    some = {"labels": ids[:, -6:], "logits_to_keep": 6}
    own = type(model).forward(model, ids, **some).loss
    torch.testing.assert_close(model(ids, **some).loss, own)

    class Adapted(torch.nn.Module):
        """As an adapter of PEFT around the head, put there after the recipe."""

        def __init__(self, head: torch.nn.Linear) -> None:
            super().__init__()
            self.head = head
            self.weight, self.bias = head.weight, head.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * self.head(x)

    model.lm_head = Adapted(model.lm_head)
    found = model(ids, labels=ids)
    assert found.logits is not None
    assert found.loss.item() != pytest.approx(wanted.item(), rel=1e-4)


def test_a_model_that_takes_no_attention_by_name_keeps_its_own() -> None:
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.FalconForCausalLM(config)
    summary = long_context(model, checkpoints=None)
    assert ATTENTION in summary.left_out
    assert "FalconForCausalLM does not take its attention by name" in str(summary)
    model(torch.randint(VOCABULARY, (1, 9)))


def test_a_loss_that_is_set_later_is_the_one() -> None:
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (1, 30))
    long_context(model, checkpoints=None)
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    found = model(ids, labels=ids)
    torch.testing.assert_close(found.loss, found.logits.square().mean())


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
def test_images_are_seen(kind: str) -> None:
    """The decoder within a model of images and text knows nothing of images."""
    text = {"gemma3": "gemma3_text"}.get(kind, "llama")
    vision = {"model_type": "clip_vision_model" if kind == "llava" else "siglip_vision_model",
              "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
    config = transformers.CONFIG_MAPPING[kind](
        text_config={"model_type": text, **SIZES}, vision_config=vision,
        image_token_index=VOCABULARY - 1, mm_tokens_per_image=4,
    )  # fmt: skip
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(VOCABULARY - 1, (1, 20))
    ids[:, 3:7] = VOCABULARY - 1
    images = torch.randn(1, 3, 8, 8)
    more = {} if kind == "llava" else {"token_type_ids": (ids == VOCABULARY - 1).long()}
    asked = {"input_ids": ids, "labels": ids, "pixel_values": images, **more}
    changed = copy.deepcopy(model)
    summary = long_context(changed, attention=False)
    assert "chunked loss" in summary.done
    for one in (model, changed):
        one(**asked).loss.backward()
    assert changed(**asked).loss.item() == pytest.approx(model(**asked).loss.item(), rel=1e-6)
    pairs = list(zip(changed.parameters(), model.parameters(), strict=True))
    assert all((ours.grad is None) == (own.grad is None) for ours, own in pairs)
    pairs = [(ours.grad, own.grad) for ours, own in pairs if own.grad is not None]
    largest = max(own.abs().max() for _, own in pairs)
    assert all((ours - own).abs().max() < 1e-4 * largest for ours, own in pairs)


@pytest.mark.parametrize("training", [False, True])
def test_a_model_in_eval_mode_is_told_that_it_checkpoints_nothing(training: bool) -> None:
    said = str(long_context(tiny("llama").train(training)))
    assert ("call model.train()" in said) is not training


def test_a_budget_too_small_for_a_few_tokens_is_refused() -> None:
    with pytest.raises(qa.BudgetError, match="budget of"):
        long_context(tiny("llama"), budget=1024)


def test_modes_of_a_models_parts_stay() -> None:
    model = tiny("llama").train()
    model.model.layers[0].eval()
    long_context(model, checkpoints=None)
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].mlp.training


def test_a_chunked_loss_in_sixteen_bits_is_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tiny("llama").bfloat16(), torch.randint(VOCABULARY, (1, 5000))
    monkeypatch.setattr("quorum_attention.recipes.step.LOSS_BYTES", 2048 * VOCABULARY * 10)
    long_context(model, checkpoints=None)
    found = model(ids, labels=ids)
    assert found.logits is None
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, type(model).forward(model, ids, labels=ids).loss)


def test_what_was_given_another_forward_is_left_as_it_is() -> None:
    """By hand, or by a library: the forward of its class would not be what it is."""
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (1, 30))
    mlp, plain = model.model.layers[0].mlp, model.forward
    mlp.forward = lambda x: -2 * type(mlp).forward(mlp, x)
    wanted = model(ids, labels=ids).loss
    model.forward = lambda *args, **named: plain(*args, **named)
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
    for one in (model, other):
        torch.testing.assert_close(one(ids, labels=ids).loss, wanted)


def test_a_loss_is_tried_in_a_call_that_uses_it() -> None:
    """One whose forward reads ``use_cache`` and does not hand it on by name (Granite Docling's)."""
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (1, 30))

    class Base(type(model.model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **others: Any) -> Any:
            return super().forward(input_ids, **others)

    class Scaled(type(model)):  # type: ignore[misc]
        def forward(
            self, input_ids: Any = None, labels: Any = None, use_cache: Any = None, **others: Any
        ) -> Any:
            found = super().forward(input_ids, use_cache=use_cache, **others)
            found.logits = found.logits / 4
            if labels is not None:
                found.loss = self.loss_function(found.logits, labels, VOCABULARY)
            return found

    model.__class__, model.model.__class__ = Scaled, Base
    wanted = model(ids, labels=ids).loss
    summary = long_context(model, checkpoints=None)
    assert "chunked loss" in summary.left_out
    torch.testing.assert_close(model(ids, labels=ids).loss, wanted)


@pytest.mark.parametrize("which", ["mask", "items"])
def test_a_loss_of_fewer_tokens_or_of_no_number_of_items_stays(which: str) -> None:
    """Granite Speech's leaves out what is masked and is a mean, whatever number it is given."""
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (1, 30))

    class Speech(type(model)):  # type: ignore[misc]
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any
        ) -> Any:
            items = more.pop("num_items_in_batch", None)
            if labels is not None and which == "mask":
                more["num_items_in_batch"] = items
                if attention_mask is not None:
                    labels = labels.masked_fill(attention_mask == 0, -100)
            return super().forward(input_ids, attention_mask, labels=labels, **more)

    model.__class__ = Speech
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "num_items_in_batch": 7}
    asked["attention_mask"][:, -4:] = 0
    wanted = model(ids, labels=ids, **asked).loss
    assert "chunked loss" in long_context(model, checkpoints=None, attention=False).left_out
    torch.testing.assert_close(model(ids, labels=ids, **asked).loss, wanted)


def test_a_balance_of_experts_asked_for_later_is_in_the_loss() -> None:
    """In the configuration of the text of a model of images, too."""
    model, ids = tiny("gpt_oss"), torch.randint(VOCABULARY, (1, 30))
    long_context(model, checkpoints=None)
    inner = copy.copy(model.config)
    inner.output_router_logits = True
    model.config.get_text_config = lambda *_, **__: inner
    assert model(ids, labels=ids).logits is not None


def test_labels_of_another_number_of_tokens_are_refused() -> None:
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (2, 30))
    for changed in (False, True):
        if changed:
            long_context(model, checkpoints=None)
        for labels in (ids[:, :20], ids[:1], torch.cat([ids, ids[:, :4]], 1), ids.repeat(2, 1)):
            with pytest.raises(ValueError, match=r"batch_size|as many as there are tokens"):
                model(ids, labels=labels)


def test_derivatives_of_a_chunked_loss() -> None:
    """Forward mode, torch.func, and a penalty on gradients."""
    model, ids = tiny("llama").double(), torch.randint(VOCABULARY, (2, 30))
    changed = copy.deepcopy(model)
    long_context(changed, attention=False, checkpoints=None, mlp_tile=None)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(held: Any, of: Any) -> Any:
        asked = {"input_ids": ids, "labels": ids, "use_cache": False}
        return torch.func.functional_call(of, held, (), asked).loss

    for found in (
        lambda of: torch.func.jvp(lambda held: loss(held, of), (weights,), (weights,))[1],
        lambda of: torch.func.grad(loss)(weights, of)["lm_head.weight"],
    ):
        torch.testing.assert_close(found(changed), found(model))
    seconds = []
    for one in (model, changed):
        one.set_attn_implementation("eager")
        total = one(ids, labels=ids).loss
        first = torch.autograd.grad(total, list(one.parameters()), create_graph=True)
        (total + sum(grad.square().sum() for grad in first)).backward()
        seconds.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(*seconds, rtol=1e-5, atol=1e-7)


def test_a_budget_is_of_one_model_and_what_was_registered_stays() -> None:
    def options(model: Any) -> Any:
        names = transformers.AttentionInterface._global_mapping
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


def test_hooks_of_the_head_are_called() -> None:
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (1, 30))
    long_context(model, checkpoints=None)
    with torch.no_grad():
        zero = torch.zeros_like(model(ids).logits)
    model.lm_head.register_forward_hook(lambda *_: zero)
    assert model(ids, labels=ids).loss.item() == pytest.approx(math.log(VOCABULARY), rel=1e-5)


def test_labels_are_all_that_changes_a_call() -> None:
    """Without them there are logits; a copy of the model has a forward of its own."""
    model, ids = tiny("llama"), torch.randint(VOCABULARY, (1, 30))
    logits = model(ids).logits
    long_context(model, checkpoints=None)
    torch.testing.assert_close(model(ids).logits, logits)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    labels = {"labels": ids}
    flat = other(ids, **labels).loss.item()
    assert flat == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), rel=1e-5)
    assert model(ids, **labels).loss.item() != pytest.approx(flat, rel=1e-3)
    summed = model(ids, num_items_in_batch=2, **labels).loss
    assert summed.item() == pytest.approx(model(ids, **labels).loss.item() * 29 / 2, rel=1e-5)


def test_arguments_that_make_no_sense_are_named() -> None:
    with pytest.raises(ValueError, match="checkpoints"):
        long_context(tiny("llama"), checkpoints="disk")
    with pytest.raises(ValueError, match="mlp_tile"):
        long_context(tiny("llama"), mlp_tile=0)
    with pytest.raises(TypeError, match="PreTrainedModel"):
        long_context(torch.nn.Linear(2, 2))
