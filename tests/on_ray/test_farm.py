"""Calls on a farm give what one device gives, whoever dies: with Ray in this process,
and on one in this machine whose workers and driver are killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.conformance import Case, by_farm, in_files
from helpers.plans import shape_of
from helpers.processes import until
from helpers.ray import FakeRay, fake_farm

import quorum_attention as qa
from quorum_attention.call.options import CallOptions
from quorum_attention.cli import main
from quorum_attention.devices.handles import FileId
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.errors import BudgetError
from quorum_attention.files import open_tensors
from quorum_attention.files.file_call import file_call
from quorum_attention.quorums.interest import chunks_of_task, tasks_of_chunk
from quorum_attention.ray import Farm
from quorum_attention.ray import compute as farm_compute
from quorum_attention.ray import farm as ray_farm
from quorum_attention.ray.chunks import (
    FarmUnit,
    choose_n_chunks,
    rows_of_chunk,
)
from quorum_attention.ray.farm_pass import FarmPass


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(6))
def test_whoever_dies(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a unit, after it, and while it writes a state."""
    draw, deaths = random.Random(seed), Counter[Any]()
    leave_state = FarmPass.leave_state

    def dies(unit: Any) -> bool:
        found = deaths[unit] < 3 and draw.random() < 0.2
        deaths[unit] += found
        return found

    def cut_off(job: Any, unit: Any, chunk: int, state: Any) -> None:
        if draw.random() < 0.1:
            path = job.state_path(unit, unit.number, chunk)
            Path(f"{path}.12345678").write_bytes(b"half of it")
        leave_state(job, unit, chunk, state)

    monkeypatch.setattr(FarmPass, "leave_state", cut_off)
    case = Case(1000 + seed)
    farm = fake_farm(FakeRay(draw, dies), workers=draw.choice([None, 1, 3]))
    case.check(by_farm(case, farm, tmp_path))


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Any]:
    """A call of some tokens, and a result for it."""

    def made(
        tokens: int = 60, keys: int | None = None, heads: int = 2, dim: int = 8
    ) -> Any:
        keys = tokens if keys is None else keys
        q, k, v = (torch.randn(1, heads, n, dim) for n in (tokens, keys, keys))
        for name in ("in", "out"):
            (tmp_path / name).unlink(missing_ok=True)
        given = in_files(tmp_path / "in", {"q": q, "k": k, "v": v})
        out = in_files(
            tmp_path / "out", {"out": torch.full(q.shape, 7.0)}, writable=True
        )
        return *given.values(), out["out"]

    return made


def test_a_unit_that_kills_every_worker(
    call: Callable[..., Any], tmp_path: Path
) -> None:
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
    fake_farm(budget=8 << 20).attention(
        q, k, v, is_causal=True, out=out, chunks=7, report=report
    )
    assert torch.allclose(out, qa.attention(q, k, v, is_causal=True), atol=1e-5)
    assert report.forward is not None
    passes = [
        one.report.forward
        for one in report.forward.ran
        if one.report.forward is not None
    ]
    assert passes
    assert all(one.budget_bytes <= 8 << 20 for one in passes)
    with pytest.raises(BudgetError):
        fake_farm(budget=2000).attention(q, k, v, out=out)


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
    for number, shape in enumerate(
        ((2, 3, 2, 30, 30), (3, 1, 1, 30), (2, 1, 1, 30, 1))
    ):
        mask = in_files(tmp_path / f"{number}", {"mask": torch.randn(shape)})["mask"]
        for chunks in (1, 3):
            fake_farm().attention(
                given, given, given, mask, out=out.zero_(), chunks=chunks
            )
            assert torch.allclose(out, qa.attention(q, q, q, mask), atol=1e-5)


