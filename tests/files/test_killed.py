"""Runs that are killed at any moment, and disks that fill up: no bit differs, nothing
is lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import quorum_attention as qa
from quorum_attention.cli import main

HEADS = 4
EACH = ["--device", "cpu", "--keep-every", "1", "--depth", "1"]
# Runs in children, which are forked so that nothing is imported or planned again.
CHILD = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from quorum_attention.cli import main

torch.set_num_threads(1)
STEPS = ("fsync", "link", "replace", "unlink", "rmdir", "mkdir")

def killed_at(step):
    # The process ends right before that call.
    left = iter(range(step, -1, -1))
    for name in STEPS:
        def call(*arguments, real=getattr(os, name), **named):
            if not next(left):
                os._exit(9)
            return real(*arguments, **named)
        setattr(os, name, call)

def child(arguments, step=None, delay=None, number=None):
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            if step is not None:
                killed_at(step)
            code = main(arguments)
        finally:
            os._exit(code)
    if number:
        time.sleep(delay)
        os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def contents(name):
    files = Path(name).glob("*.npy") if Path(name).is_dir() else [Path(name)]
    return {p.name if Path(name).is_dir() else "": p.read_bytes() for p in files if p.exists()}

# Of a safetensors file without what was asked for, which names the output.
def data(files):
    return {n: t if n else t[8 + int.from_bytes(t[:8], "little"):] for n, t in files.items()}

def check(name, out):
    whole = data(contents(name))
    assert all(whole[n] == t for n, t in data(contents(out)).items()), (name, out)

how, seed, *options = sys.argv[1:]
draw = random.Random(int(seed))
cases = {
    "steps": {"out/": ["qkv", "--lse"]},
    "random": {"out": ["qkv", "--lse"], "grads": ["--backward", "qkv", "forward"]},
}
for out, command in cases[how].items():
    # What a first call takes is not the work that should be interrupted.
    assert main(["run", *command, f"warm-{out}", *options]) == 0
    began, whole = time.perf_counter(), f"whole-{out}"
    assert child(["run", *command, whole, *options]) == 0, Path("said").read_text()
    took, again = time.perf_counter() - began, ["run", *command, out, *options, "--resume"]
    for step in range(40):
        if how == "steps":
            code = child(again, step=step)
            assert code in (0, 9), Path("said").read_text()
        else:
            number = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            code = child(again, delay=draw.random() * took, number=number)
            # What was interrupted before the command had begun ends as Python does.
            assert code in (0, -number, 128 + number, 99), Path("said").read_text()
        check(whole, out)
        if how == "steps" or step == 4:
            last, code = code, child(again)
            assert code == 0, Path("said").read_text()
        if code == 0:
            assert data(contents(out)) == data(contents(whole)), (out, step)
            assert not list(Path().rglob("*.run")), step
            if how != "steps" or last == 0:
                break
            for path in Path(out).iterdir():
                path.unlink()
            Path(out).rmdir()
    else:
        raise AssertionError("it never ended")
    print(out, step)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    qkv = {name: torch.randn(1, HEADS, 300, 32).half() for name in "qkv"}
    out, lse = qa.attention_with_lse(*qkv.values(), devices="cpu")
    safetensors.torch.save_file(qkv, "qkv")
    forward = {
        "out": out.contiguous(),
        "lse": lse.contiguous(),
        "do": torch.randn_like(out),
    }
    safetensors.torch.save_file(forward, "forward")
    return tmp_path


def tensors(name: str) -> dict[str, bytes]:
    return {
        name: t.numpy().tobytes()
        for name, t in safetensors.torch.load_file(name).items()
    }


@pytest.mark.slow_but_first
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("how", ["steps", "random"])
def test_kills_change_no_bit_and_leave_nothing(folder: Path, how: str) -> None:
    """Before each change of a file's name or folder, and at random moments."""
    seed = str(torch.randint(1 << 30, ()).item())
    options = ["--device", "cpu", "--keep-every", "2"] if how == "steps" else EACH
    arguments = [sys.executable, "-c", CHILD, how, seed, *options]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (seed, done.stdout, done.stderr)


def after(
    calls: int, then: Callable[..., object], first: Callable[..., object]
) -> object:
    """``first`` so many times, and ``then`` from there on."""
    left = [calls]

    def either(*arguments: object) -> object:
        left[0] -= 1
        return first(*arguments) if left[0] >= 0 else then(*arguments)

    return either


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# After the folder is made. Each part: results, progress.json, names.
@pytest.mark.parametrize("calls", [0, 1, 4, 10])
def test_a_disk_that_fills_up_keeps_what_is_done_and_is_named(
    calls: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["run", "qkv", "out", *EACH]
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", after(1 + calls, full, os.fsync))
        assert main(command) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert f"{folder}/out" in said.splitlines()[-1]
    assert not Path("out").exists()
    assert Path("out.run").exists() == (calls >= 3)
    assert (f"{calls // 3} of {HEADS} parts are done and kept" in said) == (calls >= 3)
    assert main([*command, "--resume"]) == 0
    assert main(["run", "qkv", "whole", *EACH]) == 0
    assert tensors("out") == tensors("whole")


def test_an_output_that_was_replaced_before_the_folder_was_removed_is_computed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last file had its name when the process was killed; then another took the
    name."""
    command = ["run", "qkv", "out", *EACH, "--resume"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        assert main(command) == 0
    assert Path("out.run/progress.json").exists()
    before = tensors("out")
    Path("copy").write_bytes(bytes(Path("out").stat().st_size))
    os.replace("copy", "out")
    assert main(command) == 0
    assert tensors("out") == before
    assert not Path("out.run").exists()
