"""Processes that are killed at any moment, and disks that fill up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

import quorum_attention as qa
from quorum_attention import writing
from quorum_attention.cli import main
from quorum_attention.cli import run as command
from quorum_attention.cli.stopping import Stopped
from quorum_attention.on_disk import scratch, unfinished
from quorum_attention.on_disk.compute import Work, compute_here
from quorum_attention.on_disk.journal import Journal
from quorum_attention.on_disk.parts import Part

HEADS = 6
Function = Callable[..., object]
EACH = ["--device", "cpu", "--keep-every", "1", "--depth", "1"]
# Runs in children, which are forked so that nothing is imported again; kills them at random moments
# until one has ended by itself.
CHILD = """
import os, random, signal, sys, time
import torch
from safetensors.torch import load_file
from quorum_attention.cli import main

torch.set_num_threads(1)

def same(*names):
    one, other = map(load_file, names)
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)

draw = random.Random(int(sys.argv[1]))

def child(arguments, delay=None, number=None):
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = main(arguments)
        finally:
            os._exit(code)
    if number:
        time.sleep(delay)
        os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

options = sys.argv[2].split("|")
for name, command in (("out", ["qkv", "--lse"]), ("grads", ["--backward", "qkv", "forward"])):
    began = time.perf_counter()
    assert child(["run", *command, f"whole {name}", *options]) == 0
    took, kills = time.perf_counter() - began, 0
    while kills < 4:
        number = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        again = ["run", *command, name, *options, "--resume"]
        code = child(again, draw.random() * took, number)
        if code == 0:
            break
        kills += 1
        # What was interrupted before the command had begun ends as Python does.
        assert code in (-number, 128 + number, 99), code
        assert not os.path.exists(name) or same(name, f"whole {name}")
    else:
        assert child(again) == 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    qkv = {name: torch.randn(1, HEADS, 600, 32).half() for name in "qkv"}
    out, lse = qa.attention_with_lse(*qkv.values(), devices="cpu")
    safetensors.torch.save_file(qkv, "qkv")
    forward = {"out": out.contiguous(), "lse": lse.contiguous(), "do": torch.randn_like(out)}
    safetensors.torch.save_file(forward, "forward")
    return tmp_path


def tensors(name: str) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in safetensors.torch.load_file(name).items()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_kills_at_random_moments_change_no_bit(folder: Path) -> None:
    seed = str(torch.randint(1 << 30, ()).item())
    arguments = [sys.executable, "-c", CHILD, seed, "|".join(EACH)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (seed, done.stderr)
    for name in ("out", "grads"):
        assert tensors(name) == tensors(f"whole {name}"), seed
    assert not list(folder.glob("*.run.*"))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def after(calls: int, then: Function, first: Function) -> Function:
    """``first`` so many times, and ``then`` from there on."""
    left = [calls]

    def either(*arguments: object) -> object:
        left[0] -= 1
        return first(*arguments) if left[0] >= 0 else then(*arguments)

    return either


def test_a_disk_that_fills_up_keeps_what_is_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "qkv", "out", *EACH]
    with monkeypatch.context() as patched:
        # Each part: its results, and the journal (its folder too, the first time).
        patched.setattr(os, "fsync", after(8, full, os.fsync))
        assert main(command) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert f"3 of {HEADS} head groups are done and kept" in said
    assert not Path("out").exists()
    assert main([*command, "--resume"]) == 0
    assert main(["run", "qkv", "whole", *EACH]) == 0
    assert tensors("out") == tensors("whole")


@pytest.mark.parametrize("calls", range(1 + 2 * HEADS, 1 + 2 * HEADS + 4))
def test_a_disk_that_fills_up_at_the_end_says_what_is_kept_and_names_the_file(
    calls: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "qkv", "out", *EACH]
    with monkeypatch.context() as patched:
        # All parts are kept: results, header, journal and folder are left to write.
        patched.setattr(os, "fsync", after(calls, full, os.fsync))
        status = main(command)
    said = capsys.readouterr().err
    if calls == 2 * HEADS + 4:  # whether a folder's names are on the disk nobody can know
        assert status == 0
        return
    assert status == 2
    assert f"{HEADS} of {HEADS} head groups are done and kept" in said
    assert f"{folder}/out" in said.splitlines()[-1]
    assert main([*command, "--resume"]) == 0
    assert main(["run", "qkv", "whole", *EACH]) == 0
    assert tensors("out") == tensors("whole")


def test_a_signal_right_after_the_journal_was_made_says_what_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(directory: Path) -> None:
        raise Stopped(15)

    monkeypatch.setattr(writing, "sync_directory", stop)
    assert main(["run", "qkv", "out", *EACH]) == 128 + 15
    assert f"1 of {HEADS} head groups are done and kept" in capsys.readouterr().err


def test_no_room_for_accumulators_is_said_before_any_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: object, n_bytes: int, name: str) -> None:
        raise OSError(f"{name} takes {n_bytes}")

    monkeypatch.setattr(scratch, "reserve", refuse)
    assert main(["run", "qkv", "out", *EACH]) == 2
    assert "space for accumulators" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["forward", "qkv"]


@pytest.mark.parametrize("stop", range(1, 4))
def test_a_kill_between_names_is_made_good(
    folder: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several files some have their names already: --resume gives them to the others."""
    names = ["qkv", "new/", "--lse", *EACH]

    class KilledError(BaseException):
        pass

    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        # The journal's own file is the first that is given its name.
        patched.setattr(unfinished.os, "replace", after(stop, killed, os.replace))
        try:
            main(["run", *names])
        except KilledError:
            assert stop < 3
        else:
            assert stop >= 3
    safetensors.torch.save_file(
        {n: t.float() for n, t in safetensors.torch.load_file("qkv").items()}, "other"
    )
    assert main(["run", *names, "--resume"]) == 0
    assert sorted(path.name for path in Path("new").iterdir()) == ["lse.npy", "out.npy"]
    assert main(["run", "qkv", "whole/", "--lse", *EACH]) == 0
    for name in ("lse.npy", "out.npy"):
        assert Path("new", name).read_bytes() == Path("whole", name).read_bytes()


@pytest.mark.parametrize("changed", [False, True])
def test_a_kill_before_the_journal_is_removed_costs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """The files have their names: they are recognised, unless another has taken the name of one."""

    def killed(journal: Journal) -> None:
        raise KeyboardInterrupt

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path("out").iterdir()}

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", killed)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            raise SystemExit(main(["run", "qkv", "out/", "--lse", *EACH]))
    before = contents()
    if changed:
        copy = Path("out/copy")
        copy.write_bytes(Path("out/lse.npy").read_bytes())
        os.replace(copy, "out/lse.npy")
    assert "out.npy.run.journal" in before
    before = {name: found for name, found in before.items() if name in ("lse.npy", "out.npy")}
    parts: list[Part] = []

    def counted(work: Work, left: Sequence[Part]) -> Iterator[Part]:
        for part in compute_here(work, left):
            parts.append(part)
            yield part

    monkeypatch.setattr(command, "_computer", lambda options: counted)
    assert main(["run", "qkv", "out/", "--lse", *EACH, "--resume"]) == 0
    assert bool(parts) == changed
    assert contents() == before
