"""Measured rates: kept, found again, used by plans, and harmless when the file is
broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plans import assumed

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.errors import CalibrationError
from quorum_attention.execution.device.backend import Backend, TrialSizes
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.planner import calibration
from quorum_attention.planner.calibration import (
    cache_file,
    calibrate,
    device_key,
    hardware_of,
)

CPU = torch.device("cpu")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    def forget() -> None:
        calibration._stored_entries.cache_clear()
        hardware_of.cache_clear()

    monkeypatch.setenv(
        "QUORUM_ATTENTION_CACHE", str(tmp_path / "not" / "there" / "yet")
    )
    forget()
    yield tmp_path
    forget()


def write(figures: object) -> None:
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    cache_file().write_text(
        figures if isinstance(figures, str) else json.dumps(figures)
    )
    calibration._stored_entries.cache_clear()
    hardware_of.cache_clear()


def figures(rate: float) -> dict[str, object]:
    common = dict.fromkeys((*calibration._COMMON_RATES, "filling_causal"), 1.0)
    return {"flops": {"64": [rate, rate / 2], "128": [2 * rate, rate]}, **common}


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_a_cpu_is_measured_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_ROUNDS", 1)
    # Real calls, and short ones: how exactly does not matter here.
    sizes = TrialSizes(512, 512, 1 << 20, 0.0)
    monkeypatch.setattr(Backend, "trial_sizes", lambda cpu, device: sizes)
    assert not hardware_of(CPU, torch.float32, 64).measured
    before = calibration.rates_known()
    found = calibrate("cpu", torch.float32)
    assert calibration.rates_known() is not before
    assert found.path == cache_file()
    machine = hardware_of(CPU, torch.float32, 64)
    assert machine.measured
    assert machine.flops == found.figures["flops"]["64"][0] > 1e8
    assert min(machine.backward_flops, 100 * machine.up_bytes_per_second) > 1e8
    # Others are kept beside it.
    calibrate("cpu", torch.float16)
    assert hardware_of(CPU, torch.float32, 64).measured


@pytest.mark.usefixtures("empty_cache")
def test_plans_use_it() -> None:
    seconds = []
    for rate in (1e12, 1e11):
        write({device_key(CPU, torch.float32): figures(rate)})
        plan = qa.plan(
            65_536, device="cpu", dtype=torch.float32, levels=(7,), over_inputs=False
        )
        seconds.append(plan.cost.arithmetic)
    assert seconds[1] == pytest.approx(10 * seconds[0])


@pytest.mark.usefixtures("empty_cache")
def test_fp16_and_bf16_are_apart_on_a_cpu_and_one_on_a_gpu() -> None:
    """A CPU computes bf16 a dozen times as fast as fp16: one rate for 16 bits is of
    neither."""
    half, brain = (
        assumed("cpu", dtype, 64) for dtype in (torch.float16, torch.bfloat16)
    )
    assert brain.backward_flops > 5 * half.backward_flops
    assert assumed("cuda", torch.float16, 64) == assumed("cuda", torch.bfloat16, 64)
    seconds = [
        qa.plan(8192, device="cpu", dtype=dtype, backward=True).predicted_seconds
        for dtype in (torch.float16, torch.bfloat16)
    ]
    assert seconds[0] > 5 * seconds[1]
    write({device_key(CPU, torch.bfloat16): figures(1e12)})
    assert hardware_of(CPU, torch.bfloat16, 64).measured
    assert not hardware_of(CPU, torch.float16, 64).measured
    cuda = BACKENDS["cuda"]
    assert cuda.rates_of(torch.float16) == cuda.rates_of(torch.bfloat16) == "16 bit"


# What a quiet machine measures.
QUIET = {
    "head_dim 64 forward": 9e10, "head_dim 64 backward": 8e10,
    "head_dim 128 forward": 7e10, "head_dim 128 backward": 6e10, "causal": 5e10,
    **dict.fromkeys(calibration._COMMON_RATES, 1e-4),
}  # fmt: skip
Noise = Callable[[int, str], float]


@pytest.fixture
def measured(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Noise], None]:
    """Takes by how much everything is slowed down, by round and figure."""

    def set_noise(noise: Noise) -> None:
        numbers = count()

        def take(bench: object) -> dict[str, float]:
            number = next(numbers) % 3
            return {
                name: right
                * noise(number, name) ** (1 if name.endswith("_seconds") else -1)
                for name, right in QUIET.items()
            }

        monkeypatch.setattr(calibration.RateMeasurements, "round", take)

    return set_noise


def test_the_median_is_kept_and_the_spread_shown(measured: Any) -> None:
    measured(lambda number, name: (1.25, 1.0, 0.9)[number])
    told: list[str] = []
    found = calibrate("cpu", torch.float32, told.append)
    assert found.rounds == len(told) == 3
    assert found.figures["flops"] == {"64": [9e10, 8e10], "128": [7e10, 6e10]}
    assert found.figures["call_seconds"] == 1e-4
    assert list(found.spread.values()) == pytest.approx([1.25 / 0.9] * len(QUIET))
    hardware = hardware_of(CPU, torch.float32, 128)
    assert (hardware.flops, hardware.backward_flops) == (7e10, 6e10)
    assert hardware.measured


@pytest.mark.parametrize("name", ["head_dim 64 forward", "call_seconds"])
def test_what_disagrees_with_itself_is_not_stored(
    measured: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(lambda number, figure: 1.0)
    calibrate("cpu", torch.float32)
    before = cache_file().read_bytes()
    measured(lambda number, figure: 2.0**number if figure == name else 1.0)
    with pytest.raises(CalibrationError, match=f"disagree with each other: {name} "):
        calibrate("cpu", torch.float32)
    assert main(["calibrate", "--device", "cpu"]) == 2
    assert "try again when it is quiet" in capsys.readouterr().err.splitlines()[-1]
    for value in (float("inf"), float("nan")):
        measured(lambda number, name, value=value: value)
        with pytest.raises(CalibrationError, match="nothing was stored"):
            calibrate("cpu", torch.float32)
    assert cache_file().read_bytes() == before


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("value", [-1.0, float("nan"), "quick"])
def test_stored_figures_that_cannot_be_are_not_used(value: object) -> None:
    key = device_key(CPU, torch.float32)
    flops = {"64": [value, value], "128": [value, value]}
    changes = {"call_seconds": value}, {"flops": flops}
    for content in (
        "{",
        {key: 3},
        *({key: {**figures(1e12), **one}} for one in changes),
    ):
        write(content)
        assert hardware_of(CPU, torch.float32, 64) == assumed("cpu", torch.float32, 64)
