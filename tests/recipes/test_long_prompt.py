"""``long_prompt``: a model gives the tokens that it gave before, however its prompts
run."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.models import DECODERS
from helpers.prompt_models import (
    CHUNKED,
    FALCON_H1,
    LAYERED,
    N_PROMPT,
    TILE,
    WHOLE,
    WITHOUT_CACHE,
    assert_same,
    generated,
    new_model,
    prompt,
    runner_of,
)

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.integrations.transformers.prompt_cache import PromptCache
from quorum_attention.recipes import long_prompt, undo_long_prompt
from quorum_attention.recipes.changes import changes_by
from quorum_attention.recipes.layer_calls import decoder_layers
from quorum_attention.recipes.prompt_changes import OWNER, prompt_forward_in
from quorum_attention.recipes.prompt_inputs import cache_in, cache_name, without_cache
from quorum_attention.recipes.tile_storage import (
    DeviceTiles,
    HostTiles,
    spans_of,
)


@pytest.fixture(autouse=True)
def no_warning_of_chunks(request: pytest.FixtureRequest) -> Any:
    """A test of models that run by layers fails if one does not."""
    with warnings.catch_warnings():
        if "chunks" not in request.node.name:
            warnings.filterwarnings("error", message=".*gets its prompts.*")
        yield


JAMBA: dict[str, Any] = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
    "num_experts_per_tok": 1, "mamba_d_state": 8, "head_dim": None,
}  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", LAYERED)
def test_greedy_tokens_are_the_plain_models(kind: str) -> None:
    """Under a new name of the cache, prompts ran as without a change."""
    model = new_model(kind, LAYERED[kind])
    expected = generated(copy.deepcopy(model), prompt())
    layers_done: list[int] = []
    cache = long_prompt(
        model, tile=TILE, progress=lambda done, *_: layers_done.append(done)
    )
    assert runner_of(model).layered is not None
    assert_same(generated(model, prompt(), past_key_values=cache), expected)
    n_layers = model.config.num_hidden_layers
    assert layers_done == list(range(1, n_layers + 1))


def forward_with_newer_name(model: Any, input_ids: Any, cache: Any = None) -> None:
    """From Transformers 5.24 on."""


def forward_with_older_name(model: Any, past_key_values: Any = None) -> None:
    """Before 5.24."""


def test_a_cache_goes_by_the_name_that_a_forward_has() -> None:
    assert cache_name(forward_with_newer_name) == "cache"
    assert cache_name(forward_with_older_name) == "past_key_values"
    for name in ("cache", "past_key_values"):
        arguments = {"input_ids": 1, name: 2}
        assert cache_in(arguments) == 2
        assert without_cache(arguments) == {"input_ids": 1}
    assert cache_in({"cache": None}) is None


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", CHUNKED)
def test_a_model_without_replaceable_attention_runs_in_chunks(kind: str) -> None:
    model = new_model(kind, CHUNKED[kind])
    expected = generated(copy.deepcopy(model), prompt())
    with pytest.warns(
        UserWarning, match=f"{type(model).__name__} gets its prompts in chunks"
    ):
        cache = long_prompt(model, tile=TILE)
    assert_same(generated(model, prompt(), past_key_values=cache), expected)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_that_chunks_would_change_gets_its_prompts_whole(kind: str) -> None:
    """Without a word, its logits were others."""
    model = new_model(kind, WHOLE[kind])
    with torch.no_grad():
        expected = copy.deepcopy(model)(prompt()).logits
    with pytest.warns(
        UserWarning, match=f"{type(model).__name__} gets its prompts whole"
    ):
        cache = long_prompt(model, tile=TILE)
    assert not runner_of(model).runs_chunks
    with torch.no_grad():
        logits = model(prompt(), past_key_values=cache).logits
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("kind", WITHOUT_CACHE)
def test_a_model_that_takes_no_cache_is_refused(kind: str) -> None:
    """``long_prompt`` gave a cache that ``generate`` refused."""
    model = new_model(kind, WITHOUT_CACHE[kind])
    classes = [type(module) for module in model.modules()]
    with pytest.raises(NotImplementedError, match="not take the cache of a long"):
        long_prompt(model)
    assert [type(module) for module in model.modules()] == classes


def test_a_model_with_an_encoder_is_refused() -> None:
    """Keys of the encoder went into the cache of the decoder: other tokens came out,
    without a word."""
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(vocab_size=32, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(NotImplementedError, match="has an encoder and a decoder"):
        long_prompt(model)


def test_layers_with_a_state_beside_attention_get_chunks() -> None:
    """Falcon-H1 ran by layers, which advanced its recurrence twice: logits were wrong
    by less than the trial's tolerance, which in bf16 is a third of them."""
    model = new_model("falcon_h1", FALCON_H1)
    expected = generated(copy.deepcopy(model), prompt())
    with pytest.warns(UserWarning, match="keeps more than keys and values"):
        cache = long_prompt(model, tile=TILE)
    assert_same(generated(model, prompt(), past_key_values=cache), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["big_bird", "rembert", "roformer", "bloom"])
