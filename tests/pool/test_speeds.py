"""What is expected of devices before they have done anything."""

from __future__ import annotations

import json

import pytest
import torch

from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.planner import calibration
from quorum_attention.pool.speeds import expected_paces

HALF = torch.float16


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    calibration._known.cache_clear()


def test_published_speeds() -> None:
    devices = [("cuda:0", "NVIDIA H200"), ("cuda:1", "NVIDIA A100-SXM4-80GB"), ("cpu", "cpu")]
    for backward in (False, True):
        h200, a100, cpu = expected_paces(devices, HALF, 64, backward=backward)
        assert a100 == pytest.approx(h200 / 0.36)
        assert cpu > 20 * h200


def test_of_a_device_that_was_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"NVIDIA A100-SXM4-80GB, torch {torch.__version__}, 16 bit"
    known = json.loads(json.dumps({key: {"flops": {"64": [2e14, 1e14], "128": [4e14, 3e14]}}}))
    monkeypatch.setattr(calibration, "_known", lambda: known)
    (pace,) = expected_paces([("cuda:0", "NVIDIA A100-SXM4-80GB")], HALF, 64, backward=False)
    (other,) = expected_paces([("cuda:0", "NVIDIA A100-SXM4-80GB")], HALF, 64, backward=True)
    assert pace == pytest.approx(64 / 2e14)
    assert other == 2 * pace


@pytest.mark.parametrize("entry", [{}, {"flops": {}}, {"flops": {"64": [0, -1]}}, 3])
def test_nonsense_is_not_believed(monkeypatch: pytest.MonkeyPatch, entry: object) -> None:
    known = {f"NVIDIA H200, torch {torch.__version__}, 16 bit": entry}
    monkeypatch.setattr(calibration, "_known", lambda: known)
    assert calibration.calibrated_flops(BACKENDS["cuda"], "NVIDIA H200", HALF, 64) is None
    assert expected_paces([("cuda:0", "NVIDIA H200")], HALF, 64, backward=False)[0] > 0
