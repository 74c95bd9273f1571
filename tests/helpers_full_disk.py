"""All that write files, made to write where there is no room: real errors of real writes.

``python -c "import helpers_full_disk as h; h.main()" FOLDER`` prints what became of each, as JSON.
It changes mounts of its own process: it needs one of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_NEW_NAMESPACE, _NEW_USER = 0x20000, 0x10000000
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
_DISK_BYTES = 2 << 20
NO_MOUNT = "neither a mount nor a user namespace is allowed here"


@dataclass(frozen=True)
class Writer:
    """Writes into a folder, at each turn something else.

    Attributes:
        outcome: what a lack of room is for it: "OSError", "2" (a status), or "" (it goes unsaid,
            of what only saves time).
        file: what is named in what is said of it.
        says: what else is said.
        room: bytes of the disk that are left, where not none.
    """

    write: Callable[[Path, int], Any]
    outcome: str
    file: str = ""
    says: str = "No space left on device"
    room: int = 0


def _text(folder: Path, turn: int) -> None:
    from quorum_attention.writing import write_text

    write_text(folder / "x.txt", f"{turn}\n" * 1_000)


def _run(name: str) -> Callable[[Path, int], int]:
    """32 KiB of results, of inputs that lie elsewhere."""

    def write(folder: Path, turn: int) -> int:
        import safetensors.torch
        import torch

        from quorum_attention.cli import main

        given = folder.parent.parent / "inputs"
        if not given.exists():
            tensors = {name: torch.randn(1, 2, 256, 16) for name in "qkv"}
            safetensors.torch.save_file(tensors, given)
        scale = ["--scale", str(turn)]
        return main(["run", str(given), str(folder / name), "--device", "cpu", *scale])

    return write


def _picture(ending: str) -> Callable[[Path, int], int]:
    def write(folder: Path, turn: int) -> int:
        from quorum_attention.cli import main

        tokens, picture = str(1_000 * turn), str(folder / f"plan.{ending}")
        plan = ["plan", "--tokens", tokens, "--levels", "7", "--device", "cpu", "--draw", picture]
        return main(plan)

    return write


def _created(folder: Path, turn: int) -> None:
    import torch

    from quorum_attention.files import create_tensors

    create_tensors(folder / f"x{turn}", {"t": ((5_000,), torch.float32)})


def _scratch(folder: Path, turn: int) -> None:
    import torch

    from quorum_attention.files.compute import _scratch

    _scratch(folder, [(5_000,)], torch.float32)


def _calibration(folder: Path, turn: int) -> None:
    import torch

    from quorum_attention.planner import calibration

    calibration._Bench.seconds = lambda bench, run, *seconds: 1e-3 * turn  # type: ignore
    calibration.calibrate("cpu", torch.float32)


def _proven(folder: Path, turn: int) -> None:
    from quorum_attention.kernels.probe import _note

    _note(f"a test that was passed, number {turn}: {'x' * 100}")


_RESERVED = "are missing"
WRITERS = {
    "text": Writer(_text, "OSError", "x.txt"),
    "run": Writer(_run("out.safetensors"), "2", "out.safetensors", _RESERVED),
    "run to .npy": Writer(_run("out.npy"), "2", "out.npy", _RESERVED),
    # Room for the results, and for no more.
    "run, its accumulators": Writer(
        _run("out"), "2", "out", "space for accumulators", room=36 << 10
    ),
    "new tensors": Writer(_created, "OSError", "x", _RESERVED),
    "scratch": Writer(_scratch, "OSError", "space for accumulators", _RESERVED),
    "picture": Writer(_picture("png"), "2", "plan.png"),
    "drawing": Writer(_picture("svg"), "2", "plan.svg"),
    "calibration": Writer(_calibration, "OSError", "calibration.json"),
    "tests that were passed": Writer(_proven, "", "", ""),
}


@contextlib.contextmanager
def _filled(folder: Path, room: int) -> Iterator[None]:
    """The disk that ``folder`` is on has no more room than that."""
    filler = folder.parent / "filler"
    disk = os.statvfs(folder)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - room)
    try:
        yield
    finally:
        filler.unlink()


def _mounted(folder: Path) -> bool:
    """Mount a small disk at ``folder``, which this process alone can see. False: it may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
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
    size = f"size={_DISK_BYTES}".encode()
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, size)


def _files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_bytes().hex()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _outcome(write: Callable[[Path, int], Any], folder: Path, turn: int) -> tuple[str, str]:
    """ "" and nothing, or what went wrong and what was said."""
    said = sys.stderr = SimpleNamespace(text="", isatty=lambda: False, flush=lambda: None)
    said.write = lambda text: setattr(said, "text", said.text + text)
    # Its output is a file too, which may not grow.
    sys.stdout = SimpleNamespace(write=len, isatty=lambda: False, flush=lambda: None)
    try:
        status = write(folder, turn)
    except OSError as error:
        return "OSError", str(error)
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return str(status or ""), said.text


def main() -> None:
    disk = Path(sys.argv[1]) / "disk"
    disk.mkdir()
    if not _mounted(disk):
        print(json.dumps(NO_MOUNT))
        return
    found = {}
    for name, writer in WRITERS.items():
        folder = disk / name
        folder.mkdir()
        os.environ["QUORUM_ATTENTION_CACHE"] = str(folder)
        before = _outcome(writer.write, folder, 1)
        earlier = _files(folder)
        with _filled(folder, writer.room):
            outcome, said = _outcome(writer.write, folder, 2)
        left = _files(folder)
        after = _outcome(writer.write, folder, 3)
        later = _files(folder)
        found[name] = {
            "before": before, "outcome": outcome, "said": said, "after": after,
            "unchanged": left == earlier, "names": sorted(left), "wrote": later != earlier,
        }  # fmt: skip
    print(json.dumps(found))
