"""Over inputs on a CPU: rectangles no larger than memory allows, states in the results.
Rows that pass by: their units, and overflows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    assert_close,
    exact,
    inputs,
    sink,
)
from helpers.fake_device import FakeDevice
from helpers.memory import usage
from helpers.passes import both_passes, pass_of
from helpers.plans import passing

import quorum_attention as qa
from quorum_attention.decomposition.layouts import Pieces
from quorum_attention.execution.routes.blockwise import Blockwise
from quorum_attention.execution.schedule import schedule_of

pytestmark = pytest.mark.usefixtures("one_thread")


def laid_out(pieces: Pieces, n: int, backward: bool, **sizes: Any) -> qa.Plan:
    """A plan of chunks of 64 or so tokens, with its rectangles laid out so."""
    plan = qa.plan(
        n, **sizes, levels=(7,), tile=8, over_inputs=True, device="cpu", inputs="device",
        backward=backward,
    )  # fmt: skip
    route = plan.schedule.route
    assert isinstance(route, Blockwise)
    schedule = schedule_of(
        plan.shape,
        plan.decomposition,
        plan.schedule.group,
        replace(route, pieces=pieces),
    )
    return replace(plan, schedule=schedule)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("pieces", ["halves", "rows", "blocks"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("causal", "given", "n_keys"), [(False, True, 200), (True, False, 410)]
)
def test_results_are_right(pieces, dtype, causal, given, n_keys) -> None:
    """Also of grouped heads, of wide values, and into given results that hold something
    else."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 24, "dtype": dtype}
    made = inputs(300, n_keys, **sizes)
    plans = [
        laid_out(pieces, 300, backward, n_keys=n_keys, is_causal=causal, **sizes)
        for backward in (False, True)
    ]
    each: list[dict[str, Any]] = [{"plan": plan} for plan in plans]
    if given:
        each[0]["out"] = torch.full((1, 300, 4, 24), 5.0, dtype=dtype).transpose(1, 2)
        each[1]["grads"] = tuple(torch.full_like(t, 7.0) for t in made.three)
    out, _, *grads = both_passes(made, tuple(each), is_causal=causal, enable_gqa=True)
    wanted = exact(made, is_causal=causal, gradients=True)
    assert_close(out, wanted.out, TOLERANCE[dtype])
    assert_close(grads, wanted.grads, GRADIENT_TOLERANCE[dtype])


@pytest.mark.slow
def test_a_budget_below_the_results_works_where_they_are_given() -> None:
    """Results of 8 and 24 MiB, a budget of 7: of which the kernel is reckoned to take
    6."""
    made = inputs(4_000, heads=8, head_dim=64)
    limit: dict[str, Any] = {"is_causal": True, "budget": 7 << 20}
    with pytest.raises(qa.BudgetError):
        qa.attention(*made.three, **limit)
    out, grads = (
        torch.empty_like(made.query),
        tuple(torch.empty_like(t) for t in made.three),
    )
    found: list[torch.Tensor] = []
    forward = usage(
        lambda: found.extend(qa.attention_with_lse(*made.three, out=out, **limit))
    )
    assert forward.peak <= limit["budget"]
    backward = usage(
        lambda: qa.attention_backward(
            made.grad_out, *made.three, *found, grads=grads, **limit
        )
    )
    assert backward.peak <= limit["budget"]
    three = [t.requires_grad_() for t in made.three]
    wanted = torch.nn.functional.scaled_dot_product_attention(*three, is_causal=True)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    theirs = torch.autograd.grad(wanted, three, made.grad_out)
    torch.testing.assert_close(grads, theirs, atol=5e-5, rtol=1e-4)


# --- Rows that pass by ---------------------------------------------------------------------------
# Random ones with copies as late as they may be: execution/device/test_staging.py.

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}


def plan(  # type: ignore[no-untyped-def]
    n: int, queries: int, keys: int, *, backward: bool, group: int = 1, n_cap: int = 2,
    chunk_slots: int = 2, **more
) -> qa.Plan:  # fmt: skip
    sizes = {**SIZES, "dtype": torch.float16, "is_causal": True, **more}
    made = qa.plan(
        n, backward=backward, device="cpu", levels=(7,), layout="balanced", over_inputs=False,
        kernel="cpu", **sizes,
    )  # fmt: skip
    return passing(
        made, queries, keys, group=group, n_cap=n_cap, chunk_slots=chunk_slots
    )


def run(given, plans, *, is_causal=True, report=None):  # type: ignore[no-untyped-def]
    """Output and gradients, with copies as late as they may be."""
    each = tuple({"plan": plan} for plan in plans)
    with FakeDevice():
        out, _, *grads = both_passes(
            given,
            each,
            is_causal=is_causal,
            enable_gqa=True,
            devices="cpu",
            report=report,
        )
    return out, *grads


