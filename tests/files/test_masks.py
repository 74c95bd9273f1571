"""Masks and shapes of calls from files, in parts: each part gets its own share of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import quorum_attention as qa
from quorum_attention.cli import main

CPU = ["--device", "cpu"]


def save(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    safetensors.torch.save_file(
        {name: t.contiguous() for name, t in tensors.items()}, path
    )
    return str(path)


DOCUMENTS = torch.tensor([[0] * 30 + [1] * 30, [5] * 59 + [7]])
LENGTHS = torch.tensor([60, 17])
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("options", "mask", "causal"),
    [
        (["--causal"], None, True),
        (["--causal", "--window", "9"], qa.Mask(window=9), True),
        (["--window=-1,3"], qa.Mask(window=(-1, 3)), False),
        (["--lower-right"], qa.Mask(causal="lower_right"), False),
        (["--causal", "--offset", "7"], qa.Mask(causal=True, offset=7), False),
        (["--chunk", "16", "--softcap", "2.5"], qa.Mask(chunk=16, softcap=2.5), False),
        (["--documents", "DOCUMENTS", "--causal"], qa.Mask(documents=DOCUMENTS), True),
        (["--documents", "FIRST"], qa.Mask(documents=DOCUMENTS[0]), False),
        (["--lengths", "LENGTHS"], qa.Mask(key_lengths=LENGTHS), False),
        (["--sinks", "SINKS", "--causal"], qa.Mask(sinks=SINKS), True),
    ],
)
def test_masks_by_options(
    tmp_path: Path, options: list[str], mask: Any, causal: bool
) -> None:
    """Results are in tests/test_conformance.py: here, that options are read as this
    mask."""
    named = {
        "DOCUMENTS": DOCUMENTS,
        "FIRST": DOCUMENTS[0],
        "LENGTHS": LENGTHS,
        "SINKS": SINKS,
    }
    for name, tensor in named.items():
        np.save(tmp_path / f"{name}.npy", tensor.numpy())
    options = [str(tmp_path / f"{o}.npy") if o in named else o for o in options]
    three = [torch.randn(2, h, 60, 8) for h in (4, 2, 2)]
    if mask is None:
        three = [torch.randn(60, 8) for _ in range(3)]  # without heads
    inputs, out = (
        save(tmp_path / "qkv", dict(zip("qkv", three, strict=True))),
        tmp_path / "out",
    )
    assert main(["run", inputs, str(out), *CPU, *options, "--keep-every", "1"]) == 0
    wanted = qa.attention(
        *three, mask, is_causal=causal, enable_gqa=True, devices="cpu"
    )
    torch.testing.assert_close(safetensors.torch.load_file(out)["out"], wanted)


@pytest.mark.parametrize("backward", [False, True])
def test_a_budget_that_is_too_small_for_some_entries_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backward: bool
) -> None:
    """An entry that is not padded needs no mask, and so less memory than the others."""
    three = [torch.randn(3, 2, 200, 16) for _ in range(3)]
    inputs = [save(tmp_path / "qkv", dict(zip("qkv", three, strict=True)))]
    asked = [
        "--lengths",
        save(tmp_path / "lengths", {"lengths": torch.tensor([200, 200, 100])}),
    ]
    asked += ["--keep-every", "1", *CPU]
    if backward:
        assert main(["run", *inputs, str(tmp_path / "out"), "--lse", *asked]) == 0
        inputs += [
            str(tmp_path / "out"),
            save(tmp_path / "do", {"do": torch.randn(3, 2, 200, 16)}),
        ]
        asked += ["--backward"]
    before = sorted(tmp_path.iterdir())
    assert (
        main(["run", *inputs, str(tmp_path / "made"), *asked, "--budget", "6.3MiB"])
        == 2
    )
    assert "is too small for this call" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


BY_NUMBERS = "out and lse are from another forward"


@pytest.mark.parametrize(
    ("forward", "backward", "said"),
    [
        (["--causal"], [], "--causal True, and this is a backward with False"),
        (
            ["--scale", "0.5"],
            ["--scale", "2"],
            "--scale 0.5, and this is a backward with 2.0",
        ),
        (["--window", "3"], ["--window=3,3"], "--window 3, and"),
        ([], ["--sinks", "SINKS"], "--sinks None, and"),
        (["--causal"], [], BY_NUMBERS),
        ([], ["--scale", "0.5"], BY_NUMBERS),
        (["--causal"], ["--causal", "--window", "100"], BY_NUMBERS),
    ],
)
def test_a_backward_of_another_call_is_refused(
    tmp_path: Path, forward: list[str], backward: list[str], said: str, capsys: Any
) -> None:
    """By the options in the forward's file; by the numbers where a file does not have
    them."""
    np.save(tmp_path / "SINKS.npy", np.zeros(4, np.float32))
    backward = [str(tmp_path / "SINKS.npy") if o == "SINKS" else o for o in backward]
    named = {
        n: torch.randn(2, 4, 300, 16) for n in ("query", "key", "value", "grad_out")
    }
    inputs, out, grads = (
        [save(tmp_path / "in", named)],
        str(tmp_path / "out"),
        tmp_path / "grads",
    )
    assert main(["run", *inputs, out, "--lse", *CPU, *forward]) == 0
    inputs.append(out)
    if said == BY_NUMBERS:
        inputs = [
            save(tmp_path / "both", {**named, **safetensors.torch.load_file(out)})
        ]
    command = ["run", "--backward", *inputs, str(grads), *CPU]
    assert main([*command, *backward]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not grads.exists()
    assert main([*command, *forward]) == 0


def test_plans_and_estimates_take_masks(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "estimate"):
        sizes = [
            command,
            "--tokens",
            "65536",
            "--device",
            "cpu",
            "--dtype",
            "fp32",
            "--json",
        ]
        assert main([*sizes, "--causal"]) == 0
        whole = capsys.readouterr().out
        assert main([*sizes, "--causal", "--window", "1024"]) == 0
        assert capsys.readouterr().out != whole
