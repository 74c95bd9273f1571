"""The examples in docstrings of public names run and print what they show."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels import registry

# Subpackages whose names are public too.
PARTS = ("pool", "distributed", "recipes", "decomposition", "kernels", "kernels.kit")


def public() -> dict[str, Any]:
    found = {name: getattr(qa, name) for name in qa.__all__}
    found["kernels"] = registry.kernels  # a subpackage that can be called as this one
    for part in PARTS:
        module = importlib.import_module(f"quorum_attention.{part}")
        found |= {f"{part}.{name}": getattr(module, name) for name in module.__all__}
    return {name: value for name, value in found.items() if callable(value)}


def examples(name: str, value: Any) -> list[doctest.DocTest]:
    """Those of an object and of its methods; torch and the package are imported."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    module = importlib.import_module(value.__module__)
    known = {**vars(module), "torch": torch, "qa": qa}
    return [test for test in finder.find(value, name, module=False, globs=known) if test.examples]


WITH = {name: tests for name, value in public().items() if (tests := examples(name, value))}


@pytest.mark.parametrize("name", WITH)
def test_examples_print_what_they_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    if name == "NativeKernel":
        pytest.importorskip("triton")
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in WITH[name]:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 0
