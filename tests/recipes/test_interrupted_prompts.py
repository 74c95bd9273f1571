"""A forward that ends in the middle leaves the cache as it was before, and the next one
has the plain model's results."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.fake_graphs import FakeGraphs
from helpers.models import LINEAR_EXPERTS, MIXED
from helpers.prompt_models import (
    GEMMAS,
    LAYERED,
    N_PROMPT,
    TILE,
    new_model,
    prompt,
    runner_of,
)

from quorum_attention.integrations.transformers.cache_rollback import restored_on_error
from quorum_attention.long_prompts import segmented_cache as segmented_cache_module
from quorum_attention.recipes import long_prompt
from quorum_attention.recipes.layer_calls import decoder_layers
from quorum_attention.recipes.token_layers import TokenLayers

N_QUESTION = 2 * TILE + 5  # three chunks
# Full attention; windows; both; keys of other layers; chunks of attention; states of
# recurrences; a model whose attention has no name.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {"sliding_window": 9, "layer_types": MIXED},
    "gemma4_text": GEMMAS["gemma4_text"],
    "llama4_text": LAYERED["llama4_text"],
    "qwen3_next": {
        **LINEAR_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bloom": {"n_layer": 2, "n_head": 4, "head_dim": None},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*gets its prompts in chunks")


UPDATES = ("update", "update_conv_state", "update_recurrent_state")


class Interrupt:
    """Raises an error when a layer's tokens or states come to a cache.

    Attributes:
        n_left: how often they come until then.
        is_behind: whether the cache has them already.
        error: what is raised.
    """

    def __init__(self, n_left: int, is_behind: bool, error: type) -> None:
        self.n_left = n_left
        self.is_behind = is_behind
        self.error = error

    def around(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in place of a method of the cache."""

        def run(*args: Any, **named: Any) -> Any:
            self.n_left -= 1
            if self.n_left == 0 and not self.is_behind:
                raise self.error("interrupted")
            result = update(*args, **named)
            if self.n_left == 0:
                raise self.error("interrupted")
            return result

        return run


def is_interrupted(
    model: Any, ids: torch.Tensor, cache: Any, interrupt: Interrupt
) -> bool:
    """Run a forward; return whether it ended with the interrupt."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name in UPDATES:
            if hasattr(cache, name):
                patch.setattr(cache, name, interrupt.around(getattr(cache, name)))
        try:
            model(ids, past_key_values=cache, logits_to_keep=1)
        except interrupt.error:
            return True
    return False


def lengths_of(cache: Any) -> list[int]:
    """Tokens of all layers with keys; Gemma's layers that share them have none."""
    return [
        layer.get_seq_length()
        for layer in cache.layers
        if hasattr(layer, "keys") and hasattr(layer, "get_seq_length")
    ]


def last_logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits[:, -1]
    return logits


def assert_each_interrupt_is_undone(
    model: Any, ids: torch.Tensor, new_cache: Callable[[], Any], expected: torch.Tensor
) -> None:
    """Behind an interrupt at any place, the next forward has the right logits."""
    n_interrupts = 0
    for is_behind in (False, True):
        for number in range(1, 100):
            cache = new_cache()
            before = lengths_of(cache)
            error = KeyboardInterrupt if number % 2 else OSError
            if not is_interrupted(
                model, ids, cache, Interrupt(number, is_behind, error)
            ):
                break
            n_interrupts += 1
            assert lengths_of(cache) == before
            logits = last_logits(model, ids, cache)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert n_interrupts


def with_prompt(model: Any) -> Any:
    """A new cache that has the prompt's tokens."""
    cache = long_prompt(model, tile=TILE, progress=False)
    last_logits(model, prompt(), cache)
    return cache


@pytest.fixture(autouse=True)
def blocks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question fills several blocks of memory."""
    monkeypatch.setattr(segmented_cache_module, "_MIN_BLOCK_TOKENS", 8)
    monkeypatch.setattr(segmented_cache_module, "_TOKEN_STEP", 8)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("n_tokens", [N_QUESTION, 3, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_question_behind_a_prompt(kind: str, n_tokens: int) -> None:
    """In chunks, at once, and one token. Some layers had its tokens, others did not,
    and the next logits were wrong."""
    model = new_model(kind, KINDS[kind])
    plain = copy.deepcopy(model)
    question = prompt().roll(5, 1)[:, :n_tokens]
    expected = last_logits(plain, torch.cat([prompt(), question], 1), None)
    new_cache = partial(with_prompt, model)
    assert_each_interrupt_is_undone(model, question, new_cache, expected)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt(kind: str) -> None:
    """By layers, or in chunks."""
    model = new_model(kind, KINDS[kind])
    expected = last_logits(copy.deepcopy(model), prompt(), None)
    new_cache = partial(long_prompt, model, tile=TILE, progress=False)
    assert_each_interrupt_is_undone(model, prompt(), new_cache, expected)


@pytest.mark.parametrize("kind", ["llama", "mistral", "bloom"])
def test_a_cache_of_transformers(kind: str) -> None:
    """Without a configuration it has no layers before the first tokens."""
    model = new_model(kind, KINDS[kind])
    expected = last_logits(copy.deepcopy(model), prompt(), None)
    long_prompt(model, tile=TILE, progress=False)
    for config in (None, model.config):
        new_cache = partial(transformers.DynamicCache, config=config)
        assert_each_interrupt_is_undone(model, prompt(), new_cache, expected)


def test_a_token_that_graphs_compute() -> None:
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE, progress=False)
    graphs = FakeGraphs()
    runner_of(model).token_layers = TokenLayers(decoder_layers(model), graphs)
    ids = prompt()
    last_logits(model, ids, cache)
    token = prompt()[:, 7:8]
    for _ in range(5):
        last_logits(model, token, cache)
        ids = torch.cat([ids, token], 1)
    n_replays = graphs.n_replays
    assert n_replays
    expected = last_logits(plain, torch.cat([ids, token], 1), None)
    assert_each_interrupt_is_undone(model, token, cache.fork, expected)
    assert graphs.n_replays > n_replays


def test_nothing_with_a_row_for_each_token_is_kept() -> None:
    """To keep the old keys of all layers would take the cache's memory twice."""
    layer = transformers.cache_utils.DynamicLayer()
    keys = torch.randn(1, 2, 5, 4)
    layer.update(keys, keys)
    cache = transformers.DynamicCache()
    cache.layers.append(layer)
    old_keys = weakref.ref(layer.keys)
    with suppress(KeyboardInterrupt), restored_on_error(cache):
        layer.update(keys, keys)
        assert old_keys() is None
        raise KeyboardInterrupt
    assert torch.equal(layer.keys, keys)


def test_a_device_that_is_full_in_a_chunk() -> None:
    """The cache has the tokens that it had, so a smaller tile can go on."""
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    question = prompt().roll(5, 1)
    expected = last_logits(plain, torch.cat([prompt(), question], 1), None)
    cache = with_prompt(model)
    interrupt = Interrupt(4, is_behind=True, error=torch.OutOfMemoryError)
    assert is_interrupted(model, question, cache, interrupt)
    assert lengths_of(cache) == [N_PROMPT] * 2
    runner_of(model).tile = 7
    logits = last_logits(model, question, cache)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
