"""Models by name: logits and all gradients as close to float64 as eager's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.models import (
    DECODERS,
    ENCODERS,
    VOCABULARY,
    assert_as_close_as_eager,
    assert_logits_and_gradients,
    attended,
    distance,
    exact_attention,
    logits_and_gradients,
    padding,
    register_all,
    some_ids,
    tiny,
)

import quorum_attention as qa
from quorum_attention.integrations.transformers import packing, register
from quorum_attention.integrations.transformers.attention_function import attend
from quorum_attention.integrations.transformers.options import ModelOptions

TOKENS = 41


@pytest.fixture(autouse=True)
def registered() -> None:
    register_all()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_logits_and_gradients(kind: str) -> None:
    assert_logits_and_gradients(kind, "quorum", some_ids())


def test_bf16() -> None:
    model, ids = tiny("gpt_oss"), some_ids()
    exact = logits_and_gradients(attended(model, "exact", torch.float64), ids)[0]
    eager = logits_and_gradients(attended(model, "eager", torch.bfloat16), ids)[0]
    ours = logits_and_gradients(attended(model, "quorum", torch.bfloat16), ids)[0]
    assert distance(ours, exact) <= 1.5 * distance(eager, exact)


def test_encoder_and_decoder_with_a_bias_for_every_pair() -> None:
    """T5: a learned bias, added to the scores, with a gradient; attention across two
    texts."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.AutoModelForSeq2SeqLM.from_config(
        config, attn_implementation="eager"
    )
    ids = some_ids()
    assert_as_close_as_eager(
        model.eval(),
        "quorum",
        ids,
        attention_mask=padding(ids),
        decoder_input_ids=ids[:, :23],
    )


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("kind", "cache"),
    [("mistral", "static"), ("gpt_oss", "dynamic"), ("gemma2", "static"), ("llama4_text", "static"),
     ("gemma3_text", "dynamic")],
)  # fmt: skip
def test_generate_says_what_eager_says(kind: str, cache: str) -> None:
    """Prefill, decoding, caches that slide; left padding."""
    model, ids = tiny(kind), some_ids(tokens=15)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    kwargs: dict[str, Any] = (
        {"cache_implementation": "static"} if cache == "static" else {}
    )
    texts = [
        attended(model, name).generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=True,
            return_dict_in_generate=True, output_logits=True, **kwargs,
        )
        for name in ("eager", "quorum")
    ]  # fmt: skip
    assert torch.equal(texts[0].sequences, texts[1].sequences)
    for eager, ours in zip(texts[0].logits, texts[1].logits, strict=True):
        torch.testing.assert_close(ours, eager, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_prefill_in_pieces_goes_on_behind_the_cache(kind: str) -> None:
    """Queries after a cache of keys: the last one sees the last key."""
    model, ids = tiny(kind), some_ids(tokens=40)
    whole = attended(model, "exact")(ids).logits
    cached, parts = None, []
    ours = attended(model, "quorum")
    for start, stop in ((0, 13), (13, 14), (14, 40)):
        step = ours(ids[:, start:stop], past_key_values=cached, use_cache=True)
        cached = step.past_key_values
        parts.append(step.logits)
    assert distance(torch.cat(parts, 1), whole.double()) < 2e-6


def test_gradient_checkpointing() -> None:
    model, ids = tiny("gemma2"), some_ids()
    plain = logits_and_gradients(attended(model, "quorum").train(), ids)[1]
    for reentrant in (False, True):
        checkpointed = attended(model, "quorum").train()
        new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
        enable = getattr(checkpointed, new, None) or getattr(checkpointed, old)
        enable({"use_reentrant": reentrant})
        again = logits_and_gradients(
            checkpointed, ids, attention_mask=torch.ones_like(ids)
        )[1]
        assert all(torch.equal(again[name], grad) for name, grad in plain.items())


def test_cu_seq_lens_part_documents() -> None:
    model, ids = tiny("llama"), some_ids(batch=1)
    begin = torch.tensor([0, 17, 18, TOKENS], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (17, 1, TOKENS - 18)])[None]
    exact = attended(model, "exact")(ids, position_ids=positions).logits
    lens = {
        "cu_seq_lens_q": begin,
        "cu_seq_lens_k": begin,
        "max_length_q": 23,
        "max_length_k": 23,
    }
    for given in ({"position_ids": positions, **lens}, {"position_ids": positions}):
        assert (
            distance(attended(model, "quorum")(ids, **given).logits, exact.double())
            < 2e-6
        )
    # With counts that say nothing of documents, which are in cu_seq_lens alone.
    apart = attended(model, "quorum")(ids, **lens).logits[:, :17]
    assert distance(apart, exact[:, :17].double()) < 2e-6
    with pytest.raises(ValueError, match="batch of 2"):
        attended(model, "quorum")(ids.repeat(2, 1), **lens)


