"""Random calls on a GPU are of few kinds, and each seed runs once, beside its neighbours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import quorum_attention
from random_calls.draw import draw
from random_calls.pool import ALIKE, BLOCK, kind_of, pool
from random_calls.reference import Reference
from random_calls.tensors import DTYPES, make
from random_calls.workers import How, lots, rows

SEEDS = range(20_000)


def test_what_is_compiled_for_is_of_the_kind() -> None:
    shaped: dict[int, set[tuple[object, ...]]] = {}
    for seed in SEEDS[:4000]:
        case, number = draw(seed, "cuda"), kind_of(seed)
        if number is None:
            continue
        kind = pool()[number][0]
        assert (case.kernel, case.dtype, case.head_dim, case.value_dim, case.scores) == (
            kind.kernel, kind.dtype, kind.head_dim, kind.value_dim, kind.scores,
        )  # fmt: skip
        assert kind.masked or case.mask is None
        assert kind.dropped or not case.dropout
        assert kind.of_lse or case.lse_grad is None
        if kind.native:
            assert case.layouts.count("sliced") in (0, 4)
            assert case.n_queries == 1 or case.n_queries % 16 == 0 or case.n_queries % 2
        if kind.shaped:
            shape = (case.batch, case.heads, case.n_queries, case.n_keys, case.layouts, case.orders)
            shaped.setdefault(seed // ALIKE, set()).add(shape)
    assert len(shaped) > 20
    assert all(len(shapes) == 1 for shapes in shaped.values())


def test_kinds_are_of_neighbours_and_few_seeds_have_none() -> None:
    found = [kind_of(seed) for seed in SEEDS]
    assert all(found[seed] == found[seed // BLOCK * BLOCK] for seed in SEEDS)
    assert {n for n in found if n is not None} == set(range(len(pool())))
    assert 0.005 < found.count(None) / len(found) < 0.04
    kernels = Counter(pool()[n][0].kernel for n in found if n is not None)
    assert all(kernels[name] > 100 for name in ("auto", "cudnn", "flash", "efficient", "native"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("first", "count", "jobs"), [(0, 1000, 3), (7, 100, 4), (40, 5, 2)])
def test_every_seed_is_in_one_lot(device: str, first: int, count: int, jobs: int) -> None:
    found = lots(first, count, How(device=device, jobs=jobs))
    assert len(found) == jobs
    assert sorted(seed for lot in found for seed in lot) == list(range(first, first + count))


def test_processes_tell_of_each_seed_and_of_those_that_they_died_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python runs ``sitecustomize`` first: here it ends the first process at its second seed."""
    source = Path(quorum_attention.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{source}:{Path(__file__).parents[1]}")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Seeds:\n"
        "    def __iter__(self):\n"
        "        for line in sys.__stdin__:\n"
        "            if int(line) == 15: os._exit(9)\n"
        "            yield line\n"
        "sys.stdin = Seeds()\n"
    )
    found = {row["seed"]: row for row in rows(14, 3, How(jobs=1))}
    assert sorted(found) == [14, 15, 16]
    assert found[14]["outcome"] == found[16]["outcome"] == "right", found
    assert found[15]["kinds"] == ["ends the process (9)"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_reference_is_the_same_on_a_gpu() -> None:
    """As far as matters: apart by much less than what is allowed."""
    for seed in range(300):
        case = draw(seed, "cuda")
        if case.dtype == "float64" or case.planted is not None:
            continue
        made, dtype = make(case, torch.device("cpu")), DTYPES[case.dtype]
        found = []
        for where in ("cpu", "cuda"):
            reference = Reference(case, made, torch.device(where))
            found.append(reference.forward(dtype) | reference.backward(dtype))
        for name, one in found[0].items():
            apart = (found[1][name].exact.cpu() - one.exact).abs().nan_to_num(0.0)
            assert bool((apart <= 1e-2 * one.bound).all()), (seed, name)
