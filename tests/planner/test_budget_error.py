"""A budget too small names the smallest that works, and that one does work; a forward
refuses what its backward would not fit in."""

from __future__ import annotations

import gc
import random
import re
import weakref
from functools import partial

import pytest
import torch
from helpers.attention import GRADIENT_TOLERANCE, Inputs, assert_close, exact, inputs
from helpers.memory import usage
from helpers.passes import pass_of, smallest_budget

import quorum_attention as qa
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.planner import decide

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow_but_first
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
        given,
        mask=call.get("attn_mask"),
        is_causal=call.get("is_causal", False),
        gradients=True,
    )
    tolerance = 1e-2 if sizes.get("dtype") else 5e-5
    assert_close(run(budget=smallest), reference.of(backward), tolerance)
    assert usage(lambda: run(budget=smallest)).peak <= smallest


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [(1, 48), (48, 1)])
def test_keys_are_padded_once_for_their_query_heads(
    widths: tuple[int, int], causal: bool
) -> None:
    """Keys and values of other widths were copied for each query head: 1.06 of the
    smallest budget."""
    head_dim, value_dim = widths
    query = torch.randn(1, 4, 17, head_dim)
    key = torch.randn(1, 1, 3000, head_dim)
    value = torch.randn(1, 1, 3000, value_dim)
    given = Inputs(query, key, value, torch.randn(1, 4, 17, value_dim))
    for backward in (False, True):
        run = pass_of(given, backward, enable_gqa=True, is_causal=causal)
        smallest = smallest_budget(lambda most, run=run: run(budget=most))
        assert usage(lambda run=run, most=smallest: run(budget=most)).peak <= smallest


@pytest.mark.parametrize("backward", [False, True])
def test_drawn_calls_of_whole_rows_stay_within_the_smallest_budget(
    backward: bool,
) -> None:
    """Of the kernel ``dense``, at odd sizes, with grouped heads, masks and dropout."""
    draw = random.Random(f"whole rows {backward}")
    for _ in range(3):
        n = draw.choice([129, 300])
        batch, kv_heads, shared = (
            draw.choice([3, 6]),
            draw.choice([2, 5]),
            draw.choice([4, 7]),
        )
        dtype = draw.choice([torch.float16, torch.float32, torch.float64])
        shapes = [(batch, h, n, 33) for h in (kv_heads * shared, kv_heads, kv_heads)]
        given = [
            torch.randn(shape, dtype=dtype, requires_grad=backward) for shape in shapes
        ]
        call = {
            "kernel": "dense",
            "enable_gqa": True,
            "dropout_p": draw.choice([0.0, 0.2]),
        }
        mask = draw.choice([None, (n, n), (kv_heads * shared, 1, n), (batch, 1, n, n)])
        if mask is None:
            call["is_causal"] = True
        else:
            call["attn_mask"] = torch.randn(
                mask, dtype=draw.choice([dtype, torch.float32])
            )
        run = partial(qa.attention, *given, **call)
        smallest = smallest_budget(lambda most, run=run: run(budget=most))
        peak = usage(lambda run=run, smallest=smallest: run(budget=smallest)).peak
        if backward:
            out = run(budget=smallest)
            upstream = torch.ones((), dtype=dtype).expand(out.shape)
            peak = max(
                peak, usage(partial(torch.autograd.grad, out, given, upstream)).peak
            )
        assert peak <= smallest, (shapes, dtype, call)


@pytest.mark.slow_but_first
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
    with pytest.raises(
        qa.BudgetError, match=r"^backward pass: .* smallest that works"
    ) as refused:
        qa.estimate(16_384, budget="24MiB", device="cpu")
    printed = re.search(
        r"smallest that works[^.]*? is ([0-9.]+[KMGT]?i?B)", str(refused.value)
    )[1]
    assert qa.estimate(16_384, budget=printed, device="cpu").backward


# --- Whatever gradient autograd hands over, the backward stays within what was promised -----------

N = 700
UPSTREAM = {
    "of a sum": lambda g: torch.ones((), dtype=g.dtype).expand(g.shape),
    "of rows' sums": lambda g: g[..., :1].expand(g.shape),
    "transposed": lambda g: g.transpose(-1, -2).contiguous().transpose(-1, -2),
    "as it should be": lambda g: g,
}


def sizes(dtype: torch.dtype) -> dict[str, object]:
    return {
        "heads": 4,
        "head_dim": 16,
        "dtype": dtype,
        "device": "cpu",
        "is_causal": True,
    }


@pytest.mark.slow_but_first
@pytest.mark.parametrize("upstream", list(UPSTREAM))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_backward_stays_within_the_estimate(upstream, dtype, share) -> None:
    """From the smallest budget that works (share 0) to one in which the call need not
    be cut."""
    most = qa.plan(N, levels=(), backward=True, **sizes(dtype)).peak_bytes
    least = smallest_budget(
        lambda most: qa.plan(N, budget=most, backward=True, **sizes(dtype))
    )
    budget = int(least + share * (most - least))
    promised = qa.estimate(N, budget=budget, **sizes(dtype))
    made = inputs(N, heads=4, head_dim=16, dtype=dtype)
    grad_out = UPSTREAM[upstream](made.grad_out)
    leaves = [t.clone().requires_grad_() for t in made.three]
    report = qa.Report()

    def forward() -> torch.Tensor:
        return qa.attention(*leaves, is_causal=True, budget=budget, report=report)

    out = forward()
    peak = usage(lambda: torch.autograd.grad(out, leaves, grad_out)).peak
    assert (
        peak
        <= report.backward.planned_peak_bytes
        <= promised.backward.peak_bytes
        <= budget
    )
    grads = torch.autograd.grad(forward(), leaves, grad_out)
    reference = exact(Inputs(*made.three, grad_out), is_causal=True, gradients=True)
    assert_close(grads, reference.grads, GRADIENT_TOLERANCE[dtype])


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("rival", [None, "dense"])
def test_forward_refuses_what_the_backward_would_not_fit_in(
    out_dtype, rival, monkeypatch
) -> None:
    """With another kernel to choose from as well (as on a GPU), of which none may
    fit."""
    others = () if rival is None else (get_kernel(rival),)
    monkeypatch.setattr(decide, "rivals", lambda *given: others)
    made = inputs(N, heads=4, head_dim=16, dtype=torch.float16)
    leaves = [t.clone().requires_grad_() for t in made.three]
    call = {"is_causal": True, "out_dtype": out_dtype}

    def forward(budget: int) -> torch.Tensor:
        return qa.attention(*leaves, budget=budget, **call)

    with torch.no_grad():
        forward_alone = smallest_budget(forward)
    enough = smallest_budget(forward, match=r"^(forward|backward) pass: ")
    assert enough >= forward_alone
    if rival is None:
        # This kernel's backward takes more than its forward.
        assert enough > forward_alone
        with pytest.raises(qa.BudgetError, match="backward pass: ") as refused:
            forward(forward_alone)
        assert refused.value.smallest_bytes == enough
    forward(enough).sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
