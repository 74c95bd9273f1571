"""Masks of Transformers become descriptions that keep the same pairs, and hold nothing
of N x N; inside a compiled graph there are no breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from helpers.masks import dense
from helpers.models import VOCABULARY, attended, distance, register_all, tiny
from torch._dynamo.utils import counters
from transformers import masking_utils as masking

from quorum_attention.integrations.transformers import masks, register
from quorum_attention.integrations.transformers.mask_symbols import (
    MaskSizes,
    trace_mask,
)
from quorum_attention.integrations.transformers.masks import (
    DescribedMask,
    DescriptionError,
    quorum_mask,
)
from quorum_attention.mask import Mask


def described(**asked: Any) -> tuple[torch.Tensor, torch.Tensor, Mask]:
    """What Transformers keeps, what the description keeps, and the description."""
    ours = quorum_mask(**asked)
    assert isinstance(ours, DescribedMask)
    theirs = masking.sdpa_mask(
        **{**asked, "allow_is_causal_skip": False}, use_vmap=True
    )
    batch, _, queries, keys = theirs.shape
    assert ours.shape == theirs.shape
    kept = dense(ours.mask, batch, 1, queries, keys)[:, 0]
    assert not theirs[..., ours.seen :].any()
    return theirs[:, 0], kept, ours.mask


# Older versions of Transformers count from the start of the row within documents too.
COUNTS_WITHIN_DOCUMENTS = hasattr(masking, "packed_sequence_compatibility_function")


def in_documents(function: Any, positions: torch.Tensor, ids: torch.Tensor) -> Any:
    """``function`` within packed documents, as this version of Transformers has it."""
    if COUNTS_WITHIN_DOCUMENTS:
        return masking.packed_sequence_compatibility_function(function, positions, ids)
    return masking.and_masks(function, masking.packed_sequence_mask_function(ids))


def packed(batch: int, tokens: int) -> torch.Tensor:
    """Position ids of documents of random lengths."""
    rows = []
    for _ in range(batch):
        starts = torch.rand(tokens) < 0.1
        starts[0] = True
        index = torch.arange(tokens)
        rows.append(index - torch.where(starts, index, 0).cummax(0).values)
    return torch.stack(rows)


def random_function(batch: int, tokens: int, positions: int) -> Any:
    """Any composition that Transformers makes, with every size it might have."""
    kind = int(torch.randint(6, ()))
    size = int(torch.randint(1, tokens + 2, ()))
    left = torch.randint(0, 3, (batch,)) * int(torch.randint(2, ()))
    function = (
        masking.causal_mask_function,
        masking.sliding_window_causal_mask_function(size),
        masking.sliding_window_bidirectional_mask_function(size),
        masking.chunked_causal_mask_function(size, left),
        masking.bidirectional_mask_function,
        masking.and_masks(
            masking.causal_mask_function, lambda b, h, q, k: (q * 7 + k * 3 + b) % 5 > 0
        ),
    )[kind]
    extra = int(torch.randint(5, ()))
    if extra == 1 and hasattr(masking, "blockwise_overlay"):
        blocks = torch.randint(-1, 3, (batch, positions))
        function = masking.or_masks(function, masking.blockwise_overlay(blocks))
    elif extra == 2:
        function = masking.or_masks(function, lambda b, h, q, k: (q + k) % 3 == 0)
    elif extra == 3:
        function = masking.and_masks(function, masking.sliding_window_overlay(size))
    return function


@pytest.mark.slow
def test_any_composition_keeps_the_same_pairs() -> None:
    seed = torch.seed()
    for _ in range(60):
        batch, queries, before = (
            int(torch.randint(*r, ())) for r in ((1, 4), (2, 30), (0, 12))
        )
        dropped = int(torch.randint(0, before + 1, ()))
        keys = before - dropped + queries + int(torch.randint(0, 4, ()))
        function = random_function(batch, queries, dropped + keys)
        padding = (
            torch.rand(batch, before + queries) < 0.8 if torch.rand(()) < 0.5 else None
        )
        theirs, ours, mask = described(
            batch_size=batch, q_length=queries, kv_length=keys, q_offset=before,
            kv_offset=dropped, mask_function=function, attention_mask=padding,
        )  # fmt: skip
        assert torch.equal(theirs, ours), (seed, mask)


def random_span(length: int) -> slice:
    start, stop = sorted(int(torch.randint(0, length + 1, ())) for _ in range(2))
    if torch.rand(()) < 0.3:
        return slice(None, stop or None)
    return slice(start - length or None, stop if stop < length else None)


def test_a_slice_of_a_description_is_a_description() -> None:
    """Of entries, queries and keys, as of the tensor (Gemma 4 E2B computes its last
    layers for some of the queries)."""
    seed = torch.seed()
    for _ in range(60):
        batch, queries, before = (
            int(torch.randint(*r, ())) for r in ((1, 4), (2, 30), (0, 12))
        )
        function = random_function(batch, queries, before + queries)
        padding = (
            torch.rand(batch, before + queries) < 0.8 if torch.rand(()) < 0.5 else None
        )
        asked: dict[str, Any] = {
            "batch_size": batch, "q_length": queries, "kv_length": before + queries,
            "q_offset": before, "mask_function": function, "attention_mask": padding,
        }  # fmt: skip
        theirs, _, _ = described(**asked)
        ours, rows, keys = (
            quorum_mask(**asked),
            random_span(queries),
            random_span(before + queries),
        )
        first = slice(int(torch.randint(0, batch, ())), None)
        for index in (
            (slice(None), slice(None), rows),
            (first, slice(None), rows, keys),
        ):
            wanted, part = theirs[:, None][index][:, 0], ours[index]
            assert part.shape == (wanted.shape[0], 1, *wanted.shape[1:])
            if not wanted.numel():
                continue
            kept = dense(part.mask, wanted.shape[0], 1, *wanted.shape[1:])[:, 0]
            assert torch.equal(kept, wanted), (seed, ours.mask, index)
            assert not wanted[..., part.seen :].any()
    assert ours[:, :, slice(0, None), ...] is ours
    for index in (0, (slice(None), 0), (slice(None),) * 5, (..., slice(None, None, 2))):
        with pytest.raises(DescriptionError, match="computes with its attention mask"):
            ours[index]


@pytest.mark.slow
def test_packed_documents_keep_the_same_pairs() -> None:
    for number in range(24):
        batch, tokens = 1 + number % 3, 20 + number
        positions = packed(batch, tokens)
        ids = masking.find_packed_sequence_indices(positions)
        if ids is None:
            continue
        inner = (
            masking.causal_mask_function,
            masking.sliding_window_causal_mask_function(4),
            masking.chunked_causal_mask_function(3, torch.zeros(batch, dtype=int)),
        )[number % 3]
        function = in_documents(inner, positions, ids)
        theirs, ours, mask = described(
            batch_size=batch, q_length=tokens, kv_length=tokens, mask_function=function
        )
        assert torch.equal(theirs, ours)
        assert mask.keeps is None, (
            "the kinds that Transformers has itself are described"
        )
        assert mask.documents is not None


def test_counts_that_do_not_go_up_one_by_one_are_not_taken_for_documents() -> None:
    """Ids and positions that contradict each other: the description would keep other
    pairs."""
    positions = torch.tensor([[0, 1, 2, 7, 8, 0, 1, 1]])
    ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    function = in_documents(
        masking.sliding_window_causal_mask_function(3), positions, ids
    )
    theirs, ours, mask = described(
        batch_size=1, q_length=8, kv_length=8, mask_function=function
    )
    assert torch.equal(theirs, ours)
    assert (mask.keeps is not None) == COUNTS_WITHIN_DOCUMENTS


_BLOCKS = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 1, 0, 0, 2, 2]])
_ROWS = torch.tensor([1, 0])


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: _BLOCKS[b, q // 2] == _BLOCKS[b, k // 2],
        lambda b, h, q, k: _BLOCKS[_ROWS[b], q] == _BLOCKS[_ROWS[b], k],
        lambda b, h, q, k: (q - _ROWS[_ROWS[b]]) // 2 == (k - _ROWS[_ROWS[b]]) // 2,
        lambda b, h, q, k: (q - b) // 2 == (k - b) // 2,
        lambda b, h, q, k: _BLOCKS.float()[b, q] == _BLOCKS.float()[b, k],
    ],
)
def test_numbers_looked_up_at_other_places_keep_the_same_pairs(function: Any) -> None:
    theirs, kept, _ = described(
        batch_size=2, q_length=8, kv_length=8, mask_function=function, device="cpu"
    )
    assert torch.equal(kept, theirs)


def test_simple_masks_stay_simple() -> None:
    """Nothing is described that masks nothing: a plain call stays a plain call."""
    padding = torch.ones(2, 64, dtype=torch.bool)
    for function, expected in (
        (masking.causal_mask_function, Mask(causal=True)),
        (masking.bidirectional_mask_function, Mask()),
        (
            masking.sliding_window_causal_mask_function(9),
            Mask(causal=True, window=(8, -1)),
        ),
        (masking.sliding_window_causal_mask_function(500), Mask(causal=True)),
        (masking.sliding_window_bidirectional_mask_function(9), Mask(window=(9, 9))),
    ):
        ours = quorum_mask(2, 64, 64, mask_function=function, attention_mask=padding)
        assert isinstance(ours, DescribedMask)
        assert repr(ours.mask) == repr(expected)


def held(mask: Mask) -> int:
    """Bytes of all tensors in a description."""
    tensors = [
        mask.documents,
        mask.key_padding,
        mask.key_lengths,
        mask.bias,
        mask.sinks,
    ]
    flat = [
        t for each in tensors for t in (each if isinstance(each, tuple) else (each,))
    ]
    below = sum(held(one) for one in (*mask.either, *mask.every))
    return below + sum(t.numel() * t.element_size() for t in flat if t is not None)


def test_masks_of_a_quarter_million_tokens_hold_nothing_of_n_by_n() -> None:
    """Gemma 3's masks, sliding and full: as "sdpa" builds the first, it takes 64
    GiB."""
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=1024)
    tokens = 262_144
    embeds = torch.empty(1, tokens, 0)
    config._attn_implementation = "quorum"
    register()
    asked = {"config": config, "inputs_embeds": embeds, "past_key_values": None}
    for make in (masking.create_causal_mask, masking.create_sliding_window_causal_mask):
        for positions in (None, torch.arange(tokens)[None]):
            mask = make(**asked, attention_mask=None, position_ids=positions)
            assert held(mask.mask) == 0
        ids = (torch.arange(tokens) % 1000)[None]
        mask = make(**asked, attention_mask=None, position_ids=ids)
        assert held(mask.mask) <= 2 * 8 * tokens
        padding = torch.ones(1, tokens, dtype=torch.bool)
        padding[:, :9] = False
        assert held(make(**asked, attention_mask=padding).mask) <= tokens


def test_a_model_that_computes_with_its_mask_is_told_so() -> None:
    mask = quorum_mask(1, 8, 8, mask_function=masking.causal_mask_function)
    assert mask is not None
    for use in (
        lambda: mask[:, 0], lambda: mask + 1.0, lambda: mask.masked_fill(mask, 0.0),
        lambda: mask.dtype, lambda: 1.0 + mask, lambda: mask == 0, lambda: ~mask,
        lambda: torch.cat([mask, mask], -1), lambda: torch.ones(8) + mask, lambda: mask != 1,
    ):  # fmt: skip
        with pytest.raises(DescriptionError, match="computes with its attention mask"):
            use()
    assert mask.to("cpu").contiguous() is mask
    assert mask == mask
    assert mask != None  # noqa: E711
    assert hash(mask) == hash(mask)


def test_a_mask_of_three_dimensions_is_refused_by_name() -> None:
    """Indexed as one of two it would mean something else."""
    mask = torch.ones(2, 2, 2, dtype=torch.bool)
    for queries in (1, 2):
        with pytest.raises(
            ValueError, match=r"attention_mask must be .* got shape \(2, 2, 2\)"
        ):
            quorum_mask(2, queries, 2, attention_mask=mask)


def test_padding_in_a_captured_graph_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host reads it: a replay would mask by the values of the capture."""
    monkeypatch.setattr(masks, "capturing", lambda device: True)
    asked = {
        "batch_size": 1,
        "q_length": 8,
        "kv_length": 8,
        "device": torch.device("cpu"),
    }
    padded = torch.ones(1, 8, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"^attention_mask cannot be given"):
        quorum_mask(
            **asked, mask_function=masking.causal_mask_function, attention_mask=padded
        )
    described(**asked, mask_function=masking.causal_mask_function, attention_mask=None)


