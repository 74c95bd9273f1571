"""What symbols say of a mask function; inside a compiled graph there are no breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from helpers_masks import dense
from helpers_models import VOCABULARY, attended, distance, register_all, tiny
from torch._dynamo.utils import counters
from transformers import masking_utils as made

from quorum_attention.integrations.transformers.reader import Sizes, mask_of

ids = torch.arange(40)[None] // 9
FUNCTIONS = {
    "causal": made.causal_mask_function,
    "everything": made.bidirectional_mask_function,
    "window": made.sliding_window_causal_mask_function(7),
    "window of one": made.sliding_window_causal_mask_function(1),
    "both sides": made.sliding_window_bidirectional_mask_function(5),
    "two windows": made.and_masks(made.sliding_window_overlay(9), made.sliding_window_overlay(4)),
    "turned round": lambda b, h, q, k: q >= k,
    "strictly": lambda b, h, q, k: (q - 3 < k) & (k - 2 < q),
    "chunks": lambda b, h, q, k: q // 8 == k // 8,
    "packed": made.packed_sequence_mask_function(ids),
    "blocks": made.or_masks(made.causal_mask_function, made.blockwise_overlay(ids - 1)),
    "rows": lambda b, h, q, k: (k <= q) & (ids > 1)[b, q],
}
UNKNOWN = {
    "before the query": lambda b, h, q, k: k < q,
    "itself": lambda b, h, q, k: q == k,
    "shifted": lambda b, h, q, k: (q + 2) // 5 == (k + 2) // 5,
    "by head": lambda b, h, q, k: (k <= q) if h == 0 else (k >= q),
    "by truth": lambda b, h, q, k: (k <= q) and (k > q - 3),
    "sums": lambda b, h, q, k: q + k <= 30,
    "signed": lambda b, h, q, k: q - k <= 3,
    "numbers": lambda b, h, q, k: q >= 3,
    "a constant": lambda b, h, q, k: True,
    "a tensor": lambda b, h, q, k: torch.ones(()),
    "of tensors": lambda b, h, q, k: torch.as_tensor(k) <= torch.as_tensor(q),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("queries", "keys", "offset"), [(40, 40, 0), (12, 40, 28), (5, 40, 3)])
def test_symbols_say_what_a_function_keeps(name: str, queries: int, keys: int, offset: int) -> None:
    function = FUNCTIONS[name]
    padding = torch.rand(1, keys) < 0.7
    sizes = Sizes(1, queries, keys, offset, 0, torch.device("cpu"))
    found = mask_of(function, sizes, padding)
    assert found.keeps is None
    at = torch.arange(queries)[:, None] + offset
    zero = torch.zeros((), dtype=torch.int64)
    kept = function(zero, zero, at, torch.arange(keys)[None])
    kept = kept.expand(queries, keys) & padding[:, None, None]
    assert torch.equal(dense(found, 1, 1, queries, keys), kept)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_symbols_do_not_say_stays_a_function(name: str) -> None:
    sizes = Sizes(1, 40, 40, 0, 0, torch.device("cpu"))
    joined = made.and_masks(made.causal_mask_function, UNKNOWN[name])
    assert all(mask_of(function, sizes).keeps is not None for function in (UNKNOWN[name], joined))


def test_a_compiled_model_that_is_given_its_padding_is_one_graph() -> None:
    register_all()
    model = tiny("gemma3_text")
    exact, ours = attended(model, "exact"), attended(model, "quorum")
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(ours, backend="eager")
    for length in (60, 50, 40, 30, 55):
        words = torch.randint(1, VOCABULARY, (2, length))
        mask = torch.ones_like(words)
        mask[0, :7] = 0
        live = mask.bool()
        wanted = exact(words, attention_mask=mask).logits[live]
        found = compiled(words, attention_mask=mask).logits[live]
        assert distance(found, wanted.double()) < 5e-6
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2  # of the first length, and of any


def test_a_function_that_is_unknown_in_a_graph_is_right_all_the_same() -> None:
    """It breaks the graph."""
    from transformers import Qwen3Config

    from quorum_attention.integrations.transformers import register

    config: Any = Qwen3Config(num_hidden_layers=1)
    config._attn_implementation = register()

    def shape(hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        def same(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return words[b, q] == words[b, k]

        mask = made.create_causal_mask(
            config, hidden, torch.ones_like(words), None, and_mask_function=same
        )
        return dense(mask.mask, 1, 1, 20, 20) & True

    words = torch.randint(3, (1, 20))
    torch.compiler.reset()
    found = torch.compile(shape, backend="eager")(torch.zeros(1, 20, 8), words)
    assert torch.equal(
        found, ((words[:, :, None] == words[:, None]) & torch.ones(20, 20).tril().bool())[:, None]
    )
