from typing import Any

import pytest
import torch
from helpers.kernels import taken_as_tried


@pytest.fixture
def device() -> str:
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def on_gpu() -> bool:
    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def not_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a kernel's own test takes as long as the tests of its results
    here."""
    taken_as_tried(monkeypatch, "native")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The launches of this test: each with what its kernel was compiled for."""
    from quorum_attention.kernels.native.launch import NativeLaunch

    found = []
    original = NativeLaunch._constants

    def noted(launch: NativeLaunch, *args: Any, **named: Any) -> Any:
        constants = original(launch, *args, **named)
        found.append((launch, constants))
        return constants

    monkeypatch.setattr(NativeLaunch, "_constants", noted)
    return found
