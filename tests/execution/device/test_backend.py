"""One interface for every kind of device: nobody else asks which kind it is."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import quorum_attention
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import BACKENDS, backend_of, is_known, on_host

ROOT = Path(quorum_attention.__file__).parent
# The kernels are written for one kind of device or another; the others only show what there is.
MAY_ASK = ("bench", "checking", "cli", "kernels", "execution/device")
ASKING = sorted(
    path
    for path in ROOT.rglob("*.py")
    if not path.relative_to(ROOT).as_posix().startswith(tuple(f"{room}/" for room in MAY_ASK))
)


def questions(tree: ast.AST) -> Iterator[str]:
    """Where code asks what kind of device it has, or speaks to one kind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            torchs = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in ("is_cuda", "is_cpu") or (torchs and node.attr == "cuda"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare):
            words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
            if words & set(BACKENDS):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value == "cuda":
            yield f"line {node.lineno}: {node.value!r}"


@pytest.mark.parametrize("path", ASKING, ids=[str(p.relative_to(ROOT)) for p in ASKING])
def test_nobody_else_asks_what_kind_of_device_it_has(path: Path) -> None:
    assert not list(questions(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    "line",
    [
        "if device.type == 'cuda': pass",
        "if place.device_type not in ('cpu', 'other'): pass",
        "on = tensor.is_cuda",
        "torch.cuda.synchronize()",
        "where = torch.device('cuda')",
    ],
)
def test_a_question_would_be_found(line: str) -> None:
    assert list(questions(ast.parse(line)))


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_every_backend_answers_as_the_interface_says(kind: str) -> None:
    backend = BACKENDS[kind]
    assert backend.kind == kind
    for name, what in inspect.getmembers(Backend, inspect.isfunction):
        assert inspect.signature(getattr(type(backend), name)) == inspect.signature(what), name


def test_devices_by_kind() -> None:
    assert backend_of(torch.device("cuda", 3)) is BACKENDS["cuda"]
    assert on_host(torch.device("cpu"))
    assert not on_host(torch.device("cuda"))
    # Neither: such tensors are refused elsewhere, with a name.
    assert not is_known(torch.device("meta"))
    assert not on_host(torch.device("meta"))


def test_rounding_is_what_allocators_do() -> None:
    small, large = [100, 1 << 20], [(1 << 20) + 1]
    assert BACKENDS["cpu"].rounding(small + large) == 3 * 512
    assert BACKENDS["cuda"].rounding(small) == 2 * 512
    assert BACKENDS["cuda"].rounding(small + large) == 3 * 512 + (1 << 20)
