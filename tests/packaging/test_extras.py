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
EXTRAS = re.findall(
    r"^([\w-]+) = \[",
    (ROOT / "pyproject.toml")
    .read_text(encoding="utf-8")
    .split("[project.optional-dependencies]")[1]
    .split("[project.scripts]")[0],
    re.M,
)


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
    assert {"draw", "transformers"} <= found <= set(EXTRAS)


def pictures(folder: Path) -> dict[str, Any]:
    from quorum_attention.decomposition import Decomposition
    from quorum_attention.pictures import draw_gantt, draw_recovery

    report = qa.Report()
    q = torch.randn(1, 2, 200, 16)
    qa.attention(q, q, q, report=report)
    return {
        "plan": lambda: qa.plan(4096, device="cpu").draw(folder / "a.png"),
        "report": lambda: report.draw(folder / "a.png"),
        "recovery": lambda: draw_recovery(
            folder / "a.png", decomposition=Decomposition(64, (7,)), is_causal=True,
            budget_bytes=1, bars=[],
        ),
        "gantt": lambda: draw_gantt(folder / "a.png", {"forward": (["one"], [(0, 0, 0.0, 1.0)])}),
    }  # fmt: skip


@pytest.mark.parametrize("picture", ["plan", "report", "recovery", "gantt"])
def test_pictures_without_matplotlib(picture: str, without: Any, tmp_path: Path) -> None:
    draw = pictures(tmp_path)[picture]
    without("matplotlib")
    with pytest.raises(ImportError) as said:
        draw()
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
