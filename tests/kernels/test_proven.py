"""What passed its test is remembered on disk, for exactly this machine and this code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quorum_attention.kernels import proven
from quorum_attention.kernels.cudnn import CudnnKernel
from quorum_attention.kernels.dense import DenseKernel
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.probe import probe
from quorum_attention.kernels.protocol import CallShape

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a made-up GPU."""
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path / "cache"))
    device = SimpleNamespace(name="Some GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device_: device)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    proven._known.cache_clear()
    yield tmp_path / "cache"
    proven._known.cache_clear()


def again() -> None:
    """A new process, as far as this is concerned."""
    proven._known.cache_clear()


def test_what_passed_is_known_in_the_next_process() -> None:
    kernel = CudnnKernel()
    assert not proven.is_proven(kernel, "fp16", GPU)
    proven.note_proven(kernel, "fp16", GPU)
    again()
    assert proven.is_proven(CudnnKernel(), "fp16", GPU)
    assert not proven.is_proven(kernel, "bf16", GPU)
    assert not proven.is_proven(DenseKernel(), "fp16", GPU)


@pytest.mark.parametrize("changed", ["torch", "driver", "cudnn", "code"])
def test_another_version_is_tested_again(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proven.note_proven(CudnnKernel(), "fp16", GPU)
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "99.0")
    elif changed == "driver":
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 14000, raising=False)
    elif changed == "cudnn":
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    else:
        monkeypatch.setattr(proven, "_sources", lambda: "other")
    again()
    assert not proven.is_proven(CudnnKernel(), "fp16", GPU)


def test_users_kernels_and_kernels_with_options_are_not_remembered(folder: Path) -> None:
    class Mine(CudnnKernel):
        pass

    for kernel, device in (
        (Mine(), GPU), (NativeKernel(window=3), GPU), (CudnnKernel(), torch.device("cpu")),
    ):  # fmt: skip
        proven.note_proven(kernel, "fp16", device)
        assert not proven.is_proven(kernel, "fp16", device)
    assert not folder.exists()


def test_a_file_that_is_broken_or_cannot_be_written_does_no_harm(folder: Path) -> None:
    folder.mkdir()
    path = folder / "kernels.json"
    for text in ("{", '{"a": 1}', "[1, null]", "", "[" * 100_000):
        path.write_text(text)
        again()
        assert not proven.is_proven(CudnnKernel(), "fp16", GPU)
    path.unlink()
    folder.rmdir()
    folder.write_text("a file, where the folder should be")
    again()
    proven.note_proven(CudnnKernel(), "fp16", GPU)
    assert proven.is_proven(CudnnKernel(), "fp16", GPU)
    again()
    assert not proven.is_proven(CudnnKernel(), "fp16", GPU)


def test_what_others_have_written_meanwhile_stays_and_the_file_does_not_grow(folder: Path) -> None:
    proven.note_proven(CudnnKernel(), "first", GPU)
    path = folder / "kernels.json"
    path.write_text(json.dumps([*json.loads(path.read_text()), "of another process"]))
    proven.note_proven(CudnnKernel(), "second", GPU)
    found = json.loads(path.read_text())
    assert len(found) == 3
    assert "of another process" in found
    for number in range(proven._MOST + 3):
        proven._known().append(str(number))
    proven.note_proven(CudnnKernel(), "third", GPU)
    assert len(json.loads(path.read_text())) == proven._MOST
    again()
    assert proven.is_proven(CudnnKernel(), "third", GPU)


def test_a_failure_is_never_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested on the CPU as if it were such a device."""
    module = sys.modules["quorum_attention.kernels.probe"]
    call = CallShape("cpu", torch.float32, 2, 2, 8, 8)
    monkeypatch.setattr(module, "_tried", lambda kernel, question: "it returned NaN")
    monkeypatch.setattr(module, "is_proven", lambda *asked: proven.is_proven(*asked[:2], GPU))
    monkeypatch.setattr(module, "note_proven", lambda *asked: proven.note_proven(*asked[:2], GPU))
    assert probe(CudnnKernel(), call) == "it returned NaN"
    assert not folder.exists()
    monkeypatch.setattr(module, "_tried", lambda kernel, question: None)
    assert probe(CudnnKernel(), call) is None
    again()
    monkeypatch.setattr(module, "_tried", lambda kernel, question: "not asked")
    assert probe(CudnnKernel(), call) is None