PACKED = torch.cat([torch.arange(n) for n in (17, 1, TOKENS - 18)])[None]
ONES = torch.ones(1, TOKENS, dtype=torch.int64)
LENGTHS = torch.tensor([0, 17, 18, TOKENS], dtype=torch.int32)
APART = {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS}


@pytest.mark.parametrize(
    ("kind", "asked", "warned"),
    [
        ("llama", {}, False),
        ("llama", {"use_cache": True}, True),
        ("llama", {"attention_mask": ONES}, True),
        ("llama", {"use_cache": True, **APART}, False),
        (
            "llama",
            {"use_cache": True, "position_ids": torch.arange(TOKENS)[None]},
            False,
        ),
        ("gemma3_text", {"attention_mask": ONES}, True),
        ("gpt_oss", {}, True),
        ("gpt_oss", APART, False),
    ],
)
def test_packed_documents_that_see_each_other_are_warned_of_once(
    kind: str, asked: dict[str, Any], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with each attention of Transformers; the results are those of eager."""
    monkeypatch.setattr(packing, "_warned", set())
    model, ids = tiny(kind), some_ids(batch=1)
    asked = {"position_ids": PACKED, **asked}
    ours = attended(model, "quorum")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = [ours(ids, **asked).logits for _ in range(2)]
    assert (
        len([one for one in caught if "see each other" in str(one.message)]) == warned
    )
    if "cu_seq_lens_q" not in asked:
        exact = attended(model, "exact", torch.float64)(ids, **asked).logits
        assert distance(logits[0], exact) < 2e-6


@pytest.mark.parametrize("filled", [0, 1])
def test_positions_of_padding_are_no_documents(
    filled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trainers and ``generate`` count them; documents between padding are."""
    monkeypatch.setattr(packing, "_warned", set())
    model, ids = attended(tiny("llama"), "quorum"), some_ids()
    mask = padding(ids)
    mask[0, 20:23] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, filled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, attention_mask=mask, position_ids=positions)
    positions[0, 23:] -= int(positions[0, 23])
    with pytest.warns(UserWarning, match="see each other"):
        model(ids, attention_mask=mask, position_ids=positions)


def call(*tensors: torch.Tensor, **asked: Any) -> torch.Tensor:
    """The attention function, of one small call."""
    module, function = torch.nn.Module(), transformers.AttentionInterface()["quorum"]
    asked = {"attention_mask": None, "is_causal": True, **asked}
    tensors = tensors or tuple(torch.randn(2, h, 20, 8) for h in (4, 2, 2))
    out: torch.Tensor = function(module, *tensors, **asked)[0]
    return out


def test_a_mask_wider_than_the_model_is_not_rounded() -> None:
    """ALiBi in fp32 in a model in bf16, in a prompt and in a step of decoding."""
    query, key, value = (torch.randn(1, 2, 20, 8).bfloat16() for _ in range(3))
    mask = (-3000 + 0.7 * torch.arange(20.0)).expand(1, 2, 20, 20)
    scores = query.double() @ key.double().mT * 8**-0.5 + mask.double()
    exact = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    for rows in (slice(0, 20), slice(19, 20)):
        out = call(query[:, :, rows], key, value, attention_mask=mask[:, :, rows])
        assert distance(out, exact[:, rows]) < 1e-2


