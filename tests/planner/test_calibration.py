"""Measured rates: kept, found again, used by plans, and harmless when the file is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import quorum_attention as qa
from quorum_attention.cli import main
from quorum_attention.execution.device.backend import TrialSizes
from quorum_attention.execution.device.cpu import Cpu
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.kernels.fa4 import by_head_dim
from quorum_attention.planner import calibration
from quorum_attention.planner.calibration import cache_file, calibrate, device_key, machine_of
from quorum_attention.planner.machine import assumed

CPU = torch.device("cpu")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    def forget() -> None:
        calibration._known.cache_clear()
        machine_of.cache_clear()

    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path / "not" / "there" / "yet"))
    forget()
    yield tmp_path
    forget()


def write(figures: object) -> None:
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    cache_file().write_text(figures if isinstance(figures, str) else json.dumps(figures))
    calibration._known.cache_clear()
    machine_of.cache_clear()


def figures(rate: float) -> dict[str, object]:
    common = dict.fromkeys((*calibration._COMMON, "filling_causal"), 1.0)
    return {"flops": {"64": [rate, rate / 2], "128": [2 * rate, rate]}, **common}


@pytest.mark.usefixtures("empty_cache")
def test_a_cpu_is_measured_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once, and on whatever machine this is: what noise does is test_calibration_noise's.
    for name, value in (("_ROUNDS", 1), ("_disagreeing", lambda rounds: []), ("_WAITING", 99.0)):
        monkeypatch.setattr(calibration, name, value)
    # Real calls, and short ones: how exactly does not matter here.
    sizes = TrialSizes(512, 512, 1 << 20, 0.0, torch.get_num_threads())
    monkeypatch.setattr(Cpu, "trial_sizes", lambda cpu, device: sizes)
    assert not machine_of(CPU, torch.float32, 64).measured
    before = calibration.rates_known()
    found = calibrate("cpu", torch.float32)
    assert calibration.rates_known() is not before
    assert found.path == cache_file()
    assert found.path.exists()
    machine = machine_of(CPU, torch.float32, 64)
    assert machine.measured
    assert machine.flops == found.figures["flops"]["64"][0] > 1e8
    assert machine.backward_flops > 1e8
    assert machine.up_bytes_per_second > 1e8
    assert found.seconds < 300  # some seconds on a quiet machine
    # Others are kept beside it.
    calibrate("cpu", torch.float16)
    assert machine_of(CPU, torch.float32, 64).measured


@pytest.mark.usefixtures("empty_cache")
def test_plans_use_it() -> None:
    sizes = {"device": "cpu", "dtype": torch.float32, "levels": (7,), "over_inputs": False}
    write({device_key(CPU, torch.float32): figures(1e12)})
    fast = qa.plan(65_536, **sizes).candidate.cost.arithmetic
    write({device_key(CPU, torch.float32): figures(1e11)})
    slow = qa.plan(65_536, **sizes).candidate.cost.arithmetic
    assert slow == pytest.approx(10 * fast)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '"x"', "[" * 100_000,
     json.dumps({device_key(CPU, torch.float32): {"flops": {}}}),
     json.dumps({device_key(CPU, torch.float32): 3}),
     json.dumps({device_key(CPU, torch.float32): {"flops": {"64": [10**400, 1]}}})],
)  # fmt: skip
def test_a_broken_file_is_no_calibration(content: str) -> None:
    write(content)
    assert machine_of(CPU, torch.float32, 64) == assumed("cpu", torch.float32, 64)


@pytest.mark.usefixtures("empty_cache")
def test_another_device_or_version_is_not_used() -> None:
    key = device_key(CPU, torch.float32).replace(torch.__version__, "1.0")
    write({key: figures(1e12)})
    assert not machine_of(CPU, torch.float32, 64).measured


@pytest.mark.usefixtures("empty_cache")
def test_fp16_and_bf16_are_apart_on_a_cpu_and_one_on_a_gpu() -> None:
    """A CPU computes bf16 a dozen times as fast as fp16: one rate for 16 bits is of neither."""
    half, brain = (assumed("cpu", dtype, 64) for dtype in (torch.float16, torch.bfloat16))
    assert brain.backward_flops > 5 * half.backward_flops
    assert assumed("cuda", torch.float16, 64) == assumed("cuda", torch.bfloat16, 64)
    seconds = [
        qa.plan(8192, device="cpu", dtype=dtype, backward=True).predicted_seconds
        for dtype in (torch.float16, torch.bfloat16)
    ]
    assert seconds[0] > 5 * seconds[1]
    write({device_key(CPU, torch.bfloat16): figures(1e12)})
    assert machine_of(CPU, torch.bfloat16, 64).measured
    assert not machine_of(CPU, torch.float16, 64).measured
    cuda = BACKENDS["cuda"]
    assert cuda.rates_of(torch.float16) == cuda.rates_of(torch.bfloat16) == "16 bit"


@pytest.mark.usefixtures("empty_cache")
def test_a_file_of_an_earlier_version_is_read_but_for_16_bits_of_a_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = f"{Cpu().model(CPU)}, torch {torch.__version__}"
    write({f"{before}, {bits} bit": figures(1e12) for bits in (16, 32)})
    assert machine_of(CPU, torch.float32, 64).measured
    assert not machine_of(CPU, torch.float16, 64).measured
    assert main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "calibrated for float32; assumed for float16, bfloat16, float64 (quorum-att" in said


def test_head_dims_between_and_beyond() -> None:
    table = {64: (100.0, 10.0), 128: (200.0, 30.0)}
    assert by_head_dim(table, 32) == (100.0, 10.0)
    assert by_head_dim(table, 96) == (150.0, 20.0)
    assert by_head_dim(table, 256) == (200.0, 30.0)


def test_waves() -> None:
    machine = assumed("cuda", torch.float16, 64)
    whole = machine.share_of_rate(2 * machine.wave_rows)
    assert whole == 1.0
    assert machine.share_of_rate(2 * machine.wave_rows + 128) < 0.72
    assert 0.85 < machine.share_of_rate(2 * machine.wave_rows + 128, streams=2) < 1
    assert machine.share_of_rate(5_000, causal_side=5_000) < machine.share_of_rate(5_000)
    assert machine.cached_share(1 << 30) < machine.cached_share(1 << 26) < 1.0
    assert machine.cached_share(1 << 20) == 1.0


@pytest.mark.usefixtures("empty_cache")
def test_small_calls_are_decided_anew_by_new_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rates say what is short, as on a GPU."""
    from quorum_attention.planner import small

    asked: list[object] = []
    monkeypatch.setattr(Cpu, "refuses", True)
    monkeypatch.setattr(small, "short_monolithic", lambda *given, **named: asked.append(given))
    query = torch.randn(1, 1, 37, 8)

    def count() -> int:
        qa.attention(query, query, query)
        return len(asked)

    once = count()
    assert once > 0
    assert count() == once
    calibration.rates_known.cache_clear()
    assert count() > once
