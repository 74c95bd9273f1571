"""``plan()`` and ``estimate()``: within a budget, honest about what is needed, and
quick."""

from __future__ import annotations

import logging
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.attention import inputs
from helpers.masks import dense
from helpers.memory import usage
from helpers.passes import pass_of, smallest_budget
from helpers.plans import shape_of

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.streaming import Streaming
from quorum_attention.kernels import CallShape, get_kernel
from quorum_attention.kernels.call_shape import BiasShape
from quorum_attention.kernels.kit import from_score_mod, sliding_window
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.decide import decide
from quorum_attention.planner.kernel_choice import choose_plan
from quorum_attention.planner.options import PlannerOptions
from quorum_attention.planner.plan import _log_once

CALL = {"heads": 4, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize(
    ("n", "layout", "useful"),
    [(300, "aligned", 0), (4096, "aligned", 4), (500, "balanced", 7)],
)
def test_a_depth_at_which_nothing_gets_smaller_is_refused(n, layout, useful) -> None:
    """Each level is seven times the tasks: on, and nothing gets smaller, it never
    ends."""
    shapes = [Decomposition(n, (7,) * depth, layout) for depth in range(useful + 2)]
    sizes = [shape.max_task_tokens for shape in shapes]
    assert all(after < before for before, after in pairwise(sizes[:-1]))
    assert sizes[-1] == sizes[-2]
    call = {"layout": layout, **CALL}
    for depth in (max(3, useful) + 1, 10, 40):
        with pytest.raises(
            ValueError, match=f"at most {max(3, useful)} .*more levels make"
        ):
            qa.plan(n, depth=depth, **call)
    assert qa.plan(n, depth=useful, **call).depth == useful


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_for_a_billion_tokens_is_symbolic(device: str) -> None:
    """No array over tokens anywhere: that would take minutes, and more memory than
    there is. No loop over 100,000 chunks either, which took half a minute."""
    began = time.perf_counter()
    plan = qa.plan(10**9, heads=8, head_dim=64, device=device, is_causal=True,
                   budget="64GiB" if device == "cuda" else "4TiB",
                   levels=None if device == "cuda" else (57,))  # fmt: skip
    task = plan.decomposition.task(tuple(0 for _ in plan.levels))
    rectangles = task.rectangles(True)
    assert time.perf_counter() - began < 8
    assert task.n_tokens <= plan.decomposition.max_task_tokens
    assert rectangles


def test_a_budget_of_a_plan_holds_for_wider_results() -> None:
    call = {"head_dim": 64, "dtype": torch.float16, "device": "cpu", "levels": (3,)}
    peak = qa.plan(4000, heads=1, **call).peak_bytes
    plan = qa.plan(4000, heads=1, budget=peak, **call)
    three = [torch.zeros(1, 1, 4000, 64, dtype=torch.float16) for _ in range(3)]
    qa.attention(*three, plan=plan)
    with pytest.raises(qa.BudgetError, match="the plan's budget"):
        qa.attention(*three, plan=plan, out_dtype=torch.float64)


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_made_without_a_mask_counts_the_call_s(backward: bool) -> None:
    """The call's mask adds a rectangle of the mask to each task; a budget has to hold
    for that."""
    n = 1600
    made = inputs(n, heads=1, head_dim=8)
    mask = torch.randn(n, n).mT  # not as kernels take it: gathered for every rectangle
    sizes = {"heads": 1, "head_dim": 8, "dtype": torch.float32, "levels": (7,), "device": "cpu",
             "tile": 16, "kernel": "dense", "backward": backward}  # fmt: skip
    plan, report = qa.plan(n, **sizes), qa.Report()
    run = pass_of(made, backward, attn_mask=mask, plan=plan, report=report)
    peak = usage(run).peak
    planned = (report.backward if backward else report.forward).planned_peak_bytes
    assert plan.peak_bytes < planned
    assert peak <= planned
    assert smallest_budget(lambda most: run(budget=most)) == planned


@pytest.mark.usefixtures("one_thread")
def test_once_for_calls_of_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(1, 4, 400, 16, requires_grad=True)
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, "quorum_attention"):
        qa.attention(q, q, q)
        assert not caplog.records, "not cut"
        for _ in range(3):
            qa.attention(q, q, q, depth=1).sum().backward()
        lines = [record.getMessage() for record in caplog.records]
        assert [line.split()[0] for line in lines] == ["forward", "backward"]
        for words in ("400 queries x 400 keys", "1 x 4 heads", "budget none", "depth 1",
                      "kernel cpu", "predicted"):  # fmt: skip
            assert words in lines[0]
        qa.attention(q.detach(), q.detach(), q.detach(), budget="64MiB", depth=1)
    assert "budget 64.00 MiB" in caplog.records[2].getMessage()
    assert {record.name for record in caplog.records} == {"quorum_attention"}


# --- estimate(): a dry run of both passes ---