def test_a_mask_of_ones_own_is_honoured() -> None:
    """Four dimensions, boolean or additive: as eager adds it."""
    for mask in (torch.rand(2, 1, 20, 20) < 0.6, torch.randn(2, 4, 20, 20)):
        tensors = [torch.randn(2, h, 20, 8) for h in (4, 2, 2)]
        boolean, bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
        ours = call(*tensors, attention_mask=mask, softcap=2.0)
        asked: dict[str, Any] = {"softcap": 2.0, "position_bias": bias}
        exact = exact_attention(torch.nn.Module(), *tensors, boolean, **asked)[0]
        torch.testing.assert_close(ours, exact)


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    for name, value in {
        "output_attentions": True,
        "cache": object(),
        "alibi": torch.ones(4),
    }.items():
        with pytest.raises(NotImplementedError, match=name):
            call(**{name: value})
    with pytest.raises(ValueError, match="shape"):
        call(attention_mask=torch.ones(2, 20))
    longer = [torch.randn(1, 2, n, 8) for n in (5, 9, 9)]
    for causal, said in (
        (None, "neither a mask nor is_causal"),
        (True, "position of the first"),
    ):
        with pytest.raises(ValueError, match=said):
            call(*longer, is_causal=causal)
    assert call(*longer, is_causal=False).shape == (1, 5, 2, 8)
    assert call(output_attentions=False, use_cache=True).shape == (2, 20, 4, 8)
    assert call(shift_labels=torch.zeros(2, 20), ignore_index=-1).shape == (2, 20, 4, 8)


def test_keywords_that_the_user_knows_to_be_without_effect() -> None:
    """A newer Transformers may give attentions keywords that this package has not
    seen."""
    options = ModelOptions(ignore=("new_hint",))
    tensors = [torch.randn(1, 2, 20, 8) for _ in range(3)]
    out, _ = attend(
        options, torch.nn.Module(), *tensors, None, is_causal=True, new_hint=3
    )
    assert out.shape == (1, 20, 2, 8)
    refusal = r"newer_hint.*register\(ignore=\('newer_hint',\)\)"
    with pytest.raises(NotImplementedError, match=refusal):
        attend(options, torch.nn.Module(), *tensors, None, is_causal=True, newer_hint=3)
    with pytest.raises(
        TypeError, match="ignore must be a tuple of names, got 'new_hint'"
    ):
        register("quorum_ignoring", ignore="new_hint")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_weights_asked_of_a_model_are_refused_also_if_its_attention_is_not_told(
    kind: str,
) -> None:
    model = attended(tiny(kind), "quorum")
    ids = torch.randint(VOCABULARY, (1, 9))
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(input_ids=ids, output_attentions=True)
    assert len(model(input_ids=ids, output_hidden_states=True).hidden_states) == 3


def test_options_reach_the_call() -> None:
    report = qa.Report()
    assert register("watched", depth=1, report=report) == "watched"
    model = attended(tiny("llama"), "watched")
    model(some_ids(tokens=150))
    assert report.forward is not None
    assert len(report.forward.levels) == 1
    poor = attended(model, register("poor", budget="1KiB"))
    with pytest.raises(qa.BudgetError):
        poor(some_ids())
    for name, message in (("sdpa", "another attention"), ("not a word", "a word")):
        with pytest.raises(ValueError, match=message):
            register(name)
    with pytest.raises(ValueError, match="budget must be at least"):
        register("other", budget=16)
    with pytest.raises(TypeError, match="min_tokens"):
        register("other", min_tokens="few")  # type: ignore[arg-type]
    senseless: Any = {
        "budget": "much",
        "kernel": "none",
        "depth": "deep",
        "accumulator": "x",
    }
    for name, value in senseless.items():
        with pytest.raises(ValueError, match=name):
            register("other", **{name: value})


def test_short_plain_calls_go_to_sdpa() -> None:
    report = qa.Report()
    register("long_only", min_tokens=64, report=report)
    model = attended(tiny("mistral", {"sliding_window": None}), "long_only")
    model(some_ids(tokens=63))
    assert report.forward is None
    model(some_ids(tokens=64))
    assert report.forward is not None


def test_dropout_is_drawn_while_training() -> None:
    model, ids = (
        attended(tiny("llama", {"attention_dropout": 0.5}), "quorum").train(),
        some_ids(),
    )
    first, again = (torch.manual_seed(1) and model(ids).logits for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, model(ids).logits)
    mask = padding(ids)
    dropped = model(ids, attention_mask=mask).logits
    assert not torch.equal(dropped, model(ids, attention_mask=mask).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_layers_on_several_devices() -> None:
    """``device_map`` as accelerate has it moves what layers are given: a description
    moves too."""
    model, ids = attended(tiny("gemma3_text"), "quorum"), some_ids()
    mask = padding(ids)
    described: list[Any] = []
    layer = model.model.layers[1]
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: described.append(kwargs["attention_mask"].to("cpu")),
        with_kwargs=True,
    )
    model(ids, attention_mask=mask)
    assert described[0].on(torch.device("meta")).key_padding.device.type == "meta"
    assert described[0].on(torch.device("cpu")) is described[0].mask
