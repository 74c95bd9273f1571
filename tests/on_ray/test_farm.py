"""Calls on a farm give what one device gives, whoever dies; here with Ray in this process."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_conformance import Case, by_farm, in_files
from helpers_ray import FakeRay, fake_farm

import quorum_attention as qa
from quorum_attention.call.block import WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.errors import BudgetError
from quorum_attention.files.compute import file_call
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.ray import Farm
from quorum_attention.ray import compute as farm_compute
from quorum_attention.ray.compute import Unit, chunks_of, quorum, rows_of, tasks


@pytest.mark.parametrize("seed", range(6))
def test_whoever_dies(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a unit, after it, and while it writes a state."""
    draw, deaths = random.Random(seed), Counter[Any]()
    leave = farm_compute.Job.leave

    def dies(unit: Any) -> bool:
        found = deaths[unit] < 3 and draw.random() < 0.2
        deaths[unit] += found
        return found

    def cut_off(job: Any, unit: Any, chunk: int, state: Any) -> None:
        if draw.random() < 0.1:
            path = job.state_path(unit, unit.number, chunk)
            Path(f"{path}.12345678").write_bytes(b"half of it")
        leave(job, unit, chunk, state)

    monkeypatch.setattr(farm_compute.Job, "leave", cut_off)
    case = Case(1000 + seed)
    farm = fake_farm(FakeRay(draw, dies), workers=draw.choice([None, 1, 3]))
    case.check(by_farm(case, farm, tmp_path))


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Any]:
    """A call of some tokens, and a result for it."""

    def made(tokens: int = 60, keys: int | None = None, heads: int = 2, dim: int = 8) -> Any:
        keys = tokens if keys is None else keys
        q, k, v = (torch.randn(1, heads, n, dim) for n in (tokens, keys, keys))
        for name in ("in", "out"):
            (tmp_path / name).unlink(missing_ok=True)
        given = in_files(tmp_path / "in", {"q": q, "k": k, "v": v})
        out = in_files(tmp_path / "out", {"out": torch.full(q.shape, 7.0)}, writable=True)
        return *given.values(), out["out"]

    return made


