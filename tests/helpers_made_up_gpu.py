"""A machine with a made-up GPU: calls are decided as on one, and nothing runs."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

GPU = torch.device("cuda", 0)
probing = sys.modules["quorum_attention.kernels.probe"]


def forget_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read from files has to be read again."""
    monkeypatch.setattr(probing, "_memo", functools.cache(probing._memo.__wrapped__))
