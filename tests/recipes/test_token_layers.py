"""Tokens computed by graphs of a device are those that the layers' code computes."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

import transformers
from helpers.fake_graphs import FakeGraphs
from helpers.prompt_models import (
    LAYERED,
    TILE,
    assert_same,
    generated,
    new_model,
    prompt,
)

from quorum_attention.recipes import long_prompt
from quorum_attention.recipes.changes import changes_by
from quorum_attention.recipes.layer_calls import decoder_layers
from quorum_attention.recipes.prompt_changes import OWNER, prompt_forward_in
from quorum_attention.recipes.token_layers import TokenLayers

N_TOKENS = 9
# Tokens before graphs compute them; and graphs of a layer.
N_BEFORE, N_GRAPHS = 3, 2
N_LAYERS = 2


def model_with_graphs(
    kind: str = "llama", weights: str = "device", **sizes: Any
) -> tuple[Any, Any, FakeGraphs]:
    """A changed model, the same one unchanged, and the graphs of its layers."""
    model = new_model(kind, {**LAYERED.get(kind, {}), **sizes})
    plain = copy.deepcopy(model)
    return model, plain, graphs_of(model, weights)


def graphs_of(model: Any, weights: str = "device") -> FakeGraphs:
    """Change a model, and let graphs of a CPU compute its tokens."""
    long_prompt(model, tile=TILE, weights=weights)
    graphs = FakeGraphs()
    forward = prompt_forward_in(changes_by(model, OWNER))
    layers = TokenLayers(decoder_layers(model), graphs, forward.weights)
    forward.runner.token_layers = layers
    return graphs


def answer(
    model: Any, n_tokens: int = N_TOKENS, weights: str = "device", **named: Any
) -> Any:
    cache = long_prompt(model, tile=TILE, weights=weights)
    ids = named.pop("ids", prompt())
    return generated(model, ids, n_tokens, past_key_values=cache, **named)


def n_replays(n_tokens: int) -> int:
    """Replays for so many tokens behind a prompt, of which one is compared."""
    return N_LAYERS * N_GRAPHS * (n_tokens - N_BEFORE + 1)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", LAYERED)
def test_tokens_are_the_plain_models(kind: str) -> None:
    model, plain, _ = model_with_graphs(kind)
    assert_same(answer(model), generated(plain, prompt(), N_TOKENS))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_graphs_compute_all_layers_from_the_fourth_token_on(kind: str) -> None:
    model, plain, graphs = model_with_graphs(kind)
    assert_same(answer(model), generated(plain, prompt(), N_TOKENS))
    n_behind = N_TOKENS - 1  # the first token is the prompt's
    assert graphs.n_replays == n_replays(n_behind)
    # The next answer is computed by the same graphs: they are compared once more.
    answer(model)
    assert graphs.n_replays == n_replays(n_behind) + N_LAYERS * N_GRAPHS * n_behind


def test_weights_in_host_memory() -> None:
    """Graphs read each layer's weights where they are copied to."""
    model, plain, graphs = model_with_graphs(weights="host")
    result = answer(model, weights="host")
    assert_same(result, generated(plain, prompt(), N_TOKENS))
    assert graphs.n_replays == n_replays(N_TOKENS - 1)


def test_weights_in_host_memory_of_an_odd_number_of_layers() -> None:
    """Each layer's lie in the other place of the device for every second token: its
    graphs were thrown away each time, so none was ever used."""
    model, plain, graphs = model_with_graphs(weights="host", num_hidden_layers=3)
    expected = generated(plain, prompt(), N_TOKENS)
    assert_same(answer(model, weights="host"), expected)
    n_behind = N_TOKENS - 1
    n_first = (n_behind + 1) // 2
    n_second = n_behind // 2
    n_per_layer = N_GRAPHS * (n_first + n_second - 2 * (N_BEFORE - 1))
    assert graphs.n_replays == 3 * n_per_layer
    # The next answer uses the same graphs.
    assert_same(answer(model, weights="host"), expected)
    assert graphs.n_replays == 3 * (n_per_layer + N_GRAPHS * n_behind)


def assert_padded_batch_is_replayed(model: Any, plain: Any, graphs: Any) -> None:
    ids = prompt(batch=2)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    result = answer(model, ids=ids, attention_mask=mask)
    assert_same(result, generated(plain, ids, N_TOKENS, attention_mask=mask))
    assert graphs.n_replays > 0


