"""Plans of many calls are what they were: levels, head groups, slots, route, bytes and seconds.

They differ wherever a search looks at other cuts, or bytes and seconds are reckoned otherwise: then
look at every one that differs, and write the table anew (run this file with Python).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels.kit import from_score_mod, sliding_window
from quorum_attention.planner.calibration import hardware_of

TABLE = Path(__file__).with_suffix(".txt")
MASK = from_score_mod(None, sliding_window(4096), compiled=False)
GQA = {"heads": 32, "kv_heads": 8, "head_dim": 128}
WIDE = {"dtype": torch.float32, "batch": 2}
GPU: list[tuple[int, str, dict[str, Any]]] = [
    (4096, "16MiB", {}),
    (4096, "1GiB", GQA),
    (65_536, "128MiB", {"is_causal": True}),
    (65_536, "8GiB", {"is_causal": True}),
    (65_536, "1GiB", WIDE),
    (262_144, "1GiB", {**GQA, "is_causal": True}),
    (262_144, "1GiB", {"kernel": "native", "is_causal": True}),
    (262_144, "1GiB", {"kernel": MASK, "is_causal": True}),
    (1_048_576, "128MiB", {"is_causal": True}),
    (30_011, "300MiB", {"n_keys": 70_001, "n_cap": 3}),
    (30_011, "300MiB", {"levels": (7, 7), "accumulator": "host"}),
]
CPU: list[tuple[int, str, dict[str, Any]]] = [
    (3000, "16MiB", {"is_causal": True, "heads": 8, "kv_heads": 2}),
    (20_000, "64MiB", {"dtype": torch.float32, "is_causal": True}),
    (20_000, "1GiB", {"kernel": "dense"}),
    (20_000, "64MiB", {"kernel": MASK, "is_causal": True}),
    (3000, "64MiB", {"over_inputs": True, "levels": (7,)}),
    (20_000, "16MiB", {"dtype": torch.float32, "is_causal": True, "results_given": True}),
    (20_000, "48MiB", {"is_causal": True, "results_given": True}),
]
CALLS = [
    *((*call, {"device": "cuda", "inputs": inputs, "backward": backward})
      for call, inputs, backward in product(GPU, ("host", "device"), (False, True))),
    *((*call, {"device": "cpu", "backward": backward})
      for call, backward in product(CPU, (False, True))),
]  # fmt: skip

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is here has its own rates"),
]


def line(n: int, budget: str, sizes: dict[str, Any], where: dict[str, Any]) -> str:
    """A call, and its plan."""
    named = {"n": n, "budget": budget, **sizes, **where}
    asked = " ".join(f"{name}={getattr(value, 'name', value)}" for name, value in named.items())
    asked = asked.replace(", ", ",")
    try:
        made = qa.plan(n, budget=budget, **sizes, **where)
    except qa.BudgetError as error:
        return f"{asked} | too small, {error.smallest_bytes} bytes would do"
    schedule = made.schedule
    levels = "x".join(map(str, made.levels)) or "uncut"
    return (
        f"{asked} | {levels}, {made.n_tasks} tasks, group "
        f"{schedule.group.batch}x{schedule.group.kv_heads}, n_cap {schedule.n_cap}, streams "
        f"{schedule.streams}, {schedule.route.words}, {made.peak_bytes} bytes, "
        f"{made.predicted_seconds:.6g} s"
    )


@pytest.fixture
def assumed(one_thread: None) -> Iterator[None]:
    """The rates of a CPU are assumed by its threads, and remembered."""
    hardware_of.cache_clear()
    yield
    hardware_of.cache_clear()


@pytest.mark.usefixtures("assumed")
@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_plan_is_what_it_was(number: int) -> None:
    wanted = TABLE.read_text(encoding="utf-8").splitlines()
    assert len(wanted) == len(CALLS)
    assert line(*CALLS[number]) == wanted[number]


if __name__ == "__main__":
    torch.set_num_threads(1)
    TABLE.write_text("".join(f"{line(*call)}\n" for call in CALLS), encoding="utf-8")
