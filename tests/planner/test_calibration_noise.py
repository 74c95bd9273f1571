"""What a busy machine measures is not remembered as a fact about it: everything is measured several
times, the best is kept, and what disagrees with itself is refused."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers_memory import FailingAllocations

from quorum_attention.cli import main
from quorum_attention.errors import CalibrationError
from quorum_attention.execution.device import cpu
from quorum_attention.execution.device.cpu import cpu_name
from quorum_attention.planner import calibration
from quorum_attention.planner.calibration import (
    cache_file,
    calibrate,
    device_key,
    machine_of,
)
from quorum_attention.planner.machine import assumed

CPU = torch.device("cpu")
# What a quiet machine measures.
QUIET = {
    "head_dim 64 forward": 9e10,
    "head_dim 64 backward": 8e10,
    "head_dim 128 forward": 7e10,
    "head_dim 128 backward": 6e10,
    "causal": 5e10,
    "merge_bytes_per_second": 3e10,
    "up_bytes_per_second": 2e10,
    "down_bytes_per_second": 2e10,
    "call_seconds": 1e-4,
    "backward_call_seconds": 2e-4,
    "plan_seconds": 1e-3,
}
Noise = Callable[[int, str], float]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Noise], None]]:
    """Takes by how much everything is slowed down, by round and figure."""

    def forget() -> None:
        calibration._known.cache_clear()
        machine_of.cache_clear()

    def set_noise(noise: Noise) -> None:
        def take(bench: object, number: int) -> dict[str, float]:
            return {
                name: right * noise(number, name)
                if name.endswith("_seconds")
                else right / noise(number, name)
                for name, right in QUIET.items()
            }

        monkeypatch.setattr(calibration._Bench, "round", take)
        monkeypatch.setattr(calibration, "_waited_seconds", lambda: 0.0)

    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path))
    forget()
    yield set_noise
    forget()


def test_the_fake_measures_what_the_bench_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration._Bench, "seconds", lambda bench, run, *seconds: 1e-3)
    assert calibration._Bench(CPU, torch.float32).round(0).keys() == QUIET.keys()


def test_a_round_runs_outside_the_callers_modes_and_draws_none_of_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration._Bench, "seconds", lambda bench, run, *seconds: 1e-3)
    state = torch.get_rng_state()
    with FailingAllocations(1, 10_000), torch.inference_mode():
        assert calibration._Bench(CPU, torch.float32).round(0).keys() == QUIET.keys()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_best_is_kept_and_the_spread_shown(measured: Callable[[Noise], None]) -> None:
    measured(lambda number, name: (4.0, 1.0, 1.1)[number])
    told: list[str] = []
    found = calibrate("cpu", torch.float32, told.append)
    assert found.rounds == len(told) == 3
    assert found.figures["flops"] == {"64": [9e10, 8e10], "128": [7e10, 6e10]}
    assert found.figures["call_seconds"] == 1e-4
    assert found.figures["up_bytes_per_second"] == 2e10
    assert list(found.spread.values()) == pytest.approx([4.0] * len(QUIET))
    machine = machine_of(CPU, torch.float32, 128)
    assert (machine.flops, machine.backward_flops) == (7e10, 6e10)
    assert machine.measured


def test_another_round_is_taken_where_two_do_not_agree(measured: Callable[[Noise], None]) -> None:
    measured(lambda number, name: (8.0, 3.0, 1.0, 2.0, 1.15, 1.0)[number])
    found = calibrate("cpu", torch.float32)
    assert found.rounds == 5
    assert found.figures["flops"]["64"] == [9e10, 8e10]


@pytest.mark.parametrize("name", QUIET)
def test_what_disagrees_with_itself_is_not_stored(
    measured: Callable[[Noise], None], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(lambda number, figure: 1.0)
    calibrate("cpu", torch.float32)
    before = cache_file().read_bytes()
    measured(lambda number, figure: 2.0**number if figure == name else 1.0)
    if name == "plan_seconds":  # of a shape that is new: there is no second time
        calibrate("cpu", torch.float32)
        return
    with pytest.raises(CalibrationError, match=f"disagree with each other: {name} "):
        calibrate("cpu", torch.float32)
    assert main(["calibrate", "--device", "cpu"]) == 2
    assert "try again when it is quiet" in capsys.readouterr().err.splitlines()[-1]
    assert cache_file().read_bytes() == before


def test_a_core_that_is_shared_all_the_time_is_noticed(
    measured: Callable[[Noise], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything takes twice as long, every time: nothing disagrees."""
    measured(lambda number, name: 2.0)
    waited = itertools.count()
    monkeypatch.setattr(calibration, "_waited_seconds", lambda: float(next(waited)))
    with pytest.raises(CalibrationError, match="nothing was stored: in 6 of 6 rounds this process"):
        calibrate("cpu", torch.float32)
    assert not cache_file().exists()


