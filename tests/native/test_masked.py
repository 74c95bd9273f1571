"""The native kernel under a mask, in one launch; and the pairs that dropout takes in
it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.entries import masked_call
from helpers.masks import RULES, check, few_at_a_time, random_mask

import quorum_attention as qa
from quorum_attention.decomposition import Rectangle, Span, Task
from quorum_attention.kernels import Statistics, TaskTensors
from quorum_attention.kernels.dropout import Dropout, dropped
from quorum_attention.kernels.masked import packing, ways
from quorum_attention.kernels.native import NativeKernel


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(9))
def test_random_masks_against_float64(
    seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(random.random() + seed)
    batch, heads = draw.choice([(1, 1), (1, 2), (2, 1)])
    drops, ruled = seed in (3, 4), seed > 4  # dropout takes the interpreter long
    n_queries = draw.choice([5, 40, 70] if drops else [5, 64, 130])
    n_keys = (
        n_queries
        if draw.random() < 0.5
        else draw.choice([3, 66] if drops else [3, 70, 128])
    )
    dtype = draw.choice([torch.float32, torch.float16])
    shapes = ((heads, n_queries), (1, n_keys), (1, n_keys), (heads, n_queries))
    inputs = [torch.randn(batch, h, n, 16).to(dtype) for h, n in shapes]
    sizes = (batch, heads, n_queries, n_keys)
    mask = random_mask(draw, *sizes, inner=True)
    if ruled and seed % 3:
        mask = replace(
            mask, either=tuple(random_mask(draw, *sizes, inner=True) for _ in "ab")
        )
    if ruled and seed % 2:
        mask = replace(mask, keeps=draw.choice(RULES))
        few_at_a_time(monkeypatch, draw.choice([1, 2]))
    if not ruled and seed % 4:
        mask = replace(mask, keeps=None)  # rules are tried tile by tile
    if draw.random() < 0.3:
        mask = replace(mask, softcap=5.0, sinks=torch.randn(heads))
    if draw.random() < 0.3:
        mask = replace(mask, bias=torch.randn(n_queries, n_keys).requires_grad_(ruled))
    options: dict[str, Any] = {"kernel": "native", "report": qa.Report()}
    dropout = Dropout(draw.choice([0.1, 0.5]), draw.randrange(2**63)) if drops else None
    if max(n_queries, n_keys) >= (64 if drops else 128):
        options["depth"] = draw.choice([0, 1] if ruled else [0, 1, 2])
    tolerance = 2e-5 if dtype == torch.float32 else 6e-3
    limits = tolerance, 5 * tolerance
    check(inputs, mask, 0.25, limits, dropout=dropout, device=device, **options)
    assert options["report"].forward.kernel == "native"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("number", range(4))
def test_packed_calls(
    number: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that lie in any order are gathered for it, too."""
    monkeypatch.setattr(packing, "_CLEARLY", 0)
    monkeypatch.setattr(ways, "_FEW_CALLS", 0)
    limits = 2e-5, 1e-4
    masked_call(number, limits=limits, device=device, head_dim=16, kernel="native")


@pytest.mark.parametrize("window", [(3, 9), (3, -1), (-1, 2)], ids=str)
def test_windows_beside_documents_that_end_at_their_last_keys(
    device: str, window: tuple[int, int]
) -> None:
    """Each document has a causal edge of its own, which a window of all queries does
    not undo."""
    of_query = torch.arange(16) // 8
    of_key = (torch.arange(40) >= 10).long()
    mask = qa.Mask(documents=(of_query, of_key), causal="lower_right") & qa.Mask(
        window=window
    )
    inputs = [torch.randn(1, 1, n, 16) for n in (16, 40, 40, 16)]
    check(inputs, mask, 0.25, (2e-5, 1e-4), device=device, kernel="native")


def test_a_mask_is_one_launch(
    device: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter's device is a CPU, where kernels compute masks block by block, so
    # that rows would be gathered.
    monkeypatch.setattr(packing, "_CLEARLY", 1 << 60)
    q, k, v = (torch.randn(1, 1, 130, 16, device=device) for _ in range(3))
    ids = torch.arange(130) // 30
    mask = qa.Mask(causal="lower_right", window=(40, 0), documents=ids)
    first = qa.attention(
        q, k, v, attn_mask=mask, kernel="native"
    )  # which tries the kernel once
    launched.clear()
    assert torch.equal(qa.attention(q, k, v, attn_mask=mask, kernel="native"), first)
    assert len(launched) == 1


KERNEL = NativeKernel()
SEED = 2**62 + 2**31 + 5  # words are passed as signed numbers of 32 bits


def weights(
    task: Task, rectangles: tuple[Rectangle, ...], dropout: Dropout, device: str
) -> Any:
    """Which pairs of a task are kept: all weigh the same, values are columns of the
    identity."""
    n = task.n_tokens
    zeros = torch.zeros(2, 2, n, 4, device=device)
    value = torch.eye(n, device=device).expand(2, 1, n, n)
    tensors = TaskTensors(
        task,
        rectangles,
        zeros,
        zeros[:, :1],
        value,
        1.0,
        False,
        lambda r: None,
        n,
        n,
        dropout=dropout,
    )
    out = torch.zeros(2, 2, n, n, device=device)
    lse = torch.full((2, 2, n), -torch.inf, device=device)
    KERNEL.forward(tensors, Statistics(out, lse))
    return out.cpu() != 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("starts", "way"),
    [
        ((0, 40), 2),
        ((10**9, 2 * 10**9), 2),
        ((3, 50), 1),
        ((2**31 - 60, 2**31 - 33), 1),
    ],
)
def test_the_pairs_are_those_of_the_definition(
    device: str, launched: list[Any], starts: tuple[int, int], way: int
) -> None:
    """At any position: of runs that begin at a multiple of four, and of others."""
    spans = tuple(Span(start, start + 16, 0) for start in starts)
    task = Task((), spans)
    dropout = Dropout(0.37, SEED, 6, 1)
    found = weights(task, (Rectangle(0, 32, 0, 32),), dropout, device)
    rows = torch.cat([torch.arange(start, start + 16) for start in starts])
    wanted = ~dropped(dropout, 2, 2, rows, task.segments(0, 32))
    assert torch.equal(found, wanted)
    assert {constants.DROPOUT for _, constants in launched} == {way}