def test_every_pair_of_chunk_and_block_is_one_unit() -> None:
    given, report = inputs(101, dtype=torch.float64, **SIZES), qa.Report()
    plans = [plan(101, 32, 20, backward=b, dtype=torch.float64) for b in (False, True)]
    run(given, plans, report=report)
    # Two head groups; 4 chunks of 32 queries against 2, 4, 5 and 6 blocks; 6 of 20 keys
    # against 4, 4, 3, 3, 2 and 1.
    assert report.forward.units == report.backward.units == 2 * 17
    assert (report.forward.accumulator, report.backward.accumulator) == ("none", "host")


def test_the_backward_of_a_plan_that_streams_is_planned_freely() -> None:
    """It got the levels of the tasks that take over from streaming: twice the time."""
    given, report = inputs(101, dtype=torch.float64, **SIZES), qa.Report()
    three = [tensor.requires_grad_() for tensor in given.three]
    made = plan(101, 32, 20, backward=False, dtype=torch.float64)
    with FakeDevice():
        out = qa.attention(
            *three,
            is_causal=True,
            enable_gqa=True,
            devices="cpu",
            plan=made,
            report=report,
        )
        out.backward(given.grad_out)
    assert report.forward is not None
    assert report.backward is not None
    assert report.forward.levels == (7,)
    assert report.backward.levels == ()
    grads = exact(given, is_causal=True, gradients=True).grads
    assert_close([t.grad for t in three], grads, GRADIENT_TOLERANCE[torch.float64])


@pytest.mark.parametrize("backward", [False, True])
def test_a_second_slot_hides_the_copies_of_chunks(backward: bool) -> None:
    """By the made-up clock."""
    n, exposed = 256, {}
    given = inputs(n, dtype=torch.float16, **SIZES)
    call: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "devices": "cpu"}
    results = pass_of(given, False, **call)()
    for chunk_slots in (1, 2):
        made = plan(n, 32, 32, backward=backward, chunk_slots=chunk_slots)
        with FakeDevice(bytes_per_second=16e6, unit_seconds=1e-3) as device:
            pass_of(given, backward, results, **call, plan=made, report=qa.Report())()
        stream = made.schedule.route.stream(made.shape)
        computing = 1e-3 * stream.n_units * 2  # head groups
        exposed[chunk_slots] = device.seconds - computing
    assert exposed[2] < 0.5 * exposed[1]


@pytest.mark.parametrize("backward", [False, True])
def test_with_one_slot_only_the_copies_of_chunks_are_not_hidden(backward: bool) -> None:
    """By the made-up clock: the first block beside a chunk is loaded before the chunk,
    which waits until the chunk before it is stored; and that chunk is stored before its
    last block."""
    n, rate = 256, 8e6
    given = inputs(n, dtype=torch.float16, **SIZES)
    call: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "devices": "cpu"}
    out, lse = pass_of(given, False, **call)()
    queries, keys = (32, 64) if backward else (64, 32)
    made = plan(n, queries, keys, backward=backward, chunk_slots=1)
    with FakeDevice(bytes_per_second=rate, unit_seconds=1e-3) as device:
        pass_of(given, backward, (out, lse), **call, plan=made, report=qa.Report())()
    stream = made.schedule.route.stream(made.shape)
    computing = 1e-3 * stream.n_units * 2  # head groups
    query, key, value = given.three
    loaded_and_stored = (key, value, key, value) if backward else (query, out)
    of_chunks = sum(tensor.nbytes for tensor in loaded_and_stored) / rate
    assert device.seconds - computing < 1.25 * of_chunks


@pytest.mark.slow_but_first
@pytest.mark.parametrize("broken", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("is_causal", [False, True])
def test_an_overflow_is_scaled_down(broken, is_causal) -> None:
    """Every query attends to one key, whose dV is a sum over all of them. Beside a
    number that is not finite it takes tasks to tell which gradients that leaves."""
    n, heads = 512, 2
    given = sink(n, heads)
    wanted = exact(given, is_causal=is_causal, gradients=True)
    if broken is not None:
        given.query[0, 0, 300, 3] = broken
    sizes = {"heads": heads, "kv_heads": heads, "head_dim": 64, "value_dim": 64}
    plans = [
        plan(n, 128, 64, backward=b, group=2, is_causal=is_causal, **sizes)
        for b in (False, True)
    ]
    report = qa.Report()
    found = run(given, plans, is_causal=is_causal, report=report)
    assert report.backward.repeated_units > 0
    whole = slice(0 if broken is None else 1, None)
    for mine, right in zip(found, (wanted.out, *wanted.grads), strict=True):
        torch.testing.assert_close(
            mine[:, whole].double(), right[:, whole], atol=2e-3, rtol=0
        )
