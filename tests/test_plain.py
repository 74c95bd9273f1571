"""How plainly the package reads: counts that may fall and never rise.

``python tests/test_plain.py`` prints the counts and, for each, the places. The counts
are places to look. Whoever reads the code aloud is the judge.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "quorum_attention"

# Lower a limit when the code falls below it. Nobody has to: a limit is no target.
LIMITS = {
    "packed functions": 0,
    "tangled functions": 0,
    "vague names": 5,
    "riddles": 0,
    "tuples assigned to tuples": 5,
    "formatter switched off": 0,
    "class names defined twice": 0,
    "records with several names": 0,
}
NODES_PER_LINE = 9.42

# A function of four lines and more is packed above this many syntax nodes a line.
PACKED = 16
TANGLED = 12
# Names that do not say which thing they hold.
_VAGUE = (
    "found one other others made given said says told every kept held mine whole "
    "wholes left most some own such of wanted thing things least known asked another "
    "both each what who here there more less alone beside alike again lies room rooms "
    "ran read written"
)
VAGUE = frozenset(_VAGUE.split())
# Sentences that begin like this name their subject late or never.
RIDDLE = re.compile(
    r"\s*(Of|It|What|Whatever|Who|Whose|Those|That of|As one|By so|So many|None:|Such|To be|"
    r"In which|Into how|Of each|For so|Where what)\b"
)
# Records that are handed from room to room: a parameter of that type has the same name
# in all.
_RECORDS = (
    "CallShape Decomposition CallOptions BackwardInputs Request Schedule Plan Problem "
    "Tensors Mask CallBlock"
)
RECORDS = frozenset(_RECORDS.split())
BRANCHES = (
    ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert,
    ast.With, ast.match_case,
)  # fmt: skip

Places = dict[str, list[str]]


def nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a function's body, without its docstring."""
    for statement in body_of(function):
        yield from ast.walk(statement)


def body_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return a function's statements, without its docstring."""
    return function.body[1:] if ast.get_docstring(function) else function.body


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Count the lines of a function's body, without its docstring, blank lines and
    comments."""
    body = body_of(function)
    if not body:
        return 0
    texts = [line.strip() for line in lines[body[0].lineno - 1 : function.end_lineno]]
    return sum(1 for text in texts if text and not text.startswith("#"))


def complexity(body: list[ast.AST]) -> int:
    """Count the ways through a function's body: one more for each branch, ``and`` and
    ``or``."""
    total = 1
    for node in body:
        if isinstance(node, BRANCHES):
            total += 1
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            total += len(node.ifs)
    return total


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines: variables, parameters, functions and
    classes."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name


def record_of(parameter: ast.arg) -> str | None:
    """Return the record that a parameter's annotation names, if it is one of
    ``RECORDS``."""
    if parameter.annotation is None:
        return None
    name = ast.unparse(parameter.annotation).split("|")[0].strip().split(".")[-1]
    return name if name in RECORDS else None


def riddles_in(
    tree_nodes: list[ast.AST], lines: list[str]
) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings and comments whose first sentence hides its
    subject."""
    for node in tree_nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            if RIDDLE.match(docstring):
                yield node.lineno, docstring.splitlines()[0]
    before = ""
    for number, line in enumerate(lines, 1):
        comment = re.match(r"\s*# (.*)", line)
        if comment and RIDDLE.match(comment[1]) and not before.lstrip().startswith("#"):
            yield number, comment[1]
        before = line


def census(package: Path = PACKAGE) -> tuple[Places, float]:
    """Return the places of each count, and the mean of syntax nodes on a line of a
    function."""
    places: Places = {count: [] for count in LIMITS}
    files_of_class: dict[str, set[str]] = defaultdict(set)
    names_of_record: dict[str, Counter[str]] = defaultdict(Counter)
    n_nodes = 0
    n_lines = 0
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        tree_nodes = list(ast.walk(ast.parse(text)))
        places_in_file = [
            *places_in_text(tree_nodes, lines),
            *places_in_tree(tree_nodes, lines),
        ]
        for count, place in places_in_file:
            places[count].append(f"{file}:{place}")
        for node in tree_nodes:
            if isinstance(node, ast.ClassDef):
                files_of_class[node.name.strip("_")].add(file)
            if isinstance(node, ast.arg) and (record := record_of(node)):
                names_of_record[record][node.arg] += 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                n_nodes += sum(1 for _ in nodes(node))
                n_lines += lines_of(node, lines)
    for name, files in files_of_class.items():
        if len(files) > 1:
            places["class names defined twice"].append(
                f"{name}: {', '.join(sorted(files))}"
            )
    for record, counts in names_of_record.items():
        if len(counts) > 1:
            places["records with several names"].append(f"{record}: {dict(counts)}")
    return places, n_nodes / n_lines


def places_in_text(
    tree_nodes: list[ast.AST], lines: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield count and place of riddles, and of lines that the formatter leaves
    alone."""
    for number, sentence in riddles_in(tree_nodes, lines):
        yield "riddles", f"{number} {sentence[:80]}"
    for number, line in enumerate(lines, 1):
        if "# fmt: skip" in line:
            yield "formatter switched off", f"{number}"


def places_in_tree(
    tree_nodes: list[ast.AST], lines: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield count and place of names, assignments and functions."""
    for node in tree_nodes:
        for name in names_in(node):
            if name.strip("_") in VAGUE:
                yield "vague names", f"{node.lineno} {name}"
        if isinstance(node, ast.Assign) and is_tuple_to_tuple(node):
            yield "tuples assigned to tuples", f"{node.lineno}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            height = lines_of(node, lines)
            body = list(nodes(node))
            density = len(body) / max(1, height)
            if height >= 4 and density > PACKED:
                yield "packed functions", f"{node.lineno} {node.name} {density:.1f}"
            n_ways = complexity(body)
            if n_ways > TANGLED:
                yield "tangled functions", f"{node.lineno} {node.name} {n_ways}"


def is_tuple_to_tuple(assignment: ast.Assign) -> bool:
    """Tell whether one statement assigns several values to as many names."""
    return isinstance(assignment.targets[0], ast.Tuple) and isinstance(
        assignment.value, ast.Tuple
    )


def test_the_package_does_not_read_worse() -> None:
    """No count rises. The message names all places: the new ones are among the changed
    lines."""
    places, density = census()
    worse = {
        count: found for count, found in places.items() if len(found) > LIMITS[count]
    }
    assert not worse, "\n".join(
        f"{count}: {len(found)}, at most {LIMITS[count]}\n  " + "\n  ".join(found)
        for count, found in worse.items()
    )
    assert density <= NODES_PER_LINE


def test_the_counts_see_what_they_count(tmp_path: Path) -> None:
    """A file with one of each: a count that sees nothing could never rise."""
    (tmp_path / "bad.py").write_text(
        "# What is counted by what.\n"
        "class Twice: ...\n"
        "def packed(shape: CallShape, sizes: CallShape, found):\n"
        "    a, b = 1, 2\n"
        + "    c = [x + y * z for x in a for y in b for z in a if x and y or a or b]\n"
        * 4
        + "    return c  # fmt: skip\n",
        encoding="utf-8",
    )
    (tmp_path / "again.py").write_text("class Twice: ...\n", encoding="utf-8")
    places, density = census(tmp_path)
    assert {count for count, found in places.items() if len(found) == 1} == set(LIMITS)
    assert density > PACKED


if __name__ == "__main__":
    everything, nodes_per_line = census()
    for count, found in everything.items():
        print(f"{count}: {len(found)}", *found, sep="\n  ")
    print(f"syntax nodes a line: {nodes_per_line:.1f}")