def test_rounding_hides_no_tokens_that_a_model_sees(
    kind: str, dtype: torch.dtype
) -> None:
    """Small weights in 16 bits: what tokens see of others is less than rounding.
    Models that read both ways got their prompts in chunks, as Bloom does rightly."""
    model = new_model(kind, {**WHOLE, **CHUNKED}[kind])
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.02)
    with pytest.warns(UserWarning, match="gets its prompts"):
        long_prompt(model.to(dtype))
    assert runner_of(model).runs_chunks == (kind in CHUNKED)


def test_convolutions_that_forget_the_chunk_before_are_seen_in_16_bits() -> None:
    """Jamba's, of which a chunk begins with zeros: logits differed by 7 %."""
    torch.manual_seed(0)
    model = new_model("jamba", JAMBA)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mamba.in_proj" in name or "mamba.out_proj" in name:
                weight.mul_(4.0)
            if "conv1d" in name:
                weight.mul_(32.0)
    with pytest.warns(UserWarning, match="gets its prompts whole"):
        long_prompt(model.to(torch.bfloat16))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["gemma3_text", "llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("tile", [13, 66])
def test_texts_of_a_batch_may_be_padded(kind: str, tile: int) -> None:
    model = new_model(kind, LAYERED[kind])
    ids = prompt(batch=2)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    expected = generated(copy.deepcopy(model), ids, attention_mask=mask)
    cache = long_prompt(model, tile=tile)
    result = generated(model, ids, attention_mask=mask, past_key_values=cache)
    assert_same(result, expected)


@pytest.mark.parametrize("n_padding", [14, 30])
def test_padding_may_be_longer_than_a_tile(n_padding: int) -> None:
    """Chunks of attention begin behind the padding. The first tile's mask knew no more
    padding than the tile had tokens."""
    model = new_model("llama4_text", LAYERED["llama4_text"])
    ids = prompt(batch=2)
    mask = torch.ones_like(ids)
    mask[0, :n_padding] = 0
    expected = generated(copy.deepcopy(model), ids, attention_mask=mask)
    cache = long_prompt(model, tile=13)
    result = generated(model, ids, attention_mask=mask, past_key_values=cache)
    assert_same(result, expected)


def test_weights_in_host_memory_change_nothing_and_come_back() -> None:
    model = new_model("llama", {"num_hidden_layers": 3})
    expected = generated(copy.deepcopy(model), prompt())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    cache = long_prompt(model, tile=TILE, weights="host")
    assert_same(generated(model, prompt(), past_key_values=cache), expected)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    undo_long_prompt(model)
    assert_same(generated(model, prompt()), expected)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def written_in_place(weight: torch.Tensor) -> None:
    weight.data.mul_(-1.5)


def given_other_data(weight: torch.Tensor) -> None:
    weight.data = weight.data * -1.5


@pytest.mark.parametrize("change", [written_in_place, given_other_data])
def test_weights_in_host_memory_that_change_between_prompts(change: Any) -> None:
    """An adapter that was merged in, and weights that were loaded, did not count for
    layers that lay on the device; given weights went lost."""
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE, weights="host")
    generated(model, prompt(), past_key_values=cache)
    for changed in (model, plain):
        for weight in changed.model.layers.parameters():
            change(weight)
    expected = generated(plain, prompt())
    cache = long_prompt(model, tile=TILE, weights="host")
    assert_same(generated(model, prompt(), past_key_values=cache), expected)
    undo_long_prompt(model)
    assert_same(generated(model, prompt()), expected)