def test_a_padded_batch_and_beams() -> None:
    model, plain, graphs = model_with_graphs()
    assert_padded_batch_is_replayed(model, plain, graphs)
    tokens = answer(model, num_beams=3).sequences
    assert torch.equal(
        tokens, generated(plain, prompt(), N_TOKENS, num_beams=3).sequences
    )


def next_logits(model: Any, cache: Any, token: Any = 5) -> torch.Tensor:
    """Logits behind one more token, or one of each text (b, 1)."""
    ids = torch.as_tensor(token).view(-1, 1)
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits


def cached_prompt(model: Any) -> Any:
    cache = long_prompt(model, tile=TILE)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
    return cache


def with_other_data(layer: Any) -> None:
    layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data * -1.5


def with_another_module(layer: Any) -> None:
    layer.mlp.down_proj = copy.deepcopy(layer.mlp.down_proj)
    with_other_data(layer)


def with_a_hook(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda _module, _args, result: result * 2)


def with_another_forward(layer: Any) -> None:
    forward = layer.mlp.forward
    layer.mlp.forward = lambda hidden: forward(hidden) * 2


def written_in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(-1.5)


@pytest.mark.parametrize(
    "change",
    [
        with_other_data,
        with_another_module,
        with_a_hook,
        with_another_forward,
        written_in_place,
    ],
)
def test_a_layer_that_was_changed_between_tokens_runs_as_it_is_now(change: Any) -> None:
    model, plain, graphs = model_with_graphs()
    caches = [cached_prompt(model), cached_prompt(plain)]
    for _ in range(N_BEFORE + 2):
        next_logits(model, caches[0])
        next_logits(plain, caches[1])
    assert graphs.n_replays > 0
    before = next_logits(model, caches[0].fork())
    for changed in (model, plain):
        change(decoder_layers(changed)[0])
    for _ in range(N_BEFORE + 2):
        logits = next_logits(model, caches[0])
        torch.testing.assert_close(logits, next_logits(plain, caches[1]))
    assert (logits - before).abs().max() > 1e-3


