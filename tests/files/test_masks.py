"""Masks and shapes of calls from files, in parts: each part gets its own share of them."""

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
    safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    return str(path)


def both_ways(
    folder: Path, three: list[torch.Tensor], options: list[str], mask: Any, **call: Any
) -> None:
    """A forward and a backward from files, held against one call and its autograd."""
    inputs = save(folder / "qkv", dict(zip("qkv", three, strict=True)))
    assert main(["run", inputs, str(folder / "out"), "--lse", *CPU, *options]) == 0
    given = [t.clone().requires_grad_() for t in three]
    wanted, lse = qa.attention_with_lse(
        *given, attn_mask=mask, enable_gqa=True, devices="cpu", **call
    )
    found = safetensors.torch.load_file(folder / "out")
    torch.testing.assert_close(found["out"], wanted)
    torch.testing.assert_close(found["lse"], lse)
    upstream = torch.randn_like(wanted)
    more = [str(folder / "out"), save(folder / "do", {"do": upstream}), str(folder / "grads")]
    assert main(["run", "--backward", inputs, *more, *CPU, *options]) == 0
    wanted.backward(upstream)
    grads = safetensors.torch.load_file(folder / "grads")
    for name, tensor in zip(("dq", "dk", "dv"), given, strict=True):
        torch.testing.assert_close(grads[name], tensor.grad)


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
def test_masks_by_options(tmp_path: Path, options: list[str], mask: Any, causal: bool) -> None:
    np.save(tmp_path / "DOCUMENTS.npy", DOCUMENTS.numpy())
    np.save(tmp_path / "FIRST.npy", DOCUMENTS[0].numpy())
    np.save(tmp_path / "LENGTHS.npy", LENGTHS.numpy())
    np.save(tmp_path / "SINKS.npy", SINKS.numpy())
    options = [str(tmp_path / f"{o}.npy") if o.isupper() else o for o in options]
    three = [torch.randn(2, h, 60, 8) for h in (4, 2, 2)]
    if mask is None:
        three = [torch.randn(60, 8) for _ in range(3)]  # without heads
    both_ways(tmp_path, three, [*options, "--keep-every", "1"], mask, is_causal=causal)


@pytest.mark.parametrize("backward", [False, True])
def test_a_budget_that_is_too_small_for_some_entries_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backward: bool
) -> None:
    """An entry that is not padded needs no mask, and so less memory than the others."""
    three = [torch.randn(3, 2, 200, 16) for _ in range(3)]
    inputs = [save(tmp_path / "qkv", dict(zip("qkv", three, strict=True)))]
    asked = ["--lengths", save(tmp_path / "lengths", {"lengths": torch.tensor([200, 200, 100])})]
    asked += ["--keep-every", "1", *CPU]
    if backward:
        assert main(["run", *inputs, str(tmp_path / "out"), "--lse", *asked]) == 0
        inputs += [str(tmp_path / "out"), save(tmp_path / "do", {"do": torch.randn(3, 2, 200, 16)})]
        asked += ["--backward"]
    before = sorted(tmp_path.iterdir())
    assert main(["run", *inputs, str(tmp_path / "made"), *asked, "--budget", "6.3MiB"]) == 2
    assert "is too small for this call" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_mask_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {**{n: torch.randn(1, 1, 9, 4) for n in "qkv"}, "mask": torch.ones(9, 9) > 0}
    path, mask = save(tmp_path / "in", tensors), save(tmp_path / "mask", {"mask": tensors["mask"]})
    assert main(["run", path, str(tmp_path / "out"), "--mask", mask, *CPU]) == 2
    assert "one must go" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("forward", "backward", "said"),
    [
        (["--causal"], [], "--causal True, and this is a backward with False"),
        (["--scale", "0.5"], ["--scale", "2"], "--scale 0.5, and this is a backward with 2.0"),
        (["--window", "3"], ["--window=3,3"], "--window 3, and"),
        ([], ["--sinks", "SINKS"], "--sinks None, and"),
    ],
)
def test_a_backward_of_another_call_is_refused(
    tmp_path: Path,
    forward: list[str],
    backward: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    np.save(tmp_path / "SINKS.npy", np.zeros(1, np.float32))
    backward = [str(tmp_path / "SINKS.npy") if o == "SINKS" else o for o in backward]
    tensors = {n: torch.randn(1, 1, 9, 4) for n in "qkv"}
    inputs, out = save(tmp_path / "in", tensors), str(tmp_path / "out")
    assert main(["run", inputs, out, "--lse", *CPU, *forward]) == 0
    upstream = save(tmp_path / "do", {"grad_out": torch.randn(1, 1, 9, 4)})
    command = ["run", "--backward", inputs, out, upstream, str(tmp_path / "grads"), *CPU]
    assert main([*command, *backward]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "grads").exists()
    assert main([*command, *forward]) == 0


@pytest.mark.parametrize(("forward", "backward"), [
    (["--causal"], []), ([], ["--causal"]), ([], ["--scale", "0.5"]),
    (["--window", "30"], []), (["--causal"], ["--causal", "--window", "100"]),
])  # fmt: skip
def test_a_backward_that_does_not_say_of_which_call_it_is_is_found_out(
    forward: list[str], backward: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the numbers: the file does not have the forward's options."""
    named = {n: torch.randn(2, 4, 300, 16) for n in ("query", "key", "value", "grad_out")}
    given, out, grads = save(tmp_path / "in", named), tmp_path / "out", tmp_path / "grads"
    assert main(["run", given, str(out), "--lse", *forward, *CPU]) == 0
    given = save(tmp_path / "both", {**named, **safetensors.torch.load_file(out)})
    assert main(["run", given, str(grads), "--backward", *backward, *CPU]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "out and lse are of another forward" in said
    assert not grads.exists()
    assert main(["run", given, str(grads), "--backward", *forward, *CPU]) == 0


def test_plans_and_estimates_take_masks(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "estimate"):
        sizes = [command, "--tokens", "65536", "--device", "cpu", "--dtype", "fp32", "--json"]
        assert main([*sizes, "--causal"]) == 0
        whole = capsys.readouterr().out
        assert main([*sizes, "--causal", "--window", "1024"]) == 0
        assert capsys.readouterr().out != whole
    assert main(["plan", "--tokens", "1M", "--devices", "2xH200", "--window", "9"]) == 2
    assert "--window does not go with --devices" in capsys.readouterr().err
