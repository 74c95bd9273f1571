"""A disk that is full, met by each that writes: what there was stays as it was, nothing
is left behind, and it is said, but of what only saves time."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.files import create_tensors
from quorum_attention.planner import calibration
from quorum_attention.writing import write_text


def _run(folder: Path, turn: int) -> int:
    """32 KiB of results, of inputs that lie elsewhere."""
    given = [str(folder.parent / f"{name}.npy") for name in "qkv"]
    output = str(folder / "out.safetensors")
    return main(["run", *given, output, "--device", "cpu", "--scale", str(turn)])


def _calibrate(folder: Path, turn: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            calibration.RateMeasurements,
            "seconds",
            lambda bench, run, *seconds: 1e-3 * turn,
        )
        calibration.calibrate("cpu", torch.float32)


# What writes into a folder, at each turn something else; what a lack of room is for it:
# an error, a status, or "" (it goes unsaid); what is said.
FULL, RESERVED = "No space left on device", "are missing"
WRITERS: dict[str, tuple[Callable[[Path, int], Any], str, str]] = {
    "text": (lambda f, turn: write_text(f / "x.txt", f"{turn}\n" * 1_000), "OSError", FULL),
    "run": (_run, "2", RESERVED),
    "new tensors": (
        lambda f, turn: create_tensors(f / f"x{turn}", {"t": ((5_000,), torch.float32)}).clear(),
        "OSError", RESERVED,
    ),
    "picture": (
        lambda f, turn: qa.plan(1_000 * turn, levels=(7,), device="cpu").draw(f / "plan.png"),
        "OSError", FULL,
    ),
    "calibration": (_calibrate, "OSError", FULL),
}  # fmt: skip


def _outcome(
    write: Callable[[Path, int], Any], folder: Path, turn: int
) -> tuple[str, str]:
    """ "" and nothing, or what went wrong and what was said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = write(folder, turn)
        except OSError as error:
            return "OSError", str(error)
    return (str(status) if isinstance(status, int) and status else ""), said.getvalue()


@pytest.mark.parametrize("name", list(WRITERS))
def test_without_room_nothing_changes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, outcome, says = WRITERS[name]
    folder = tmp_path / "disk"
    folder.mkdir()
    for tensor in "qkv":
        np.save(tmp_path / tensor, torch.randn(1, 2, 256, 16).numpy())
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(folder))

    def files() -> dict[str, bytes]:
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert _outcome(write, folder, 1)[0] == ""
    earlier = files()
    with monkeypatch.context() as patch:
        for call in ("posix_fallocate", "fsync", "replace"):
            patch.setattr(os, call, full)
        became = _outcome(write, folder, 2)
    assert became[0] == outcome
    assert says in became[1]
    assert became[1].count("\n") == (outcome == "2")
    assert files() == earlier
    assert _outcome(write, folder, 3)[0] == ""
    assert files() != earlier, "it would have been noticed if it could write"
    calibration._stored_entries.cache_clear()
    calibration.hardware_of.cache_clear()
    calibration.rates_known.cache_clear()