def test_nothing_to_compute(call: Callable[..., Any], tmp_path: Path) -> None:
    sinks = torch.tensor([0.5, -1.0])
    q, k, v, out = call(5, 0)
    lse = in_files(tmp_path / "lse", {"lse": torch.zeros(1, 2, 5)}, writable=True)[
        "lse"
    ]
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
        (
            {"chunks": 7, "dropout_p": 0.5},
            "chunks must be 1 for a call with dropout_p, got 7",
        ),
        (
            {"attn_mask": qa.Mask(documents=torch.zeros(19, dtype=torch.int64))},
            "Mask.documents",
        ),
        (
            {"attn_mask": torch.zeros(60, 60, requires_grad=True)},
            "must require no gradient",
        ),
        ({"kernel": "nonsense"}, "nonsense"),
        ({"kernel": qa.kernels.get_kernel("dense")}, "kernel must be a name"),
        ({"depth": -1}, "depth"),
        ({"out": torch.zeros(1, 2, 60, 9)}, "out"),
        ({"out": torch.zeros(1, 2, 60, 8)}, "out must be mapped from a file"),
        ({"out": None}, "out must be a torch.Tensor"),
        (
            {"out": lambda out: out.view(1, 2, 8, 60).mT},
            "rows of out must lie one after the other",
        ),
        ({"key": torch.Tensor.clone}, "key must be mapped from a file"),
        (
            {"value": lambda v: v.clone().share_memory_()},
            "value must be mapped from a file",
        ),
        ({"query": torch.Tensor.requires_grad_}, "must require no gradient"),
    ],
)
def test_what_is_refused(
    call: Callable[..., Any], change: dict[str, Any], said: str
) -> None:
    named = dict(zip(("query", "key", "value", "out"), call(), strict=True))
    changed = {
        n: new(named[n]) if callable(new) and n in named else new
        for n, new in change.items()
    }
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=said):
        fake_farm().attention(**{**named, **changed})
    assert (named["out"] == 7).all()


def test_a_log_sum_exp_over_anything_else_is_refused_before_any_work(
    tmp_path: Path,
) -> None:
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
    """``run --ray`` is stopped by SIGTERM as ``run`` is; Ray sets a handler of its
    own."""

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
    call = shape_of((1,), 2, 1, n, m, draw.random() < 0.5)
    chunks = draw.choice([3, 7, 13, 21, 31])
    every = range(chunks)
    for a, b in product(every, every):
        assert (
            a == b
            or len({*tasks_of_chunk(a, chunks)} & {*tasks_of_chunk(b, chunks)}) == 1
        )
    for task in every:
        held = set(chunks_of_task(task, chunks))
        assert held == {
            chunk for chunk in every if task in tasks_of_chunk(chunk, chunks)
        }
        assert task in held, "the owner's own pairs are its task's"
    for size in (n, m):
        spans = [rows_of_chunk(call, chunk, chunks, size) for chunk in every]
        assert [span.start for span in spans] == [
            0,
            *(span.stop for span in spans[:-1]),
        ]
        assert spans[-1].stop == size
    for chunk in every if call.is_causal else ():
        queries, keys = (rows_of_chunk(call, chunk, chunks, size) for size in (n, m))
        assert queries.start == keys.start or not queries.length or not keys.length


def test_large_heads_are_cut_though_there_are_many() -> None:
    call = shape_of((1,), 64, 64, 1 << 24, 1 << 24)
    assert choose_n_chunks(call, 64, 2, 1 << 20, None) == 1
    assert choose_n_chunks(call, 64, 2, 3 << 31, None) >= 13
    assert choose_n_chunks(replace(call, dropout=True), 64, 2, 3 << 31, None) == 1


def test_rows_are_written_only_into_the_files_of_a_call_that_runs(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of the file; by that of its device as well, on the program's own
    machine. A call that is over has removed its folder."""
    q, k, v, out = call(5)
    jobs: list[Any] = []
    monkeypatch.setattr(
        Farm, "_run", lambda self, job, *_: jobs.append(job) or iter(())
    )
    fake_farm().attention(q, k, v, out=out)
    (job,) = jobs
    sent, whole = job.results["out"], FarmUnit("head", 0, 1)
    block = job.block(whole, 0, 0)
    rows = [torch.randn(1, 1, 5, 8), torch.zeros(1, 1, 5)]
    with pytest.raises(RuntimeError, match="this call is over"):
        job.write_results(block, rows)
    Path(job.folder).mkdir()
    machine, device, inode = sent.file
    for file, is_same in (
        (FileId(machine, device, inode), True),
        (FileId("another", device + 1, inode), True),
        (FileId(machine, device + 1, inode), False),
        (FileId("another", device, inode + 1), False),
    ):
        one = replace(job, results={"out": replace(sent, file=file)})
        out.fill_(7.0)
        if is_same:
            one.write_results(block, rows)
        else:
            with pytest.raises(OSError, match=f"{sent.path} is another file"):
                one.write_results(block, rows)
        assert torch.equal(
            out[:, 1:], rows[0] if is_same else torch.full((1, 1, 5, 8), 7.0)
        )
        assert (out[:, 0] == 7).all()


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def command_of(pid: int) -> str:
    """The command of a process; nothing of one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def commands_below(pid: int) -> dict[int, str]:
    """The processes that one has begun, and these, and so on, with their commands."""
    found: dict[int, str] = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found |= {child: command_of(child), **commands_below(child)}
    return found


def wait_for_end(pids: Iterable[int]) -> None:
    pids = set(pids)
    until(lambda: not any(map(command_of, pids)), 30)


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    import ray

    with (
        pytest.MonkeyPatch.context() as patch,
        # Sockets are in it, whose names must be short.
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder,
    ):
        # A token would be written to the home folder.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Rules of masks are functions of modules that workers have.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", object_store_memory=100 << 20, _temp_dir=folder,
        )  # fmt: skip
        try:
            with Farm() as made:
                yield made
                assert ray.is_initialized(), "it was not begun by the farm"
                workers = commands_below(os.getpid())
        finally:
            ray.shutdown()
        wait_for_end(pid for pid, command in workers.items() if "ray" in command)