def test_a_layer_that_counts_its_tokens_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It adds a number that no tensor holds: recorded, it would stay the same."""
    model, _, graphs = model_with_graphs()
    kind = type(decoder_layers(model)[0].mlp)
    forward = kind.forward
    n_calls = 0

    def counting(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal n_calls
        n_calls += 1
        result: torch.Tensor = forward(self, hidden) + 0.1 * n_calls
        return result

    cache = cached_prompt(model)
    monkeypatch.setattr(kind, "forward", counting)
    for _ in range(N_BEFORE):
        next_logits(model, cache)
    n_compared = graphs.n_replays
    assert n_compared > 0
    next_logits(model, cache)
    assert graphs.n_replays == n_compared


def test_a_layer_that_asks_for_the_number_of_tokens_is_not_recorded() -> None:
    """Llama 4 scales queries by a step function of the cache's length. The graphs would
    agree with the layer until the next step, and scale by the last one behind it."""
    model, plain, graphs = model_with_graphs("llama4_text", floor_scale=36)
    assert_same(answer(model), generated(plain, prompt(), N_TOKENS))
    n_recorded = 1  # of two layers: the other one turns queries by positions
    assert graphs.n_replays == n_replays(N_TOKENS - 1) * n_recorded / N_LAYERS


def test_a_layer_that_has_a_state_in_its_cache_is_not_recorded() -> None:
    """Falcon-H1 advances a recurrence beside its attention. Comparing graphs would
    advance it twice."""
    sizes = {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }
    model, plain, graphs = model_with_graphs("falcon_h1", **sizes)
    assert_same(answer(model), generated(plain, prompt(), N_TOKENS))
    assert graphs.n_replays == 0


def test_a_mask_that_attention_gets_by_name() -> None:
    """AFMoE hands its attention the mask as a keyword."""
    assert_padded_batch_is_replayed(*model_with_graphs("afmoe"))


def test_a_tensor_beside_a_layers_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer may read a tensor that is no weight of it, and another one later."""
    model, plain, _ = model_with_graphs()
    kind = type(decoder_layers(plain)[0].mlp)
    forward = kind.forward
    factors = [torch.ones(1)]

    def scaled(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(self, hidden) * factors[-1]
        return result

    caches = [cached_prompt(model), cached_prompt(plain)]
    monkeypatch.setattr(kind, "forward", scaled)
    for token in range(N_BEFORE + 4):
        if token == N_BEFORE + 2:
            factors.append(torch.tensor([3.0]))
        logits = next_logits(model, caches[0])
        torch.testing.assert_close(logits, next_logits(plain, caches[1]))


def with_another_epsilon(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 1.0


def with_another_scale(layer: Any) -> None:
    layer.self_attn.scaling *= 3


@pytest.mark.parametrize("change", [with_another_epsilon, with_another_scale])
def test_a_number_of_a_layer_that_changed_between_answers(change: Any) -> None:
    """It is no tensor, and stays as it was: in the graphs, or in what attends between
    them."""
    model, plain, graphs = model_with_graphs()
    answer(model)
    n_before = graphs.n_replays
    for changed in (model, plain):
        change(decoder_layers(changed)[1])
    assert_same(answer(model), generated(plain, prompt(), N_TOKENS))
    assert graphs.n_replays > n_before


def scripted(mlp: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(mlp, torch.ones(1, 1, 32), check_trace=False)


@pytest.mark.parametrize(
    "compiled", [lambda mlp: torch.compile(mlp, backend="eager"), scripted]
)
def test_a_compiled_module_in_a_layer(compiled: Any) -> None:
    """It lacks attributes that other modules have."""
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    layer = decoder_layers(model)[0]
    layer.mlp = compiled(layer.mlp)
    graphs = graphs_of(model)
    assert_same(answer(model), generated(plain, prompt(), N_TOKENS))
    assert graphs.n_replays > 0  # of the other layer


def test_sparse_weights_have_no_address() -> None:
    model = new_model("llama", {})
    plain = copy.deepcopy(model)
    for changed in (model, plain):
        mlp: Any = decoder_layers(changed)[0].mlp
        projection = mlp.down_proj
        sparse = projection.weight.detach().to_sparse_csr()
        projection.weight = torch.nn.Parameter(sparse, requires_grad=False)
    graphs = graphs_of(model)
    assert_same(answer(model), generated(plain, prompt(), N_TOKENS))
    assert graphs.n_replays > 0  # of the other layer


def test_modes_and_hooks_of_all_modules_see_each_token() -> None:
    """Operators in a graph pass them by."""
    model, _, graphs = model_with_graphs()
    cache = cached_prompt(model)
    for _ in range(N_BEFORE + 1):
        next_logits(model, cache)
    n_before = graphs.n_replays
    assert n_before > 0
    with FlopCounterMode(display=False) as counted:
        next_logits(model, cache)
    mlp: Any = decoder_layers(model)[0].mlp
    assert counted.get_total_flops() > 2 * mlp.up_proj.weight.numel()
    modules: list[Any] = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: modules.append(module)
    )
    try:
        next_logits(model, cache)
    finally:
        hook.remove()
    assert mlp in modules
    assert graphs.n_replays == n_before


def test_hooks_that_a_call_for_hidden_states_leaves() -> None:
    """They do nothing later, and no layer was computed by graphs from then on."""
    model, plain, graphs = model_with_graphs()
    cache = cached_prompt(model)
    with torch.no_grad():
        asked = model(
            torch.tensor([[5]]), past_key_values=cache, output_hidden_states=True
        )
    assert len(asked.hidden_states) == N_LAYERS + 1
    assert decoder_layers(model)[0]._forward_hooks
    assert graphs.n_replays == 0
    assert_same(answer(model), generated(plain, prompt(), N_TOKENS))
    assert graphs.n_replays == n_replays(N_TOKENS - 1)


def test_hooks_that_replace_those_are_seen() -> None:
    """There are as many of them as before."""
    model, _, graphs = model_with_graphs()
    cache = cached_prompt(model)
    mlp: Any = decoder_layers(model)[0].mlp
    with torch.no_grad():
        model(torch.tensor([[5]]), past_key_values=cache, output_hidden_states=True)
    recorder = mlp.register_forward_hook(some_recorder(model))
    for _ in range(N_BEFORE + 1):
        next_logits(model, cache)
    n_before = graphs.n_replays
    assert n_before > 0
    recorder.remove()
    n_calls = []
    mlp.register_forward_hook(lambda *_: n_calls.append(1))
    next_logits(model, cache)
    assert n_calls == [1]
    # The other layer's alone.
    assert graphs.n_replays == n_before + N_GRAPHS


def some_recorder(model: Any) -> Any:
    """A hook of Transformers that records outputs."""
    return next(iter(decoder_layers(model)[0]._forward_hooks.values()))


def test_outputs_of_modules_are_recorded_though_there_are_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model may name any of its modules, and graphs call none of them."""
    llama = transformers.models.llama.modeling_llama
    names = {**llama.LlamaPreTrainedModel._can_record_outputs, "mlps": llama.LlamaMLP}
    monkeypatch.setattr(llama.LlamaPreTrainedModel, "_can_record_outputs", names)
    model, _, graphs = model_with_graphs()
    cache = cached_prompt(model)
    outputs: list[Any] = []
    model.model.register_forward_hook(lambda *args: outputs.append(args[-1]))
    for _ in range(N_BEFORE + 1):
        next_logits(model, cache)
    assert graphs.n_replays > 0
    for is_asked in (True, False, True, False):
        model.config.output_mlps = is_asked
        for _ in range(N_BEFORE + 1):
            n_before = graphs.n_replays
            next_logits(model, cache)
            if is_asked:
                assert len(outputs[-1].mlps) == N_LAYERS
                assert graphs.n_replays == n_before
        if not is_asked:
            assert graphs.n_replays > n_before


class _Interrupt:
    """Raises a ``KeyboardInterrupt`` at a line of what runs a layer.

    Args:
        n_lines: before that line, as they run.
    """

    def __init__(self, n_lines: int) -> None:
        self._file = TokenLayers.run.__code__.co_filename
        self.n_lines = n_lines

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename != self._file or code.co_name != "run":
            return None
        if event == "line":
            self.n_lines -= 1
            if self.n_lines == 0:
                raise KeyboardInterrupt
        return self.trace


def test_an_interrupt_at_any_line_leaves_the_next_token_right() -> None:
    """One text and two take turns: each token has other arguments than the one
    before."""
    model, plain, graphs = model_with_graphs()
    caches = [cached_prompt(model), cached_prompt(plain)]
    pairs = [cached_prompt(model), cached_prompt(plain)]
    for cache in pairs:
        cache.batch_repeat_interleave(2)
    tokens = torch.tensor([[5], [7]])
    n_interrupts = 0
    while True:
        for _ in range(N_BEFORE + 1):
            logits = next_logits(model, caches[0])
        for _ in range(N_BEFORE + 1):
            exact = next_logits(plain, caches[1])
        torch.testing.assert_close(logits, exact)
        interrupt = _Interrupt(n_interrupts + 1)
        sys.settrace(interrupt.trace)
        try:
            next_pair = pairs[0].fork()
            next_logits(model, next_pair, tokens)
        except KeyboardInterrupt:
            n_interrupts += 1
        finally:
            sys.settrace(None)
        logits = next_logits(model, pairs[0].fork(), tokens)
        exact = next_logits(plain, copy.deepcopy(pairs[1]), tokens)
        torch.testing.assert_close(logits, exact)
        if interrupt.n_lines > 0:
            break
    n_before = graphs.n_replays
    for _ in range(N_BEFORE + 1):
        next_logits(model, caches[0])
    assert graphs.n_replays > n_before
    assert n_interrupts > 20


def test_what_a_layer_returned_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs write their results into the same memory for each token."""
    model, _, graphs = model_with_graphs()
    cache = cached_prompt(model)
    results: list[torch.Tensor] = []
    run = TokenLayers.run

    def noting(self: Any, number: int, call: Any) -> Any:
        result = run(self, number, call)
        results.append(result)
        return result

    monkeypatch.setattr(TokenLayers, "run", noting)
    for token in range(N_BEFORE + 1):
        next_logits(model, cache, token)
    assert graphs.n_replays == n_replays(N_BEFORE + 1)
    copies = [result.clone() for result in results]
    next_logits(model, cache, 20)
    for result, copied in zip(results, copies, strict=False):
        assert torch.equal(result, copied)


def test_a_full_device_leaves_a_layer_its_code() -> None:
    model, plain, graphs = model_with_graphs()
    graphs.fails = True
    with pytest.warns(UserWarning, match="by its own code: CUDA out of memory"):
        result = answer(model)
    assert_same(result, generated(plain, prompt(), N_TOKENS))
    assert graphs.n_replays == 0


def test_two_threads_do_not_share_graphs_at_once() -> None:
    """Both would compute in the same memory."""
    model, plain, _ = model_with_graphs()
    answer(model)
    prompts = [prompt(), prompt().flip(1)]
    results: list[Any] = [None, None]

    def run(number: int) -> None:
        results[number] = answer(model, 40, ids=prompts[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ids, result in zip(prompts, results, strict=True):
        assert_same(result, generated(plain, ids, 40))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_has_its_own_graphs(copied: Any) -> None:
    model, plain, _ = model_with_graphs()
    answer(model)
    twin = copied(model)
    for changed in (twin, plain):
        with_other_data(decoder_layers(changed)[0])
    assert_same(answer(twin), generated(plain, prompt(), N_TOKENS))
