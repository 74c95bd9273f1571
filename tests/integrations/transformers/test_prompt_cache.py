"""Models generate the same tokens with a cache in segments as with Transformers'
own."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers.models import DECODERS, MIXED, VOCABULARY, attended, some_ids, tiny

from quorum_attention.integrations.transformers import (
    prompt_cache as prompt_cache_module,
)
from quorum_attention.integrations.transformers import register, segmented_tensor
from quorum_attention.integrations.transformers.prompt_cache import PromptCache, _spread
from quorum_attention.integrations.transformers.saved_layers import restore_layer
from quorum_attention.integrations.transformers.segmented_layer import SegmentedLayer
from quorum_attention.long_prompts import segmented_cache as segmented_cache_module
from quorum_attention.long_prompts.places import Place

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 16},
    # Transformers 5.6 needs a token that ends answers here: one that never comes.
    "assisted": {"prompt_lookup_num_tokens": 3, "eos_token_id": VOCABULARY},
}
MEMORY = {"device": None, "both": 20_000, "files": 0}
TOKENS = 41
# They end in a block behind the one that the prompt begins.
NEW_TOKENS = 18


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts are cut as long ones are."""
    register()
    monkeypatch.setattr(segmented_cache_module, "_MIN_BLOCK_TOKENS", 8)
    monkeypatch.setattr(segmented_cache_module, "_TOKEN_STEP", 8)


def model_of(kind: str) -> Any:
    model = attended(tiny(kind), "quorum")
    model.config.use_cache = True
    model.generation_config.use_cache = True
    model.generation_config.eos_token_id = None
    return model


def generate(
    model: Any, ids: torch.Tensor, cache: Any = None, **options: Any
) -> torch.Tensor:
    named = {} if cache is None else {"past_key_values": cache}
    try:
        tokens: torch.Tensor = model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, **named, **options
        )
    except ValueError as error:
        if "Cannot `crop`" in str(error):
            pytest.skip("Transformers 5.6 takes no tokens back from a window")
        raise
    return tokens


def cache_of(model: Any, memory: int | None, folder: Path) -> PromptCache:
    return PromptCache(model.config, device_memory=memory, folder=folder)


def left_padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return mask


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", DECODERS)
def test_tokens_are_those_of_the_plain_cache(
    kind: str, way: str, tmp_path: Path
) -> None:
    """Every way of generating, whatever the layers and wherever segments lie."""
    model = model_of(kind)
    ids = some_ids(1 if way == "assisted" else 2, TOKENS)
    padding = torch.ones_like(ids) if way == "assisted" else left_padded(ids)
    options = {**WAYS[way], "attention_mask": padding}
    expected = generate(model, ids, **options)
    for memory, n_bytes in MEMORY.items():
        cache = cache_of(model, n_bytes, tmp_path)
        tokens = generate(model, ids, cache, **options)
        assert torch.equal(tokens, expected), memory


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "qwen3"])
def test_forks_answer_several_questions_about_one_text(
    kind: str, tmp_path: Path
) -> None:
    """Neither fork sees the other's tokens, and the text is there once."""
    model = model_of(kind)
    text = some_ids(1, TOKENS)
    cache = cache_of(model, None, tmp_path)
    with torch.no_grad():
        model(text, past_key_values=cache)
    used = cache.places.used(Place.DEVICE)
    for _ in range(3):
        question = torch.cat((text, some_ids(1, 5)), dim=1)
        expected = generate(model, question)
        assert torch.equal(generate(model, question, cache.fork()), expected)
    assert cache.get_seq_length() == TOKENS
    assert cache.places.used(Place.DEVICE) == used


@pytest.mark.parametrize("n_tokens_on_device", [0, 30, 41, 60, 1000])
def test_tokens_move_to_the_device_layer_by_layer(
    n_tokens_on_device: int, tmp_path: Path
) -> None:
    """A layer for which there is no room moves in part; later tokens go behind."""
    model = model_of("llama")
    ids = some_ids(2, TOKENS)
    expected = generate(model, ids)
    cache = cache_of(model, 0, tmp_path)
    places = cache.places
    places._limits[Place.HOST] = None
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    tokens = [layer.tokens for layer in cache._segmented_layers()]
    token_bytes = tokens[0].token_bytes
    n_behind = 32
    n_bytes = (n_tokens_on_device + n_behind * len(tokens)) * token_bytes
    cache.promote(n_bytes, n_behind)
    n_there = [
        sum(s.n_tokens for s in layer.segments() if s.place is Place.DEVICE)
        for layer in tokens
    ]
    n_most = (TOKENS - 1) * len(tokens)
    assert sum(n_there) == min(n_tokens_on_device, n_most)
    assert len([n for n in n_there if 0 < n < TOKENS - 1]) <= 1
    assert places.used(Place.DEVICE) <= n_bytes + (64 * token_bytes + 512) * len(tokens)
    assert torch.equal(generate(model, ids, cache), expected)
    for layer in tokens:
        assert layer.segments()[-1].place is Place.DEVICE


