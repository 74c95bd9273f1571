"""The commands, run as a user would, small."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.docs import QWEN3_8B, my_attention

from quorum_attention.cli import doctor, main
from quorum_attention.cli.options import DTYPES
from quorum_attention.cli.plan import devices_of


def test_plan_and_estimate_speak_json(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "65536", "--device", "cuda", "--budget", "64MiB", "--json"]
    assert main(["plan", *sizes, "--levels", "7,7", "--census"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["levels"] == [7, 7]
    assert made["peak_bytes"] <= 64 << 20
    assert main(["estimate", *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["forward"]["peak_bytes"] <= 64 << 20


VERDICT = r"fits in 24.00 GiB of the device; [\d.]+ [GM]iB free; host [\d.]+ GiB of 106.67 GiB"


@pytest.mark.slow
def test_estimate_of_a_long_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_8B))
    prompt = ["estimate", "--model", str(file), "--prompt", "256K", "--memory", "24GiB"]
    host = ["--device", "cuda", "--host-memory", "128GiB"]
    assert main([*prompt, *host, "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["fits"] is True
    assert estimate["tokens"] == 262_144
    assert [part["name"] for part in estimate["parts"]] == [
        "weights",
        "cache",
        "working memory",
    ]
    assert main([*prompt, *host]) == 0
    words = capsys.readouterr().out
    assert "prefill: " in words
    assert re.search(VERDICT, words)
    # The last of two options counts.
    assert main([*prompt, *host, "--host-memory", "16GiB"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    limits = "24.00 GiB of the device and 13.33 GiB of host memory"
    assert re.search(rf"does not fit in {limits}: longest \d+K", words)
    assert "each further token" not in words
    assert main([*prompt, *host, "--memory", "8GiB"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"no prompt fits; with weights in host memory .*: longest \d+K", words
    )
    # Whoever plans for a GPU on a machine without one is told how.
    on_cpu = main([*prompt, "--memory", "80GiB"])
    words = " ".join(capsys.readouterr().out.split())
    assert on_cpu == 0
    assert ("For a GPU say --device cuda" in words) != torch.cuda.is_available()
    assert main([*prompt, "--memory", "80GiB", "--device", "cpu"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "(on this machine's CPU)" in words
    assert "quorum-attention calibrate measures this one's" in words
    for refused in (
        ["--tokens", "5"],
        ["--lora", "8"],
        ["--budget", "1GiB"],
        ["--causal"],
    ):
        assert main([*prompt, *refused]) == 2
        assert f"{refused[0]} does not go with --prompt" in capsys.readouterr().err
    assert main(["estimate", "--model", str(file), "--tokens", "5", "--causal"]) == 2
    assert "--causal does not go with --model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*prompt, "--memory", "24"])
    assert "memory must be at least 1.00 MiB" in capsys.readouterr().err
    if not torch.cuda.is_available():  # how much memory has it?
        no_memory = ["estimate", "--model", str(file), "--prompt", "5"]
        assert main([*no_memory, "--device", "cuda"]) == 2
        assert "--device" in capsys.readouterr().err
    assert main(["estimate", "--prompt", "5"]) == 2
    assert "--prompt goes with --model only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "t5", "d_model": 64, "is_encoder_decoder": True},
            "t5 has an encoder and a decoder, .* give --tokens, --heads and --head-dim",
        ),
        (
            {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2},
            "mamba has no attention, .* measure a short prompt",
        ),
    ],
    ids=["t5", "mamba"],
)
def test_models_that_are_not_estimated_say_why(
    config: dict[str, Any],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They were told that a size is missing, which their configurations have no place
    for."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for length in ("--prompt", "--tokens"):
        arguments = ["estimate", "--model", str(file), length, "4K", "--memory", "1GiB"]
        assert main(arguments) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert re.search(words, error), error
    call = ["estimate", "--tokens", "4K", "--heads", "8", "--head-dim", "64"]
    assert main(call) == 0, "what the message advises"


def test_doctor_names_every_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The interpreter would take ten seconds for the native one.
    some = {
        name: kernel for name, kernel in doctor.kernels().items() if name != "native"
    }
    monkeypatch.setattr(doctor, "kernels", lambda: some)
    assert main(["doctor", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert all(set(d["kernels"]) >= {"cpu", "dense", "cudnn"} for d in devices)


def test_doctor_says_what_would_be_faster() -> None:
    """Of a GPU, of threads, and of what is installed."""
    versions = {"flash-attn-4": None, "transformers": None}
    hopper = {
        "device": "cuda:0",
        "capability": (9, 0),
        "calibrated": ["float16"],
    }
    here = {"n_threads": 1, "n_cores": 16, "has_driver": True}
    said = doctor.advice([hopper], versions, **here)
    assert any("fa4" in line for line in said)
    assert any("calibrate" in line for line in said)
    assert any("OMP_NUM_THREADS" in line for line in said)
    assert any("transformers" in line for line in said)
    assert not any("CUDA build" in line for line in said)
    older = {**hopper, "capability": (8, 0), "calibrated": list(DTYPES)}
    here = {"n_threads": 16, "n_cores": 16, "has_driver": True}
    installed = {"flash-attn-4": None, "transformers": "5.17.0"}
    assert doctor.advice([older], installed, **here) == []
    cpu = {"device": "cpu", "capability": None}
    assert any("CUDA build" in line for line in doctor.advice([cpu], installed, **here))


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--tokens", "100", "--levels", "8"],
        ["plan", "--tokens", "100000", "--budget", "1KiB", "--device", "cpu"],
        ["run", "no-such-file", "out"],
        ["run", "q=", "out"],
        ["recover", "--tokens", "500", "--draw", "", "--device", "cpu"],
        ["bench", "--heads", "3", "--kv-heads", "2", "--device", "cpu"],
    ],
)
def test_user_errors_are_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("quorum-attention: ")
    assert said.count("\n") == 1


MODULE = f"""
import torch
from typing import Any

