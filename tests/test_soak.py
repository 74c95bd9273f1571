"""The soak finds leaks, and a short one finds nothing."""

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

SECONDS = 10


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


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
def test_a_short_soak() -> None:
    seed = str(random.randrange(1 << 30))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = Path(quorum_attention.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "soak", "--minutes", str(SECONDS / 60), "--seed", seed,
         "--device", device],
        env=os.environ | {"PYTHONPATH": f"{source}:{Path(__file__).parent}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    assert all(f"'{kind}': " in done.stdout for kind in ("alone", "at once", "interrupts"))
