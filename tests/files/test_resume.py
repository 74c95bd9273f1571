"""A stopped ``run`` loses the head group that it was at, and nothing else. What
``--resume`` makes of the rest is bit for bit what one run would have made, or it
refuses by name. A folder that another user may have planted is never resumed from, nor
written through."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import quorum_attention as qa
from quorum_attention import writing
from quorum_attention.cli import main
from quorum_attention.cli import run as command
from quorum_attention.cli.process import Stopped
from quorum_attention.files import create_tensors
from quorum_attention.files.compute import FileRun, compute_here
from quorum_attention.files.run_folder import RunFolder

HEADS = 4
# Head by head, cut at depth 1.
EACH = ["--device", "cpu", "--keep-every", "1", "--depth", "1"]
PROGRESS = "out.run/progress.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Inputs of a forward and of a backward, and results of an earlier call."""
    torch.manual_seed(1)
    qkv = {name: torch.randn(1, HEADS, 300, 16) for name in "qkv"}
    out, lse = qa.attention_with_lse(*qkv.values(), devices="cpu")
    safetensors.torch.save_file(qkv, tmp_path / "qkv")
    safetensors.torch.save_file(
        {"out": out, "lse": lse.contiguous()}, tmp_path / "forward"
    )
    safetensors.torch.save_file(
        {"grad_out": torch.randn_like(out)}, tmp_path / "upstream"
    )
    safetensors.torch.save_file({"old": torch.ones(3)}, tmp_path / "out")
    return tmp_path


def inputs(folder: Path, backward: bool) -> list[str]:
    names = ["qkv", "forward", "upstream"] if backward else ["qkv"]
    return [
        *(["--backward"] if backward else ["--lse"]),
        *(str(folder / name) for name in names),
    ]


def run(folder: Path, *options: str, backward: bool = False, out: str = "out") -> int:
    return main(["run", *inputs(folder, backward), f"{folder}/{out}", *EACH, *options])


def stopping(parts: int, then: Callable[[], Any] | None = None) -> Any:
    """Computes parts; a signal comes, or ``then`` is called, when so many are kept, and
    one more is computed."""

    def compute(work: FileRun, left: Sequence[int]) -> Iterator[int]:
        for number, part in enumerate(compute_here(work, left)):
            if number == parts and then is None:
                raise Stopped(15)
            if number == parts and then is not None:
                then()
            yield part

    return compute


def stopped(folder: Path, parts: int, *options: str, **named: Any) -> int:
    return computed_by(stopping(parts), lambda: run(folder, *options, **named))


