"""A budget too small names the smallest that works, and that one does work."""

from __future__ import annotations

import gc
import random
import re
import weakref

import pytest
import torch
from helpers_attention import assert_close, exact, inputs
from helpers_memory import usage
from helpers_passes import pass_of, smallest_budget

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        ({"is_causal": True}, {"dtype": torch.float16}),
        ({"depth": 1}, {}),
        ({"kernel": "dense"}, {}),
        ({"enable_gqa": True}, {"kv_heads": 1, "value_dim": 12}),
        ({"attn_mask": torch.rand(1100, 1100) > 0.3}, {}),
    ],
    ids=["causal", "pinned", "dense", "grouped", "mask"],
)
@pytest.mark.parametrize("backward", [False, True])
def test_exactly_the_smallest_budget_works(call, sizes, backward) -> None:
    given = inputs(1100, **sizes)
    run = pass_of(given, backward, **call)
    smallest = smallest_budget(lambda most: run(budget=most))
    reference = exact(
        given, mask=call.get("attn_mask"), is_causal=call.get("is_causal", False), gradients=True
    )
    tolerance = 1e-2 if sizes.get("dtype") else 5e-5
    assert_close(run(budget=smallest), reference.of(backward), tolerance)
    assert usage(lambda: run(budget=smallest)).peak <= smallest


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_at_any_length_works_and_nothing_less_does(seed: int) -> None:
    draw = random.Random(f"smallest {seed}")
    n = int(10 ** draw.uniform(2, 8))
    call = {
        "device": draw.choice(["cpu", "cuda"]),
        "is_causal": draw.random() < 0.5,
        "backward": draw.random() < 0.5,
        "heads": draw.choice([1, 3, 8]),
        "layout": draw.choice(["aligned", "balanced"]),
    }
    smallest = smallest_budget(lambda most: qa.plan(n, budget=most, **call))
    assert qa.plan(n, budget=smallest, **call).peak_bytes <= smallest
    for levels in ((7,), (13,), (7, 7), (31, 7)):
        through_slots = qa.plan(n, levels=levels, over_inputs=False, **call)
        assert through_slots.peak_bytes >= smallest


@pytest.mark.parametrize("recorded", [False, True])
def test_a_refused_call_lets_go_of_its_tensors_at_once(recorded: bool) -> None:
    """Who catches the error may need the memory before Python looks for cycles."""

    def refused() -> weakref.ref[torch.Tensor]:
        given = torch.randn(1, 2, 70, 16, requires_grad=recorded)
        with pytest.raises(qa.BudgetError):
            qa.attention(given, given, given, budget=1)
        return weakref.ref(given)

    gc.collect()
    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()


def test_an_estimate_names_the_pass_that_needs_more() -> None:
    with pytest.raises(qa.BudgetError, match=r"^backward pass: .* smallest that works") as refused:
        qa.estimate(16_384, budget="24MiB", device="cpu")
    printed = re.search(r"smallest that works[^.]*? is ([0-9.]+[KMGT]?i?B)", str(refused.value))[1]
    assert qa.estimate(16_384, budget=printed, device="cpu").backward
