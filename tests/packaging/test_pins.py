"""What is asked for of other packages: the pins of ``make``, and the ranges of ``pip install``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def environment(python: str) -> dict[str, str]:
    return {
        **default_environment(),  # type: ignore[dict-item]
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "sys_platform": "linux",
        "extra": "",
    }


def applies(requirement: Requirement, python: str, extra: str = "") -> bool:
    marker = requirement.marker
    return marker is None or marker.evaluate({**environment(python), "extra": extra})


def lines() -> Iterator[Requirement]:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            yield Requirement(text)


def pins(python: str) -> dict[str, Version]:
    """The pinned version of each package on one Python."""
    found: dict[str, Version] = {}
    for requirement in lines():
        if applies(requirement, python):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"two pins of {name} on Python {python}"
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", requirement
            found[name] = Version(specifier.version)
    return found


def is_installed(name: str, version: Version) -> bool:
    try:
        return Version(metadata.version(name)).public == version.public
    except metadata.PackageNotFoundError:
        return False


def ours() -> dict[str, list[str]]:
    """What this project asks for, by extra; "" without any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def demands(name: str, python: str) -> Iterator[Requirement]:
    """What a distribution asks for: as installed; of this one what `make test` installs."""
    asked = metadata.requires(name) or []
    if name == "quorum-attention":
        asked = [text for extra in ("", "draw", "dev") for text in ours()[extra]]
    for text in asked:
        if applies(requirement := Requirement(text), python):
            yield requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_no_pin_contradicts_what_another_pinned_package_asks_for(python: str) -> None:
    pinned = pins(python)
    looked_at = 0
    for name in (*pinned, "quorum-attention"):
        if name in pinned and not is_installed(name, pinned[name]):
            continue  # another one's demands, if any, are not the pinned one's
        for requirement in demands(name, python):
            wanted = canonicalize_name(requirement.name)
            if wanted in pinned:
                looked_at += 1
                assert pinned[wanted] in requirement.specifier, f"{name} asks for {requirement}"
    assert looked_at > 10
