"""Where an extra is missing, what needs it says so and how to get it; the rest works."""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa

ROOT = Path(__file__).parents[2]
HINT = re.compile(r'pip install "?quorum-attention\[([\w-]+)\]"?')


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a package that may be installed look as if it were not."""

    def hide(package: str) -> None:
        for name in [n for n in sys.modules if n.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


def test_every_hint_names_an_extra_that_there_is() -> None:
    found = {
        extra
        for path in (ROOT / "src").rglob("*.py")
        for extra in HINT.findall(path.read_text(encoding="utf-8"))
    }
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.split("[project.optional-dependencies]")[1].split("[project.scripts]")[0]
    assert {"draw", "transformers"} <= found <= set(re.findall(r"^([\w-]+) = \[", extras, re.M))


def test_pictures_without_matplotlib(without: Any, tmp_path: Path) -> None:
    report, q = qa.Report(), torch.randn(1, 2, 200, 16)
    qa.attention(q, q, q, report=report)
    without("matplotlib")
    for drawn in (qa.plan(4096, device="cpu"), report):
        with pytest.raises(ImportError) as said:
            drawn.draw(tmp_path / "a.png")
        assert HINT.findall(str(said.value)) == ["draw"]
    assert not list(tmp_path.iterdir())


def test_models_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    for name in [n for n in sys.modules if n.startswith("quorum_attention.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as said:
        importlib.import_module("quorum_attention.integrations.transformers")
    assert HINT.findall(str(said.value)) == ["transformers"]


def test_the_native_kernel_without_triton(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from quorum_attention.kernels.native import kernel as native

    monkeypatch.setattr(native, "interpreted", lambda: True)  # as if a GPU were there
    monkeypatch.setattr(native, "triton_available", lambda: False)
    q = torch.randn(1, 2, 200, 16)
    with pytest.raises(NotImplementedError, match="Triton, which is not installed"):
        qa.attention(q, q, q, kernel="native")
    assert qa.attention(q, q, q, depth=1).shape == q.shape
