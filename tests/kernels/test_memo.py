"""A kernel that passed its test is not tested again in the next process, on the same machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers_made_up_gpu import forget_files

from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.probe import probe
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.kernels.vendors import CudnnKernel

GPU = torch.device("cuda", 0)
CALL = CallShape("cuda", torch.float16, 2, 2, 8, 8)
probing = sys.modules["quorum_attention.kernels.probe"]


@pytest.fixture
def tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are tested, on a made-up GPU; the cache is empty."""
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path / "cache"))
    about = SimpleNamespace(name="Some GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    found: list[str] = []
    monkeypatch.setattr(probing, "_tried", lambda kernel, *kind: found.append(kernel.name))
    forget_files(monkeypatch)
    return found


@pytest.mark.parametrize("changed", [None, "torch", "driver", "cudnn", "code"])
def test_in_the_next_process(
    changed: str | None, tested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe(CudnnKernel(), CALL, GPU) is None
    assert tested == ["cudnn"]
    forget_files(monkeypatch)
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    elif changed == "driver":
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 14000, raising=False)
    elif changed == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    elif changed == "code":
        monkeypatch.setattr(probing, "_sources", lambda: "other")
    assert probe(CudnnKernel(), CALL, GPU) is None
    assert tested == ["cudnn"] * (2 if changed else 1)


def test_failures_users_kernels_and_options_are_not_remembered(
    tested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(CudnnKernel):
        name = "mine"

    makers = (Mine, lambda: NativeKernel(window=3), CudnnKernel)
    for turn in range(2):
        if turn == 0:
            monkeypatch.setattr(probing, "_tried", lambda *kind: "it returned NaN")
        else:
            monkeypatch.setattr(probing, "_tried", lambda kernel, *kind: tested.append(kernel.name))
        for make in makers:
            found = probe(make(), CALL, GPU)
            assert found == ("it returned NaN" if turn == 0 else None)
        forget_files(monkeypatch)
    assert tested == ["mine", "native", "cudnn"]
    for make in makers:
        probe(make(), CALL, GPU)
    assert tested == ["mine", "native", "cudnn", "mine", "native"]


def test_a_broken_file_does_no_harm_and_others_entries_stay(
    tested: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    path = tmp_path / "cache" / "kernels.json"
    for text in ("{", '{"a": 1}', "[1, null]", "", "[" * 100_000):
        path.write_text(text)
        forget_files(monkeypatch)
        assert probe(CudnnKernel(), CALL, GPU) is None
    assert len(tested) == 5
    path.write_text(json.dumps([*json.loads(path.read_text()), "of another process"]))
    probing._memo().extend(map(str, range(probing._MOST)))
    probing._note(["new"])
    found = json.loads(path.read_text())
    assert found[-1] == "new"
    assert len(found) == probing._MOST
