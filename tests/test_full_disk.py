"""A disk that is full, met by each that writes: what there was stays as it was, nothing is left
behind, and it is said, but of what only saves time. Real errors of real writes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_processes import run_python

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.files import create_tensors
from quorum_attention.kernels.registry import _note
from quorum_attention.planner import calibration
from quorum_attention.writing import write_text

NO_MOUNT = "neither a mount nor a user namespace is allowed here"
_NEW_NAMESPACE, _NEW_USER, _PRIVATE = 0x20000, 0x10000000, 0x44000
_FULL, _RESERVED = "No space left on device", "are missing"


def _run(output: str) -> Callable[[Path, int], int]:
    """32 KiB of results, of inputs that lie elsewhere."""

    def write(folder: Path, turn: int) -> int:
        given = [str(folder.parent.parent / f"{name}.npy") for name in "qkv"]
        words = ["run", *given, str(folder / output), "--device", "cpu", "--scale", str(turn)]
        return main(words)

    return write


def _calibrate(folder: Path, turn: int) -> None:
    calibration._Bench.seconds = lambda bench, run, *seconds: 1e-3 * turn  # type: ignore
    calibration.calibrate("cpu", torch.float32)


# What writes into a folder, at each turn something else; what a lack of room is for it: an error, a
# status, or "" (it goes unsaid); what is said; bytes of the disk that are left.
WRITERS: dict[str, tuple[Callable[[Path, int], Any], str, str, int]] = {
    "text": (lambda f, turn: write_text(f / "x.txt", f"{turn}\n" * 1_000), "OSError", _FULL, 0),
    "run": (_run("out.safetensors"), "2", _RESERVED, 0),
    # Room for the results, and for no more.
    "run, its accumulators": (_run("out"), "2", "-accumulators", 36 << 10),
    "new tensors": (
        lambda f, turn: create_tensors(f / f"x{turn}", {"t": ((5_000,), torch.float32)}).clear(),
        "OSError", _RESERVED, 0,
    ),
    "picture": (
        lambda f, turn: qa.plan(1_000 * turn, levels=(7,), device="cpu").draw(f / "plan.png"),
        "OSError", _FULL, 0,
    ),
    "calibration": (_calibrate, "OSError", _FULL, 0),
    "tests that were passed": (lambda f, turn: _note(f"number {turn}: {'x' * 100}"), "", "", 0),
}  # fmt: skip


@contextlib.contextmanager
def _filled(folder: Path, room: int) -> Iterator[None]:
    """The disk that ``folder`` is on has no more room than that."""
    filler, disk = folder.parent / "filler", os.statvfs(folder)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - room)
    try:
        yield
    finally:
        filler.unlink()


def _mounted(folder: Path) -> bool:
    """Mount a disk of 2 MiB at ``folder``, which this process alone can see. False: it may not."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEW_NAMESPACE):
        # Whoever is not root is so in a user namespace of its own.
        if libc.unshare(_NEW_NAMESPACE | _NEW_USER):
            return False
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        try:
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError:
            return False
    if libc.mount(b"none", b"/", None, _PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=2097152")


def _outcome(write: Callable[[Path, int], Any], folder: Path, turn: int) -> tuple[str, str]:
    """ "" and nothing, or what went wrong and what was said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = write(folder, turn)
        except OSError as error:
            return "OSError", str(error)
    return (str(status) if isinstance(status, int) and status else ""), said.getvalue()


def write_all(above: str) -> None:
    """Print what became of each, as JSON. It changes mounts: it needs a process of its own."""
    disk = Path(above) / "disk"
    disk.mkdir()
    for name in "qkv":
        np.save(disk.parent / name, torch.randn(1, 2, 256, 16).numpy())
    if not _mounted(disk):
        print(json.dumps(NO_MOUNT))
        return
    found = {}
    for name, (write, *_, room) in WRITERS.items():
        folder = disk / name
        folder.mkdir()
        os.environ["QUORUM_ATTENTION_CACHE"] = str(folder)

        def files(folder: Path = folder) -> dict[str, str]:
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            return {str(path.relative_to(folder)): path.read_bytes().hex() for path in paths}

        before, earlier = _outcome(write, folder, 1), files()
        with _filled(folder, room):
            became = _outcome(write, folder, 2)
        left, after = files(), _outcome(write, folder, 3)
        found[name] = [before, became, after, left == earlier, files() != earlier]
    print(json.dumps(found))


@functools.cache
def found() -> Any:
    """What became of all writers."""
    code = "import sys; sys.path.append(sys.argv[1]); import test_full_disk as t; t.write_all"
    with tempfile.TemporaryDirectory() as folder:
        done = run_python(f"{code}(sys.argv[2])", Path(__file__).parent, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", list(WRITERS))
def test_without_room_nothing_changes(name: str) -> None:
    if found() == NO_MOUNT:
        pytest.skip(NO_MOUNT)
    before, became, after, unchanged, wrote = found()[name]
    _, outcome, says, _ = WRITERS[name]
    assert before[0] == after[0] == "", (before, after)
    assert became[0] == outcome, became
    assert says in became[1]
    assert became[1].count("\n") == (outcome == "2")
    assert unchanged
    assert wrote, "it would have been noticed if it could write"
