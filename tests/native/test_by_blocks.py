"""Rules that have to be tried, on the native kernel: which blocks are masked, clear or
mixed, in how many launches, and against float64."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.masks import RULES, check, dense, off, random_mask
from helpers.plans import shape_of

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.decomposition import EMPTY, FULL, PARTIAL, Rectangle
from quorum_attention.kernels.masked import block_table
from quorum_attention.kernels.masked.block_evaluator import BlockEvaluator
from quorum_attention.kernels.masked.block_table import listed_blocks
from quorum_attention.kernels.masked.resolve import resolve
from quorum_attention.kernels.native import rule_blocks
from quorum_attention.kernels.native.rule_blocks import bits_of
from quorum_attention.kernels.operator_call import Call, whole_task


@pytest.mark.parametrize("seed", range(12))
def test_what_a_block_is_said_to_be_it_is(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clear: every pair is kept in every head and entry; masked: none is."""
    draw = random.Random(random.random() + seed)
    if seed % 4 == 0:
        monkeypatch.setattr(block_table, "MOST_NODES", 3)  # what is left is tried
    n, m = draw.choice([130, 400, 700]), draw.choice([100, 384, 650])
    mask = replace(
        random_mask(draw, 1, 2, n, m, inner=True),
        either=tuple(random_mask(draw, 1, 2, n, m, inner=True) for _ in range(2)),
    )
    if seed % 2:
        mask = replace(
            mask,
            keeps=draw.choice([*RULES, lambda b, h, q, k: (q // 128 + h) % 2 == 0]),
        )
    keep = dense(mask, 1, 2, n, m)
    (geometry,) = resolve(mask, shape_of((1,), 2, 2, n, m)).geometries
    rectangles = (Rectangle(0, n, 0, m),)
    task = whole_task(Call(torch.zeros(1, 2, n, 4), *torch.zeros(2, 1, 2, m, 4)))
    codes = np.zeros((-(-n // 128), -(-m // 128)), dtype=np.int8)
    found = listed_blocks(
        geometry, task, *rectangles, rectangles, draw.choice([1, 16 << 20])
    )
    for code, nodes in zip((FULL, PARTIAL), found, strict=False):
        for _, q0, q1, k0, k1 in nodes.tolist():
            part = slice(q0 // 128, -(-q1 // 128)), slice(k0 // 128, -(-k1 // 128))
            assert not codes[part].any()
            codes[part] = code
    for i, j in np.ndindex(codes.shape):
        part = keep[..., i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
        assert codes[i, j] != FULL or part.all(), (i, j)
        assert codes[i, j] != EMPTY or not part.any(), (i, j)
    rows, columns = partial = torch.from_numpy(np.stack(np.nonzero(codes == PARTIAL)))
    evaluator = BlockEvaluator(geometry, task, *rectangles)
    words = bits_of(evaluator, partial, draw.choice([1, 3])).expand(1, 2, -1, -1, -1)
    for number, (i, j) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        part = keep[0, :, i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
        bits = (words[0, :, number, :, :, None] >> torch.arange(32)) & 1
        got = bits.flatten(2)[:, : part.shape[1], : part.shape[2]].bool()
        assert torch.equal(got, part), (i, j)


@pytest.mark.slow
def test_a_window_beside_a_rule(device: str) -> None:
    """The kernel reads either the bounds of a window or the strides of bits."""
    inputs = [torch.randn(1, 2, 150, 16) for _ in range(4)]
    mask = Mask(
        window=(20, 3), causal=True, keeps=lambda b, h, q, k: (q + k + h) % 3 != 0
    )
    check(inputs, mask, 0.25, (2e-5, 1e-4), device=device, kernel="native")


def test_a_table_is_made_again_when_what_a_function_reads_has_changed(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, original = [], rule_blocks.listed_blocks
    monkeypatch.setattr(
        rule_blocks, "listed_blocks", lambda *args: made.append(1) or original(*args)
    )
    q, k, v = (torch.randn(1, 1, 20, 16, device=device) for _ in range(3))
    kept = torch.arange(20, device=device) < 13
    held = SimpleNamespace(kept=kept.clone())

    def call(mask: Mask, keys: torch.Tensor) -> int:
        out = qa.attention(q, k, v, attn_mask=mask, kernel="native")
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, keys.expand(20, 20)
        )
        assert off(out, want.double().cpu()) <= 2e-5
        return len(made)

    closed_over = Mask(keeps=lambda b, h, q, k: kept[k])
    assert [call(closed_over, kept), call(closed_over, kept)] == [1, 1]
    kept[7:] = False
    assert call(closed_over, kept) == 2
    attribute = Mask(keeps=lambda b, h, q, k: held.kept[k])
    assert call(attribute, held.kept) == 3
    held.kept = ~held.kept
    assert call(attribute, held.kept) == 4
