"""Plans of many calls are what they were: levels, head groups, slots, route and bytes.

A line of the table is a call and its plan. A line changes wherever a search looks at
other cuts, or bytes are counted otherwise: then look at every line that differs, and
write the table anew (run this file with Python). Of predicted seconds the table says
nothing; they obey inequalities.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels.kit import from_score_mod, sliding_window
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.rates import assumed_hardware

TABLE = Path(__file__).with_suffix(".txt")
LINES = TABLE.read_text(encoding="utf-8").splitlines()
WINDOW = 4096
VALUES: dict[str, Any] = {
    "True": True,
    "False": False,
    "torch.float32": torch.float32,
    "(7,)": (7,),
    "(7,7)": (7, 7),
    "flex": from_score_mod(None, sliding_window(WINDOW), compiled=False),
}

# Each call of the table, as text.
CALLS = [line.partition(" | ")[0] for line in LINES]
# Those whose budget is large enough.
FITTING = [line.partition(" | ")[0] for line in LINES if "too small" not in line]
# Forward and backward of one call.
PAIRS = [
    (call.replace("backward=True", "backward=False"), call)
    for call in FITTING
    if "backward=True" in call
]
# Copies, launches and merges hardly count in calls of so many tokens.
LONG = [call for call in FITTING if "n=1048576 " in call]

pytestmark = [
    pytest.mark.usefixtures("assumed_rates"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="a GPU that is here has its own rates"
    ),
]


def cpu_capability() -> str:
    """The CPU whose workspace the table counts, in place of the CPU that is here."""
    return "AVX512"


@pytest.fixture
def assumed_rates(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rates of a CPU are assumed by its number of threads, and remembered."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", cpu_capability)
    hardware_of.cache_clear()
    yield
    hardware_of.cache_clear()


def arguments_of(call: str) -> dict[str, Any]:
    """The arguments of `qa.plan`; the number of tokens is called n."""
    arguments: dict[str, Any] = {}
    for assignment in call.split():
        name, value = assignment.split("=")
        arguments[name] = int(value) if value.isdigit() else VALUES.get(value, value)
    return arguments


def plan_of(call: str, **changes: Any) -> qa.Plan:
    arguments = arguments_of(call) | changes
    return qa.plan(arguments.pop("n"), **arguments)


@cache
def seconds_of(call: str) -> float:
    return plan_of(call).predicted_seconds


def arithmetic_seconds(call: str) -> float:
    """The seconds of the products alone: two in a forward, five in a backward."""
    arguments = arguments_of(call)
    n_queries = arguments["n"]
    n_pairs = n_queries * arguments.get("n_keys", n_queries)
    if arguments.get("is_causal", False):
        n_pairs = n_queries * (n_queries + 1) // 2
    if "kernel=flex" in call:
        n_pairs = min(n_pairs, n_queries * WINDOW - WINDOW * (WINDOW - 1) // 2)
    head_dim = arguments.get("head_dim", 64)
    n_heads = arguments.get("batch", 1) * arguments.get("heads", 8)
    flops_of_a_product = 2 * n_heads * n_pairs * head_dim

    device = torch.device(arguments["device"])
    rates = assumed_hardware(device, arguments.get("dtype", torch.bfloat16), head_dim)
    if arguments["backward"]:
        return 5 * flops_of_a_product / rates.backward_flops
    return 2 * flops_of_a_product / rates.flops


def line_of(call: str) -> str:
    """A line of the table: the call and its plan."""
    try:
        plan = plan_of(call)
    except qa.BudgetError as error:
        return f"{call} | too small, {error.smallest_bytes} bytes would do"
    levels = "x".join(map(str, plan.levels)) or "uncut"
    group = plan.schedule.group
    route = plan.schedule.route
    parts = (
        levels,
        f"{plan.n_tasks} tasks",
        f"group {group.batch}x{group.kv_heads}",
        f"n_cap {route.n_cap}",
        f"streams {route.streams}",
        route.words,
        f"{plan.peak_bytes} bytes",
    )
    return f"{call} | {', '.join(parts)}"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("line", LINES, ids=CALLS)
def test_a_plan_is_what_it_was(line: str) -> None:
    assert line_of(line.partition(" | ")[0]) == line


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", FITTING)
def test_no_pass_is_predicted_faster_than_its_arithmetic(call: str) -> None:
    assert seconds_of(call) >= arithmetic_seconds(call)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", LONG)
def test_a_long_pass_takes_little_more_than_its_arithmetic(call: str) -> None:
    assert seconds_of(call) <= 1.1 * arithmetic_seconds(call)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("forward", "backward"), PAIRS)
def test_a_backward_takes_longer_than_its_forward(forward: str, backward: str) -> None:
    assert seconds_of(backward) > seconds_of(forward)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("call", FITTING)
def test_twice_the_budget_is_not_slower(call: str) -> None:
    budget = arguments_of(call)["budget"]
    number = budget.rstrip("GMiB")
    twice = f"{2 * int(number)}{budget.removeprefix(number)}"
    # Of the blocks that stream by, a search looks at the largest that fit alone. Smaller
    # ones may be predicted up to 1 % faster.
    assert plan_of(call, budget=twice).predicted_seconds <= 1.01 * seconds_of(call)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.backends.cpu.get_cpu_capability = cpu_capability
    lines = [f"{line_of(call)}\n" for call in CALLS]
    TABLE.write_text("".join(lines), encoding="utf-8")