def next_logits(model: Any, cache: Any, results: list[torch.Tensor]) -> None:
    with torch.no_grad():
        results.append(model(torch.tensor([[5]]), past_key_values=cache).logits)


def test_two_threads_do_not_share_the_place_of_a_layers_weights() -> None:
    """A question in another thread fetched its layer's weights over those that this
    thread's layer was computing with: 73 of 180 tokens were wrong."""
    model = new_model("llama", {"num_hidden_layers": 3})
    cache = long_prompt(model, tile=TILE, weights="host")
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    results: list[torch.Tensor] = []
    next_logits(model, cache.fork(), results)
    threads: list[threading.Thread] = []

    def ask_meanwhile(*_: Any) -> None:
        if threads:
            return
        arguments = (model, cache.fork(), results)
        threads.append(threading.Thread(target=next_logits, args=arguments))
        threads[0].start()
        threads[0].join(0.3)

    mlp: Any = decoder_layers(model)[0].mlp
    mlp.register_forward_pre_hook(ask_meanwhile)
    next_logits(model, cache.fork(), results)
    threads[0].join()
    expected, *answers = results
    assert len(answers) == 2
    for logits in answers:
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("weights", ["device", "host"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_runs_prompts_with_its_own_weights(
    copied: Callable[[Any], Any], weights: str
) -> None:
    """Host memory of an unpickled model was no longer that of its weights."""
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE, weights=weights)
    expected = generated(model, prompt(), past_key_values=cache)
    twin = copied(model)
    for changed in (twin, plain):
        for weight in changed.parameters():
            weight.data.mul_(-1.5)
    cache = long_prompt(twin, tile=TILE, weights=weights)
    result = generated(twin, prompt(), past_key_values=cache)
    assert_same(result, generated(plain, prompt()))
    cache = long_prompt(model, tile=TILE, weights=weights)
    assert_same(generated(model, prompt(), past_key_values=cache), expected)


def test_a_new_model_of_a_changed_models_class_is_plain(tmp_path: Path) -> None:
    """Its class asked for changes that it does not carry."""
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    long_prompt(model, tile=TILE)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(generated(loaded, prompt()), generated(plain, prompt()))
    cache = long_prompt(loaded, tile=TILE)
    result = generated(loaded, prompt(), past_key_values=cache)
    assert_same(result, generated(plain, prompt()))


def test_weights_in_host_memory_of_another_dtype_are_refused() -> None:
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    long_prompt(model, tile=TILE, weights="host")
    model.double()
    with pytest.raises(RuntimeError, match="call undo_long_prompt"):
        model(prompt())
    undo_long_prompt(model)
    exact = plain.double()(prompt()).logits
    torch.testing.assert_close(model(prompt()).logits, exact)


def test_undo_leaves_the_model_as_it_was() -> None:
    model = new_model("llama", {})
    classes = [type(module) for module in model.modules()]
    long_prompt(model, tile=TILE)
    assert [type(module) for module in model.modules()] != classes
    undo_long_prompt(model)
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == "eager"
    undo_long_prompt(model)


def test_another_call_changes_what_was_changed_back() -> None:
    """A model that was given another attention after ``long_prompt`` refused its
    prompts, also after another ``long_prompt``."""
    model = new_model("llama", {})
    expected = generated(copy.deepcopy(model), prompt())
    long_prompt(model, tile=TILE)
    model.set_attn_implementation("sdpa")
    cache = long_prompt(model, tile=TILE)
    assert_same(generated(model, prompt(), past_key_values=cache), expected)
    assert runner_of(model).layered is not None
    undo_long_prompt(model)
    assert_same(generated(model, prompt()), expected)


def test_a_model_that_moved_has_lost_its_change() -> None:
    """Another call left the cache and the tiles on the device that the model had."""
    model = new_model("llama", {})
    long_prompt(model, tile=TILE)
    changes = changes_by(model, OWNER)
    assert changes is not None
    assert changes.hold(model)
    model.to("meta")
    assert prompt_forward_in(changes).why_lost(model) is not None


def test_logits_of_all_tokens_if_they_are_asked_for() -> None:
    model = new_model("qwen3", DECODERS["qwen3"])
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE)
    with torch.no_grad():
        result = model(prompt(), past_key_values=cache)
        expected = plain(
            prompt(), past_key_values=transformers.DynamicCache(config=plain.config)
        )
        torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-5)
        cache = long_prompt(model, tile=TILE)
        last = model(prompt(), past_key_values=cache, logits_to_keep=29).logits
    torch.testing.assert_close(last, expected.logits[:, -29:], rtol=1e-4, atol=1e-5)
    assert result.past_key_values.get_seq_length() == N_PROMPT


