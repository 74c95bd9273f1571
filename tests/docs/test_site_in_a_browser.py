"""The site as a person opens it: as a file, without a network, in a window of any
width."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import Browser, browser, missing

BLOCKS_THAT_ARE_CUT = """
return [...document.querySelectorAll(".md-typeset pre > code, .md-typeset pre")]
    .filter(block => block.scrollWidth > block.clientWidth + 1)
    .map(block => block.textContent.slice(0, 60));
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if lacking := missing():
        pytest.skip(f"a browser is needed: there is no {lacking}")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


# What somebody types, and the page that helps.
SEARCHES = {
    "generate": "long-prompts",
    "KV cache": "long-prompts",
    "long prompt": "long-prompts",
    "QLoRA": "long-context",
    "host memory": "long-context",
    "out of memory": "long-context",
    "gradient checkpointing": "long-context",
    "sliding window": "masks",
    "padding": "masks",
    "several GPUs": "devices",
    "larger than memory": "files",
    "resume": "files",
    "flash-attn": "coming-from",
    "FlexAttention": "programs",
    "diffusers": "programs",
    "torch.compile": "programs",
    "torchrun": "distributed",
    "TRL": "long-context",
    "packed documents": "masks",
    "dropout seed": "dropout",
    "own kernel": "kit",
    "CUDA out of memory": "long-context",
    "save cache": "long-prompts",
    "weights do not fit": "long-prompts",
    "ALiBi": "masks",
    "CUDA graph": "programs",
    "MultiheadAttention": "programs",
    "fp16 overflow": "kernels",
    "xformers": "coming-from",
    "lost worker": "devices",
    "budget": "budget",
}
LINKS = (
    "return [...document.querySelectorAll('.md-search-result__link')]"
    ".map(a => a.href).filter(href => href.includes('.html'))"
)


@pytest.mark.slow
@pytest.mark.parametrize("words", SEARCHES)
def test_a_search_finds_the_page_that_helps_first(
    words: str, site: Path, window: Browser
) -> None:
    """In a page that is a file, without a network."""
    found = search(words, site, window)
    assert all(href.startswith(site.as_uri()) for href in found)
    first = found[0].removeprefix(site.as_uri()).strip("/")
    assert first.startswith(f"{SEARCHES[words]}.html"), found[:4]
    loaded = window.run(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert all(name.startswith("file:") for name in loaded), loaded


def search(words: str, site: Path, window: Browser) -> list[str]:
    """Links that a search shows, the best first."""
    window.open((site / "index.html").as_uri())
    window.wait_for("return document.querySelector('.md-search__input') !== null")
    window.run("document.querySelector('[data-md-toggle=search]').click()")
    window.type(".md-search__input", words)
    # Results of the first letters come first.
    earlier: list[str] = []
    found: list[str] = window.wait_for(LINKS)
    while found != earlier:
        time.sleep(0.5)
        earlier = found
        found = window.wait_for(LINKS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 500])
def test_no_block_is_cut(width: int, site: Path, window: Browser) -> None:
    for page in sorted(site.glob("*.html")):
        window.open(page.as_uri(), width)
        assert window.run(BLOCKS_THAT_ARE_CUT) == [], page.name


@pytest.mark.slow
def test_a_hundred_columns_are_not_broken(site: Path, window: Browser) -> None:
    """In a window as most have it; ruff holds our own code to a hundred."""
    window.open((site / "commands.html").as_uri())
    columns = window.run(
        "const block = document.querySelector('.md-typeset pre > code');"
        "const mark = document.createElement('span');"
        "mark.textContent = 'x'.repeat(100); mark.style.whiteSpace = 'pre';"
        "block.appendChild(mark);"
        "const style = getComputedStyle(block);"
        "const inner = block.clientWidth - parseFloat(style.paddingLeft)"
        " - parseFloat(style.paddingRight);"
        "return 100 * inner / mark.getBoundingClientRect().width"
    )
    assert columns >= 100