def test_one_query_has_a_mask_as_large_as_its_keys() -> None:
    padding = torch.ones(2, 40, dtype=torch.bool)
    padding[0, :3] = False
    mask = quorum_mask(2, 1, 40, 39, 0, masking.causal_mask_function, padding)
    assert isinstance(mask, torch.Tensor)
    assert mask.shape == (2, 1, 1, 40)
    assert torch.equal(mask[:, 0, 0], padding)


ids = torch.arange(40)[None] // 9
FUNCTIONS = {
    "causal": masking.causal_mask_function,
    "everything": masking.bidirectional_mask_function,
    "window": masking.sliding_window_causal_mask_function(7),
    "window of one": masking.sliding_window_causal_mask_function(1),
    "both sides": masking.sliding_window_bidirectional_mask_function(5),
    "two windows": masking.and_masks(
        masking.sliding_window_overlay(9), masking.sliding_window_overlay(4)
    ),
    "turned round": lambda b, h, q, k: q >= k,
    "strictly": lambda b, h, q, k: (q - 3 < k) & (k - 2 < q),
    "chunks": lambda b, h, q, k: q // 8 == k // 8,
    "packed": masking.packed_sequence_mask_function(ids),
    "rows": lambda b, h, q, k: (k <= q) & (ids > 1)[b, q],
}
if hasattr(masking, "blockwise_overlay"):  # not in Transformers 5.6
    FUNCTIONS["blocks"] = masking.or_masks(
        masking.causal_mask_function, masking.blockwise_overlay(ids - 1)
    )
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
@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(40, 40, 0), (12, 40, 28), (5, 40, 3)]
)
def test_symbols_say_what_a_function_keeps(
    name: str, queries: int, keys: int, offset: int
) -> None:
    function = FUNCTIONS[name]
    padding = torch.rand(1, keys) < 0.7
    sizes = MaskSizes(1, queries, keys, offset, 0, torch.device("cpu"))
    found = trace_mask(function, sizes, padding)
    assert found.keeps is None
    at = torch.arange(queries)[:, None] + offset
    zero = torch.zeros((), dtype=torch.int64)
    kept = function(zero, zero, at, torch.arange(keys)[None])
    kept = kept.expand(queries, keys) & padding[:, None, None]
    assert torch.equal(dense(found, 1, 1, queries, keys), kept)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_symbols_do_not_say_stays_a_function(name: str) -> None:
    sizes = MaskSizes(1, 40, 40, 0, 0, torch.device("cpu"))
    joined = masking.and_masks(masking.causal_mask_function, UNKNOWN[name])
    assert all(
        trace_mask(function, sizes).keeps is not None
        for function in (UNKNOWN[name], joined)
    )


