"""The soak finds what it is for, and five minutes of it find nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from soak.outcome import Kind, Outcome, Where, compare, textbook
from soak.report import markdown
from soak.run import KINDS, Soak
from soak.verdict import LEFT, LIMITS, complaints, growth, slope

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 5


def rows(**grows: float) -> list[dict[str, Any]]:
    """An hour of rows, a minute apart; what is named grows by so much a minute."""
    return [
        {"seconds": 60.0 * i, "calls": i, "wrong": 0}
        | {name: 1000 + grows.get(name, 0.0) * i for name in LIMITS}
        for i in range(60)
    ]


@pytest.mark.parametrize("name", LIMITS)
def test_a_leak_is_found_by_its_name(name: str) -> None:
    found = rows(**{name: LIMITS[name] / 20})
    (words,) = complaints(found, found[0], found[0])
    assert words.startswith(f"{name} grew by")


def test_a_warm_up_and_a_few_jumps_are_no_leak() -> None:
    found = rows()
    for i, row in enumerate(found):
        row["anonymous"] = (
            10 * LIMITS["anonymous"] if i in (31, 40, 55) else min(i, 20) * LIMITS["anonymous"]
        )
    assert growth(found)["anonymous"] == 0
    assert complaints(found, found[0], found[0]) == []
    assert slope([0, 1], [5, 7]) == 2


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_found(name: str) -> None:
    found = rows()
    ended = found[0] | {name: found[0][name] + LEFT[name] + 1}
    (words,) = complaints(found, found[0], ended)
    assert words.startswith(f"{name}:")


def test_a_wrong_call_and_one_that_raises_are_told_with_what_repeats_them(tmp_path: Path) -> None:
    said: list[str] = []

    def off(where: Where, draw: random.Random) -> Outcome:
        outcome = Outcome(calls=1)
        exact = torch.zeros(3)
        compare("out", exact + draw.choice([0.0, 1.0]), exact, torch.float32, outcome)
        return outcome

    def broken(where: Where, draw: random.Random) -> Outcome:
        raise RuntimeError("by accident")

    soak = Soak(Where("cpu", tmp_path, ROOT / "src", ROOT / "tests"), 7, said.append)
    for _ in range(8):
        soak.step(Kind("off", 1, off))
    soak.step(Kind("broken", 1, broken))
    assert "by accident" in soak.wrong[-1]
    assert 1 < len(soak.wrong) < 9
    number = int(soak.wrong[0].split("--step ")[1].split()[0])
    assert off(soak.where, soak.source("off", number)).wrong
    assert len(said) == len(soak.wrong)
    assert soak.calls == {"off": 8, "broken": 1}
    text = markdown(soak.data() | {"passed": False, "rows": rows(), "growth": growth(rows())})
    assert "FAILED" in text
    assert soak.wrong[0] in text


def test_the_textbook_is_torchs() -> None:
    q, k, v, upstream = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(4))
    three = [t.requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*three, is_causal=True)
    found = [out.detach(), *torch.autograd.grad(out, three, upstream)]
    exact = textbook(*three, upstream, is_causal=True)
    for one, other in zip(found, (exact[0], *exact[2:]), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name in ("masks", "sdpa", "threads")],
                         ids=lambda kind: kind.name)  # fmt: skip
def test_some_steps_of_a_kind_are_right(kind: Kind, tmp_path: Path) -> None:
    soak = Soak(Where("cpu", tmp_path, ROOT / "src", ROOT / "tests"), 0)
    soak.step(kind)
    assert soak.calls[kind.name] > 0
    assert not soak.wrong


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 900)
def test_some_minutes(tmp_path: Path) -> None:
    """As a user would start it; QUORUM_ATTENTION_SEED, any word, makes other calls of it."""
    seed = str(random.randrange(1 << 30))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(MINUTES), "--seed", seed]
    done = subprocess.run(
        [*command, "--device", device, "--json", str(tmp_path / "soak.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    assert (tmp_path / "soak.md").exists()
