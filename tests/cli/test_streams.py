"""Standard streams that are closed, or cannot print a name: no result is damaged, none is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quorum_attention

# What some library would write to a stream of the process, while results are computed. The command
# is changed when it is loaded, which is when it loads torch: streams are completed before.
LOUD = """
import os, sys
from quorum_attention import cli

def changed(name):
    from quorum_attention.files.compute import compute_here

    def loud(work, parts):
        for part in compute_here(work, parts):
            for number in (1, 2):
                os.write(number, b"a warning of a library " * 20)
            yield part

    run = load(name)
    run._computer = lambda options: loud
    return run

load, cli.import_module = cli.import_module, changed
sys.exit(cli.main())
"""
RUN = ["run", "--device", "cpu", "q.npy", "k.npy", "v.npy"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "qkv":
        array = np.random.default_rng(ord(name)).standard_normal((1, 2, 40, 8))
        np.save(tmp_path / f"{name}.npy", array.astype(np.float32))
    return tmp_path


def run(folder: Path, out: str, closed: str = "", **environment: str) -> tuple[int, bytes]:
    shell = f'exec "$@" {closed}'
    # In another folder a relative path of this one would lead nowhere, or to another version.
    environment["PYTHONPATH"] = str(Path(quorum_attention.__file__).parents[1])
    done = subprocess.run(
        ["sh", "-c", shell, "sh", sys.executable, "-c", LOUD, *RUN, out],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_libraries_say_goes_into_no_result_though_streams_are_closed(folder: Path) -> None:
    assert run(folder, "whole.npy")[0] == 0
    assert run(folder, "out.npy", "<&- >&- 2>&-")[0] == 0
    assert (folder / "out.npy").read_bytes() == (folder / "whole.npy").read_bytes()


def test_a_name_that_cannot_be_printed_is_no_failure(folder: Path) -> None:
    status, said = run(folder, "größe.npy", PYTHONIOENCODING="ascii")
    assert (status, (folder / "größe.npy").exists()) == (0, True)
    assert b"wrote gr\\xf6\\xdfe.npy" in said