@pytest.mark.slow
def test_a_compiled_model_that_is_given_its_padding_is_one_graph() -> None:
    register_all()
    model = tiny("gemma3_text")
    exact, ours = attended(model, "exact"), attended(model, "quorum")
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(ours, backend="eager")
    for length in (60, 50, 40):
        words = torch.randint(1, VOCABULARY, (2, length))
        mask = torch.ones_like(words)
        mask[0, :7] = 0
        live = mask.bool()
        wanted = exact(words, attention_mask=mask).logits[live]
        found = compiled(words, attention_mask=mask).logits[live]
        assert distance(found, wanted.double()) < 5e-6
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 2  # of the first length, and of any


@pytest.mark.slow
def test_a_function_that_is_unknown_in_a_graph_is_right_all_the_same() -> None:
    """It breaks the graph."""
    config: Any = transformers.Qwen3Config(num_hidden_layers=1)
    config._attn_implementation = register()

    def shape(hidden: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        def same(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return words[b, q] == words[b, k]

        mask = masking.create_causal_mask(
            config,
            hidden,
            torch.ones_like(words),
            past_key_values=None,
            and_mask_function=same,
        )
        return dense(mask.mask, 1, 1, 20, 20) & True

    words = torch.randint(3, (1, 20))
    torch.compiler.reset()
    found = torch.compile(shape, backend="eager")(torch.zeros(1, 20, 8), words)
    assert torch.equal(
        found,
        ((words[:, :, None] == words[:, None]) & torch.ones(20, 20).tril().bool())[
            :, None
        ],
    )
