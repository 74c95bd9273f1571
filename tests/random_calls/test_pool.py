"""Random calls on a GPU: of few kinds, each seed once, neighbours in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from random_calls.case import Case, Mask, Scores
from random_calls.draw import draw, of_kind
from random_calls.pool import ALIKE, BLOCK, Kind, kind_of, pool
from random_calls.reference import Reference
from random_calls.tensors import DTYPES, make
from random_calls.workers import How, _Run, lots, rows

SEEDS = range(20_000)


def cases(count: int) -> Iterator[tuple[Case, Kind | None]]:
    for seed in SEEDS[:count]:
        number = kind_of(seed)
        yield draw(seed, "cuda"), None if number is None else pool()[number][0]


def test_what_is_compiled_for_is_of_the_kind() -> None:
    for case, kind in cases(4000):
        if kind is None:
            continue
        assert (case.kernel, case.dtype) == (kind.kernel, kind.dtype)
        assert (case.head_dim, case.value_dim) == (kind.head_dim, kind.value_dim)
        assert case.scores == kind.scores
        assert kind.masked or case.mask is None
        assert kind.dropped or not case.dropout
        assert kind.of_lse or case.lse_grad is None
        if kind.native:
            assert case.layouts.count("sliced") in (0, 4)
            assert case.n_queries == 1 or case.n_queries % 16 == 0 or case.n_queries % 2
        assert not (case.mask_grad and case.mask is None)


def test_kinds_are_of_neighbours_and_few_seeds_have_none() -> None:
    found = [kind_of(seed) for seed in SEEDS]
    assert all(found[seed] == found[seed // BLOCK * BLOCK] for seed in SEEDS)
    assert {n for n in found if n is not None} == set(range(len(pool())))
    assert 0.005 < found.count(None) / len(found) < 0.04
    assert sum(weight for _, weight in pool()) == pytest.approx(1.0)
    kernels = Counter(pool()[n][0].kernel for n in found if n is not None)
    assert all(kernels[name] > 100 for name in ("auto", "cudnn", "flash", "efficient", "native"))


def test_shapes_that_are_prepared_are_those_of_eight() -> None:
    def shape(case: Case) -> tuple[object, ...]:
        return (
            case.batch, case.heads, case.kv_heads, case.n_queries, case.n_keys, case.layouts,
            case.orders, case.backward_orders, case.is_causal, case.route, case.residency,
            None if case.mask is None else case.mask.spans,
        )  # fmt: skip

    groups: dict[int, list[Case]] = {}
    for case, kind in cases(12_000):
        if kind is not None and kind.shaped:
            groups.setdefault(case.seed // ALIKE, []).append(case)
    assert len({shape(group[0]) for group in groups.values()}) > 20
    for group in groups.values():
        assert len({shape(case) for case in group}) == 1
        assert len({str(case.content) + str(case.grad) + str(case.scale) for case in group}) > 1


def test_everything_else_is_drawn_as_freely() -> None:
    found = [case for case, _ in cases(4000)]
    assert len({(c.n_queries, c.n_keys) for c in found}) > 1000
    for name, least in (("route", 3), ("content", 10), ("grad", 9), ("batch", 6), ("layouts", 400)):
        assert len({getattr(c, name) for c in found}) >= least, name
    planned = {one.levels for c in found for one in (c.orders, c.backward_orders) if one}
    assert {(), (1,), (3,), (7,), (13,), (21,), (31,), (1, 7), (7, 7), (3, 3)} <= planned
    assert sum(c.mask is not None for c in found) > 400
    assert sum(c.failure is not None for c in found) > 50
    assert sum(c.planted is not None for c in found) > 80
    assert any(c.dropout for c in found)
    assert any(c.lse_grad for c in found)
    assert sum(c.orders.how == "budget" for c in found) > 600
    every = [one for c in found for one in (c.orders, c.backward_orders) if one is not None]
    assert sum(one.passing is not None for one in every) > 200


def test_free_ones_have_no_kind() -> None:
    widths = {draw(seed, "cuda", free=True).head_dim for seed in range(BLOCK)}
    assert len(widths) > 1
    assert draw(3, "cpu") == draw(3, "cpu", free=True)


def test_lengths_of_a_mask_that_triton_reads() -> None:
    kind = Kind("native", "float16", 64, 64)
    mask = Mask("bool", (False, False, True, True))
    for n in range(1, 70):
        case = of_kind(replace(draw(0), n_queries=n, n_keys=n, mask=mask), kind)
        assert case.n_keys % 16 == 0 or (case.n_keys % 2 and case.n_keys > 1)
        assert n <= case.n_queries <= max(3, n + 1)
    assert not replace(kind, scores=Scores(softcap=1.0), masked=False).masked


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("first", "count", "jobs"), [(0, 1000, 3), (7, 100, 4), (40, 5, 2)])
def test_every_seed_is_in_one_lot(device: str, first: int, count: int, jobs: int) -> None:
    found = lots(first, count, How(device=device, jobs=jobs))
    assert len(found) == jobs
    seeds = [seed for lot in found for run in lot for seed in range(*run)]
    assert sorted(seeds) == list(range(first, first + count))


def test_on_a_gpu_a_lot_is_of_few_kinds() -> None:
    found = lots(0, 10_000, How(device="cuda", jobs=15))
    kinds = [{kind_of(first) for first, _ in lot} - {None} for lot in found]
    assert sum(map(len, kinds)) <= len(pool()) + 14
    free = [sum(kind_of(first) is None for first, _ in lot) for lot in found]
    assert max(free) - min(free) <= 1


def test_who_has_done_helps_others() -> None:
    run = _Run(lots(0, 100, How(jobs=2)), How(jobs=2), "")
    given: list[tuple[int, int]] = []
    while (seeds := run.seeds(1)) is not None:
        given.append(seeds)
    assert sorted(seed for one in given for seed in range(*one)) == list(range(100))


def test_processes_tell_of_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    import random_calls

    folder = random_calls.__path__[0].rsplit("/", 1)[0]
    import quorum_attention

    src = quorum_attention.__path__[0].rsplit("/", 1)[0]
    monkeypatch.setenv("PYTHONPATH", f"{src}:{folder}")
    found = list(rows(14, 4, How(jobs=1, chunk=2)))
    assert sorted(row["seed"] for row in found) == [14, 15, 16, 17]
    assert all(row["outcome"] == "right" for row in found), found
    assert sum("start" in row["parts"] for row in found) == 2, "two processes, of two seeds each"
    assert all(row["parts"]["call"] > 0 for row in found)


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
