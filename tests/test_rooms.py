"""Who imports whom: only downwards, and nothing heavy before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quorum_attention

ROOT = Path(quorum_attention.__file__).parent
# From the ground up. Rooms of one line may not import each other, those of api excepted.
FLOORS = (
    ("counts",),
    ("errors", "sizes"),
    ("quorums",),
    ("decomposition",),
    ("kernels", "pictures"),
    ("execution",),
    ("planner",),
    ("call",),
    ("api", "autograd", "passes", "progress"),
    ("integrations", "distributed", "bench", "checking"),
    ("cli",),
)
LEVEL = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, inside functions too, types excepted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "quorum_attention":
                yield from (f"quorum_attention.{alias.name}" for alias in node.names)
            else:
                yield node.module


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(ROOT)) for p in FILES])
def test_imports_only_look_down(path: Path) -> None:
    here = room_of(path)
    if here not in LEVEL:
        assert len(path.relative_to(ROOT).parts) == 1, f"{here} is in no list of rooms here"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "quorum_attention" or len(parts) == 1:
            continue
        there = parts[1]
        if there == here or there not in LEVEL:
            continue
        level = LEVEL.get(here, len(FLOORS))
        together = LEVEL[there] == LEVEL["api"] == level
        assert LEVEL[there] < level or together, f"{here} imports {name}, which is above it"


@pytest.mark.parametrize("room", ["quorums", "decomposition", "execution/control"])
def test_pure_rooms_know_nothing_of_torch(room: str) -> None:
    names = [name for path in (ROOT / room).rglob("*.py") for name in imported(path)]
    assert names
    assert not [name for name in names if name.split(".")[0] == "torch"]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import quorum_attention", ("torch", "triton", "matplotlib", "rich")),
        ("import quorum_attention.quorums, quorum_attention.decomposition", ("torch",)),
        ("from quorum_attention import interest_set; interest_set(6)", ("torch",)),
        ("from quorum_attention import attention, plan", ("triton", "matplotlib", "rich")),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(
    statement: str, absent: tuple[str, ...]
) -> None:
    # torch brings some of them in by itself in some builds; then it is not our doing.
    torchs_own = "import torch; import sys; print(*sys.modules)"
    mine = f"{statement}; import sys; print(*sys.modules)"
    by_torch, by_us = (
        set(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout.split()
        )
        for code in (torchs_own, mine)
    )
    found = [name for name in absent if name in by_us and (name == "torch" or name not in by_torch)]
    assert not found
