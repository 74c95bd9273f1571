"""What the documentation shows: blocks and commands, with where they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# What the commands call config.json.
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 4096,
}  # fmt: skip
# What blocks for other projects need; tests/docs/test_programs.py runs them.
OTHER_PROJECTS = ("from tabpfn", "pipe.transformer", "from boltz", "from torchtitan")
_COMMAND = re.compile(r"(quorum-attention|make|pip|python) ")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``not_run``: the reason of a marker before it."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command in words, in a table, or a line of a block without a language."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        reason = None
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
            if token.type == "html_block" and (said := _NOT_RUN.search(token.content)):
                reason = said[1]
            elif token.type == "fence":
                assert token.map is not None
                yield Block(
                    page.name, token.map[0] + 1, token.info, token.content, reason
                )
                reason = None


def commands() -> Iterator[Command]:
    for page in PAGES:
        for token in (
            MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
        ):
            line = token.map[0] + 1 if token.map else 0
            if token.type == "fence" and not token.info:
                # A backslash at the end of a line joins the next one to it.
                for text in re.sub(r" *\\\n *", " ", token.content).splitlines():
                    if _COMMAND.match(text):
                        yield Command(page.name, line, text.partition("#")[0].strip())
            for child in token.children or ():
                if child.type == "code_inline" and _COMMAND.match(child.content + " "):
                    yield Command(page.name, line, " ".join(child.content.split()))


def built_site(folder: Path) -> Path:
    """The pages as a site, built into ``folder`` as `make docs` does."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def normal(text: str) -> str:
    """Output without what differs from run to run: numbers, units of time, spaces,
    rules."""
    text = re.sub(r"[0-9]+(,[0-9]{3})*([.][0-9]+)?(e[-+]?[0-9]+)?", "#", text)
    text = re.sub(
        r"# (us|ms|s|min|h|days?|years?)\b( # (s|min|h|days?)\b)?", "# s", text
    )
    text = re.sub(r"\blevels (none|#( x #)*)", "levels #", text)
    text = re.sub(r"\b(unit|head)s?\b", r"\1", text)
    text = re.sub(r"# (B|KiB|MiB|GiB|TiB)\b", "# B", text)
    return " ".join(text.split())


def my_attention(
    query: Any, key: Any, value: Any, *, is_causal: bool, scale: float
) -> Any:
    """What a reader of the documentation has of his own."""
    scores = scale * (query.float() @ key.float().mT)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return (torch.exp(scores - lse.unsqueeze(-1)) @ value.float()).to(value.dtype), lse