def test_a_batch_of_questions_reads_the_text_once(tmp_path: Path) -> None:
    """The text's keys are one row that all questions read."""
    model = model_of("llama")
    text = some_ids(1, TOKENS)
    cache = cache_of(model, None, tmp_path)
    with torch.no_grad():
        model(text, past_key_values=cache)
    questions = torch.cat((text.expand(3, -1), some_ids(3, 6)), dim=1)
    padding = torch.ones_like(questions)
    padding[1, TOKENS : TOKENS + 2] = 0
    cache.batch_repeat_interleave(3)
    expected = generate(model, questions, attention_mask=padding)
    assert torch.equal(
        generate(model, questions, cache, attention_mask=padding), expected
    )
    layer = next(layer for layer in cache.layers if isinstance(layer, SegmentedLayer))
    assert layer.tokens.segments()[0].key.shape[0] == 1


def test_entries_of_a_cache_that_was_cropped_to_no_tokens(tmp_path: Path) -> None:
    """The entries of tokens that are gone were remembered: the next ones were
    refused."""
    model = model_of("llama")
    cache = cache_of(model, None, tmp_path)
    ids = some_ids(4, 6)
    with torch.no_grad():
        model(some_ids(2, 1), past_key_values=cache)
        cache.crop(-1)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1, 2, 2]))
        logits = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids).logits)


@pytest.mark.slow
def test_a_smaller_model_assists(tmp_path: Path) -> None:
    """Proposed tokens that are wrong are cropped again."""
    model = model_of("llama")
    assistant = model_of("llama")
    ids = some_ids(1, TOKENS)
    expected = generate(model, ids)
    cache = cache_of(model, 20_000, tmp_path)
    assert torch.equal(generate(model, ids, cache, assistant_model=assistant), expected)


def test_a_deep_copy_is_a_fork(tmp_path: Path) -> None:
    """Libraries copy caches to go back to them."""
    model = model_of("gemma2")
    text = some_ids(1, TOKENS)
    cache = cache_of(model, None, tmp_path)
    with torch.no_grad():
        model(text, past_key_values=cache)
    question = torch.cat((text, some_ids(1, 5)), dim=1)
    expected = generate(model, question)
    assert torch.equal(generate(model, question, copy.deepcopy(cache)), expected)
    assert cache.get_seq_length() == TOKENS


