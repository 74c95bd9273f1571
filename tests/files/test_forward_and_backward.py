"""A backward from files is of the forward that wrote them: options that disagree are an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from quorum_attention.cli import main

CPU = ["--device", "cpu"]
ANOTHER = "out and lse are of another forward"


def _forward(folder: Path, *options: str) -> Path:
    torch.manual_seed(0)
    named = {n: torch.randn(2, 4, 300, 16) for n in ("query", "key", "value", "grad_out")}
    safetensors.torch.save_file(named, folder / "in.safetensors")
    forward = [str(folder / "in.safetensors"), str(folder / "out.safetensors")]
    assert main(["run", *forward, "--lse", *options, *CPU]) == 0
    found = safetensors.torch.load_file(folder / "out.safetensors")
    safetensors.torch.save_file({**named, **found}, folder / "both.safetensors")
    return folder / "both.safetensors"


@pytest.mark.parametrize(("forward", "backward"), [
    (["--causal"], []), ([], ["--causal"]), ([], ["--scale", "0.5"]),
    (["--window", "30"], []), (["--causal"], ["--causal", "--window", "100"]),
])  # fmt: skip
def test_options_that_disagree(
    forward: list[str], backward: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = _forward(tmp_path, *forward)
    grads = tmp_path / "grads.safetensors"
    assert main(["run", str(given), str(grads), "--backward", *backward, *CPU]) != 0
    assert ANOTHER in " ".join(capsys.readouterr().err.split())
    assert not grads.exists()
    assert main(["run", str(given), str(grads), "--backward", *forward, *CPU]) == 0
    assert grads.exists()