def computed_by(compute: Any, does: Callable[[], int]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_computer", lambda options: compute)
        return does()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("parts", range(HEADS))
def test_a_resumed_run_gives_what_one_run_gives(
    folder: Path, backward: bool, parts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    old = (folder / "out").read_bytes()
    assert run(folder, backward=backward, out="whole") == 0
    assert stopped(folder, parts, backward=backward) == 128 + 15
    assert (folder / "out").read_bytes() == old
    said = capsys.readouterr().err
    assert (folder / PROGRESS).exists() == (folder / "out.run").exists() == (parts > 0)
    assert (f"{parts} of {HEADS} parts are done and kept" in said) == (parts > 0)
    assert run(folder, "--resume", "--json", backward=backward) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["parts"] == HEADS
    assert shown["resumed_parts"] == (parts or None)
    passes = shown["total"]["backwards" if backward else "forwards"]
    assert passes == HEADS - parts
    assert tensors(folder / "out") == tensors(folder / "whole")
    assert not (folder / "out.run").exists()


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in folder.rglob("*")
    }


def tensors(path: Path) -> dict[str, bytes]:
    return {
        name: t.numpy().tobytes()
        for name, t in safetensors.torch.load_file(path).items()
    }


def test_what_is_unfinished_is_not_destroyed_without_a_word(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(folder, 2)
    before = contents(folder)
    capsys.readouterr()
    assert run(folder) == 2
    said = capsys.readouterr().err
    assert "2 of 4 parts are done" in said
    assert "--resume" in said
    assert "--restart" in said
    assert contents(folder) == before
    assert run(folder, "--restart", "--json") == 0
    assert json.loads(capsys.readouterr().out)["resumed_parts"] is None
    assert run(folder, out="whole") == 0
    assert tensors(folder / "out") == tensors(folder / "whole")


def test_other_arguments_are_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(folder, 1)
    before = contents(folder)
    for options, said in (
        ("--causal", "--causal was False and is True"),
        ("--scale 0.5", "--scale was not given and is 0.5"),
        ("--budget 1GiB", "--budget was not given and is 1073741824"),
        ("--out-dtype fp64", "the results"),
        ("--kernel dense", "--kernel was auto and is dense"),
        ("--depth 2", "--depth was 1 and is 2"),
    ):
        capsys.readouterr()
        assert run(folder, "--resume", *options.split()) == 2
        assert said in capsys.readouterr().err
        assert contents(folder) == before


@pytest.mark.parametrize("how", ["other content", "other file"])
def test_a_changed_input_is_refused_by_name(
    folder: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(folder, 1)
    if how == "other file":
        shutil.copy2(folder / "qkv", folder / "copy")
        os.replace(folder / "copy", folder / "qkv")
    else:
        with open(folder / "qkv", "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(bytes(8))
        os.utime(folder / "qkv")
    assert run(folder, "--resume") == 2
    said = capsys.readouterr().err
    for role in ("query", "key", "value"):
        assert f"of the file of the {role} was" in said


def test_an_input_that_changes_meanwhile_ends_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, compute = (
        (folder / "out").read_bytes(),
        stopping(1, lambda: os.utime(folder / "qkv")),
    )
    assert computed_by(compute, lambda: run(folder)) == 2
    assert "was changed while it was read" in capsys.readouterr().err
    assert (folder / "out").read_bytes() == old


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_earlier_output(
    folder: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    old = (folder / "out").read_bytes()
    compute = stopping(1, lambda: signal.raise_signal(number))
    former = signal.signal(number, signal.SIG_DFL)  # also where tests run under nohup
    try:
        assert computed_by(compute, lambda: run(folder)) == 128 + number
    finally:
        signal.signal(number, former)
    assert f"quorum-attention: stopped by {number.name}" in capsys.readouterr().err
    assert (folder / "out").read_bytes() == old


def test_an_input_that_is_written_through_an_older_mapping_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page was not on the disk yet when the run began, so the file's time did not
    change, and the parts of one output were of different inputs."""
    source = tmp_path / "in"
    specs = dict.fromkeys("qkv", ((4, 30, 8), torch.float32))
    tensors = create_tensors(source, specs)
    tensors["v"].fill_(1.0)
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    before = source.stat().st_mtime_ns
    time.sleep(0.02)  # times of files are that coarse
    tensors["v"].fill_(2.0)
    if source.stat().st_mtime_ns == before:
        pytest.skip("this file system notes no time of mapped writes")
    time.sleep(0.02)
    call = ["run", str(source), str(tmp_path / "out"), *EACH]
    assert computed_by(stopping(1), lambda: main(call)) == 128 + 15
    tensors["v"].zero_()
    capsys.readouterr()
    assert main([*call, "--resume"]) == 2
    assert "the time of the file of the value was" in capsys.readouterr().err


def test_the_same_files_in_other_places_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys as values, and values as keys."""
    for name in ("q", "a", "b"):
        np.save(tmp_path / f"{name}.npy", np.random.randn(2, 30, 8).astype(np.float32))
    q, a, b = (str(tmp_path / f"{name}.npy") for name in ("q", "a", "b"))
    out = [str(tmp_path / "out.npy"), *EACH]
    command = ["run", q, f"k={a}", f"v={b}", *out]
    assert computed_by(stopping(1), lambda: main(command)) == 128 + 15
    capsys.readouterr()
    assert main(["run", q, f"v={a}", f"k={b}", *out, "--resume"]) == 2
    assert "the file of the key" in capsys.readouterr().err
    assert main(["run", f"v={b}", f"k={a}", q, *out, "--resume"]) == 0


@pytest.mark.parametrize("damaged", ["progress.json", "*-0"])
def test_what_is_damaged_is_refused_by_name(
    folder: Path, damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(folder, 3)
    (path,) = (folder / "out.run").glob(damaged)
    path.write_bytes(path.read_bytes()[:-3])
    before = contents(folder)
    assert run(folder, "--resume") == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert "--restart" in said
    assert contents(folder) == before
    assert run(folder, "--restart") == 0
    assert run(folder, out="whole") == 0
    assert tensors(folder / "out") == tensors(folder / "whole")


@pytest.mark.parametrize("out", ["new/", "new/out.npy"])
def test_a_second_run_at_the_same_time_is_refused(
    folder: Path,
    out: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also one to the first of several files, by whatever option."""
    second = ["run", str(folder / "qkv"), f"{folder}/{out}", "--device", "cpu"]
    tried = []

    def compute(work: FileRun, left: Sequence[int]) -> Iterator[int]:
        for part in compute_here(work, left):
            monkeypatch.setattr(command, "_computer", lambda options: compute_here)
            tried.extend(
                main([*second, *more]) for more in ([], ["--resume"], ["--restart"])
            )
            yield part

    monkeypatch.setattr(command, "_computer", lambda options: compute)
    assert run(folder, out="new/") == 0
    assert tried == [2] * 3 * HEADS
    assert (
        capsys.readouterr().err.count("is being written by another process")
        == 3 * HEADS
    )
    assert run(folder, out="whole/") == 0
    for name in ("out.npy", "lse.npy"):
        assert (folder / "new" / name).read_bytes() == (
            folder / "whole" / name
        ).read_bytes()


@pytest.mark.parametrize("when", ["before its run folder", "before the lock"])
def test_a_folder_that_another_process_has_just_removed_is_its(
    folder: Path,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if when == "before the lock":
        monkeypatch.setattr(
            writing, "sync_directory", lambda _: (folder / "out.run").rmdir()
        )
    else:
        mkdir = Path.mkdir

        def made(path: Path, *mode: int) -> None:
            mkdir(path, *mode)
            if path.name == "new":
                path.rmdir()

        monkeypatch.setattr(Path, "mkdir", made)
    assert run(folder, out="out" if when == "before the lock" else "new/") == 2
    assert "is being written by another process" in capsys.readouterr().err


OTHER = 12345
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def begun(folder: Path) -> Path:
    """With a run that is unfinished, as another process left it."""
    stopped(folder, 3)
    return folder


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
    begun: Path,
    planted: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planted(begun / "out.run")
    before = contents(begun)
    for options in (["--resume"], ["--restart"], []):
        assert run(begun, *options) == 2
        assert f"{begun}/out.run {said}" in capsys.readouterr().err
        assert contents(begun) == before


@pytest.mark.parametrize("umask", [0, 0o077])
def test_nobody_else_may_look_into_the_folder(
    folder: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def looked(self: RunFolder, part: int) -> None:
        modes.append(stat.S_IMODE(self.output.run.stat().st_mode))

    monkeypatch.setattr(RunFolder, "keep", looked)
    before = os.umask(umask)
    try:
        assert run(folder) == 0
    finally:
        os.umask(before)
    assert modes == [0o700] * HEADS


def test_what_is_not_the_runs_stays_in_its_folder(begun: Path) -> None:
    (begun / "out.run" / "notes").write_text("mine")
    assert run(begun, "--restart") == 0
    assert [path.name for path in (begun / "out.run").iterdir()] == ["notes"]


@pytest.mark.parametrize("inside", ["out.run", "out.run/deeper"])
def test_an_input_in_the_folder_of_the_run_is_refused(
    begun: Path, inside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (begun / inside).mkdir(exist_ok=True)
    (begun / "qkv").rename(begun / inside / "qkv")
    (begun / "qkv").symlink_to(f"{inside}/qkv")
    before = contents(begun)
    assert run(begun, "--restart") == 2
    assert "where the run works" in capsys.readouterr().err
    assert contents(begun) == before


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

    def plant(self: RunFolder) -> None:
        if planted == "link":
            (begun / "out").symlink_to("mine")
        else:
            (begun / "out").write_bytes(mine)
            (begun / "out").chmod(0o666)
        given_away(begun / "out")
        finish(self)

    monkeypatch.setattr(RunFolder, "finish", plant)
    assert run(begun, "--resume") == 0
    made = (begun / "out").lstat()
    assert stat.S_ISREG(made.st_mode)
    assert (made.st_uid, made.st_mode & 0o022) == (os.geteuid(), 0)
    assert (begun / "mine").read_bytes() == mine