def test_a_unit_that_kills_every_worker(call: Callable[..., Any], tmp_path: Path) -> None:
    q, k, v, out = call(2000, heads=1)
    farm = fake_farm(FakeRay(dies=lambda unit: unit.kind == "merge"))
    with pytest.raises(RuntimeError, match=r"merge.* was begun 4 times.*of 26 units"):
        farm.attention(q, k, v, out=out, chunks=13)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_results_are_repeatable_whatever_the_order(call: Callable[..., Any]) -> None:
    q, k, v, out = call(600)
    found = []
    for seed in range(3):
        fake_farm(FakeRay(random.Random(seed))).attention(q, k, v, out=out, chunks=7)
        found.append(out.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_budgets(call: Callable[..., Any]) -> None:
    q, k, v, out = call(3000, heads=1, dim=16)
    report = PoolReport()
    fake_farm(budget=8 << 20).attention(q, k, v, is_causal=True, out=out, chunks=7, report=report)
    assert torch.allclose(out, qa.attention(q, k, v, is_causal=True), atol=1e-5)
    assert report.forward is not None
    passes = [one.report.forward for one in report.forward.ran if one.report.forward is not None]
    assert passes
    assert all(one.budget_bytes <= 8 << 20 for one in passes)
    with pytest.raises(BudgetError):
        fake_farm(budget=1000).attention(q, k, v, out=out)


def test_what_a_mask_leaves_out_is_not_computed(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 13 chunks, a window of half a chunk keeps pairs of neighbours alone."""
    q, k, v, out = call(13 * 20, heads=1)
    blocks = []
    inner = farm_compute.compute_block

    def counted(whole: Any, block: Any, *args: Any) -> Any:
        blocks.append(block.rows.length * block.keys.length)
        return inner(whole, block, *args)

    monkeypatch.setattr(farm_compute, "compute_block", counted)
    mask = qa.Mask(causal=True, window=(10, 0))
    fake_farm().attention(q, k, v, mask, out=out, chunks=13)
    assert torch.allclose(out, qa.attention(q, k, v, mask), atol=1e-5)
    assert blocks == [400] * (13 + 12)


def test_masks_in_files(tmp_path: Path) -> None:
    q = torch.randn(2, 3, 2, 30, 8)
    given, out = in_files(tmp_path / "in", {"q": q, "out": q}, writable=True).values()
    for number, shape in enumerate(((2, 3, 2, 30, 30), (3, 1, 1, 30), (2, 1, 1, 30, 1))):
        mask = in_files(tmp_path / f"{number}", {"mask": torch.randn(shape)})["mask"]
        for chunks in (1, 3):
            fake_farm().attention(given, given, given, mask, out=out.zero_(), chunks=chunks)
            assert torch.allclose(out, qa.attention(q, q, q, mask), atol=1e-5)


def test_nothing_to_compute(call: Callable[..., Any], tmp_path: Path) -> None:
    sinks = torch.tensor([0.5, -1.0])
    q, k, v, out = call(5, 0)
    lse = in_files(tmp_path / "lse", {"lse": torch.zeros(1, 2, 5)}, writable=True)["lse"]
    fake_farm().attention_with_lse(q, k, v, qa.Mask(sinks=sinks), out=out, lse=lse)
    assert torch.equal(out, torch.zeros(1, 2, 5, 8))
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 5))
    q, k, v, out = call(5)
    call = file_call(CallOptions(devices="cpu"), {"query": q, "key": k, "value": v})
    assert not list(fake_farm().by_parts(call, {"out": out}, {}, report=PoolPass()))
    assert (out == 7).all(), "no part is computed, so nothing is written"
    empty = torch.empty(1, 2, 0, 8)
    assert fake_farm().attention(empty, q, q, out=empty.clone()).shape == empty.shape
    for shape in ((1, 0, 5, 8), (0, 2, 5, 8)):
        one = torch.ones(shape)
        assert fake_farm().attention(one, one, one, out=one.clone()).shape == shape


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunks": 8}, "8"),
        ({"chunks": 0}, "chunks"),
        ({"chunks": 7, "dropout_p": 0.5}, "chunks must be 1 for a call with dropout_p, got 7"),
        ({"attn_mask": qa.Mask(documents=torch.zeros(19, dtype=torch.int64))}, "Mask.documents"),
        ({"attn_mask": torch.zeros(60, 60, requires_grad=True)}, "must require no gradient"),
        ({"kernel": "nonsense"}, "nonsense"),
        ({"kernel": qa.kernels.get_kernel("dense")}, "kernel must be a name"),
        ({"depth": -1}, "depth"),
        ({"out": torch.zeros(1, 2, 60, 9)}, "out"),
        ({"out": torch.zeros(1, 2, 60, 8)}, "out must be mapped from a file"),
        ({"out": None}, "out must be a torch.Tensor"),
        ({"out": lambda out: out.view(1, 2, 8, 60).mT}, "rows of out must lie one after the other"),
        ({"key": torch.Tensor.clone}, "key must be mapped from a file"),
        ({"value": lambda v: v.clone().share_memory_()}, "value must be mapped from a file"),
        ({"query": torch.Tensor.requires_grad_}, "must require no gradient"),
    ],
)
def test_what_is_refused(call: Callable[..., Any], change: dict[str, Any], said: str) -> None:
    named = dict(zip(("query", "key", "value", "out"), call(), strict=True))
    changed = {
        n: new(named[n]) if callable(new) and n in named else new for n, new in change.items()
    }
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=said):
        fake_farm().attention(**{**named, **changed})
    assert (named["out"] == 7).all()


def test_a_log_sum_exp_over_anything_else_is_refused_before_any_work(tmp_path: Path) -> None:
    """It would be written over inputs that are read again, or over the output."""
    np.save(tmp_path / "in", np.ones((4, 1, 2, 20, 8), np.float32))
    mapped = torch.from_numpy(np.load(tmp_path / "in.npy", mmap_mode="r+"))
    query, key, value, out = mapped
    other = torch.from_numpy(np.load(tmp_path / "in.npy", mmap_mode="r+"))
    over = {"query": query[..., 0], "out": out[..., 3], "value": other[2, ..., 7]}
    call = fake_farm().attention_with_lse
    for name, lse in over.items():
        with pytest.raises(ValueError, match=f"lse must not share memory with {name}"):
            call(query, key, value, out=out, lse=lse)
    assert (mapped == 1).all()


@pytest.mark.parametrize("workers", [{"num_gpus": 1}, {"num_cpus": 3}, {"num_cpus": 0}])
def test_a_cluster_that_holds_no_worker(workers: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="no machine of the cluster holds a worker"):
        fake_farm(**workers)


def test_a_program_keeps_its_handler_of_a_signal() -> None:
    """``run --ray`` is stopped by SIGTERM as ``run`` is; Ray sets a handler of its own."""

    class Setting(FakeRay):
        def init(self, address: object, **options: object) -> None:
            super().init(address, **options)
            signal.signal(signal.SIGTERM, print)

    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        fake_farm(Setting())
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("seed", range(12))
def test_chunks_lie_side_by_side_and_each_pair_is_in_one_task(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.choice([1, 2, 100, 999, 5000, 20_011, 70_000, 900_001])
    m = draw.choice([n, n, 1, 250, 4097, 66_000, 800_000])
    call = WholeCall((1,), 2, 1, n, m, is_causal=draw.random() < 0.5)
    chunks = draw.choice([3, 7, 13, 21, 31])
    every = range(chunks)
    for a, b in product(every, every):
        assert a == b or len(tasks(a, chunks) & tasks(b, chunks)) == 1
    for task in every:
        held = set(quorum(task, chunks))
        assert held == {chunk for chunk in every if task in tasks(chunk, chunks)}
        assert task in held, "the owner's own pairs are its task's"
    for size in (n, m):
        spans = [rows_of(call, chunk, chunks, size) for chunk in every]
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == size
    for chunk in every if call.is_causal else ():
        queries, keys = (rows_of(call, chunk, chunks, size) for size in (n, m))
        assert queries.start == keys.start or not queries.length or not keys.length


def test_large_heads_are_cut_though_there_are_many() -> None:
    call = WholeCall((1,), 64, 64, 1 << 24, 1 << 24)
    assert chunks_of(call, 64, 2, 1 << 20, None) == 1
    assert chunks_of(call, 64, 2, 3 << 31, None) >= 13
    assert chunks_of(replace(call, dropout=Dropout(0.5, 1)), 64, 2, 3 << 31, None) == 1


def test_rows_are_written_only_into_the_files_of_a_call_that_runs(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of the file; by that of its device as well, on the program's own machine. A
    call that is over has removed its folder."""
    q, k, v, out = call(5)
    jobs: list[Any] = []
    monkeypatch.setattr(Farm, "_run", lambda self, job, *_: jobs.append(job) or iter(()))
    fake_farm().attention(q, k, v, out=out)
    (job,) = jobs
    sent, whole = job.results["out"], Unit("head", 0, 1)
    block = job.block(whole, 0, 0)
    rows = [torch.randn(1, 1, 5, 8), torch.zeros(1, 1, 5)]
    with pytest.raises(RuntimeError, match="this call is over"):
        job.write(block, rows)
    Path(job.folder).mkdir()
    machine, device, inode = sent.file
    for file, is_same in (
        ((machine, device, inode), True),
        (("another", device + 1, inode), True),
        ((machine, device + 1, inode), False),
        (("another", device, inode + 1), False),
    ):
        one = replace(job, results={"out": replace(sent, file=file)})
        out.fill_(7.0)
        if is_same:
            one.write(block, rows)
        else:
            with pytest.raises(OSError, match=f"{sent.path} is another file"):
                one.write(block, rows)
        assert torch.equal(out[:, 1:], rows[0] if is_same else torch.full((1, 1, 5, 8), 7.0))
        assert (out[:, 0] == 7).all()
