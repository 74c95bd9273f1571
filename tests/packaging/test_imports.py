"""What importing costs, and what it leaves alone."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_processes import run_python

import quorum_attention as qa

# What somebody who imports this package has not asked for; some are not even installed.
ABSENT = (
    "triton", "matplotlib", "rich", "rich.progress", "transformers", "liger_kernel", "trl", "ray",
    "safetensors", "IPython", "quorum_attention.pictures", "quorum_attention.cli",
    "quorum_attention.bench", "quorum_attention.integrations", "torch._dynamo", "torch._inductor",
    "torch.nn.attention.flex_attention", "torch.distributed.tensor",
)  # fmt: skip
STEPS = {
    "the package": "import quorum_attention as qa",
    "every public name": "import quorum_attention as qa; [getattr(qa, n) for n in qa.__all__]",
    "a call": (
        "import quorum_attention as qa; q = torch.randn(1, 2, 200, 16);"
        "qa.attention(q, q, q); qa.attention(q, q, q, depth=1); qa.estimate(4096, device='cpu')"
    ),
}
CODE = """
import json, sys, time
import torch
before = set(sys.modules)
began = time.thread_time()
{step}
spent = time.thread_time() - began
print(json.dumps({{"seconds": spent, "modules": sorted(set(sys.modules) - before)}}))
"""


@functools.cache
def imported(step: str, again: bool = False) -> dict[str, object]:
    """What a step takes and loads, after torch."""
    done = run_python(CODE.format(step=STEPS[step]))
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def seconds(step: str, again: bool = False) -> float:
    return float(str(imported(step, again)["seconds"]))


def test_importing_adds_less_than_a_tenth_of_a_second() -> None:
    """Of this thread's own time, so that a busy machine makes no difference; usually a millisecond,
    because names are loaded when they are first used."""
    assert seconds("the package") < 0.1 or seconds("the package", again=True) < 0.1


@pytest.mark.parametrize("step", STEPS)
def test_what_is_not_used_is_not_loaded(step: str) -> None:
    modules = imported(step)["modules"]
    assert isinstance(modules, list)
    assert [name for name in ABSENT if name in modules] == []


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
