"""docs/left-out.md has each message of the recipes for training and of the integration of
Transformers, and no message that there is not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers.docs import ROOT

SOURCE = ROOT / "src" / "quorum_attention"
RECIPES = (
    "attention", "changes", "checkpoints", "chunked_loss", "deferred_logits", "fused_norms",
    "long_context", "offload", "patching", "reached_attention", "tiled_layer", "tiled_layer_trial",
    "tiled_mlp", "trials",
)  # fmt: skip
FILES = [
    *sorted((SOURCE / "integrations").rglob("*.py")),
    *(SOURCE / "recipes" / f"{name}.py" for name in RECIPES),
]
# Texts that are no messages: what an object is shown as, and names of attributes.
NO_MESSAGES = ("DescribedMask(", "PromptCache(", "device dtype grad_fn")
MOST_SHORT = 3


def literal_parts(node: ast.AST) -> list[str]:
    """The fixed parts of a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"\{\w+\}", node.value)  # a text for str.format
    if isinstance(node, ast.JoinedStr):
        values = [v.value for v in node.values if isinstance(v, ast.Constant)]
        return [str(value) for value in values]
    return []


def messages(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and fixed parts of each text of four words or more, but docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(inner) for inner in ast.walk(node) if inner is not node}
        elif isinstance(node, ast.Expr):
            left_out |= (
                {id(inner) for inner in ast.walk(node.value)}
                if isinstance(node.value, ast.Constant)
                else set()
            )
    for node in ast.walk(tree):
        parts = [] if id(node) in left_out else literal_parts(node)
        text = " ".join(parts)
        if len(text.split()) > MOST_SHORT and not text.startswith(NO_MESSAGES):
            yield node.lineno, parts  # type: ignore[attr-defined]


def cells() -> list[str]:
    """The messages of the page: the first cells of its tables."""
    page = (ROOT / "docs" / "left-out.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \|", page, re.M)
    return [row for row in rows if row != "message"]


def is_in(parts: list[str], cell: str) -> bool:
    """Whether a cell has the fixed parts of a message, in their order."""
    pattern = ".*".join(re.escape(part.strip()) for part in parts)
    return re.search(pattern, cell) is not None


def test_no_message_is_missing() -> None:
    shown = cells()
    missing = [
        f"{path.name}:{line}: {'…'.join(parts)}"
        for path in FILES
        for line, parts in messages(path)
        if not any(is_in(parts, cell) for cell in shown)
    ]
    assert not missing, "\n".join(missing)


def test_no_message_of_the_page_is_gone() -> None:
    known = [parts for path in FILES for _, parts in messages(path)]
    gone = [cell for cell in cells() if not any(is_in(parts, cell) for parts in known)]
    assert not gone, "\n".join(gone)
