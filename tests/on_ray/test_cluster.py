"""A farm on a Ray in this machine: its workers and its driver are killed."""

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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers_conformance import Case, by_farm, in_files
from helpers_ray import FakeRay

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.files import open_tensors
from quorum_attention.ray import Farm
from quorum_attention.ray import farm as ray_farm

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
    limit, pids = time.monotonic() + 30, set(pids)
    while any(map(command_of, pids)):
        assert time.monotonic() < limit, "a process is still there"
        time.sleep(0.1)


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


@needs_ray
def test_as_on_one_device_also_after_an_error(farm: Farm, tmp_path: Path) -> None:
    tensors = {name: torch.randn(1, 2, 50, 8) for name in "qkvo"}
    q, k, v, out = in_files(tmp_path / "in", tensors, writable=True).values()
    with pytest.raises(qa.BudgetError, match="budget"):
        Farm(budget=1000).attention(q, k, v, out=out, chunks=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    (tmp_path / "in").unlink()
    for seed in (2000, 2001):
        case = Case(seed)
        case.check(by_farm(case, farm, tmp_path))


@needs_ray
def test_workers_killed_at_random_moments(farm: Farm, tmp_path: Path) -> None:
    """Others finish what they had not, and nothing is left behind."""
    draw, case, over = random.Random(), Case(11), threading.Event()
    killed: list[int] = []
    # A call of a second.
    case.dtype, case.mask, case.options = torch.float32, None, {"is_causal": True, "scale": None}
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


@pytest.mark.usefixtures("one_thread")
@needs_ray
def test_a_killed_driver_loses_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers end, and a second run goes on, to the bits of one that nobody disturbed."""
    shape = 1, 4, 1500, 16
    inputs = {name: torch.randn(shape) for name in ("query", "key", "value")}
    safetensors.torch.save_file(inputs, tmp_path / "in")
    command = ["run", str(tmp_path / "in"), str(tmp_path / "out"), "--causal", "--ray", "local",
               "--chunks", "7", "--keep-every", "1", "--ray-cpus", "0.5"]  # fmt: skip
    driver = subprocess.Popen(
        [sys.executable, "-m", "quorum_attention", *command],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    limit = time.monotonic() + 60
    while not list(tmp_path.glob("**/*.states-*/*-*")) and time.monotonic() < limit:
        time.sleep(0.05)
    time.sleep(random.uniform(0, 1.5))
    # Agents of Ray's own stay for a minute.
    of_ray = [pid for pid, command in commands_below(driver.pid).items()
              if command.startswith(("ray::compute", "ray::IDLE"))]  # fmt: skip
    driver.kill()
    driver.wait()
    wait_for_end(of_ray)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(ray_farm, "ray_here", FakeRay)
    assert main([*command, "--resume"]) == 0
    command[2] = str(tmp_path / "wanted")
    assert main(command) == 0
    wanted, out = (open_tensors(tmp_path / name)["out"] for name in ("wanted", "out"))
    assert torch.equal(wanted, out)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "wanted", "out"}


def test_without_ray_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'quorum-attention\[ray\]'"):
        Farm()


def test_a_cluster_is_joined_only_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another user's: what its workers answer is unpickled here."""
    ray = FakeRay()
    monkeypatch.setattr(ray_farm, "ray_here", lambda: ray)

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