def test_a_second_prompt_continues_the_first() -> None:
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE)
    plain_cache = transformers.DynamicCache(config=plain.config)
    with torch.no_grad():
        for ids in (prompt(), prompt(45)):
            result = model(ids, past_key_values=cache)
            expected = plain(ids, past_key_values=plain_cache)
            torch.testing.assert_close(
                result.logits, expected.logits, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("n_tokens", [20, 40, 68])
def test_a_cache_that_has_another_text_is_refused_by_name(n_tokens: int) -> None:
    """``generate`` leaves nothing of a shorter prompt, or its last tokens."""
    model = new_model("qwen3", LAYERED["qwen3"])
    cache = long_prompt(model, tile=TILE)
    generated(model, prompt(), 3, past_key_values=cache)
    assert cache.get_seq_length() == 69
    with pytest.raises(ValueError, match=r"has 69 tokens already.*fork"):
        generated(model, prompt(n_tokens), 3, past_key_values=cache)
    assert cache.get_seq_length() == 69


def test_another_text_with_padding_is_refused_by_name() -> None:
    """Positions do not count padding, so the width of its mask has to tell. (Older
    versions of ``generate`` hand on each mask, also one that masks nothing.)"""
    model = new_model("qwen3", LAYERED["qwen3"])
    cache = long_prompt(model, tile=TILE)
    padding = torch.ones(1, N_PROMPT, dtype=torch.long)
    padding[:, :5] = 0
    generated(model, prompt(), 3, past_key_values=cache, attention_mask=padding)
    with pytest.raises(ValueError, match=r"has 69 tokens already.*fork"):
        generated(
            model, prompt(40), 3, past_key_values=cache, attention_mask=padding[:, :40]
        )
    assert cache.get_seq_length() == 69


def test_calls_with_gradients_and_without_a_cache_run_as_before() -> None:
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    long_prompt(model, tile=TILE)
    for some_model in (model, plain):
        some_model(prompt(), labels=prompt()).loss.backward()
    for weight, plain_weight in zip(
        model.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(weight.grad, plain_weight.grad)


def test_a_prompt_that_fails_leaves_an_empty_cache() -> None:
    """Half of the layers would have its tokens, and the next token would be wrong."""
    model = new_model("llama", {})

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    cache = long_prompt(model, tile=TILE, progress=interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(prompt(), past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert {layer.get_seq_length() for layer in cache.layers} == {0}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_same_with_a_cache_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose ``reset`` keeps zeros as tokens in older versions."""
    layer_class = transformers.cache_utils.DynamicLayer
    monkeypatch.setattr(
        layer_class, "reset", transformers.cache_utils.CacheLayerMixin.reset
    )
    model = new_model(kind, LAYERED[kind])
    plain = copy.deepcopy(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    long_prompt(model, tile=TILE, progress=interrupt)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(prompt(), past_key_values=cache)
    assert cache.get_seq_length() == 0
    long_prompt(model, tile=TILE, progress=False)
    with torch.no_grad():
        result = model(prompt(), past_key_values=cache)
        expected = plain(
            prompt(), past_key_values=transformers.DynamicCache(config=model.config)
        )
    torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_gradients_of_tokens_in_the_cache_are_refused() -> None:
    """The cache keeps none, so those of the weights would be wrong."""
    model = new_model("llama", {})
    cache = long_prompt(model, tile=TILE)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    with pytest.raises(NotImplementedError, match=r"torch\.no_grad\(\)"):
        model(prompt(), past_key_values=cache)


def test_labels_beside_a_cache() -> None:
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    long_prompt(model, tile=TILE)
    losses = []
    with torch.no_grad():
        for some_model in (model, plain):
            new_cache = transformers.DynamicCache(config=model.config)
            losses.append(
                some_model(prompt(), past_key_values=new_cache, labels=prompt()).loss
            )
    torch.testing.assert_close(*losses)


def test_a_saved_prompt_is_continued_another_day(tmp_path: Path) -> None:
    model = new_model("llama", {})
    text = prompt()
    question = torch.cat([text, prompt(8)], 1)
    expected = generated(copy.deepcopy(model), question, 8)
    cache = long_prompt(model, tile=TILE)
    with torch.no_grad():
        model(text, past_key_values=cache, logits_to_keep=1)
    forked = cache.fork()
    assert_same(generated(model, question, 8, past_key_values=forked), expected)
    cache.save(tmp_path / "text")
    undo_long_prompt(model)
    loaded = long_prompt(model, tile=TILE, cache=tmp_path / "text")
    assert loaded.get_seq_length() == N_PROMPT
    assert_same(generated(model, question, 8, past_key_values=loaded), expected)


def test_a_printed_cache_says_what_lies_where() -> None:
    model = new_model("llama", {"num_hidden_layers": 3})
    cache = long_prompt(model, weights="host")
    lines = str(cache).splitlines()
    assert lines[0].startswith("PromptCache(0 tokens")
    assert lines[1].startswith("weights: ")
    assert "two layers at a time are copied to cpu" in lines[1]
    assert lines[2] == "prompts: one layer after the other, 3 layers"


def test_progress_is_told_by_layer() -> None:
    model = new_model("llama", {"num_hidden_layers": 3})
    steps: list[tuple[int, int, str]] = []
    cache = long_prompt(model, tile=TILE, progress=lambda *step: steps.append(step))
    generated(model, prompt(), 1, past_key_values=cache)
    assert [step[:2] for step in steps] == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ({"weights": "disk"}, ValueError),
        ({"tile": 0}, ValueError),
        ({"device_memory": "much"}, ValueError),
        # For "16GiB": 16 bytes failed at the first prompt.
        ({"device_memory": 16}, ValueError),
        ({"device_memory": "16"}, ValueError),
        ({"device_memory": 0}, ValueError),
        ({"host_memory": 64}, ValueError),
        ({"memory": "1GiB"}, TypeError),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    argument: dict[str, Any], error: type
) -> None:
    model = new_model("llama", {})
    (name,) = argument
    with pytest.raises(error, match=name):
        long_prompt(model, **argument)
    assert model.config._attn_implementation == "eager"


def test_tiles_of_host_memory_are_those_of_the_device() -> None:
    """Rows come back as they were stored, with a tile that does not divide the
    tokens."""
    spans = spans_of(67, 20)
    assert spans[0] == Interval(0, 17)
    assert [span.length for span in spans] == [17, 17, 17, 16]
    rows = torch.randn(2, 3, 67, 5)
    for tiles in (DeviceTiles(torch.device("cpu")), HostTiles(torch.device("cpu"))):
        stored = tiles.empty(rows[:, :, :1], 67)
        for span in spans:
            tiles.store(span, [stored], [rows[:, :, span.start : span.stop]])
        tiles.finish()
        loaded = [tile.clone() for _, (tile,) in tiles.load(spans, stored)]
        assert torch.equal(torch.cat(loaded, 2), rows)


def test_a_prompt_that_just_fits_has_room_in_all_layers() -> None:
    """The first layers took room for an answer, and the last one found none for the
    prompt."""
    model = new_model("llama", {"num_hidden_layers": 6})
    expected = copy.deepcopy(model)
    long_prompt(model, tile=TILE)
    ids = prompt(640)
    with torch.no_grad():
        whole = PromptCache(model.config)
        model(ids, past_key_values=whole)
        n_bytes = 6 * 640 * whole.layers[0].tokens.token_bytes
        cache = PromptCache(model.config, device_memory=n_bytes + 10_000, host_memory=0)
        logits = model(ids, past_key_values=cache).logits
        assert cache.get_seq_length() == 640
        torch.testing.assert_close(logits, expected(ids).logits, rtol=1e-4, atol=1e-5)
        # With memory for an answer too, its tokens lie in the prompt's segment.
        model(ids[:, :1], past_key_values=whole)
    assert len(whole.layers[-1].tokens.segments()) == 1
