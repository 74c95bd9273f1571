"""Who imports whom: only downwards, and nothing heavy before it is needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.sources import PACKAGE, SOURCES, syntax_tree
from torch.nn.modules import module as modules
from torch.nn.utils import stateless

# Every room, a folder or a file, from the ground up. Rooms of one floor do not import
# each other.
FLOORS = (
    (
        "argument_checks",
        "arithmetic",
        "errors",
        "extras",
        "keywords",
        "plain_types",
        "progress",
        "threads",
    ),
    ("quorums", "units"),
    ("decomposition", "mask", "writing"),
    ("kernels", "partition", "pictures"),
    ("execution",),
    ("planner",),
    ("call",),
    ("passes",),
    ("autograd",),
    ("devices", "operator"),
    ("dispatch",),
    ("api",),
    ("flex",),
    ("sdpa",),
    ("checking", "distributed", "files", "long_prompts"),
    ("ray",),
    ("bench",),
    ("integrations",),
    ("recipes",),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = [path for path in SOURCES if path != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in (PACKAGE / "__init__.py", *FILES)}


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules a file imports, inside functions too, types
    excepted."""
    tree = syntax_tree(path)
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
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_the_house_has_every_room_and_no_other() -> None:
    assert {room_of(module_of(path)) for path in FILES} == set(LEVEL)


def test_imports_only_look_down() -> None:
    wrong = []
    for path in FILES:
        here = room_of(module_of(path))
        for name in imported(path):
            # The package itself has the version, and public names of every floor.
            whole = name == "quorum_attention" and LEVEL[here] <= LEVEL["api"]
            there = room_of(name) if name.startswith("quorum_attention.") else here
            if whole or (there != here and LEVEL[there] >= LEVEL[here]):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}, above it")
    assert not wrong


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle() -> None:
    """Inside functions neither: what two files share has a file of its own, below
    both."""
    graph = {
        module: {name for name in imported(path) if name in MODULES}
        - {module, "quorum_attention"}
        for module, path in MODULES.items()
    }
    # Whoever imports nothing that is left goes, again and again: circles stay, and
    # their users.
    while free := {
        module for module, below in graph.items() if not below & graph.keys()
    }:
        for module in free:
            del graph[module]
    left = {module: sorted(below & graph.keys()) for module, below in graph.items()}
    assert not left


@pytest.mark.parametrize("room", ["quorums", "decomposition", "execution/control"])
def test_pure_rooms_know_nothing_of_torch(room: str) -> None:
    names = [name for path in (PACKAGE / room).rglob("*.py") for name in imported(path)]
    assert names
    assert not [name for name in names if name.split(".")[0] == "torch"]


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private attributes that a file reads or sets, and texts that look like one."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
        elif isinstance(node, ast.alias):
            name = node.name
        if re.fullmatch(r"_[a-zA-Z]\w*", name):
            yield name


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            if owner in ("self", "tensor"):
                yield node.attr


def is_torchs(name: str) -> bool:
    owners = (torch.nn.Module(), torch.Tensor, torch, torch._C, modules, stateless)
    operator = torch.ops.aten.add.Tensor
    return any(hasattr(owner, name) for owner in (*owners, torch.utils, operator))


def test_private_names_of_libraries_stand_in_one_file_for_each() -> None:
    """Transformers' and Accelerate's, of which one rename made a change fail without a
    word."""
    trees = {path: syntax_tree(path) for path in FILES}
    own = {"_quorum_attention_changes", "_quorum_attention_patch", "_replace"}
    for tree in trees.values():
        own.update(defined_names(tree))
    foreign: dict[str, set[str]] = {}
    for path, tree in trees.items():
        room = room_of(module_of(path))
        if room not in ("integrations", "recipes"):
            continue
        names = {name for name in private_names(tree) if not is_torchs(name)}
        if names - own:
            foreign[path.stem] = names - own
    assert foreign.keys() == {"transformers_private", "accelerate_private"}, foreign
    assert "_set_gradient_checkpointing" in foreign["transformers_private"]


def test_what_a_cache_layer_of_transformers_holds_is_read_in_one_folder() -> None:
    """The estimate of a prompt had asked layers for what they may have, a floor above
    the folder that a rename in Transformers is looked for in."""
    attributes = {"cumulative_length", "is_initialized", "sliding_window"}
    # Others have rows too: these are looked for where they are asked for by name.
    asked = {"keys", "values", *attributes}
    reading = set()
    for path in FILES:
        if LEVEL[room_of(module_of(path))] < LEVEL["integrations"]:
            continue
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Attribute) and node.attr in attributes:
                reading.add(path.parent.name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                name = getattr(node.args[1], "value", None)
                if name in asked:
                    reading.add(path.parent.name)
    assert reading == {"transformers"}
