"""The cache is this user's alone: whoever else could write it would choose kernels and
plans.

Where it is not, calls go on without it, and it is said.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quorum_attention.kernels import cache_files
from quorum_attention.kernels.cache_files import load, refusal, store

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users here")
NAME = "x.json"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache is to be; it is not there yet."""
    made = tmp_path / "a" / "cache"
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(made))
    cache_files._warn_once.cache_clear()
    return made


def planted(folder: Path) -> None:
    """Somebody's file is there, well formed."""
    folder.mkdir(parents=True)
    (folder / NAME).write_text(json.dumps(["planted"]))


def test_a_new_folder_is_this_users_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        store(NAME, lambda said: [said, 1])
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert load(NAME) == [None, 1]
    assert refusal() is None


@pytest.mark.parametrize("whose", ["another user's", "everybody's"])
def test_what_others_may_have_written_is_neither_read_nor_written(
    whose: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planted(folder)
    if whose == "everybody's":
        folder.chmod(0o777)
        said = r"others may write to .* \(mode 0777\)"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        said = "belongs to user"
    with caplog.at_level(logging.WARNING):
        assert load(NAME) is None
        assert load(NAME) is None
    assert len(caplog.records) == 1, "said once"
    with pytest.raises(PermissionError, match=said):
        store(NAME, lambda said: ["mine"])
    assert [p.read_text() for p in folder.iterdir()] == ['["planted"]']
    assert re.search(said, str(refusal()))


def test_ones_own_link_may_lead_elsewhere(folder: Path) -> None:
    planted(folder.parent / "large disk")
    folder.symlink_to(folder.parent / "large disk")
    store(NAME, lambda said: [*said, "more"])
    assert load(NAME) == ["planted", "more"]
    assert folder.is_symlink()


@pytest.mark.parametrize(
    "text", ["", "[1, 2", "nonsense", "[" * 100_000, "\0" * 10, "[1]\xff"]
)
def test_a_broken_file_is_none_and_is_replaced(folder: Path, text: str) -> None:
    planted(folder)
    (folder / NAME).write_bytes(text.encode("latin-1"))
    assert load(NAME) is None
    store(NAME, lambda said: [said])
    assert load(NAME) == [None]


@pytest.mark.slow
def test_a_call_without_a_home_folder_goes_on(tmp_path: Path) -> None:
    environment = {
        n: v for n, v in os.environ.items() if n not in ("HOME", "XDG_CACHE_HOME")
    }
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    environment.pop("QUORUM_ATTENTION_CACHE")
    environment["HOME"] = "/dev/null"
    program = (
        "import torch, quorum_attention as qa\n"
        "q = torch.randn(1, 2, 300, 16)\n"
        "print(qa.attention(q, q, q, is_causal=True, budget='8MiB').shape)\n"
        "from quorum_attention.kernels.cache_files import refusal, store\n"
        "try:\n    store('x.json', lambda said: 1)\nexcept OSError: print('not kept')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout.split("\n")[1:2] == ["not kept"], (done.stdout, done.stderr)
    assert not list(tmp_path.iterdir())


def _add(number: int) -> None:
    while True:
        store(NAME, lambda said: [*(said or [])[-50:], f"{number} {'x' * 200}"])


def test_several_that_write_at_once_and_are_killed_leave_a_whole_file(
    folder: Path,
) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_add, args=(n,)) for n in range(3)]
    for writer in writers:
        writer.start()
    limit = time.monotonic() + 1.0
    while time.monotonic() < limit:
        assert load(NAME) or not (folder / NAME).exists(), "readers see whole files"
    for writer in writers:
        writer.kill()
        writer.join()
    assert len(load(NAME)) > 1
