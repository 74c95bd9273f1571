"""The site of docs/: names, links, tables, examples in docstrings; it builds without a
warning."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.docs import PAGES, ROOT

import quorum_attention as qa
from quorum_attention.kernels import registry

DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
OBJECT = re.compile(r"^::: ([\w.]+)\n    options:\n      heading: ([\w.]+)$", re.M)
# Subpackages whose names are all for users.
PUBLIC = ("devices", "distributed", "recipes")


def described() -> dict[str, str]:
    """By the name that users write: where the reference says it is defined."""
    found: dict[str, str] = {}
    for page in REFERENCE:
        text = page.read_text(encoding="utf-8")
        listed = OBJECT.findall(text)
        assert len(listed) == text.count(":::"), f"{page.name}: each needs a heading"
        for home, name in listed:
            assert name not in found, f"{name} is in the reference twice"
            found[name] = home
    return found


def public_names() -> list[str]:
    names = [f"quorum_attention.{name}" for name in qa.__all__]
    for part in PUBLIC:
        module = importlib.import_module(f"quorum_attention.{part}")
        names += [f"{module.__name__}.{name}" for name in module.__all__]
    return names


@pytest.mark.parametrize("name", public_names())
def test_the_reference_has_every_public_name(name: str) -> None:
    place, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(place), attribute)
    home = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', attribute)}"
    entry = (
        f"::: {home}\n    options:\n      heading: {name}\n      toc_label: "
        f"{attribute}\n"
    )
    assert name in described(), f"add this to a page of docs/reference:\n\n{entry}"


def test_the_reference_describes_what_users_get() -> None:
    """The object named in a heading is the one whose docstring is shown."""
    needs = {"transformers": "transformers", "ray": "ray"}
    for name, home in described().items():
        parts = name.split(".")
        if any(
            importlib.util.find_spec(needs[part]) is None
            for part in parts
            if part in needs
        ):
            continue
        place, _, attribute = name.rpartition(".")
        wanted = getattr(importlib.import_module(place), attribute)
        room, _, defined = home.rpartition(".")
        shown = getattr(importlib.import_module(room), defined)
        # ``kernels`` is a subpackage that can be called as the function.
        assert shown is wanted or name == "quorum_attention.kernels", name
        assert shown.__doc__, name


def test_a_section_of_a_docstring_begins_on_its_own_line() -> None:
    """Docstrings that were wrapped anew joined "Options:" and the first option. The
    reference then showed all options of `attention` as one text."""
    section = re.compile(r"^ *(Args|Keyword Args|Attributes|Raises|Options): \S", re.M)
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not section.search(text), path.name


@pytest.mark.slow
def test_the_reference_lists_options_one_by_one(site: Path) -> None:
    page = (site / "reference" / "calls.html").read_text(encoding="utf-8")
    for option in ("budget", "depth", "devices", "exact_delta"):
        assert f"<code>{option}</code>" in page, option
    # Each line of a description was a result of its own.
    results = re.findall(r"Returns:</span>.*?</table>", page, re.S)
    assert results
    for table in results:
        assert table.count('<tr class="doc-section-item">') == 1
    # Two attributes in one entry: the second was shown as the type of the first.
    for path in sorted((site / "reference").glob("*.html")):
        text = path.read_text(encoding="utf-8")
        assert ",</span></code></td>" not in text, path.name


# Attributes and styles by which a page loads something.
LOADS = (
    re.compile(
        r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc=[\"']?(\S+)"
    ),
    re.compile(
        r"<link\b(?![^>]*rel=[\"']?(?:canonical|next|prev|alternate))[^>]*href=[\"']?(\S+)"
    ),
    re.compile(r"url\([\"']?([^)\"']+)"),
    re.compile(r"@import\s+[\"']([^\"']+)"),
)


@pytest.mark.slow
def test_the_site_builds(site: Path) -> None:
    """Strictly: every page is on the menu, every link and anchor leads somewhere."""
    assert (site / "reference" / "calls.html").exists()


@pytest.mark.slow
def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures lie in the site."""
    checked = 0
    for file in (*site.rglob("*.html"), *site.rglob("*.css")):
        text = file.read_text(encoding="utf-8")
        for target in (found for pattern in LOADS for found in pattern.findall(text)):
            checked += 1
            assert not re.match(r"[\"']?(https?:)?//", target), (
                f"{file.name} loads {target}"
            )
    assert checked > 100, "the search finds what there is"


_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """What headings of a page are linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


SCRIPT = ROOT / "benchmarks" / "tables.py"


@pytest.mark.slow
def test_the_script_runs_as_it_says() -> None:
    """And the page and README are up to date."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_raw_file_is_read_or_linked() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), SCRIPT, ROOT / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    names = [file.name for file in (ROOT / "benchmarks" / "results").iterdir()]
    cases_shown = {case_of_run(name) for name in names if name in text}
    for name in names:
        is_shown = name in text or name.endswith("-random-calls.json")
        # Tables read all runs of a case, and link those that have the newest of a row.
        assert is_shown or case_of_run(name) in cases_shown, name


def case_of_run(name: str) -> str:
    """The machine and case in the name of a run's file; the name of any other file."""
    match = re.fullmatch(
        r"[0-9-]{10}-(.+?)-([0-9a-f]{7,}|unknown)(-[0-9]+)?[.]json", name
    )
    return name if match is None else match[1]


# Subpackages whose names are public too.
PARTS = ("devices", "distributed", "recipes", "decomposition", "kernels", "kernels.kit")


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
    return [
        test
        for test in finder.find(value, name, module=False, globs=known)
        if test.examples
    ]


WITH = {
    name: tests for name, value in public().items() if (tests := examples(name, value))
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", WITH)
def test_examples_print_what_they_show(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))
    if name == "NativeKernel":
        pytest.importorskip("triton")
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in WITH[name]:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)
    assert runner.tries > 0
