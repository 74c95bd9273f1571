"""A machine with a made-up GPU: calls are decided as on one, and nothing runs."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quorum_attention.kernels import registry
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.vendors import CudnnKernel, FlashKernel

GPU = torch.device("cuda", 0)
probing = sys.modules["quorum_attention.kernels.probe"]


def made_up_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Until the test is over: kernels have been neither tested nor built, caches are empty."""
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(folder))
    # As many multiprocessors as are assumed where there is no GPU: that is remembered.
    about = SimpleNamespace(
        name="made up", multi_processor_count=160, L2_cache_size=50 << 20, major=9, minor=0
    )
    for name, answer in {
        "is_available": True, "set_device": None, "is_current_stream_capturing": False,
        "get_device_capability": (9, 0), "get_device_properties": about, "current_device": 0,
        "device_count": 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *of, answer=answer: answer)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    new_kernels(monkeypatch)
    forget_files(monkeypatch)


def new_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of which nothing is remembered in this process."""
    for kernel in (CudnnKernel(), FlashKernel(), NativeKernel()):
        monkeypatch.setitem(registry._KERNELS, kernel.name, kernel)


def forget_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read from files has to be read again."""
    monkeypatch.setattr(probing, "_memo", functools.cache(probing._memo.__wrapped__))
