"""A farm on a Ray of two workers in this machine, some of which are killed."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers_farm import Case
from safetensors.torch import save_file

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.devices.report import PoolPass, PoolReport
from quorum_attention.farm import Farm, cluster
from quorum_attention.farm.cluster import Workers, _check_there
from quorum_attention.files import open_tensors

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def processes(farm: Farm) -> list[int]:
    return [int(re.search(r"process (\d+)", label)[1]) for label in farm.workers]  # type: ignore[index]


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_for_end(pids: list[int]) -> None:
    limit = time.monotonic() + 10
    while any(map(is_there, pids)):
        assert time.monotonic() < limit, "a worker is still there"
        time.sleep(0.05)


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
        ray.init(
            "local", num_cpus=3, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", object_store_memory=100 << 20, _temp_dir=folder,
        )  # fmt: skip
        try:
            with Farm(workers=2) as made:
                yield made
                pids = processes(made)
        finally:
            ray.shutdown()
        wait_for_end(pids)


def each_once(one: PoolPass | None) -> None:
    assert one is not None
    assert sorted(ran.index for ran in one.ran) == list(range(one.parts))


@needs_ray
@pytest.mark.parametrize("seed", range(4))
def test_as_on_one_device(farm: Farm, seed: int, tmp_path: Path) -> None:
    case = Case(2000 + seed)
    case.in_files(farm, tmp_path)
    if case.options["is_causal"] or seed % 2:
        report = case.in_memory(farm)
        each_once(report.forward)
        assert report.forward is not None
        assert report.forward.copied_bytes > 0


@needs_ray
def test_a_mask_goes_along(farm: Farm) -> None:
    q, mask = torch.randn(2, 2, 60, 8), torch.randn(2, 1, 60, 60)
    assert torch.allclose(farm.attention(q, q, q, mask), qa.attention(q, q, q, mask), atol=1e-5)
    ids = torch.arange(60) // 25
    described = qa.Mask(causal=True, window=30, documents=ids, sinks=torch.randn(2), bias=mask)
    for options in ({"chunks": 7}, {"dropout_p": 0.5, "dropout_seed": 3}):
        got = farm.attention(q, q, q, described, **options)
        options.pop("chunks", None)
        assert torch.allclose(got, qa.attention(q, q, q, described, **options), atol=1e-5)


@needs_ray
def test_on_the_command_line(farm: Farm, tmp_path: Path) -> None:
    q = torch.randn(1, 2, 500, 16)
    save_file({"q": q, "k": q.clone(), "v": q.clone()}, tmp_path / "in.safetensors")
    files = [str(tmp_path / name) for name in ("in.safetensors", "out.safetensors")]
    # Its workers get what the farm of these tests has left of the machine.
    options = ["--ray", "auto", "--ray-workers", "1", "--ray-cpus", "0.25", "--chunks", "7"]
    assert main(["run", *files, "--causal", *options]) == 0
    out = open_tensors(files[1])["out"]
    assert torch.allclose(out, qa.attention(q, q, q, is_causal=True), atol=1e-5)


@needs_ray
def test_errors_come_through(farm: Farm, tmp_path: Path) -> None:
    case = Case(7)
    with pytest.raises(ValueError, match="kernel"):
        farm.attention(*case.inputs[:3], kernel="nonsense", **case.options)
    case.in_files(farm, tmp_path)  # its workers are well


@needs_ray
def test_workers_killed_at_random_moments(farm: Farm, tmp_path: Path) -> None:
    """The others finish what they had not, another one comes, and nothing is left behind; at last
    all of them die at once."""
    draw = random.Random()
    case = Case(11)  # sizes are made below: a call of half a second
    case.dtype, case.chunks = torch.float32, 13
    case.inputs = [torch.randn(1, 2, 1500, 16) for _ in range(4)]
    case.options = {"is_causal": True, "enable_gqa": True, "scale": None}
    case.compute()
    for round_ in range(3):
        victims = processes(farm) if round_ == 2 else processes(farm)[:1]
        timers = [
            threading.Timer(draw.uniform(0.0, 0.4), os.kill, (victim, signal.SIGKILL))
            for victim in victims
        ]
        for timer in timers:
            timer.start()
        report = PoolReport()
        while any(timer.is_alive() for timer in timers) or report.forward is None:
            (folder := tmp_path / f"{round_}-{draw.random()}").mkdir()
            report = case.in_files(farm, folder)
            each_once(report.forward)
            each_once(report.backward)
        case.in_memory(farm)
        wait_for_end(victims)
    assert not set(processes(farm)) & set(victims)


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'quorum-attention\[ray\]'"):
        Farm()


class NoRay:
    """In the place of Ray: a cluster of somebody's runs here, and any is joined that is asked for.

    Attributes:
        asked: the addresses.
    """

    def __init__(self) -> None:
        self.asked: list[object] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, address: object, **options: object) -> None:
        self.asked.append(address)

    def cluster_resources(self) -> dict[str, float]:
        raise KeyboardInterrupt  # it is there: that was all


@pytest.mark.parametrize(
    ("address", "joined"), [((), "local"), ((None,), "local"), (("local",), "local"),
                            (("auto",), "auto")],
)  # fmt: skip
def test_a_cluster_that_runs_is_joined_only_where_that_is_said(
    address: tuple[str | None, ...], joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another user's: what its workers answer is unpickled here."""
    ray = NoRay()
    monkeypatch.setattr(cluster, "ray_here", lambda: ray)
    with pytest.raises(KeyboardInterrupt):
        Farm(*address)
    assert ray.asked == [joined]


def test_an_address_is_joined_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = NoRay()
    monkeypatch.setattr(cluster, "ray_here", lambda: ray)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(KeyboardInterrupt):
            Farm(address)
    assert ray.asked == [address]
    with pytest.raises(ConnectionError, match="no Ray cluster"):
        Farm("127.0.0.1:1")
    assert ray.asked == [address], "nor is another one begun"


def test_addresses_where_nobody_is() -> None:
    with pytest.raises(ConnectionError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        _check_there("127.0.0.1:1")
    for wrong in ("nonsense", "host:", "7"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            _check_there(wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"count": 0}, "count"),
        ({"num_cpus": -1}, "num_cpus"),
        ({"num_gpus": "one"}, "num_gpus"),
        ({"num_cpus": 0}, "both"),
        ({"budget": "much"}, "much"),
    ],
)
def test_workers_that_make_no_sense(wrong: dict[str, object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        Workers(**wrong)  # type: ignore[arg-type]


def test_how_many_a_cluster_holds() -> None:
    there = {"CPU": 12.0, "GPU": 2.0, "large": 1.0}
    assert Workers().held(there) == 12
    assert Workers(num_gpus=0.5).held(there) == 4
    assert Workers(num_cpus=5, num_gpus=1).held(there) == 2
    assert Workers(resources={"large": 1}).held(there) == 1
    assert Workers(resources={"other": 1}).held(there) == 0
