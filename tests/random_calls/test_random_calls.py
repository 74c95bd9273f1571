"""Hundreds of random calls against float64, the same each time; on a GPU where there is
one.

One of them alone: ``python -m random_calls --seed N`` with src and tests on the import
path; ``--count`` runs as many as you like.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.fa4 import FA4

import quorum_attention
from random_calls.__main__ import rows
from random_calls.draw import draw
from random_calls.run import check_seed

pytestmark = pytest.mark.usefixtures("one_thread")
CALLS = 1000 if torch.cuda.is_available() else 200
AT_ONCE = 50
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What a call may say no to: the limits of a kernel that was asked for by name.
REFUSALS = ("NotImplementedError: kernel '",)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", range(0, CALLS, AT_ONCE))
def test_calls(first: int) -> None:
    """Right in every element, inputs and other memory untouched, nothing left; or
    refused."""
    print(f"seeds {first} to {first + AT_ONCE - 1} on {DEVICE}")
    wrong, outcomes = [], Counter()
    for seed in range(first, first + AT_ONCE):
        verdict = check_seed(seed, DEVICE)
        outcomes[verdict.outcome] += 1
        if verdict.outcome == "refused" and not verdict.refusal.startswith(REFUSALS):
            verdict.add("refused", verdict.refusal)
        if verdict.outcome == "wrong":
            print(f"seed {seed}: {verdict}")
            wrong.append(seed)
    assert not wrong, f"seeds {wrong}: {outcomes}"
    assert outcomes["right"] > 0.8 * AT_ONCE, outcomes


def test_they_are_of_every_kind() -> None:
    cases = [draw(seed, DEVICE) for seed in range(400)]
    assert cases[:20] == [draw(seed, DEVICE) for seed in range(20)]
    planned = {
        one.levels for c in cases for one in (c.orders, c.backward_orders) if one
    }
    assert {
        (),
        (1,),
        (3,),
        (7,),
        (13,),
        (21,),
        (31,),
        (1, 7),
        (7, 7),
        (3, 3),
    } <= planned
    for least, what in (
        (3, lambda c: c.route), (4, lambda c: c.dtype), (10, lambda c: c.content),
        (9, lambda c: c.grad), (6, lambda c: c.kernel), (6, lambda c: c.batch),
        (4, lambda c: c.scale and c.scale / abs(c.scale)), (4, lambda c: c.orders.how),
        (5, lambda c: c.results.given and c.results.layout),
    ):  # fmt: skip
        assert len({what(c) for c in cases}) >= least
    assert len({layout for c in cases for layout in c.layouts}) == 13
    masks = [c.mask for c in cases if c.mask]
    assert {m.kind for m in masks} == {"bool", "float", "float32", "float64", "half"}
    rules = [c.rules for c in cases if c.rules]
    assert {"scattered", "runs", "two"} <= {one.documents for one in rules}
    shares = {
        "few keys": (0.06, lambda c: c.n_keys <= 5), "mask": (0.15, lambda c: c.mask),
        "few queries": (0.04, lambda c: c.n_queries <= 5), "lse_grad": (0.08, lambda c: c.lse_grad),
        "overlapping": (0.03, lambda c: "overlapping" in c.layouts),
        "long": (0.005, lambda c: c.n_queries > 600), "mask_grad": (0.04, lambda c: c.mask_grad),
        "wider mask": (0.06, lambda c: c.mask and c.mask.kind in ("float32", "float64", "half")),
        "rules": (0.1, lambda c: c.rules), "sinks": (0.02, lambda c: c.rules and c.rules.sinks),
        "scattered": (0.03, lambda c: c.rules and c.rules.documents in ("scattered", "two")),
        "crowded": (0.004, lambda c: math.prod(c.batch) >= 1000),
        "permuted": (0.03, lambda c: "permuted" in c.layouts),
        "failure": (0.015, lambda c: c.failure), "dropout": (0.03, lambda c: c.dropout),
    }  # fmt: skip
    for name, (share, kind) in shares.items():
        assert sum(map(bool, map(kind, cases))) > share * len(cases), name


@pytest.mark.slow
def test_processes_tell_of_each_seed_and_of_those_that_they_died_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python runs ``sitecustomize`` first: here it ends the process that draws seed
    15."""
    source = Path(quorum_attention.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{source}:{Path(__file__).parents[1]}")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, random\n"
        "class Random(random.Random):\n"
        "    def __init__(self, seed=None):\n"
        "        if seed == 15: os._exit(9)\n"
        "        super().__init__(seed)\n"
        "random.Random = Random\n"
    )
    found = {row["seed"]: row for row in rows(14, 3, 1, [])}
    assert sorted(found) == [14, 15, 16]
    assert found[14]["outcome"] == found[16]["outcome"] == "right", found
    assert found[15]["said"] == ["ends the process (9)"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", [FA4, "cudnn"])
def test_calls_of_kernels_that_are_seldom_drawn(kernel: str) -> None:
    found = [check_seed(seed, "cuda", kernel=kernel) for seed in range(60)]
    assert [str(one) for one in found if one.outcome == "wrong"] == []
    assert sum(one.outcome == "right" for one in found) > 20
