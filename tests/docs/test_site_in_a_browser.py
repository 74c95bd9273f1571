"""The site as a person opens it: as a file, without a network, in a window of any
width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import Browser, browser, missing
from helpers.docs import built_site

BLOCKS_THAT_ARE_CUT = """
return [...document.querySelectorAll(".md-typeset pre > code, .md-typeset pre")]
    .filter(block => block.scrollWidth > block.clientWidth + 1)
    .map(block => block.textContent.slice(0, 60));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if lacking := missing():
        pytest.skip(f"a browser is needed: there is no {lacking}")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.slow
def test_the_search_finds_a_word_in_a_page_that_is_a_file(
    site: Path, window: Browser
) -> None:
    window.open((site / "index.html").as_uri())
    window.wait_for("return document.querySelector('.md-search__input') !== null")
    window.run("document.querySelector('[data-md-toggle=search]').click()")
    window.type(".md-search__input", "generate")
    links = (
        "return [...document.querySelectorAll('.md-search-result__link')].map(a => "
        "a.href)"
    )
    found = window.wait_for(links + ".filter(href => href.includes('.html'))")
    titles = window.run(
        "return [...document.querySelectorAll('.md-search-result__item')].map(a => "
        "a.textContent)"
    )
    assert any("generate" in title for title in titles)
    assert all(href.startswith(site.as_uri()) for href in found)
    loaded = window.run(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert all(name.startswith("file:") for name in loaded), loaded


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
