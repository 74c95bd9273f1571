"""The soak finds leaks and wrong calls, and a short one finds nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import soak
import torch

import quorum_attention

SECONDS = 20


def rows(**grows: float) -> list[dict[str, float]]:
    """An hour of rows, a minute apart; what is named grows by so much a minute."""
    return [
        {"seconds": 60.0 * i} | {name: 1000 + grows.get(name, 0.0) * i for name in soak.LIMITS}
        for i in range(60)
    ]


@pytest.mark.parametrize("name", soak.LIMITS)
def test_a_leak_is_found_by_its_name(name: str) -> None:
    (words,) = soak.grown(rows(**{name: soak.LIMITS[name] / 20}))
    assert words.startswith(f"{name} grew by")


def test_a_warm_up_and_a_few_jumps_are_no_leak() -> None:
    found, limit = rows(), soak.LIMITS["anonymous"]
    for i, row in enumerate(found):
        row["anonymous"] = 10 * limit if i in (31, 40, 55) else min(i, 20) * limit
    assert soak.grown(found) == []


def test_a_wrong_call_and_one_that_raises_are_told_with_what_repeats_them() -> None:
    def off(step: soak.Step) -> None:
        exact = torch.zeros(3)
        step.compare("out", [exact + step.draw.choice([0.0, 1.0])], [exact])

    def broken(step: soak.Step) -> None:
        raise RuntimeError("by accident")

    found = soak.Soak("cpu", 7)
    for _ in range(8):
        found.step(off)
    found.step(broken)
    assert "by accident" in found.wrong[-1]
    assert 1 < len(found.wrong) < 9
    again = soak.Soak("cpu", 7)
    again.step(off, int(found.wrong[0].split("--step ")[1].split()[0]))
    assert len(again.wrong) == 1


@pytest.mark.parametrize("kind", [soak.masks, soak.sdpa, soak.at_once])
def test_some_steps_of_a_kind_are_right(kind) -> None:
    found = soak.Soak("cpu", 0)
    found.step(kind)
    assert found.calls.total() > 0
    assert not found.wrong


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_a_short_soak(tmp_path: Path) -> None:
    seed = str(random.randrange(1 << 30))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = Path(quorum_attention.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "soak", "--minutes", str(SECONDS / 60), "--seed", seed,
         "--device", device, "--json", str(tmp_path / "soak.json")],
        env=os.environ | {"PYTHONPATH": f"{source}:{Path(__file__).parent}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    assert (tmp_path / "soak.json").exists()
