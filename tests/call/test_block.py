"""Blocks of a call, computed one by one and put together, are the call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.call.block import Block, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.passes import compute_block

BATCH, HEADS, KV, QUERIES, KEYS = 2, 4, 2, 29, 37
ON_CPU = CallOptions(devices=torch.device("cpu"))
IDS = torch.tensor([[0] * 20 + [1] * 17, [3] * 30 + [4] * 7])
PADDING = torch.arange(KEYS) % 5 != 1
MASKS: dict[str, Any] = {
    "none": None,
    "boolean": torch.rand(BATCH, 1, QUERIES, KEYS) < 0.7,
    "bias": torch.randn(HEADS, 1, KEYS, dtype=torch.float64),
    "window": qa.Mask(window=(5, 2)),
    "lower right": qa.Mask(causal="lower_right", window=(9, -1)),
    "offset": qa.Mask(causal=True, offset=3),
    "chunk": qa.Mask(chunk=8, softcap=3.0),
    "documents": qa.Mask(documents=(IDS[:, :QUERIES], IDS)),
    "lengths": qa.Mask(key_lengths=torch.tensor([30, 9])),
    "padding": qa.Mask(key_padding=PADDING, bias=torch.randn(QUERIES, 1, dtype=torch.float64)),
    "keeps": qa.Mask(keeps=lambda b, h, q, k: (b + h + 2 * q + 3 * k) % 4 != 0),
    "either": qa.Mask(window=3) | qa.Mask(key_lengths=torch.tensor([4, 11])),
}


def cuts(count: int, at: int) -> list[Interval]:
    return [Interval(0, at), Interval(at, count)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_blocks_together_are_the_call(name: str, causal: bool) -> None:
    shapes = ((HEADS, QUERIES), (KV, KEYS), (KV, KEYS))
    query, key, value = (torch.randn(BATCH, *shape, 8, dtype=torch.float64) for shape in shapes)
    wanted, wanted_lse = qa.attention_with_lse(
        query, key, value, MASKS[name], is_causal=causal, enable_gqa=True
    )
    grad_out = torch.randn_like(wanted)
    of_rows = {"query": query, "grad_out": grad_out, "out": wanted, "lse": wanted_lse}
    grads = qa.attention_backward(
        grad_out, query, key, value, wanted, wanted_lse, MASKS[name], is_causal=causal,
        enable_gqa=True,
    )  # fmt: skip
    found = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    call = WholeCall((BATCH,), HEADS, KV, QUERIES, KEYS, MASKS[name], causal)
    for entries, heads, rows in itertools.product(
        cuts(BATCH, 1), cuts(HEADS, 2), cuts(QUERIES, 13)
    ):
        outs, lses = [], []
        for keys in cuts(KEYS, 10):
            block = Block(entries, heads, rows, keys)
            inputs = {n: call.cut(t, block, of_keys=False) for n, t in of_rows.items()}
            inputs |= {
                n: call.cut(t, block, of_keys=True) for n, t in (("key", key), ("value", value))
            }
            three = {n: inputs[n] for n in ("query", "key", "value")}
            out, lse = compute_block(call, block, three, ON_CPU)
            outs.append(out)
            lses.append(lse)
            made = compute_block(call, block, inputs, ON_CPU)
            for whole, part, of_keys in zip(found, made, (False, True, True), strict=True):
                call.cut(whole, block, of_keys=of_keys).add_(part)
        lse = torch.logsumexp(torch.stack(lses), 0)
        weights = (torch.stack(lses) - lse).nan_to_num(nan=-torch.inf).exp()
        out = (torch.stack(outs) * weights[..., None]).sum(0)
        torch.testing.assert_close(out, call.cut(wanted, block, of_keys=False))
        torch.testing.assert_close(lse, call.cut(wanted_lse, block, of_keys=False))
    for mine, theirs in zip(found, grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sinks_dropout_and_batch_dimensions() -> None:
    query, key, value = (torch.randn(2, 3, HEADS, 20, 8) for _ in range(3))
    mask = qa.Mask(sinks=torch.randn(HEADS), bias=torch.randn(3, 1, 1, 20))
    asked: Any = {"dropout_p": 0.3, "dropout_seed": 5}
    wanted = qa.attention(query, key, value, mask, **asked)
    call = WholeCall((2, 3), HEADS, HEADS, 20, 20, mask, dropout=Dropout(0.3, 5))
    for entry, head in itertools.product(range(6), range(HEADS)):
        block = Block(
            Interval(entry, entry + 1), Interval(head, head + 1), Interval(0, 20), Interval(0, 20)
        )
        three = {
            n: call.cut(t, block, of_keys=n != "query")
            for n, t in (("query", query), ("key", key), ("value", value))
        }
        out, _ = compute_block(call, block, three, ON_CPU)
        torch.testing.assert_close(out, call.cut(wanted, block, of_keys=False))
