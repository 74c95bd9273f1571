"""Rows pass by where that is faster than tasks: within the budget, only where they can."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.execution.routes.slots import Slots, Streaming
from quorum_attention.planner import policy

N = 1 << 20


def planned(budget: str | int, *, backward: bool = True, n: int = N, **more: Any) -> qa.Plan:
    # For a CUDA device that need not be here.
    call = {"is_causal": True, "device": "cuda", "inputs": "host", **more}
    return qa.plan(n, budget=budget, backward=backward, **call)


@pytest.mark.parametrize("backward", [False, True])
def test_a_tight_budget_lets_rows_pass_by(backward: bool) -> None:
    found = planned("64MiB", backward=backward)
    tasks = planned("64MiB", backward=backward, depth=1, kernel="cudnn")
    assert isinstance(found.schedule.route, Streaming)
    assert found.kernel == "cudnn"
    assert found.peak_bytes <= 64 << 20
    assert found.predicted_seconds < policy.PASSING * tasks.predicted_seconds
    # Whole waves of an H200, so that none of its multiprocessors waits for others.
    route = found.schedule.route
    assert route.rows(route.stays) * found.schedule.group.kv_heads % (132 * 128) == 0
    assert route.rows(route.stays) % route.rows(route.streams_by) == 0
    assert route.words in found.describe()
    # What takes over if memory runs out fits the budget as well.
    instead = found.schedule.through_slots(found.work)
    assert isinstance(instead.route, Slots)
    assert f"{found.schedule.route.passage(found.work).n_units:,} time" in found.describe()


@pytest.mark.parametrize(
    "asked",
    [
        {"depth": 1}, {"levels": (553,)}, {"n_cap": 1}, {"accumulator": "host"}, {"streams": 1},
        {"heads_per_group": 1}, {"kernel": "native"}, {"dropout_p": 0.1}, {"over_inputs": False},
        {"attn_mask": qa.Mask(window=4096)}, {"inputs": "device", "budget": "20GiB"},
    ],
    ids=str,
)  # fmt: skip
def test_not_where_tasks_were_asked_for_or_rows_cannot_pass_by(asked: dict[str, Any]) -> None:
    budget = asked.get("budget", "512MiB" if "levels" in asked else "128MiB")
    rest = {name: value for name, value in asked.items() if name != "budget"}
    assert not isinstance(planned(budget, **rest).schedule.route, Streaming)


def test_random_calls_are_within_their_budgets() -> None:
    draw, passing = random.Random(torch.initial_seed()), 0
    for _ in range(8):
        kv_heads = draw.choice([1, 2, 3, 8])
        sizes = {
            "heads": kv_heads * draw.choice([1, 4]), "kv_heads": kv_heads,
            "head_dim": draw.choice([64, 128]), "is_causal": draw.random() < 0.7,
            "dtype": draw.choice([torch.float16, torch.bfloat16]),
            "n_keys": draw.choice([None, draw.randrange(1 << 15, 1 << 20)]),
        }  # fmt: skip
        budget = draw.randrange(24 << 20, 400 << 20)
        backward = draw.random() < 0.5
        try:
            n = draw.randrange(1 << 15, 1 << 20)
            found = planned(budget, n=n, backward=backward, kernel="cudnn", **sizes)
        except qa.BudgetError:
            continue
        assert found.peak_bytes <= budget
        passing += isinstance(found.schedule.route, Streaming)
    assert passing
