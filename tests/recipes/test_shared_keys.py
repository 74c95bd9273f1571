"""Prompts through layers that read keys and values of the layers before them."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers.prompt_models import (
    GEMMAS,
    N_PROMPT,
    TILE,
    assert_same,
    generated,
    new_model,
    prompt,
    runner_of,
)

from quorum_attention.recipes import long_prompt
from quorum_attention.recipes.handed_states import HandedStates, hands_states_on
from quorum_attention.recipes.tile_storage import DeviceTiles

pytestmark = pytest.mark.filterwarnings("error:.*gets its prompts in chunks")


@pytest.fixture(params=GEMMAS)
def model(request: pytest.FixtureRequest) -> Any:
    return new_model(request.param, GEMMAS[request.param])


@pytest.mark.parametrize("n_kept", [0, 1, 3, 30])
def test_logits_are_the_plain_models(model: Any, n_kept: int) -> None:
    """Of the last token, of some in one tile, of some in two tiles, and of all. With
    one, attention had a mask of one query for all of them, and raised an error."""
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE)
    with torch.no_grad():
        result = model(prompt(), past_key_values=cache, logits_to_keep=n_kept)
        expected = plain(prompt(), logits_to_keep=n_kept)
    torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tile", "n_kept"), [(6, 1), (11, 1), (16, 3)])
def test_the_last_tile_may_have_just_the_tokens_that_are_asked_for(
    model: Any, tile: int, n_kept: int
) -> None:
    """Its mask is not cut then. Of a tile that is smaller than the window, the mask had
    a query for each token of the prompt, and Gemma 4 ended with an error."""
    assert N_PROMPT % tile == n_kept
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=tile)
    with torch.no_grad():
        result = model(prompt(), past_key_values=cache, logits_to_keep=n_kept)
        expected = plain(prompt(), logits_to_keep=n_kept)
    torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-5)


def tokens_of_layers(model: Any, n_kept: int, cache: Any = None) -> list[int]:
    """The tokens that the MLP of each layer computes of a prompt."""
    n_tokens = [0] * len(model.model.layers)

    def count(number: int, module: Any, args: Any) -> None:
        n_tokens[number] += args[0].shape[1]

    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(partial(count, number))
    with torch.no_grad():
        model(prompt(), past_key_values=cache, logits_to_keep=n_kept)
    return n_tokens


@pytest.mark.parametrize("n_kept", [1, 3])
def test_layers_that_share_keys_compute_the_last_tokens_alone(n_kept: int) -> None:
    """As in the plain model of newer versions of Transformers: with all tokens, prompts
    of Gemma 4 E2B took twice the time."""
    model = new_model("gemma4_text", GEMMAS["gemma4_text"])
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE)
    n_tokens = tokens_of_layers(model, n_kept, cache)
    assert n_tokens == tokens_of_layers(plain, n_kept)
    assert n_tokens[:2] == [N_PROMPT] * 2


def test_rows_in_host_memory_and_a_padded_batch(model: Any) -> None:
    plain = copy.deepcopy(model)
    ids = prompt(batch=2)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    cache = long_prompt(model, tile=TILE)
    runner_of(model).working = 1
    result = generated(model, ids, attention_mask=mask, past_key_values=cache)
    assert_same(result, generated(plain, ids, attention_mask=mask))


def test_weights_in_host_memory(model: Any) -> None:
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE, weights="host")
    result = generated(model, prompt(), past_key_values=cache)
    assert_same(result, generated(plain, prompt()))


def test_a_question_behind_a_prompt_forked_and_saved(
    model: Any, tmp_path: Path
) -> None:
    """The question is longer than a tile, so it runs in chunks."""
    plain = copy.deepcopy(model)
    question = torch.cat([prompt(), prompt(2 * TILE)], 1)
    expected = generated(plain, question)
    cache = long_prompt(model, tile=TILE)
    with torch.no_grad():
        model(prompt(), past_key_values=cache, logits_to_keep=1)
    for _ in range(2):
        fork = cache.fork()
        assert_same(generated(model, question, past_key_values=fork), expected)
    cache.save(tmp_path / "text")
    loaded = long_prompt(model, tile=TILE, cache=tmp_path / "text")
    assert loaded.get_seq_length() == N_PROMPT
    assert_same(generated(model, question, past_key_values=loaded), expected)


@pytest.mark.parametrize("kind", GEMMAS)
def test_more_than_half_of_the_layers_share(kind: str) -> None:
    """As in Gemma 4 E2B: three of four here, without windows."""
    sizes = {"num_kv_shared_layers": 3, "layer_types": ["full_attention"] * 4}
    model = new_model(kind, {**GEMMAS[kind], **sizes})
    plain = copy.deepcopy(model)
    cache = long_prompt(model, tile=TILE)
    result = generated(model, prompt(), past_key_values=cache)
    assert_same(result, generated(plain, prompt()))


class ElsewhereTiles(DeviceTiles):
    """Tiles that lie in other memory, as those of a GPU's prompt in host memory do."""

    def stash(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def unstash(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


def test_shared_keys_lie_where_rows_of_all_tokens_lie() -> None:
    """On a GPU, keys and values of a long prompt would stay on the device uncounted."""
    states = HandedStates(ElsewhereTiles(torch.device("cpu")))
    assert hands_states_on(states)
    key, value = torch.randn(2, 1, 2, 5, 8)
    states["full_attention"] = key, value
    assert not hands_states_on(states)
    stored = states.data["full_attention"]
    for tensor, own, read in zip(
        stored, (key, value), states["full_attention"], strict=True
    ):
        assert tensor.data_ptr() not in (own.data_ptr(), read.data_ptr())
        assert torch.equal(read, own)
