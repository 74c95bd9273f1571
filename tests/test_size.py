"""The package does not grow: each room has a budget of lines and of files, which commits lower.

``python tests/test_size.py`` prints where the rooms stand now, to be copied into ``BUDGETS``.
"""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "quorum_attention"
# Lines of code and files of each room; "top": the files beside the rooms.
BUDGETS = {
    "bench": (344, 3),
    "call": (1052, 8),
    "checking": (703, 6),
    "cli": (1242, 13),
    "decomposition": (874, 8),
    "devices": (1173, 7),
    "distributed": (1044, 6),
    "execution": (3705, 23),
    "files": (726, 5),
    "integrations": (899, 7),
    "kernels": (5565, 31),
    "pictures": (364, 3),
    "planner": (1408, 9),
    "progress": (92, 3),
    "quorums": (148, 3),
    "ray": (493, 3),
    "recipes": (1084, 6),
    "top": (1614, 17),
}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def lines_of_code(path: Path) -> int:
    """Lines with a token of code on them: no blank lines, comments and docstrings."""
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type != tokenize.ENCODING]
    code = {n for t in tokens if t.type not in _NO_CODE for n in range(t.start[0], t.end[0] + 1)}
    return len(code - set(_docstrings(ast.parse(path.read_text(encoding="utf-8")))))


def _docstrings(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            first = node.body[0]
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def sizes(package: Path = PACKAGE) -> dict[str, tuple[int, int]]:
    """By room, lines of code and files."""
    lines, files = Counter[str](), Counter[str]()
    for path in sorted(package.rglob("*.py")):
        room, *below = path.relative_to(package).parts
        room = room if below else "top"
        lines[room] += lines_of_code(path)
        files[room] += 1
    return {room: (lines[room], files[room]) for room in sorted(lines)}


def test_no_room_grows() -> None:
    found = sizes()
    assert set(found) == set(BUDGETS), "every room has a budget; a new one takes it elsewhere"
    grown = {
        room: f"{found[room]} of {most} (lines, files)"
        for room, most in BUDGETS.items()
        if found[room][0] > most[0] or found[room][1] > most[1]
    }
    assert not grown


def test_the_list_of_slow_tests_names_tests_that_there_are() -> None:
    """Of tests/slow.txt; a test that is renamed or gone takes its line with it."""
    tests, gone = Path(__file__).parent, []
    file = ""
    for line in (tests / "slow.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            name = line.strip().removesuffix("[*]").split("::")[-1]
            here = (tests / file).exists()
            if not here or f"def {name}(" not in (tests / file).read_text(encoding="utf-8"):
                gone.append(f"{file}::{name}")
        elif line and not line.startswith("#"):
            file = line
    assert not gone


if __name__ == "__main__":
    for room, (lines, files) in sizes().items():
        print(f'    "{room}": ({lines}, {files}),')
