"""Optional packages: which are installed, and how to install what a feature needs."""

from __future__ import annotations

from importlib import metadata


def install_hint(extra: str) -> str:
    """How to install an extra, for error messages. No index has this package."""
    return f'in a checkout of Quorum Attention, run pip install ".[{extra}]"'


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