@pytest.mark.slow
@needs_ray
def test_as_on_one_device_also_after_an_error(farm: Farm, tmp_path: Path) -> None:
    tensors = {name: torch.randn(1, 2, 50, 8) for name in "qkvo"}
    q, k, v, out = in_files(tmp_path / "in", tensors, writable=True).values()
    with pytest.raises(qa.BudgetError, match="budget"):
        Farm(budget=1024).attention(q, k, v, out=out, chunks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    (tmp_path / "in").unlink()
    for seed in (2000, 2001):
        case = Case(seed)
        case.check(by_farm(case, farm, tmp_path))


@pytest.mark.slow
@needs_ray
def test_workers_killed_at_random_moments(farm: Farm, tmp_path: Path) -> None:
    """Others finish what they had not, and nothing is left behind."""
    draw, case, over = random.Random(), Case(11), threading.Event()
    killed: list[int] = []
    # A call of a second.
    case.dtype, case.mask, case.options = (
        torch.float32,
        None,
        {"is_causal": True, "scale": None},
    )
    case.inputs = [torch.randn(1, 2, 900, 16) for _ in range(4)]

    def kill() -> None:
        while len(killed) < 2 and not over.wait(draw.uniform(0.2, 1.0)):
            for pid, command in commands_below(os.getpid()).items():
                if command.startswith("ray::compute"):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    break

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        limit = time.monotonic() + 60
        while killer.is_alive() and time.monotonic() < limit:
            case.check(by_farm(case, farm, tmp_path, 7))
    finally:
        over.set()
        killer.join()
    assert len(killed) == 2
    case.check(by_farm(case, farm, tmp_path, 7))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@needs_ray
def test_a_killed_driver_loses_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers end, and a second run goes on, to the bits of one that nobody
    disturbed."""
    shape = 1, 4, 1500, 16
    inputs = {name: torch.randn(shape) for name in ("query", "key", "value")}
    safetensors.torch.save_file(inputs, tmp_path / "in")
    command = ["run", str(tmp_path / "in"), str(tmp_path / "out"), "--causal", "--ray", "local",
               "--chunks", "7", "--keep-every", "1", "--ray-cpus", "1"]  # fmt: skip
    driver = subprocess.Popen(
        [sys.executable, "-m", "quorum_attention", *command],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: list(tmp_path.glob("**/*.states-*/*-*")), 120)
    time.sleep(random.uniform(0, 1.5))
    # Agents of Ray's own stay for a minute.
    of_ray = [pid for pid, command in commands_below(driver.pid).items()
              if command.startswith(("ray::compute", "ray::IDLE"))]  # fmt: skip
    driver.kill()
    driver.wait()
    wait_for_end(of_ray)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(ray_farm, "import_ray", FakeRay)
    assert main([*command, "--resume"]) == 0
    command[2] = str(tmp_path / "wanted")
    assert main(command) == 0
    wanted, out = (open_tensors(tmp_path / name)["out"] for name in ("wanted", "out"))
    assert torch.equal(wanted, out)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "wanted", "out"}


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[ray\]"'):
        Farm()


def test_a_cluster_is_joined_only_where_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be another user's: what its workers answer is unpickled here."""
    ray = FakeRay()
    monkeypatch.setattr(ray_farm, "import_ray", lambda: ray)

    def joined(*address: str | None) -> object:
        ray.asked.clear()
        Farm(*address).close()
        return ray.asked[-1]

    assert joined() == joined(None) == joined("local") == "local"
    assert joined("auto") == "auto"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert joined(address) == address
    with pytest.raises(ConnectionError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        joined("127.0.0.1:1")
    for wrong in ("nonsense", "host:", "7"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            joined(wrong)
    assert not ray.asked, "nor is another one begun"