def test_what_was_better_before_is_said(
    measured: Callable[[Noise], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds that are wrong by the same factor agree with each other, and not with those of another
    day. Which are right is not known: the machine may have changed."""
    measured(lambda number, name: 1.0)
    assert calibrate("cpu", torch.float32).better_before == {}
    assert main(["calibrate", "--device", "cpu"]) == 0
    assert "before" not in capsys.readouterr().err
    slow = {"head_dim 64 backward": 1.5, "call_seconds": 2.0}
    measured(lambda number, name: slow.get(name, 1.1))
    found = calibrate("cpu", torch.float32)
    assert found.better_before == pytest.approx(slow)
    assert found.figures["call_seconds"] == 2e-4, "what was measured last is kept"
    measured(lambda number, name: 3.0)
    assert main(["calibrate", "--device", "cpu"]) == 0
    assert "head_dim 64 forward was 2.7 times as good: unless" in capsys.readouterr().err
    measured(lambda number, name: 1.0)
    assert calibrate("cpu", torch.float32).better_before == {}, "it is better now"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not say")
def test_waiting_for_a_core_is_counted() -> None:
    """Two threads of work that never waits for anything, on one core: each waits for the other."""
    spin = "import time\nend = time.monotonic() + 1.0\nwhile time.monotonic() < end: pass\n"
    count = (
        "import os, subprocess, sys\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from quorum_attention.planner.calibration import _waited_seconds\n"
        f"other = subprocess.Popen([sys.executable, '-c', {spin!r}])\n"
        "before = _waited_seconds()\n"
        f"exec({spin!r})\n"
        "print(_waited_seconds() - before)\n"
        "other.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.15


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_cannot_be_is_not_stored(measured: Callable[[Noise], None], value: float) -> None:
    measured(lambda number, name: value)
    with pytest.raises(CalibrationError, match="cannot be"):
        calibrate("cpu", torch.float32)
    assert not cache_file().exists()


def test_a_busy_machine_is_right_or_refused(measured: Callable[[Noise], None]) -> None:
    """Every other measurement is up to thirty times slower than it should be."""
    stored = refused = 0
    for seed in range(200):
        draw = random.Random(seed)

        def noise(number: int, name: str, draw: random.Random = draw) -> float:
            return draw.uniform(1.0, 1.05) if draw.random() < 0.6 else draw.uniform(2, 30)

        measured(noise)
        try:
            found = calibrate("cpu", torch.float32)
        except CalibrationError:
            refused += 1
            continue
        stored += 1
        right = [rate for d in ("64", "128") for rate in found.figures["flops"][d]]
        off = [a / b for a, b in zip(list(QUIET.values())[:4], right, strict=True)]
        # Two that are wrong by the same factor are not told from two that are right.
        assert max(off) < 1.06 or max(off) > 2
        stored -= max(off) > 2
    assert stored > 100
    assert refused > 0


def test_a_profile_belongs_to_a_model_and_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_name() in device_key(CPU, torch.float32)
    assert "\n" not in cpu_name()
    assert cpu_name()
    keys = set()
    for name in ("Quick 9000", "Slow 10"):
        for threads in (2, 4):
            monkeypatch.setattr(cpu, "cpu_name", lambda name=name: name)
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            keys.add(device_key(CPU, torch.float32))
    assert len(keys) == 4


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), None, "quick", [1]])
@pytest.mark.parametrize("name", ["call_seconds", "filling_causal", "flops"])
def test_stored_figures_that_cannot_be_are_not_used(
    measured: Callable[[Noise], None], name: str, value: object
) -> None:
    measured(lambda number, figure: 1.0)
    calibrate("cpu", torch.float32)
    stored = json.loads(cache_file().read_text())
    entry = stored[device_key(CPU, torch.float32)]
    entry[name] = {"64": [value, value], "128": [value, value]} if name == "flops" else value
    cache_file().write_text(json.dumps(stored))
    calibration._known.cache_clear()
    machine_of.cache_clear()
    assert machine_of(CPU, torch.float32, 64) == assumed("cpu", torch.float32, 64)
