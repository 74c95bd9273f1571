"""``plan --devices`` answers for devices that are not here, and says what it assumed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from quorum_attention.cli import main
from quorum_attention.cli.plan import devices_of

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
    [["--levels", "7"], ["--census"], ["--backward"], ["--device", "cpu"], ["--window", "9"]],
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
