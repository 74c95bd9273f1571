"""``"lower_right"`` by document and by entry: what FlashAttention's calls of several
lengths, and xFormers' bottom-right blocks, compute."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention import error
from helpers.masks import check, dense
from helpers.plans import shape_of

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.masked.resolve import ResolvedMask

Window = tuple[int, int]
# (queries, keys) of documents: more keys, more queries, none of either, equal.
LENGTHS = [(3, 9), (7, 2), (4, 0), (0, 5), (6, 6), (1, 20), (20, 1)]


def ids_of(counts: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def document_alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: Window,
    causal: bool,
) -> torch.Tensor:
    """FlashAttention's definition for one text, (heads, tokens, head_dim): the lower
    right corners of queries and keys are aligned; a row that sees no key is 0."""
    n_queries, n_keys = query.shape[1], key.shape[1]
    scores = query @ key.mT * 0.3
    for row in range(n_queries):
        place = row + n_keys - n_queries
        for column in range(n_keys):
            hidden = causal and column > place
            hidden |= window[0] >= 0 and column < place - window[0]
            hidden |= window[1] >= 0 and column > place + window[1]
            if hidden:
                scores = scores.index_put(
                    tuple(torch.tensor([n]) for n in (0, row, column)),
                    torch.tensor(-torch.inf, dtype=scores.dtype),
                )
    weights = scores.softmax(-1).nan_to_num()
    return weights @ value


@pytest.mark.parametrize("window", [(-1, -1), (4, 0), (2, 3), (-1, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"kernel": "dense"}, {"depth": 1}, {"depth": 2}]
)
def test_documents_are_the_calls_that_each_would_be(
    window: Window, causal: bool, options: dict[str, Any]
) -> None:
    """Forward and backward of ``flash_attn_varlen_func``, whose lengths of queries and
    of keys may differ."""
    of_query, of_key = ([pair[i] for pair in LENGTHS] for i in (0, 1))
    sizes = (1, 1, sum(of_query)), (1, 1, sum(of_key)), (1, 1, sum(of_key))
    leaves = [
        torch.randn(*size, 8, dtype=torch.float64).requires_grad_() for size in sizes
    ]
    mask = Mask(
        causal="lower_right" if causal else False, offset=None if causal else "lower_right",
        window=window, documents=(ids_of(of_query), ids_of(of_key)),
    )  # fmt: skip
    out = qa.attention(*leaves, attn_mask=mask, scale=0.3, **options)
    split = [
        t[0].split(n, 1)
        for t, n in zip(leaves, (of_query, of_key, of_key), strict=True)
    ]
    texts = [
        document_alone(*three, window, causal) for three in zip(*split, strict=True)
    ]
    wanted = torch.cat(texts, 1)[None]
    upstream = torch.randn_like(out)
    assert error(out, wanted) < 1e-12
    for grad, exact in zip(
        torch.autograd.grad(out, leaves, upstream),
        torch.autograd.grad(wanted, leaves, upstream),
        strict=True,
    ):
        assert error(grad, exact) < 1e-12


@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
@pytest.mark.parametrize("depth", [0, 1])
def test_entries_end_where_their_keys_do(window: Window, depth: int) -> None:
    """``flash_attn_with_kvcache``: the last query of an entry sees its last key, which
    is not the last of the cache."""
    lengths = [30, 4, 0, 17]
    query = torch.randn(4, 2, 6, 8, dtype=torch.float64)
    key, value = (torch.randn(4, 2, 30, 8, dtype=torch.float64) for _ in range(2))
    mask = Mask(causal="lower_right", window=window, key_lengths=torch.tensor(lengths))
    out = qa.attention(query, key, value, attn_mask=mask, scale=0.3, depth=depth)
    for entry, length in enumerate(lengths):
        for head in range(2):
            at = entry, slice(head, head + 1)
            wanted = document_alone(
                query[at], key[at][:, :length], value[at][:, :length], window, True
            )
            assert error(out[at], wanted) < 1e-12


def aligned(draw: random.Random, batch: int, n_queries: int, n_keys: int) -> Mask:
    """A random mask that counts from the last keys, of documents in any order."""

    def ids(n: int) -> torch.Tensor:
        rows = []
        for _ in range(draw.choice([1, batch])):
            row: list[int] = []
            for nth in range(n):
                name = nth if draw.random() < 0.6 else draw.randint(0, 3)
                row += [name] * draw.choice([1, 2, 6, 15])
            rows.append(row[:n])
        return torch.tensor(rows if len(rows) == batch else rows[0])

    causal = draw.random() < 0.7
    mask = Mask(causal="lower_right") if causal else Mask(offset="lower_right")
    if not causal or draw.random() < 0.5:
        mask = replace(
            mask, window=draw.choice([0, 3, (5, 2), (-1, 1), (4, -1), (25, 0)])
        )
    if draw.random() < 0.3:
        mask = replace(mask, chunk=draw.choice([1, 4, 9, 30]))
    if draw.random() < 0.8:
        mask = replace(mask, documents=(ids(n_queries), ids(n_keys)))
    if draw.random() < 0.4:
        lengths = [draw.randint(0, n_keys) for _ in range(batch)]
        mask = replace(mask, key_lengths=torch.tensor(lengths))
    if draw.random() < 0.15:
        mask = replace(mask, key_padding=torch.rand(batch, n_keys) < 0.7)
    if draw.random() < 0.15:
        inner = (
            Mask(causal=True),
            Mask(window=4),
            Mask(documents=(ids(n_queries), ids(n_keys))),
        )
        mask = draw.choice([mask & draw.choice(inner), mask | draw.choice(inner)])
    return mask


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", range(0, 150, 25))
def test_random_masks_against_float64(first: int) -> None:
    for seed in range(first, first + 25):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        batch, n_queries, n_keys = (
            draw.randint(1, 3),
            draw.randint(1, 60),
            draw.randint(1, 60),
        )
        shared, kv_heads = draw.choice([1, 2]), draw.randint(1, 2)
        shapes = [
            (shared * kv_heads, n_queries),
            (kv_heads, n_keys),
            (kv_heads, n_keys),
        ]
        inputs = [
            torch.randn(batch, heads, n, 8, dtype=torch.float64)
            for heads, n in (*shapes, shapes[0])
        ]
        mask = aligned(draw, batch, n_queries, n_keys)
        options = draw.choice([{}, {"kernel": "dense"}, {"depth": 1}, {"depth": 2}])
        dropout = Dropout(0.3, seed) if draw.random() < 0.15 else None
        print("seed", seed)
        check(inputs, mask, 0.25, (1e-12, 1e-11), dropout=dropout, **options)


@pytest.mark.parametrize("first", range(0, 60, 30))
def test_parts_of_a_call_are_aligned_as_the_call_is(first: int) -> None:
    """Devices, ranks and files compute blocks, whose documents may begin and end
    elsewhere."""
    for seed in range(first, first + 30):
        draw = random.Random(seed)
        batch, n_queries, n_keys = (
            draw.randint(1, 3),
            draw.randint(1, 40),
            draw.randint(1, 40),
        )
        mask = aligned(draw, batch, n_queries, n_keys)
        call = WholeCall(
            shape_of((batch,), 2, 1, n_queries, n_keys, draw.random() < 0.3), mask
        )
        kept = dense(mask, batch, 2, n_queries, n_keys)
        if call.shape.is_causal:
            kept &= torch.ones(n_queries, n_keys, dtype=torch.bool).tril()
        edges = [
            sorted(draw.sample(range(n + 1), 2)) for n in (batch, 2, n_queries, n_keys)
        ]
        block = CallBlock(*(Interval(*pair) for pair in edges))
        cut_mask, is_causal = call.mask_of(block)
        found = dense(cut_mask or Mask(), *(span.length for span in block))
        if is_causal:
            found &= torch.ones(
                block.rows.length, block.keys.length, dtype=torch.bool
            ).tril()
        assert torch.equal(found, kept[tuple(slice(*span) for span in block)]), (
            seed,
            mask,
            block,
        )


def test_aligned_documents_are_blocks_with_diagonals_of_their_own() -> None:
    """No pair is tested one by one, and no pair between documents is computed."""
    of_query, of_key = [40, 100, 7] * 20, [90, 130, 200] * 20
    mask = Mask(causal="lower_right", documents=(ids_of(of_query), ids_of(of_key)))
    shape = shape_of((1,), 1, 1, sum(of_query), sum(of_key))
    resolved = ResolvedMask(mask, shape, packs=False)
    (geometry,) = resolved.geometries
    kept = sum(n * m - n * (n - 1) // 2 for n, m in zip(of_query, of_key, strict=True))
    assert not geometry.rules
    assert len(geometry.blocks) == len(of_query)
    assert resolved.kept_pairs == kept


@pytest.mark.parametrize("ids", [torch.arange(50) // 8, torch.arange(50) % 3])
def test_documents_of_equal_lengths_stay_what_they_were(ids: torch.Tensor) -> None:
    """Queries and keys with the same ids stand where their numbers say, in any order.
    (By blocks: ids in any order may be gathered instead.)"""
    shape = shape_of((1,), 1, 1, 50, 50)
    for documents in (ids, (ids, ids.clone())):
        lower, upper = (
            ResolvedMask(
                Mask(causal=causal, window=(9, 0), documents=documents),
                shape,
                packs=False,
            )
            for causal in ("lower_right", True)
        )
        assert lower.geometries[0].band == upper.geometries[0].band
        blocks = lower.geometries[0].blocks
        assert blocks is None or not blocks.has_bands
        assert lower.is_causal


def test_a_mask_that_counts_from_the_last_key_counts_its_own_documents() -> None:
    """``a & b`` keeps what both keep: the documents of the other one do not move the
    diagonal."""
    lower = Mask(causal="lower_right")
    documents = Mask(documents=(ids_of([2, 5]), ids_of([9, 4])))
    lengths = Mask(key_lengths=torch.tensor([5]))
    for other in (documents, lengths):
        wanted = dense(lower, 1, 1, 7, 13) & dense(other, 1, 1, 7, 13)
        for both in (lower & other, other & lower):
            assert torch.equal(dense(both, 1, 1, 7, 13), wanted)


def test_lengths_that_are_written_to_move_the_diagonal() -> None:
    """As a cache's lengths are from step to step."""
    query, key = (torch.randn(2, 1, n, 4) for n in (3, 20))
    lengths = torch.tensor([5, 8])
    mask = Mask(causal="lower_right", key_lengths=lengths)
    for _ in range(2):
        out = qa.attention(query, key, key, attn_mask=mask)
        again = Mask(causal="lower_right", key_lengths=lengths.clone())
        assert torch.equal(out, qa.attention(query, key, key, attn_mask=again))
        lengths += 3
    assert not torch.equal(out, qa.attention(query, key, key, attn_mask=mask))


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        ("upper_left", "Mask.offset must be a whole number, a tensor"),
        (torch.zeros(3), "Mask.offset must be integers"),
        (
            torch.zeros(1, 1, 1, dtype=torch.int64),
            "Mask.offset must have 1 or 2 dimensions",
        ),
        (
            torch.zeros(5, dtype=torch.int64),
            r"Mask.offset must have shape \(6,\), \(2, 6\) or",
        ),
        (torch.tensor([[-(2**63)]]), "Mask.offset must be from"),
    ],
)
def test_offsets_that_make_no_sense_are_refused(offset: Any, words: str) -> None:
    query, key = (torch.randn(2, 1, n, 4) for n in (6, 8))
    with pytest.raises((TypeError, ValueError), match=words):
        qa.attention(query, key, key, attn_mask=Mask(causal=True, offset=offset))


def test_offsets_of_queries_may_be_given() -> None:
    """Tokens that stand anywhere among the keys: parts of a text that a device
    holds."""
    inputs = [torch.randn(2, 1, n, 4, dtype=torch.float64) for n in (6, 30, 30, 6)]
    of_query = torch.tensor([[3, 3, 3, 20, 20, 20], [-2, 0, 0, 0, 9, 30]])
    for offset in (of_query, of_query[0], of_query[:, :1]):
        check(
            inputs, Mask(causal=True, window=(7, 2), offset=offset), 0.5, (1e-12, 1e-11)
        )
        check(inputs, Mask(chunk=5, offset=offset), 0.5, (1e-12, 1e-11), depth=1)
