"""Which kernel "auto" means, where a budget is so tight that the preferred one is held up."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_made_up_gpu import GPU, made_up_gpu, probing

import quorum_attention as qa
from quorum_attention.execution.problem import Placement, Problem, Workload, spec_of
from quorum_attention.kernels import CallShape, get_kernel
from quorum_attention.kernels.registry import rivals
from quorum_attention.planner import decide as module
from quorum_attention.planner import search
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.decide import Decision, choose_plan, decide, is_small, with_plan
from quorum_attention.planner.plan import Options
from quorum_attention.planner.price import least_seconds
from quorum_attention.planner.search import PlanConstraints

N = 1 << 20
PLACE = Placement("cpu", True, False, torch.float32)


def planned(budget: str, **call) -> qa.Plan:
    # For a CUDA device that need not be here.
    return qa.plan(N, budget=budget, is_causal=True, device="cuda", inputs="host", **call)


def cut(budget: str, **call) -> qa.Plan:
    """Tasks of one level: where no rows pass by, the preferred kernel is held up by many calls."""
    return planned(budget, depth=1, **call)


def test_another_where_it_is_clearly_faster() -> None:
    tight = cut("128MiB", backward=True)
    named = cut("128MiB", backward=True, kernel="cudnn")
    assert tight.kernel == "native"
    assert tight.predicted_seconds < 0.9 * named.predicted_seconds
    assert named.kernel == "cudnn"


def test_a_budget_that_only_another_fits() -> None:
    with pytest.raises(qa.BudgetError) as alone:
        planned("1MiB", backward=True, kernel="cudnn")
    with pytest.raises(qa.BudgetError) as both:
        planned("1MiB", backward=True)
    least = both.value.smallest_bytes
    assert least is not None
    assert least < alone.value.smallest_bytes
    found = planned(str(least), backward=True)
    assert found.kernel == "native"
    assert found.peak_bytes <= least


def chosen(constraints: PlanConstraints, kernel_works: Any) -> str:
    work = Workload((1,), 8, 8, N, N, 64, 64, torch.float16, True)
    place = Placement("cuda", False, False, torch.float16)
    case = Problem(work, get_kernel("cudnn"), spec_of(True), place)
    hardware = hardware_of(torch.device("cuda"), torch.float16, 64)
    others = [get_kernel("native")]
    return choose_plan(case, constraints, others, hardware, kernel_works=kernel_works)[0].name


def test_a_kernel_has_to_work_before_it_is_taken() -> None:
    asked = []

    def works(kernel: qa.InnerKernel) -> bool:
        asked.append(kernel.name)
        return len(asked) == 1

    constraints = PlanConstraints(128 << 20, depth=1)
    assert chosen(constraints, works) == "native"
    assert chosen(constraints, works) == "cudnn"
    assert asked == ["native", "native"]


def test_not_where_rates_were_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CallShape("cuda", torch.float16, 8, 8, 64, 64, True, True)
    preferred, device = get_kernel("cudnn"), torch.device("cuda")
    assert [k.name for k in rivals(preferred, call, device)] == ["native"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, names in (((9, 0), ["native"]), ((8, 0), [])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        assert [k.name for k in rivals(preferred, call, device)] == names


def test_the_number_that_is_named_is_of_a_kernel_that_works() -> None:
    smallest = []
    for answer in (True, False):
        with pytest.raises(qa.BudgetError) as raised:
            chosen(PlanConstraints(1 << 20), lambda kernel, answer=answer: answer)
        smallest.append(raised.value.smallest_bytes)
    assert smallest[0] < smallest[1]


def decided(n: int, kernel: str | qa.InnerKernel = "auto", **given) -> Decision:
    work = Workload((1,), 4, 4, n, n, 16, 16, torch.float32, False)
    return decide(work, PLACE, Options(torch.device("cpu"), kernel, **given), torch.float32)


@pytest.mark.parametrize(
    "given", [{"budget_bytes": 1 << 30}, {"depth": 0}, {"watched": True}], ids=str
)
def test_what_is_asked_for_by_its_caller_has_a_plan(given: dict[str, int]) -> None:
    assert decided(100, **given).plan is not None


def test_a_small_pass_is_planned_where_it_has_run_out_of_memory() -> None:
    first = decided(100)
    assert first.plan is None
    second = with_plan(first)
    assert second.plan is not None
    assert second.kernel is first.kernel


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("budget", ["64MiB", "1GiB"])
def test_a_rival_is_left_out_only_where_no_search_would_take_it(
    backward: bool, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No schedule is priced below the floor that a rival is left out by, and with a floor of 0
    the same is decided."""
    price, looked = search.price, []

    def priced(schedule: Any, case: Any, machine: Any) -> Any:
        found = price(schedule, case, machine)
        floor = least_seconds(case, machine)
        assert found.cost.seconds >= floor * (1 - 1e-9)
        looked.append(case.kernel.name)
        return found

    def decided(tokens: int) -> tuple[Any, ...]:
        found = qa.plan(
            tokens, heads=4, dtype=torch.float16, is_causal=True, budget=budget, backward=backward,
            device="cuda", inputs="host", depth=1,
        )  # fmt: skip
        return found.kernel, found.levels, found.peak_bytes, found.predicted_seconds

    monkeypatch.setattr(search, "price", priced)
    # Lengths that no other test has asked for: answers are remembered.
    lengths = [262_144 + 128 * random.randint(1, 900) for _ in range(2)]
    found = [decided(n) for n in lengths]
    left_out = "native" not in looked
    monkeypatch.setattr(module, "least_seconds", lambda *of: 0.0)
    assert [decided(n) for n in lengths] == found
    assert "native" in looked
    assert left_out == (budget == "1GiB")


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_short_and_lies_well_is_small(backward: bool) -> None:
    def small(n: int = 100, place: Placement = PLACE, batch: tuple[int, ...] = (1,)) -> bool:
        work = Workload(batch, 2, 2, n, n, 16, 16, torch.float32, True)
        problem = Problem(work, get_kernel("cpu"), spec_of(backward), place)
        return is_small(problem, torch.device("cpu"))

    assert small()
    assert not small(1 << 20)
    assert not small(place=replace(PLACE, resident=False))
    assert not small(place=replace(PLACE, dense_rows=False))
    assert not small(batch=(2, 2))


@pytest.mark.parametrize(("mib", "tokens"), [(16, 1 << 15), (4, 1 << 16)])
def test_a_kernel_is_built_where_it_is_clearly_faster_or_alone_fits(
    mib: int, tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever was called before. On a made-up GPU, where nothing is built: by default a forward of
    43 ms on the native kernel, of 110 on cuDNN's."""
    made_up_gpu(monkeypatch, tmp_path)
    built: list[str] = []
    monkeypatch.setattr(probing, "_tried", lambda kernel, *kind: built.append(kernel.name))
    work = Workload((1,), 8, 8, tokens, tokens, 64, 64, torch.float16, True)
    place = Placement("cuda", False, False, torch.float16)
    options = Options(GPU, budget_bytes=mib << 20)
    first, *others = (decide(work, place, options, torch.float16) for _ in range(3))
    assert first.kernel.name == "native"
    assert others == [first, first]
    assert built == ["cudnn", "native"]
