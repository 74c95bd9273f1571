"""Quorum attention is undone where a model's results would not stay, and the summary
says why."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.models import DECODERS, MIXED, SIZES, VOCABULARY, attended, distance, tiny

import quorum_attention as qa
from quorum_attention.integrations.transformers import register
from quorum_attention.recipes import long_context
from quorum_attention.recipes.attention import QuorumAttention
from quorum_attention.recipes.changes import Change, ChangeSet
from quorum_attention.recipes.switches import ATTENTION, LOSS

IDS = torch.arange(60).reshape(2, 30) * 7 % VOCABULARY
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
# Models that compute with their mask: choose keys, add to it, or lengthen it.
COMPUTING: dict[str, dict[str, Any]] = {
    "doge": {"keep_window_size": 8},
    "deepseek_v32": LATENT,
    "glm_moe_dsa": LATENT,
    "deepseek_v4": {**LATENT, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 9},
}


def build(kind: str, sizes: dict[str, Any]) -> Any:
    """A small causal model of a kind that this version of Transformers may not have."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {kind}")
    common = {name: size for name, size in SIZES.items() if name != "head_dim"}
    config = transformers.CONFIG_MAPPING[kind](**{**common, **sizes})
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():  # some are not initialised
            weight.copy_(torch.randn_like(weight) * 0.2)
    return model


def set_attention(model: Any, name: str, how: str) -> Change:
    return ChangeSet("test").make(model, QuorumAttention(name, how))


@pytest.mark.parametrize("kind", COMPUTING)
def test_a_model_that_computes_with_its_mask_keeps_its_attention(kind: str) -> None:
    model = build(kind, COMPUTING[kind])
    before, wanted = model.config._attn_implementation, model(IDS, labels=IDS)
    wanted.loss.backward()
    changed = copy.deepcopy(model)
    changed.zero_grad()
    summary = long_context(changed, checkpoints=None)
    assert ATTENTION in summary.left_out
    assert LOSS in summary.done, "the other changes do not fail with it"
    assert f"{type(model).__name__} failed with it on a few tokens" in str(summary)
    assert 'use attn_implementation="sdpa" or "eager"' in str(summary)
    assert changed.config._attn_implementation == before
    found = changed(IDS, labels=IDS)
    found.loss.backward()
    torch.testing.assert_close(found.loss, wanted.loss)
    for ours, own in zip(changed.parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (own.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(ours.grad, own.grad)


SHARED: dict[str, Any] = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 9,
    "layer_types": [*MIXED, *MIXED], "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8, "head_dim": 16, "global_head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma3n_text"])
def test_layers_that_slice_their_mask_take_it(kind: str) -> None:
    """Gemma's small models compute their last layers, which share keys, for the logits
    that are asked for; in ``generate`` of the last token alone."""
    model = build(kind, SHARED)
    register(min_tokens=0)
    ours = attended(model, "quorum")
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    for asked in (
        {},
        {"logits_to_keep": 3},
        {"logits_to_keep": 1},
        {"attention_mask": mask},
    ):
        found, wanted = (one(IDS, **asked).logits for one in (ours, model))
        assert distance(found[:, -1], wanted[:, -1].double()) < 2e-5, asked
    named = {
        "max_new_tokens": 4,
        "do_sample": False,
        "use_cache": True,
        "attention_mask": mask,
    }
    assert torch.equal(ours.generate(IDS, **named), model.generate(IDS, **named))
    assert ATTENTION in long_context(model, checkpoints=None).done


def test_labels_that_a_model_hands_down_have_no_effect() -> None:
    """Gemma 4 of images and text gives its labels to its decoder, and so to its
    attention."""
    model = tiny("llama")
    wanted = model(IDS).logits
    register(min_tokens=0)
    found = attended(model, "quorum").model(IDS, labels=IDS).last_hidden_state
    torch.testing.assert_close(model.lm_head(found), wanted, rtol=1e-4, atol=1e-4)


def test_a_model_that_takes_other_labels_is_tried() -> None:
    """Doge computes with its mask: a classifier's first training step failed."""
    if "doge" not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of Transformers does not have it")
    config = transformers.CONFIG_MAPPING["doge"](**SIZES)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    (change, *_) = long_context(model, checkpoints=None).changes
    assert "failed with it on a few tokens: DescriptionError" in change.how


def test_all_names_are_restored() -> None:
    """Of parts too, some of which have none (MPT's, Moshi's)."""
    sizes = {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "vocab_size": 96,
    }
    model = transformers.MptForCausalLM(transformers.MptConfig(**sizes)).eval()
    own = [
        model.config,
        *(getattr(model.config, key) for key in model.config.sub_configs),
    ]
    before = [config._attn_implementation for config in own]
    wanted = model(IDS).logits
    assert ATTENTION in long_context(model, checkpoints=None).left_out
    assert [config._attn_implementation for config in own] == before
    torch.testing.assert_close(model(IDS).logits, wanted)


def test_other_results_are_seen() -> None:
    """A model that looks at the name of its attention, and does something else."""
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    plain = attention.forward

    def by_name(*args: Any, **named: Any) -> Any:
        out, weights = plain(*args, **named)
        return (
            out if attention.config._attn_implementation == "eager" else -out
        ), weights

    attention.forward = by_name
    change = set_attention(model, register(), "")
    assert not change.done
    assert change.how == "LlamaForCausalLM had other results with it on a few tokens"
    assert model.config._attn_implementation == "eager"


def test_a_budget_that_is_too_small_leaves_the_model_as_it_was() -> None:
    model = tiny("llama")
    with pytest.raises(qa.BudgetError, match="budget of"):
        long_context(model, budget=1024)
    assert model.config._attn_implementation == "eager"
    model(IDS)


def test_what_could_not_be_tried_is_said() -> None:
    """As a model that takes more than tokens."""
    model = tiny("llama")

    def images(*_: Any, **__: Any) -> Any:
        raise ValueError("this model needs images")

    model.model.forward = images
    change = set_attention(model, register(), "budget of 1 GiB")
    assert change.done
    assert change.how.startswith(
        "budget of 1 GiB; it was not tried: as it was, LlamaForCausalLM"
    )
    assert "this model needs images" in change.how
    assert model.config._attn_implementation == "quorum"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", DECODERS)
def test_rounding_is_no_other_result(kind: str, dtype: torch.dtype) -> None:
    """Cut calls against eager ones, with sharp scores and experts."""
    model = tiny(kind).to(dtype)
    assert set_attention(model, register("cut_once", depth=1), "").done
