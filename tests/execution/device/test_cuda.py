"""What torch is told of a CUDA device, without one."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.execution.device.cuda import Cuda


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_limit_with_or_without_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own limit takes no device without one."""
    told = []
    fakes = {
        "init": lambda: None,
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (0, 1000),
        "memory_reserved": lambda device: 100,
        "set_per_process_memory_fraction": lambda share, device: told.append((share, device)),
    }
    for what, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, what, fake)
    Cuda().limit(400, torch.device(name))
    ((share, device),) = told
    assert share == 0.5
    assert device == torch.device("cuda", 1 if name == "cuda:1" else 0)
