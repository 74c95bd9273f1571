"""Files that another user may have planted where a run keeps its own: taken over by nobody, never
written to, never waited for."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from quorum_attention.cli import main
from quorum_attention.on_disk import journal

OTHER = 12345
UNFINISHED, JOURNAL = "out.run.unfinished", "out.run.journal"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def given_away(path: Path) -> None:
    os.lchown(path, OTHER, OTHER)


def hard_linked(path: Path) -> None:
    path.with_name("second name").hardlink_to(path)


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


class StoppedError(Exception):
    """Ends a run when all is computed, and nothing has its name yet."""


def stop_at_the_end(folder: Path) -> None:
    def stop(self: journal.Journal, files: object = ()) -> None:
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal.Journal, "finish", stop)
        with pytest.raises(StoppedError):
            run(folder)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with an output that is unfinished, as another process left it."""
    qkv = {name: torch.randn(1, 3, 100, 16) for name in "qkv"}
    safetensors.torch.save_file(qkv, tmp_path / "qkv")
    safetensors.torch.save_file({"old": torch.ones(3)}, tmp_path / "out")

    stop_at_the_end(tmp_path)
    assert (tmp_path / UNFINISHED).exists()
    assert (tmp_path / JOURNAL).exists()
    return tmp_path


def run(folder: Path, *options: str) -> int:
    device = ["--device", "cpu", "--keep-every", "1"]
    return main(["run", str(folder / "qkv"), str(folder / "out"), *device, *options])


def contents(folder: Path) -> dict[str, object]:
    return {
        path.name: path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("name", [UNFINISHED, JOURNAL])
@pytest.mark.parametrize(
    ("planted", "said"),
    [
        pytest.param(given_away, f"belongs to user {OTHER}", marks=ROOT),
        (hard_linked, "has 2 names"),
        (linked, "is a symbolic link"),
        (piped, "is not a regular file"),
    ],
)
def test_what_is_not_ones_own_is_not_resumed(
    begun: Path,
    name: str,
    planted: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planted(begun / name)
    before = contents(begun)
    assert run(begun, "--resume") == 2
    error = capsys.readouterr().err
    assert said in error
    assert name in error
    assert contents(begun) == before


def test_a_journal_that_others_may_write_is_not_read(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_to_all(begun / JOURNAL)
    assert run(begun, "--resume") == 2
    assert "may be written by other users" in capsys.readouterr().err
    assert run(begun, "--restart") == 0


def test_a_journal_is_its_users_whatever_the_umask_is(begun: Path) -> None:
    shutil.copy(begun / "out", begun / "old")
    before = os.umask(0)
    try:
        (begun / JOURNAL).unlink()
        (begun / UNFINISHED).unlink()
        found = journal.Journal(begun / JOURNAL, journal.Header({}, {}, {}))
        found.add(0)
    finally:
        os.umask(before)
    assert (begun / JOURNAL).stat().st_mode & 0o777 == 0o600
    read = journal.read(begun / JOURNAL)
    assert read is not None
    assert read.done == {0}


def test_a_link_that_waits_for_the_journal_is_not_written_through(tmp_path: Path) -> None:
    """At a name that can be foreseen, or in the journal's place while it is written to."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f"{JOURNAL}.new").symlink_to("mine")
    found = journal.Journal(tmp_path / JOURNAL, journal.Header({}, {}, {}))
    found.add(0)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / JOURNAL).is_symlink()
    linked(tmp_path / JOURNAL)
    with pytest.raises(OSError, match="is a symbolic link"):
        found.add(1)
    assert found.done == {0}


@ROOT
def test_everything_done_says_a_journal_of_another_user(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """His numbers would be in the output, and the file would be his."""
    planted = begun / UNFINISHED
    whole = bytearray(planted.read_bytes())
    whole[64:] = b"\1" * (len(whole) - 64)
    planted.write_bytes(whole)
    for name in (UNFINISHED, JOURNAL):
        given_away(begun / name)
    assert run(begun, "--resume") == 2
    assert f"belongs to user {OTHER}" in capsys.readouterr().err
    assert safetensors.torch.load_file(begun / "out").keys() == {"old"}
    assert run(begun, "--restart") == 0
    assert safetensors.torch.load_file(begun / "out").keys() == {"out"}
    assert (begun / "out").stat().st_uid == os.geteuid()


@ROOT
@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_the_successor_of_another_users_file_can_be_resumed(tmp_path: Path, mode: int) -> None:
    """It becomes his when it is whole: until then it is ours."""
    safetensors.torch.save_file({"old": torch.ones(3)}, tmp_path / "out")
    (tmp_path / "out").chmod(mode)
    given_away(tmp_path / "out")
    (tmp_path / "old").mkdir()
    shutil.copy2(tmp_path / "out", tmp_path / "old")
    qkv = {name: torch.randn(1, 3, 100, 16) for name in "qkv"}
    safetensors.torch.save_file(qkv, tmp_path / "qkv")

    stop_at_the_end(tmp_path)
    left = (tmp_path / UNFINISHED).stat()
    assert (left.st_uid, left.st_mode & 0o777) == (os.geteuid(), mode)
    assert run(tmp_path, "--resume") == 0
    made = (tmp_path / "out").stat()
    assert (made.st_uid, made.st_mode & 0o777) == (OTHER, mode)


@pytest.mark.parametrize("planted", [linked, piped])
@pytest.mark.parametrize("options", [[], ["--restart"]])
def test_without_resume_nothing_is_written_through_a_link(
    begun: Path, planted: Callable[[Path], None], options: list[str]
) -> None:
    if not options:
        (begun / JOURNAL).unlink()
    planted(begun / UNFINISHED)
    before = contents(begun)
    assert run(begun, *options) == 2
    assert contents(begun) == before


def test_pipes_that_are_called_as_other_outputs_files_are_not_waited_for(begun: Path) -> None:
    for name in ("b.run.journal", "b.run.unfinished", "out.01234567.unfinished"):
        os.mkfifo(begun / name)
    assert run(begun, "--restart") == 0
    assert safetensors.torch.load_file(begun / "out").keys() == {"out"}


@ROOT
@pytest.mark.parametrize("planted", ["link", "file"])
def test_what_is_planted_during_the_run_gives_the_output_nothing(
    begun: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its owner nor its permissions; and the file behind a link stays."""
    begun.chmod(0o1777)
    (begun / "out").rename(begun / "mine")
    (begun / "mine").chmod(0o666)
    mine = (begun / "mine").read_bytes()
    finish = journal.Journal.finish

    def plant(self: journal.Journal, files: Sequence[int] = ()) -> None:
        if planted == "link":
            (begun / "out").symlink_to("mine")
        else:
            shutil.copy2(begun / "mine", begun / "out")
        given_away(begun / "out")
        finish(self, files)

    monkeypatch.setattr(journal.Journal, "finish", plant)
    assert run(begun, "--resume") == 0
    made = (begun / "out").lstat()
    assert stat.S_ISREG(made.st_mode)
    assert (made.st_uid, made.st_mode & 0o022) == (os.geteuid(), 0)
    assert (begun / "mine").read_bytes() == mine