@pytest.mark.slow
def test_a_conversation_goes_on(tmp_path: Path) -> None:
    """A second question behind the first answer, with the cache as it is."""
    model = model_of("gemma2")
    cache = cache_of(model, 20_000, tmp_path)
    ids = some_ids(1, TOKENS)
    for _ in range(3):
        expected = generate(model, ids)
        answer = generate(model, ids, cache)
        assert torch.equal(answer, expected)
        ids = torch.cat((answer, some_ids(1, 9)), dim=1)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_other_attention_gets_copies(name: str, tmp_path: Path) -> None:
    """A model that computes with its keys itself gets right results, and a warning says
    it once."""
    model = model_of("llama")
    model.set_attn_implementation(name)
    ids = some_ids(2, TOKENS)
    expected = generate(model, ids)
    segmented_tensor._warn_of_copies.cache_clear()
    with pytest.warns(UserWarning, match="copies its whole cache"):
        assert torch.equal(generate(model, ids, cache_of(model, 0, tmp_path)), expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*copies its whole cache")
        generate(model, ids, cache_of(model, 0, tmp_path))


@pytest.mark.slow
def test_nothing_is_copied_for_our_attention(tmp_path: Path) -> None:
    """Segments reach the attention as they are."""
    segmented_tensor._warn_of_copies.cache_clear()
    for kind in ("llama", "gemma2", "gpt_oss"):
        model = model_of(kind)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*copies its whole cache")
            for options in WAYS.values():
                generate(
                    model, some_ids(1, TOKENS), cache_of(model, 0, tmp_path), **options
                )


def test_inference_mode_and_no_grad_take_turns(tmp_path: Path) -> None:
    """Memory allocated in inference mode can be written to outside of it."""
    model = model_of("llama")
    cache = cache_of(model, None, tmp_path)
    ids = some_ids(1, TOKENS)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    cache.reorder_cache(torch.tensor([0]))
    with torch.no_grad():
        logits = model(some_ids(1, 1), past_key_values=cache).logits
    assert logits.isfinite().all()


def test_a_reset_cache_takes_another_prompt(tmp_path: Path) -> None:
    """Also of another batch."""
    model = model_of("gpt_oss")
    cache = cache_of(model, 20_000, tmp_path)
    for batch in (1, 3):
        ids = some_ids(batch, TOKENS)
        expected = generate(model, ids)
        assert torch.equal(generate(model, ids, cache), expected)
        cache.reset()
        assert cache.get_seq_length() == 0
    assert cache.places.used(Place.FILE) == 0
    assert "0 tokens" in repr(cache)


def test_layers_of_other_kinds_stay_the_models_own(tmp_path: Path) -> None:
    """Sliding windows keep no more than their window."""
    model = attended(tiny("gemma2", {"layer_types": MIXED}), "quorum")
    cache = cache_of(model, None, tmp_path)
    kinds = [isinstance(layer, SegmentedLayer) for layer in cache.layers]
    assert kinds == [False, True]
    assert cache.is_sliding == [True, False]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", DECODERS)
def test_tomorrow_a_saved_cache_goes_on(kind: str, tmp_path: Path) -> None:
    """The next question, from the files of a text that was read yesterday."""
    model = model_of(kind)
    text = some_ids(1, TOKENS)
    cache = cache_of(model, 20_000, tmp_path / "segments")
    with torch.no_grad():
        model(text, past_key_values=cache)
    cache.save(tmp_path / "book")
    for _ in range(2):
        loaded = cache_of(model, None, tmp_path / "segments")
        loaded.load(tmp_path / "book")
        assert loaded.get_seq_length() == TOKENS
        question = torch.cat((text, some_ids(1, 5)), dim=1)
        expected = generate(model, question)
        assert torch.equal(generate(model, question, loaded), expected)


def test_an_interrupted_load_leaves_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer had the tokens, and the others none."""
    model = model_of("llama")
    cache = cache_of(model, None, tmp_path / "segments")
    generate(model, some_ids(1, TOKENS), cache)
    cache.save(tmp_path / "book")
    restored: list[Any] = []

    def restore(layer: Any, *arguments: Any) -> None:
        if restored:
            raise KeyboardInterrupt
        restored.append(layer)
        restore_layer(layer, *arguments)

    monkeypatch.setattr(prompt_cache_module, "restore_layer", restore)
    other = cache_of(model, None, tmp_path / "others")
    with pytest.raises(KeyboardInterrupt):
        other.load(tmp_path / "book")
    assert restored
    assert {layer.get_seq_length() for layer in other.layers} == {0}


CHANGES: dict[str, Any] = {
    "crop": -3,
    "batch_repeat_interleave": 2,
    "reorder_cache": torch.tensor([1, 0]),
    "batch_select_indices": torch.tensor([1]),
}


class Interrupted:
    """A method of layers that an interrupt ends.

    Attributes:
        n_left: how often the method runs until then.
        is_behind: whether the last run comes to its end.
        method: the method.
    """

    def __init__(self, method: Any, n_left: int, is_behind: bool) -> None:
        self.n_left = n_left
        self.is_behind = is_behind
        self.method = method

    def run(self, *arguments: Any) -> None:
        self.n_left -= 1
        if self.n_left == 0 and not self.is_behind:
            raise KeyboardInterrupt
        self.method(*arguments)
        if self.n_left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", CHANGES)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("is_behind", [False, True])
def test_an_interrupted_change_of_entries_leaves_no_tokens(
    method: str, number: int, is_behind: bool, tmp_path: Path
) -> None:
    """Some layers had the new beams, and others the old ones: later tokens were wrong,
    without a word."""
    model = model_of("llama")
    cache = cache_of(model, None, tmp_path)
    ids = some_ids(2, TOKENS)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    interrupted = Interrupted(getattr(SegmentedLayer, method), number, is_behind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SegmentedLayer, method, lambda *arguments: interrupted.run(*arguments)
        )
        with pytest.raises(KeyboardInterrupt):
            getattr(cache, method)(CHANGES[method])
    assert {layer.get_seq_length() for layer in cache.layers} == {0}
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_a_refused_change_leaves_all_layers(tmp_path: Path) -> None:
    """A window that keeps no older tokens refused to be cropped behind layers that had
    been, and a batch entry that is not there."""
    types = ["full_attention", "sliding_attention"]
    model = attended(tiny("gemma2", {"layer_types": types}), "quorum")
    cache = cache_of(model, None, tmp_path)
    ids = some_ids(2, TOKENS)
    next_ids = some_ids(2, 1)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        plain = copy.deepcopy(cache)
        with pytest.raises(RuntimeError):
            cache.crop(-3)
        with pytest.raises((IndexError, ValueError)):
            cache.batch_select_indices(torch.tensor([5]))
        logits = model(next_ids, past_key_values=cache).logits
        expected = model(next_ids, past_key_values=plain).logits
    torch.testing.assert_close(logits, expected)


def test_memory_of_a_few_bytes_is_a_slip() -> None:
    """16 for "16GiB": all tokens went to host memory without a word."""
    model = model_of("llama")
    for name in ("device_memory", "host_memory"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1.00 KiB"):
            PromptCache(model.config, **{name: 16})
    PromptCache(model.config, device_memory=0, host_memory="1KiB")


def test_a_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    """Keys of one model mean nothing to another."""
    cache = cache_of(model_of("llama"), None, tmp_path / "segments")
    cache.save(tmp_path / "book")
    other = cache_of(model_of("qwen3"), None, tmp_path / "segments")
    with pytest.raises(ValueError, match="another model"):
        other.load(tmp_path / "book")


@pytest.mark.parametrize("n_layers", [1, 2, 28, 36])
def test_layers_on_the_device_are_spread_among_all(n_layers: int) -> None:
    """Layers in host memory that lie together have nothing to be copied under."""
    order = _spread(list(range(n_layers)))
    assert sorted(order) == list(range(n_layers))
    for n_on_device in range(n_layers // 2, n_layers):
        in_host_memory = sorted(order[n_on_device:])
        gaps = [behind - at for at, behind in pairwise(in_host_memory)]
        even_gap = n_layers / max(1, len(in_host_memory))
        assert all(even_gap / 2.7 <= gap <= even_gap * 2.7 for gap in gaps)


def test_the_next_layer_in_host_memory_is_copied_ahead() -> None:
    """Layers on the device between are passed over; behind the last comes the first."""
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=5, num_key_value_heads=1)
    cache = PromptCache(config)
    tokens = torch.randn(1, 1, 9, 8)
    for number in range(5):
        cache.update(tokens, tokens, number)
    layers = cache._segmented_layers()
    for number in (1, 3):
        prefix = layers[number].tokens._prefixes[0]
        prefix.block.place = Place.HOST
    following = [layer._next_segments()[0].key.data_ptr() for layer in layers]
    addresses = [layer.tokens.segments()[0].key.data_ptr() for layer in layers]
    expected = [addresses[number] for number in (1, 3, 3, 1, 1)]
    assert following == expected


@pytest.mark.parametrize("device_layers", [0, 3, 9])
def test_memory_for_copies_is_taken_before_the_first_attention(
    device_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken later, it would split the memory that the next layer's attention needs in
    one piece. Without layers in host memory nobody needs it."""
    from transformers import Qwen3Config

    n_layers = 5
    config = Qwen3Config(num_hidden_layers=n_layers, num_key_value_heads=1)
    tokens = torch.randn(1, 1, 16, 8)
    device_memory = device_layers * 2 * tokens.nbytes
    cache = PromptCache(config, device_memory=device_memory)
    n_taken_before: list[int] = []
    monkeypatch.setattr(
        cache._shared.places,
        "staging_memory",
        lambda: n_taken_before.append(count_taken(cache)),
    )
    cache.reserve(16)
    cache.prepare_device(tokens, tokens, tokens)
    n_taken = count_taken(cache)
    assert n_taken_before == ([] if n_taken == n_layers else [n_taken])
    assert (n_taken < n_layers) == (device_layers < n_layers)


def count_taken(cache: PromptCache) -> int:
    """The layers that have memory."""
    return sum(layer.tokens.taken_bytes > 0 for layer in cache._segmented_layers())
