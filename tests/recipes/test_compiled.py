"""Changed models under torch's compiler: their results stay, soon."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.models import VOCABULARY, tiny

from quorum_attention.recipes import long_context, long_prompt, undo_long_prompt

TILE = 20
N_GENERATED = 4
# Tracing a layer in tiles and segments, graph by graph, took minutes.
pytestmark = pytest.mark.timeout(180)


def compile_model(model: Any) -> None:
    model.compile(backend="eager")


def compile_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compile_decoder(model: Any) -> None:
    model.model.compile(backend="eager")


def compile_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


WAYS: tuple[Callable[[Any], None], ...] = (
    compile_model,
    compile_forward,
    compile_decoder,
    compile_layers,
)


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def new_model() -> Any:
    model = tiny("llama")
    for config in (model.config, model.generation_config):
        config.use_cache = True
    return model


def prompt() -> torch.Tensor:
    return torch.arange(1, 68)[None] * 7 % (VOCABULARY - 1) + 1


def generated(model: Any, **named: Any) -> Any:
    return model.generate(
        prompt(),
        attention_mask=torch.ones_like(prompt()),
        max_new_tokens=N_GENERATED,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **named,
    )


def assert_same(result: Any, expected: Any) -> None:
    assert torch.equal(result.sequences, expected.sequences)
    for logits, exact in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("compile_part", WAYS)
def test_prompts_of_a_model_that_is_compiled_afterwards(
    compile_part: Callable[[Any], None], recwarn: pytest.WarningsRecorder
) -> None:
    """They run outside of graphs, layer by layer, and tokens behind them too; compiled
    layers failed on keys in segments. Undone, the model has its own forward."""
    model = new_model()
    expected = generated(copy.deepcopy(model))
    layers_done = []
    cache = long_prompt(
        model, tile=TILE, progress=lambda done, *_: layers_done.append(done)
    )
    compile_part(model)
    assert_same(generated(model, past_key_values=cache), expected)
    assert layers_done == [1, 2]
    assert not [w for w in recwarn if "long_prompt" in str(w.message)]
    undo_long_prompt(model)
    assert "forward" not in vars(model)
    torch._dynamo.reset()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = model(prompt()).logits
    torch.testing.assert_close(logits[:, -1], expected.logits[0])


def test_a_model_whose_layers_are_compiled_is_changed() -> None:
    """Trials run uncompiled: they compiled each layer again for each tile."""
    model = new_model()
    expected = generated(copy.deepcopy(model))
    compile_layers(model)
    cache = long_prompt(model, tile=TILE)
    assert_same(generated(model, past_key_values=cache), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_a_graph_of_a_prompt_is_refused_by_name() -> None:
    model = new_model()
    cache = long_prompt(model, tile=TILE)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="outside the graph"):
        compiled(prompt(), past_key_values=cache)
    assert cache.get_seq_length() == 0


def change_for_context(model: Any) -> None:
    long_context(model, budget="64MiB")


def change_for_prompts(model: Any) -> None:
    long_prompt(model, tile=TILE)


@pytest.mark.slow
@pytest.mark.parametrize("change", [change_for_context, change_for_prompts])
def test_generate_compiles_for_a_cache_of_fixed_size(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``cache_implementation="static"`` does on a GPU."""
    # Transformers sets it, and leaves it set.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "0")
    model = new_model()
    expected = generated(copy.deepcopy(model))
    change(model)
    model.eval()
    options = transformers.CompileConfig(backend="eager", fullgraph=False)
    options._compile_all_devices = True
    result = generated(model, cache_implementation="static", compile_config=options)
    assert_same(result, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_evaluation_of_a_compiled_model() -> None:
    """Losses and logits of ``long_context``, of texts of many lengths: there are few
    graphs of them."""
    model = new_model()
    plain = copy.deepcopy(model)
    long_context(model, budget="64MiB")
    compiled = torch.compile(model.eval(), backend="eager")
    n_graphs = []
    for n_tokens in (30, 41, 50, 53, 60):
        ids = prompt()[:, :n_tokens]
        with torch.no_grad():
            result = compiled(input_ids=ids, labels=ids)
            expected = plain(input_ids=ids, labels=ids)
        torch.testing.assert_close(result.loss, expected.loss)
        torch.testing.assert_close(result.logits[:], expected.logits)
        n_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert n_graphs[1:] == [n_graphs[1]] * 4