def test_what_fits_and_what_does_not() -> None:
    roomy = qa.estimate(20_000, budget="2GiB", **CALL)
    assert roomy.fits_monolithic
    assert roomy.forward.depth == 0
    least = smallest_budget(
        lambda most: qa.plan(20_000, budget=most, backward=True, **CALL)
    )
    tight = qa.estimate(20_000, budget=least, **CALL)
    assert tight.forward.peak_bytes <= tight.budget_bytes
    assert tight.backward.peak_bytes <= tight.budget_bytes
    assert tight.backward.backward
    assert not tight.forward.backward


# --- Where a budget is tight: another kernel, or rows that pass by, where that is faster ----------

N = 1 << 20


def planned(budget: str | int, *, backward: bool = True, **more: Any) -> qa.Plan:
    # For a CUDA device that need not be here.
    call = {"is_causal": True, "device": "cuda", "inputs": "host", **more}
    return qa.plan(N, budget=budget, backward=backward, **call)


def test_another_kernel_where_it_is_clearly_faster() -> None:
    """Tasks of one level: where no rows pass by, the preferred kernel is held up by
    many calls."""
    tight = planned("128MiB", depth=1)
    named = planned("128MiB", depth=1, kernel="cudnn")
    assert (tight.kernel, named.kernel) == ("native", "cudnn")
    assert tight.predicted_seconds < 0.9 * named.predicted_seconds


@pytest.mark.slow
def test_a_budget_that_only_another_fits() -> None:
    with pytest.raises(qa.BudgetError) as alone:
        planned("1MiB", kernel="cudnn")
    with pytest.raises(qa.BudgetError) as both:
        planned("1MiB")
    least = both.value.smallest_bytes
    assert least is not None
    assert least < alone.value.smallest_bytes
    found = planned(str(least))
    assert found.kernel == "native"
    assert found.peak_bytes <= least


def chosen(constraints: PlanConstraints, kernel_works: Any) -> str:
    work = shape_of((1,), 8, 8, N, N, True)
    place = Placement(False, False, torch.float16)
    case = Problem(work, get_kernel("cudnn"), spec_of(True), place)
    hardware = hardware_of(torch.device("cuda"), torch.float16, 64)
    others = [get_kernel("native")]
    return choose_plan(case, constraints, others, hardware, kernel_works=kernel_works)[
        0
    ].name


def test_the_number_that_is_named_is_of_a_kernel_that_works() -> None:
    smallest = []
    for answer in (True, False):
        with pytest.raises(qa.BudgetError) as raised:
            chosen(PlanConstraints(1 << 20), lambda kernel, answer=answer: answer)
        smallest.append(raised.value.smallest_bytes)
    assert smallest[0] < smallest[1]


@pytest.mark.parametrize("backward", [False, True])
def test_a_tight_budget_lets_rows_pass_by(backward: bool) -> None:
    found = planned("64MiB", backward=backward)
    tasks = planned("64MiB", backward=backward, depth=1, kernel="cudnn")
    assert isinstance(found.schedule.route, Streaming)
    assert found.kernel == "cudnn"
    assert found.peak_bytes <= 64 << 20
    assert found.predicted_seconds < tasks.predicted_seconds
    # Whole waves of an H200, so that none of its multiprocessors waits for others.
    route = found.schedule.route
    assert (
        route.rows(route.resident_axis) * found.schedule.group.kv_heads % (132 * 128)
        == 0
    )
    assert route.rows(route.resident_axis) % route.rows(route.streamed_axis) == 0
    assert route.words in found.describe()
    assert (
        f"{found.schedule.route.stream(found.shape).n_units:,} time" in found.describe()
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("budget", [64 << 20, 128 << 20])
def test_tasks_that_take_over_from_rows_that_pass_by_fit_the_budget_too(
    budget: int, backward: bool
) -> None:
    """Rows pass by for several heads at a time, where tasks fit for one head only."""
    found = planned(budget, backward=backward)
    assert isinstance(found.schedule.route, Streaming)
    instead = found.schedule.through_slots(found.shape)
    assert isinstance(instead.route, Slots)
    problem = Problem(
        found.shape, get_kernel(found.kernel), spec_of(backward), found.place
    )
    assert instead.route.memory_use(instead, problem).total <= budget


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "asked",
    [
        {"depth": 1}, {"levels": (553,)}, {"n_cap": 1}, {"accumulator": "host"}, {"streams": 1},
        {"heads_per_group": 1}, {"kernel": "native"}, {"dropout_p": 0.1}, {"over_inputs": False},
        {"attn_mask": qa.Mask(window=4096)}, {"inputs": "device", "budget": "20GiB"},
    ],
    ids=str,
)  # fmt: skip
def test_not_where_tasks_were_asked_for_or_rows_cannot_pass_by(
    asked: dict[str, Any],
) -> None:
    budget = asked.get("budget", "512MiB" if "levels" in asked else "128MiB")
    rest = {name: value for name, value in asked.items() if name != "budget"}
    assert not isinstance(planned(budget, **rest).schedule.route, Streaming)


