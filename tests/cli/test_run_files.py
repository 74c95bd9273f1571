"""``run`` destroys nothing: what is on the disk is replaced when its successor is
whole, or not at all, whatever is asked for and whatever happens on the way."""

from __future__ import annotations

import json
import os
import resource
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from helpers.processes import run_python

import quorum_attention as qa
from quorum_attention.cli import main

CPU = ["--device", "cpu"]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {name: torch.randn(1, 4, 300, 16) for name in ("query", "key", "value")}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A good result of an earlier call."""
    path = tmp_path / "out.safetensors"
    safetensors.torch.save_file({"out": torch.ones(7)}, path)
    return path


def in_folder(path: Path) -> dict[str, bytes]:
    return {
        found.name: found.read_bytes()
        for found in path.parent.iterdir()
        if found.is_file()
    }


ODD = torch.zeros(1, 2, 5, 4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--budget", "1"], "too small"),
        (["--kernel", "nope"], "no kernel is named"),
        (["--depth", "1", "--kernel", "cudnn"], "cudnn"),
        *((f"out.{end}", f"ends in .{end}") for end in ("txt", "npz", "pt", "NPY", "safetensor")),
        (dict.fromkeys(("query", "key"), ODD), "value"),
        ({"q": ODD, "k": torch.zeros(1, 2, 5, 8), "v": ODD}, "key"),
        (dict.fromkeys(("q", "query", "k", "v"), ODD), "query"),
        ({**dict.fromkeys("qkv", ODD), "mask": torch.zeros(9, 9).bool()}, "mask"),
    ],
)  # fmt: skip
def test_a_refused_call_leaves_the_earlier_output(
    inputs: Path,
    earlier: Path,
    wrong: Any,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its options, the name of its output, or the tensors of its input."""
    more, out = wrong if isinstance(wrong, list) else [], str(earlier)
    if isinstance(wrong, str):
        out = str(inputs.parent / wrong)
    elif isinstance(wrong, dict):
        safetensors.torch.save_file({n: t.clone() for n, t in wrong.items()}, inputs)
    before = in_folder(inputs)
    assert main(["run", str(inputs), out, *CPU, *more]) == 2
    assert in_folder(inputs) == before
    error = capsys.readouterr().err
    assert error.startswith("quorum-attention: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("how", ["path", "dot", "symlink", "hard link"])
def test_the_input_is_no_output(
    inputs: Path,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = inputs.parent / "other"
    if how == "symlink":
        other.symlink_to(inputs)
    elif how == "hard link":
        other.hardlink_to(inputs)
    before = in_folder(inputs)
    monkeypatch.chdir(inputs.parent)
    output = {"path": str(inputs), "dot": f"./{inputs.name}"}.get(how, str(other))
    assert main(["run", str(inputs), output, *CPU]) == 2
    assert "is the input" in capsys.readouterr().err
    assert in_folder(inputs) == before


def test_what_is_no_file_is_not_replaced(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = inputs.parent / "pipe"
    os.mkfifo(pipe)
    reader, writer = os.pipe()
    # A pipe without a name is what /dev/stdout is beside another command.
    for output in (pipe, inputs.parent, f"/dev/fd/{writer}"):
        assert main(["run", str(inputs), str(output), *CPU]) == 2
        assert f"{output} cannot be written: it is" in (said := capsys.readouterr().err)
        assert "not a regular file" in said
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    os.close(writer)


# Of a process whose output nobody reads any more.
UNREAD = """
import os, sys
from quorum_attention.cli import main
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1), os.dup2(writer, 2)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_readers_that_are_gone_change_neither_work_nor_status(inputs: Path) -> None:
    """``2>&1 | true``: nobody reads the first line, and the result is wanted."""
    output = inputs.parent / "made.safetensors"
    assert run_python(UNREAD, "run", inputs, output, *CPU).returncode == 0
    assert output.exists()


def test_a_limit_on_files_is_no_bus_error(
    inputs: Path, earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, limits = in_folder(inputs), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert main(["run", str(inputs), str(earlier), *CPU]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "File too large" in said
    assert "out.safetensors" in said
    assert in_folder(inputs) == before


def test_the_new_output_has_the_place_and_the_permissions_of_the_old(
    inputs: Path, earlier: Path
) -> None:
    earlier.chmod(0o640)
    link = earlier.parent / "link"
    link.symlink_to(earlier.name)
    assert main(["run", str(inputs), str(link), *CPU, "--lse", "--causal"]) == 0
    assert link.is_symlink()
    assert stat.S_IMODE(earlier.stat().st_mode) == 0o640
    given = safetensors.torch.load_file(inputs)
    given = [given[name] for name in ("query", "key", "value")]
    out, lse = qa.attention_with_lse(*given, is_causal=True, devices="cpu")
    written = safetensors.torch.load_file(earlier)
    torch.testing.assert_close(written["out"], out)
    torch.testing.assert_close(written["lse"], lse)
    with safetensors.safe_open(earlier, "pt") as file:
        metadata = file.metadata()
    assert metadata["quorum_attention"] == qa.__version__
    assert json.loads(metadata["arguments"])["causal"] is True


@pytest.mark.parametrize("name", ["mask", "attn_mask"])
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_in_the_file_is_taken(
    tmp_path: Path, name: str, additive: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {n: torch.randn(1, 2, 40, 8) for n in ("query", "key", "value")}
    mask = torch.rand(40, 40) < 0.5
    if additive:
        mask = torch.randn(40, 40)
    path, output = tmp_path / "in", tmp_path / "out"
    safetensors.torch.save_file({**tensors, name: mask}, path)
    assert main(["run", str(path), str(output), *CPU]) == 0
    assert "float32, bias, on cpu" in capsys.readouterr().out
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *tensors.values(), attn_mask=mask
    )
    torch.testing.assert_close(safetensors.torch.load_file(output)["out"], wanted)
    # Who cannot take one says so.
    assert main(["recover", "--qkv", str(path), *CPU]) == 2
    assert "has a mask" in capsys.readouterr().err
    for option in ("--heads", "--kv-heads", "--head-dim", "--tokens"):
        assert main(["recover", "--qkv", str(path), option, "2", *CPU]) == 2
        assert f"{option} does not go with --qkv" in capsys.readouterr().err
    safetensors.torch.save_file({"mask": mask}, tmp_path / "mask")
    assert (
        main(["run", str(path), str(output), "--mask", str(tmp_path / "mask"), *CPU])
        == 2
    )
    assert "one must go" in capsys.readouterr().err


def test_the_first_line_shows_tokens_that_come_before_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such an input is a right call of another meaning, so nothing refuses it."""
    path = tmp_path / "in.safetensors"
    tensor = torch.randn(1, 300, 4, 16)  # (batch, tokens, heads, head_dim)
    tensors = {name: tensor.clone() for name in ("query", "key", "value")}
    safetensors.torch.save_file(tensors, path)
    assert main(["run", str(path), str(tmp_path / "out.safetensors"), *CPU]) == 0
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.startswith("queries 1 x 300 heads x 4 tokens x 16, keys 1 x 300 ")


def test_a_missing_tensor_names_what_is_there_and_how_a_file_is_named(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "query_layer3.npy", np.zeros((1, 4, 300, 16)))
    out = str(tmp_path / "out.safetensors")
    assert main(["run", str(tmp_path / "query_layer3.npy"), out, *CPU]) == 2
    message = capsys.readouterr().err
    assert "has no tensor named query or q; there is query_layer3" in message
    assert "query=FILE.npy" in message
    safetensors.torch.save_file({"Q": torch.zeros(1, 4, 300, 16)}, inputs)
    assert main(["run", str(inputs), out, *CPU]) == 2
    message = capsys.readouterr().err
    assert "there is Q" in message
    assert ".npy" not in message
