"""A kernel that has to be built is built where it is predicted clearly faster, whatever was called
before: on a made-up GPU, where nothing is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers_made_up_gpu import GPU, forget_files, made_up_gpu, new_kernels, probing

from quorum_attention.execution.case import Placement
from quorum_attention.execution.workload import Workload
from quorum_attention.planner import decide
from quorum_attention.planner.options import Options


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the kernels that were tested, and so built."""
    made_up_gpu(monkeypatch, tmp_path)
    found: list[str] = []
    monkeypatch.setattr(probing, "_tried", lambda kernel, question: found.append(kernel.name))
    new_kernels(monkeypatch)
    forget_files(monkeypatch)
    return found


def asked(mib: int = 16, tokens: int = 1 << 15) -> decide.Asked:
    """By default a forward of 43 ms on the native kernel, of 110 on cuDNN's."""
    work = Workload((1,), 8, 8, tokens, tokens, 64, 64, torch.float16, True)
    place = Placement("cuda", False, False, torch.float16)
    options = Options(GPU, budget_bytes=mib << 20)
    return decide.Asked(work, options, place, torch.float16, False, False)


def test_equal_calls_are_decided_alike(built: list[str]) -> None:
    first, *others = (decide.decide(asked()) for _ in range(3))
    assert first.kernel.name == "native"
    assert others == [first, first]
    assert built == ["cudnn", "native"]


def test_what_only_another_kernel_fits_is_built(built: list[str]) -> None:
    assert decide.decide(asked(mib=4, tokens=1 << 16)).kernel.name == "native"
    assert built == ["cudnn", "native"]