# --- Under masks that tell what they keep ---------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_many_tasks_are_trimmed_before_they_are_taken(backward: bool) -> None:
    """Thousands of whole tasks may fit as well, and take a hundred times as long."""
    kernel = from_score_mod(None, sliding_window(4096), compiled=True)
    found = [
        planned(budget, backward=backward, kernel=kernel)
        for budget in ("1GiB", "64MiB")
    ]
    assert all(plan.schedule.route.trimmed is not None for plan in found)
    assert found[1].predicted_seconds < 30 * found[0].predicted_seconds


def test_plans_and_estimates_of_a_mask() -> None:
    """A window is planned with the pairs that it keeps; a plan runs the call it was
    made for."""
    sizes = {**CALL, "heads": 2}
    mask = qa.Mask(causal=True, window=(200, 0), sinks=torch.zeros(2))
    window = qa.plan(4096, attn_mask=mask, levels=(7,), **sizes)
    plain = qa.plan(4096, is_causal=True, levels=(7,), **sizes)
    assert window.predicted_seconds < plain.predicted_seconds / 2
    slots = qa.plan(4096, attn_mask=mask, levels=(7,), over_inputs=False, **sizes)
    assert slots.schedule.trimmed_share > 0.3
    q, k, v = (torch.randn(1, 2, 4096, 16) for _ in range(3))
    report = qa.Report()
    found = qa.attention(q, k, v, attn_mask=mask, plan=window, report=report)
    assert report.forward.levels == (7,)
    assert torch.allclose(found, qa.attention(q, k, v, attn_mask=mask), atol=1e-5)
    estimate = qa.estimate(4096, attn_mask=mask, **sizes)
    assert estimate.forward.predicted_seconds < plain.predicted_seconds
    bias = torch.zeros(2, 1, 4096)
    of_tensor = qa.plan(4096, attn_mask=bias, **sizes)
    assert of_tensor == qa.plan(4096, attn_mask=qa.Mask(bias=bias), **sizes)
    with pytest.raises(TypeError, match="must be a tensor or a quorum_attention"):
        qa.plan(4096, attn_mask="causal", **sizes)  # type: ignore[arg-type]


IDS = torch.arange(3_000) // 350
SHOWN = [
    (qa.Mask(window=(500, 0)), True, "causal, window 500,0"),
    (qa.Mask(chunk=900, offset=0), False, "chunk 900"),
    (qa.Mask(documents=IDS), True, "causal, documents"),
    (qa.Mask(key_lengths=torch.tensor([1_250])), False, "key lengths"),
    (qa.Mask(window=300) | qa.Mask(chunk=500), False, "(window 300) or (chunk 500)"),
    (qa.Mask(sinks=torch.zeros(8), softcap=20.0), True, "causal, softcap 20.0, sinks"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("mask", "causal", "words"), SHOWN)
def test_header_and_census_are_about_the_mask(
    mask: qa.Mask, causal: bool, words: str
) -> None:
    """Census: every tile of every task as it is run, pair by pair."""
    made = qa.plan(
        3_000,
        attn_mask=mask,
        is_causal=causal,
        levels=(7,),
        device="cuda",
        over_inputs=False,
    )
    assert made.describe().splitlines()[0].endswith(f"float16, {words}")
    kept, wanted = dense(mask, 1, 1, 3_000, 3_000)[0, 0], Counter[bool | None]()
    tasks = made._trimmed_tasks() or list(made.tasks())
    assert len(tasks) == made.n_tasks
    for task in tasks:
        at = torch.cat([torch.arange(s.start, s.stop) for s in task.spans])
        inside = torch.from_numpy(task.mask()) & kept[at][:, at]
        for row in range(0, task.n_tokens, 128):
            # One on the diagonal is told by its other rules; here: below the diagonal.
            for column in range(0, row + 1 if causal else task.n_tokens, 128):
                part = inside[row : row + 128, column : column + 128]
                if causal and column == row:
                    part = part[torch.ones_like(part).tril()]
                wanted[None if part.any() and not part.all() else bool(part.any())] += 1
    found = made.census()
    every = wanted.total()
    assert (found.masked, found.tiles) == (wanted[False] / every, every)
    # A tile on the diagonal may be mixed by the mask's own causal rule.
    if not causal:
        assert found.clear == wanted[True] / every


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "native"])
@pytest.mark.parametrize("spans", [(True, False, False), (True, True, True)])
@pytest.mark.parametrize("backward", [False, True])
def test_a_small_masked_call_with_grouped_heads_is_one_kernel_call_on_a_gpu(
    kernel: str, spans: tuple[bool, bool, bool], backward: bool
) -> None:
    """With `efficient` it went through slots, which a CUDA graph cannot capture."""
    shape = CallShape(
        "cuda",
        torch.bfloat16,
        2,
        1,
        64,
        64,
        bias=BiasShape(*spans, True),
        batch_shape=(3,),
        n_queries=300,
        n_keys=300,
    )
    place = Placement(True, False, torch.bfloat16)
    options = PlannerOptions(torch.device("cuda"), kernel)
    decision = decide(shape, place, options, torch.bfloat16, backward=backward)
    assert decision.plan is None
