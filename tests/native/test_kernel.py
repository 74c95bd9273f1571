"""The native kernel task by task, against float64: every shape, dtype and mask it
takes.

Without a GPU it runs in Triton's interpreter, small shapes; on one, the wide grid.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from kernel_harness import Case, check_nan_in_a_query, errors, exact, random_case, run

from quorum_attention.decomposition import Decomposition
from quorum_attention.kernels import CallShape, Extent, TaskTensors
from quorum_attention.kernels.native import NativeKernel, kernel
from quorum_attention.kernels.native.columns import EntryColumn
from quorum_attention.kernels.native.config import Config, Tiling

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
half, brain, full = torch.float16, torch.bfloat16, torch.float32

SMALL = {
    "monolithic": {"n_queries": 70, "levels": (), "causal": True},
    "tasks": {"n_queries": 90, "causal": True},
    "two levels": {"n_queries": 80, "levels": (3, 3), "causal": True},
    "more queries": {"n_queries": 110, "n_keys": 60, "head_dim": 24, "value_dim": 40},
    "more keys": {"n_queries": 60, "n_keys": 110, "causal": True},
    "one row": {"n_queries": 1, "n_keys": 50},
    "one key": {"n_queries": 50, "n_keys": 1},
    "narrow": {"n_queries": 60, "head_dim": 1, "value_dim": 3, "dtype": half},
    "odd": {"n_queries": 60, "head_dim": 72, "causal": True, "dtype": half},
    "balanced": {"n_queries": 50, "layout": "balanced", "causal": True, "levels": (7,)},
    "large scores": {"n_queries": 60, "spread": 80.0, "causal": True},
    "boolean mask": {
        "n_queries": 60,
        "mask": (torch.arange(3600) * 7919 % 5 > 1).view(1, 1, 60, 60),
    },
    "wider queries": {
        "n_queries": 70,
        "head_dim": 192,
        "value_dim": 128,
        "dtype": half,
    },
    "narrow values": {"n_queries": 70, "head_dim": 64, "value_dim": 32, "dtype": half},
    "wider values": {"n_queries": 70, "head_dim": 32, "value_dim": 128, "dtype": half},
}


def check(device: str, case: Case) -> None:
    found = errors(run(NativeKernel(), case, device, check=False), exact(case))
    size = 1.0 if case.dropout is None else max(1.0, case.dropout.rescale)
    limit = TOLERANCE[case.dtype] * (20 if case.spread > 1 else 1) * size
    assert max(found.values()) < limit, (case, found)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", SMALL)
def test_small(name: str, device: str) -> None:
    check(device, Case(**{"levels": (3,), **SMALL[name]}))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("part", range(5))
def test_random_cases(
    device: str, launched: list[Any], on_gpu: bool, part: int, dropout: bool
) -> None:
    """Masks, causal squares, grouped heads, scales of either sign, rows without keys.

    In parts, because most of a draw on a GPU is compilation. A single one may have no
    run that begins at a multiple of four.
    """
    r = random.Random(17 + part)
    for _ in range(12 if on_gpu else 1):
        few = (
            {} if on_gpu else {"heads": [1]}
        )  # the interpreter takes a second for ten of them
        case = random_case(
            r, r.choice([half, full]), 60 if on_gpu else 16, dropout, **few
        )
        case.levels = case.levels if on_gpu else case.levels and (3,)
        check(device, case)
    ways = {constants.DROPOUT for _, constants in launched}
    assert ways <= ({1, 2} if dropout else {0})
    assert 2 in ways or not (dropout and on_gpu)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [3, 70])
def test_a_query_of_nan(n: int, causal: bool, device: str) -> None:
    case = Case(n, causal=causal, levels=(3,), layout="balanced", dtype=half)
    check_nan_in_a_query(NativeKernel(), case, device)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [half, brain, full], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 80, 96, 128, 192, 256])
def test_wide(
    head_dim: int, dtype: torch.dtype, causal: bool, device: str, on_gpu: bool
) -> None:
    if not on_gpu:
        pytest.skip("the wide grid is for a GPU (and the interpreter has no bfloat16)")
    check(device, Case(700, dtype=dtype, head_dim=head_dim, causal=causal, tile=128))


@pytest.mark.slow
def test_repeatable_bit_for_bit(device: str, on_gpu: bool) -> None:
    """Also the query's gradient, unlike the vendors'."""
    case = Case(n_queries=2000 if on_gpu else 100, levels=(3,), dtype=half, causal=True)
    first, second = (run(NativeKernel(), case, device, check=False) for _ in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.slow
def test_a_large_table_goes_in_parts(
    device: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where runs are many, a task takes several launches and no more memory than was
    said."""
    check(device, Case(60, causal=True, levels=(3,)))
    whole = len(launched)
    monkeypatch.setattr(kernel, "_RUNS_OF_A_BLOCK", 0)
    check(device, Case(60, causal=True, levels=(3,)))
    assert len(launched) > 2 * whole


@pytest.mark.parametrize("levels", [(7,), (57,), (13, 7), (7, 7, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_tables_stay_within_the_bound(levels: tuple[int, ...], causal: bool) -> None:
    native = NativeKernel()
    decomposition = Decomposition(1 << 17, levels)
    task = decomposition.task(tuple(c // 2 for c in levels))
    n = task.n_tokens
    empty = torch.empty(1, 1, n, 1)
    tensors = TaskTensors(
        task,
        task.rectangles(causal),
        empty,
        empty,
        empty,
        1.0,
        causal,
        lambda r: None,
        n,
        n,
    )
    bound = native.forward_workspace_bytes(
        CallShape("cuda", half, 1, 1, 64, 64, causal), Extent(1, 1, 1, n, n, n)
    )
    pairs = 0
    tiling = Tiling("query", Config(128, 64, 4, 1))
    for launch in native.launch_tables(tensors, tensors.rectangles, (tiling,)):
        (runs,) = launch.tables
        assert 4 * (runs.starts.numel() + runs.entries.numel()) <= bound
        entries = runs.entries.long()
        rows = entries[:, EntryColumn.HIGH] - entries[:, EntryColumn.LOW]
        columns = entries[:, EntryColumn.STOP] - entries[:, EntryColumn.START]
        pairs += int((rows * columns).sum())
    every = sum(r.n_queries * r.n_keys for r in tensors.rectangles)
    assert pairs <= every if causal else pairs == every
