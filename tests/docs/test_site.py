"""The site of docs/: every public name is in its reference, and it builds without a warning."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_docs import ROOT

import quorum_attention as qa

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
    entry = f"::: {home}\n    options:\n      heading: {name}\n      toc_label: {attribute}\n"
    assert name in described(), f"add this to a page of docs/reference:\n\n{entry}"


def test_the_reference_describes_what_users_get() -> None:
    """The object named in a heading is the one whose docstring is shown."""
    needs = {"transformers": "transformers", "ray": "ray"}
    for name, home in described().items():
        parts = name.split(".")
        if any(importlib.util.find_spec(needs[part]) is None for part in parts if part in needs):
            continue
        place, _, attribute = name.rpartition(".")
        wanted = getattr(importlib.import_module(place), attribute)
        room, _, defined = home.rpartition(".")
        shown = getattr(importlib.import_module(room), defined)
        # ``kernels`` is a subpackage that can be called as the function.
        assert shown is wanted or name == "quorum_attention.kernels", name
        assert shown.__doc__, name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds(site: Path) -> None:
    """Strictly: every page is on the menu, every link and anchor leads somewhere."""
    assert (site / "reference" / "calls.html").exists()
