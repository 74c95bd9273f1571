"""Tokens of an answer that CUDA graphs compute, on a GPU."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers.prompt_models import LAYERED, TILE, generated, new_model, prompt, runner_of

from quorum_attention.recipes import long_prompt
from quorum_attention.recipes.layer_recording import LayerRecording

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
N_TOKENS = 12
KINDS = ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "qwen3_moe"]


@pytest.fixture(autouse=True)
def kernels_are_compiled() -> Any:
    """A thread compiles them while the first prompt is computed."""
    yield
    for thread in threading.enumerate():
        if "compile_kernels" in thread.name:
            thread.join(60)


@pytest.fixture
def n_replays(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns how many layers were replayed."""
    replayed: list[LayerRecording] = []
    replay = LayerRecording.replay

    def counting(self: LayerRecording, call: Any) -> Any:
        replayed.append(self)
        return replay(self, call)

    monkeypatch.setattr(LayerRecording, "replay", counting)
    return lambda: len(replayed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_layers_code(
    kind: str, dtype: torch.dtype, n_replays: Any
) -> None:
    """Two prompts: the second one's tokens are replayed from the second on."""
    model = new_model(kind, LAYERED[kind]).cuda().to(dtype)
    twin = copy.deepcopy(model)
    long_prompt(model, tile=TILE)
    long_prompt(twin, tile=TILE)
    runner_of(twin).token_layers = None
    for seed in range(2):
        ids = prompt().roll(seed, 1).cuda()
        answers = []
        for changed in (model, twin):
            cache = long_prompt(changed, tile=TILE)
            answers.append(generated(changed, ids, N_TOKENS, past_key_values=cache))
        ours, theirs = answers
        assert torch.equal(ours.sequences, theirs.sequences)
        for logits, exact in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(logits, exact)
    print(kind, dtype, n_replays())
    if kind in ("llama", "qwen3"):
        # Three tokens of the first answer, and one of the second, run the layers' code.
        assert n_replays() == 2 * (2 * (N_TOKENS - 1) - 4)


def test_sampling_and_a_padded_batch_go_on_behind_a_recording(n_replays: Any) -> None:
    """Random numbers of the device are drawn between graphs."""
    model = new_model("llama", {}).cuda()
    ids = prompt(batch=2).cuda()
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        cache = long_prompt(model, tile=TILE)
        result = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=N_TOKENS,
            do_sample=True,
        )
        texts.append(result)
    assert torch.equal(*texts)
    assert n_replays() > 0


def test_other_batches_are_recorded_too(n_replays: Any, recwarn: Any) -> None:
    """All graphs of one batch are gone before those of the next one are recorded."""
    model = new_model("llama", {}).cuda()
    for batch in (1, 2, 1, 3):
        n_before = n_replays()
        cache = long_prompt(model, tile=TILE)
        ids = prompt(batch=batch).cuda()
        generated(model, ids, N_TOKENS, past_key_values=cache)
        assert n_replays() == n_before + 2 * (N_TOKENS - 1 - 3)
    messages = [str(warning.message) for warning in recwarn]
    assert not any("by its own code" in message for message in messages)


def test_a_layer_that_cannot_be_recorded_leaves_random_numbers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recording that the device refuses ends, and the answer goes on."""
    model = new_model("llama", {}).cuda()
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward

    def waiting(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        result: torch.Tensor = forward(self, hidden)
        return result

    monkeypatch.setattr(kind, "forward", waiting)
    ids = prompt().cuda()
    cache = long_prompt(model, tile=TILE)
    with pytest.warns(UserWarning, match="by its own code"):
        model.generate(
            ids, past_key_values=cache, max_new_tokens=N_TOKENS, do_sample=True
        )
    torch.randn(5, device="cuda")


def test_weights_in_host_memory_of_an_odd_number_of_layers(n_replays: Any) -> None:
    """Graphs of each layer for both places that its weights are copied to."""
    model = new_model("llama", {"num_hidden_layers": 3}).cuda()
    twin = copy.deepcopy(model)
    expected = generated(twin, prompt().cuda(), N_TOKENS).sequences
    for _ in range(2):
        cache = long_prompt(model, tile=TILE, weights="host")
        result = generated(model, prompt().cuda(), N_TOKENS, past_key_values=cache)
        assert torch.equal(result.sequences, expected)
    assert n_replays() > 3 * N_TOKENS
