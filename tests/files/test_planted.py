"""A run's folder that another user may have planted: never resumed from, never written through."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from quorum_attention.cli import main
from quorum_attention.files.run import RunFolder

OTHER = 12345
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


class StoppedError(Exception):
    """Ends a run when all is computed, and nothing has its name yet."""


def run(folder: Path, *options: str) -> int:
    device = ["--device", "cpu", "--keep-every", "1"]
    return main(["run", str(folder / "qkv"), str(folder / "out"), *device, *options])


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    qkv = {name: torch.randn(1, 3, 100, 16) for name in "qkv"}
    safetensors.torch.save_file(qkv, tmp_path / "qkv")
    return tmp_path


@pytest.fixture
def begun(inputs: Path) -> Path:
    """A folder with a run that is unfinished, as another process left it."""

    def stop(self: RunFolder, *_: object) -> None:
        raise StoppedError

    safetensors.torch.save_file({"old": torch.ones(3)}, inputs / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "finish", stop)
        with pytest.raises(StoppedError):
            run(inputs)
    assert (inputs / "out.run" / "progress.json").exists()
    return inputs


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in folder.rglob("*")
    }


def given_away(path: Path) -> None:
    os.lchown(path, OTHER, OTHER)


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        make(path)

    return plant


def somebodys(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("mine")


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        pytest.param(given_away, f"belongs to user {OTHER}", marks=ROOT),
        (lambda path: path.chmod(0o777), "may be written by other users"),
        (in_its_place(lambda path: path.symlink_to("elsewhere")), "is no folder"),
        (in_its_place(os.mkfifo), "is no folder"),
        (in_its_place(somebodys), "is not the folder of a run"),
    ],
)
def test_a_folder_that_is_not_ones_own_is_not_taken_over(
    begun: Path, planted: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(begun / "out.run")
    before = contents(begun)
    for options in (["--resume"], ["--restart"], []):
        assert run(begun, *options) == 2
        assert f"{begun}/out.run {said}" in capsys.readouterr().err
        assert contents(begun) == before


@pytest.mark.parametrize("umask", [0, 0o077])
def test_nobody_else_may_look_into_the_folder(
    inputs: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def looked(self: RunFolder, part: int) -> None:
        modes.append(stat.S_IMODE(self.output.run.stat().st_mode))

    monkeypatch.setattr(RunFolder, "keep", looked)
    before = os.umask(umask)
    try:
        assert run(inputs) == 0
    finally:
        os.umask(before)
    assert modes == [0o700] * 3


def test_what_is_not_the_runs_stays_in_its_folder(begun: Path) -> None:
    (begun / "out.run" / "notes").write_text("mine")
    assert run(begun, "--restart") == 0
    assert [path.name for path in (begun / "out.run").iterdir()] == ["notes"]


@pytest.mark.parametrize("folder", ["out.run", "out.run/deeper"])
def test_an_input_in_the_folder_of_the_run_is_refused(
    begun: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (begun / folder).mkdir(exist_ok=True)
    (begun / "qkv").rename(begun / folder / "qkv")
    (begun / "qkv").symlink_to(f"{folder}/qkv")
    before = contents(begun)
    assert run(begun, "--restart") == 2
    assert "where the run works" in capsys.readouterr().err
    assert contents(begun) == before


@ROOT
def test_the_successor_of_another_users_file_becomes_his_when_it_is_whole(begun: Path) -> None:
    (begun / "out").chmod(0o664)
    given_away(begun / "out")
    assert run(begun, "--resume") == 0
    made = (begun / "out").stat()
    assert (made.st_uid, made.st_mode & 0o777) == (OTHER, 0o664)


@ROOT
@pytest.mark.parametrize("planted", ["link", "file"])
def test_what_is_planted_during_the_run_gives_the_output_nothing(
    begun: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its owner nor its permissions; and the file behind a link stays."""
    begun.chmod(0o1777)
    (begun / "out").rename(begun / "mine")
    (begun / "mine").chmod(0o666)
    mine, finish = (begun / "mine").read_bytes(), RunFolder.finish

    def plant(self: RunFolder, *inputs: Any) -> None:
        if planted == "link":
            (begun / "out").symlink_to("mine")
        else:
            (begun / "out").write_bytes(mine)
            (begun / "out").chmod(0o666)
        given_away(begun / "out")
        finish(self, *inputs)

    monkeypatch.setattr(RunFolder, "finish", plant)
    assert run(begun, "--resume") == 0
    made = (begun / "out").lstat()
    assert stat.S_ISREG(made.st_mode)
    assert (made.st_uid, made.st_mode & 0o022) == (os.geteuid(), 0)
    assert (begun / "mine").read_bytes() == mine
