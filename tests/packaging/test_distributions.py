"""The wheel and the sdist have what belongs in them, and what is installed from them
works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import quorum_attention as qa

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
BUILD = """
import os, sys
from setuptools import build_meta
folder = sys.argv[1]
print(build_meta.build_sdist(folder), build_meta.build_wheel(folder))
"""
OF_THE_PACKAGE = [
    path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.py")
]


def copied(folder: Path) -> Path:
    """The checkout without what building leaves behind, which then stays out of the
    checkout."""
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "MANIFEST.in",
    ):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel): by setuptools as it is here, so that nothing is fetched."""
    source = copied(tmp_path_factory.mktemp("source"))
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(
    built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the wheel installed, and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--disable-pip-version-check", "--target", str(target), str(built[1])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
def test_the_wheel_and_the_sdist_have_every_file_of_the_package(
    built: tuple[Path, Path],
) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    assert {str(path) for path in OF_THE_PACKAGE} <= names
    assert "quorum_attention/py.typed" in names
    with tarfile.open(built[0]) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{path}" for path in OF_THE_PACKAGE} <= sources
    assert {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "src/quorum_attention/py.typed",
    } <= sources
    others = {name for name in names if not name.startswith("quorum_attention/")}
    assert all(".dist-info/" in name for name in others), (
        "nothing else lands in site-packages"
    )
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert built[1].name == f"quorum_attention-{qa.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_what_is_installed_works(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, str(SMOKE)], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "smoke: passed"
    said = subprocess.run(
        [str(installed / "bin" / "quorum-attention"), "--version"], cwd=tmp_path,
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == qa.__version__