{inspect.getsource(my_attention)}

def wrong(query, key, value, *, is_causal, scale):
    out, lse = my_attention(query, key, value, is_causal=is_causal, scale=scale)
    return out, lse * 0

def refuses(query, key, value, *, is_causal, scale):
    raise ValueError("too short")

def inner(grad):
    return grad @ torch.zeros(grad.shape[-1] + 1)

def fails_backward(query, key, value, *, is_causal, scale):
    scores = query @ key.mT * scale
    scores.register_hook(inner) if scores.requires_grad else None
    return scores.softmax(-1) @ value, scores.logsumexp(-1)

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_attention.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
def test_check_a_function_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--device", "cpu", "--tokens", "80", "--forward-only"]
    assert main(["check", "my_own_attention:my_attention", *short]) == 0
    assert "my_attention: exact within rounding" in capsys.readouterr().out
    assert main(["check", "my_own_attention:wrong", *short, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "not exact"
    assert any(case["errors"]["lse"] > case["limit"] for case in found["cases"])
    assert main(["check", "my_own_attention:number", "--device", "cpu"]) == 2
    assert "neither an inner kernel nor a function" in capsys.readouterr().err
    assert main(["check", "my_own_attention:missing", "--device", "cpu"]) == 2
    # A script that ends when it is imported: its status is no verdict.
    (tmp_path / "my_own_script.py").write_text(f"import sys\n{MODULE}\nsys.exit(0)\n")
    assert main(["check", "my_own_script:wrong", "--device", "cpu"]) == 2
    assert "my_own_script ends the program" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["refuses", "fails_backward"])
def test_check_shows_the_users_own_frames_of_a_failure(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["check", f"my_own_attention:{name}", "--device", "cpu", "--no-causal"])
        == 2
    )
    said = capsys.readouterr().err
    assert "quorum_attention" not in said
    assert "my_own_attention.py" in said
    error = "ValueError: too short" if name == "refuses" else "RuntimeError: "
    assert f"\n{error}" in said
    assert ("in inner" in said) == (name != "refuses")


# For devices that are not here.
CALL = ["plan", "--tokens", "1M", "--causal", "--budget", "1GiB"]


def test_lists_of_devices() -> None:
    assert devices_of("2xH200,a100") == [("H200", 1.0)] * 2 + [("a100", 0.36)]
    assert devices_of("mine:0.5") == [("mine", 0.5)]


@pytest.mark.parametrize(
    "text", ["", "8x", "2xH900", "H200:0", "0xH200", "99999xH200", "H200;A100"]
)
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        devices_of(text)


def test_more_devices_take_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for devices in ("1xH200", "2xH200", "2xH200,2xA100"):
        assert main([*CALL, "--devices", devices, "--json"]) == 0
        passes = json.loads(capsys.readouterr().out)["passes"]
        seconds.append((passes["forward"]["seconds"], passes["backward"]["seconds"]))
    for one, two, four in zip(*seconds, strict=True):
        assert two == pytest.approx(one / 2, rel=0.05)
        assert one / 2.8 < four < one / 2.3


@pytest.mark.parametrize(
    "option",
    [
        ["--levels", "7"],
        ["--census"],
        ["--backward"],
        ["--device", "cpu"],
        ["--window", "9"],
    ],
)
def test_what_would_be_ignored_is_refused(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CALL, "--devices", "2xH200", *option]) != 0
    assert f"{option[0]} does not go with --devices" in capsys.readouterr().err


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "gantt.svg"
    assert main([*CALL, "--devices", "2xH200,1xA100", "--draw", str(target)]) == 0
    assert "not measured" in capsys.readouterr().out
    assert "backward" in target.read_text()
