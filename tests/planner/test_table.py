"""Plans of many calls are what they were: levels, head groups, slots, route, bytes and seconds.

They differ wherever a search looks at other cuts, or bytes and seconds are reckoned otherwise: then
look at every one that differs, and write the table anew (run this file with Python).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels.kit import from_score_mod, sliding_window
from quorum_attention.planner.calibration import hardware_of

TABLE = Path(__file__).with_suffix(".txt")
LINES = TABLE.read_text(encoding="utf-8").splitlines()
VALUES: dict[str, Any] = {
    "True": True, "False": False, "torch.float32": torch.float32, "(7,)": (7,), "(7,7)": (7, 7),
    "flex": from_score_mod(None, sliding_window(4096), compiled=False),
}  # fmt: skip

CAPABILITY = partial(str, "AVX512")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is here has its own rates"),
]


def line(before: str) -> str:
    """The call of a line, and its plan."""
    asked = before.partition(" | ")[0]
    named = dict(one.split("=") for one in asked.split())
    given = {k: int(v) if v.isdigit() else VALUES.get(v, v) for k, v in named.items()}
    try:
        made = qa.plan(given.pop("n"), **given)
    except qa.BudgetError as error:
        return f"{asked} | too small, {error.smallest_bytes} bytes would do"
    schedule = made.schedule
    levels = "x".join(map(str, made.levels)) or "uncut"
    return (
        f"{asked} | {levels}, {made.n_tasks} tasks, group "
        f"{schedule.group.batch}x{schedule.group.kv_heads}, n_cap {schedule.route.n_cap}, streams "
        f"{schedule.route.streams}, {schedule.route.words}, {made.peak_bytes} bytes, "
        f"{made.predicted_seconds:.6g} s"
    )


@pytest.fixture
def assumed(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rates of a CPU are assumed by its threads, and remembered; workspace depends on what it
    can do."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", CAPABILITY)
    hardware_of.cache_clear()
    yield
    hardware_of.cache_clear()


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("assumed")
@pytest.mark.parametrize("before", LINES)
def test_a_plan_is_what_it_was(before: str) -> None:
    assert line(before) == before


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.backends.cpu.get_cpu_capability = CAPABILITY
    TABLE.write_text("".join(f"{line(before)}\n" for before in LINES), encoding="utf-8")
