"""The record of a run: what was run, of which source and where, and the rows that it
measured.

``quorum-attention bench`` and ``benchmarks/run.py`` write the same kind of file.
"""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import quorum_attention
from quorum_attention.extras import installed_version
from quorum_attention.plain_types import JsonObject
from quorum_attention.units import counted
from quorum_attention.writing import write_text

# Optional packages whose versions change what is measured.
_OPTIONAL = ("triton", "flash-attn-4", "transformers", "liger-kernel")
# Runs and rows have a line each.
_DEPTH_OF_LINES = 2


class RunRecord:
    """The file of a run, which is written anew whenever a row is added.

    Attributes:
        path: of the file.
        run: where the rows come from (``describe_run``).
        rows: the measurements by name.
    """

    def __init__(self, path: Path, run: JsonObject) -> None:
        self.path = path
        self.run = run
        self.rows: JsonObject = {}

    def add(self, rows: Mapping[str, Any]) -> None:
        """Add rows, and write the file."""
        self.rows.update(rows)
        write_text(self.path, to_json({"run": self.run, "rows": self.rows}) + "\n")


def describe_run(command: str, arguments: Mapping[str, Any], device: str) -> JsonObject:
    """Command, source, machine, versions, date and time (UTC) of a run that begins now.

    Args:
        arguments: of the command, as it was parsed.
        device: "cpu" or "cuda".
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "command": command,
        "arguments": {name: _as_json(value) for name, value in arguments.items()},
        **describe_source(),
        "machine": describe_machine(device),
        "versions": describe_versions(device),
        "date": now.date().isoformat(),
        "time": now.time().isoformat("seconds"),
    }


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def describe_source() -> JsonObject:
    """The commit of the package's source, and whether the tree had no changes.

    Both are None where the package is not in a git repository of its own, as when it is
    installed.
    """
    name = Path(quorum_attention.__file__).name
    if _ask_git("ls-files", "--error-unmatch", name) is None:
        return {"commit": None, "is_clean": None}
    changes = _ask_git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _ask_git("rev-parse", "--short=8", "HEAD"),
        "is_clean": changes == "",
    }


def _ask_git(*arguments: str) -> str | None:
    """The answer of git in the package's folder, or None if there is none."""
    git = shutil.which("git")
    if git is None:
        return None
    folder = Path(quorum_attention.__file__).parent
    command = [git, "-C", str(folder), *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def describe_machine(device: str) -> str:
    """The device that computes; nothing that names a particular machine."""
    if device == "cpu":
        n_threads = counted(torch.get_num_threads(), "thread")
        return f"CPU, {platform.machine()}, {n_threads}"
    return torch.cuda.get_device_name(device)


def describe_versions(device: str) -> dict[str, str]:
    """The versions of the package and of what it runs on."""
    versions = {}
    if device != "cpu":
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
    versions["quorum-attention"] = quorum_attention.__version__
    versions["torch"] = torch.__version__
    versions["python"] = platform.python_version()
    for package in _OPTIONAL:
        version = installed_version(package)
        if version is not None:
            versions[package] = version
    return versions


def to_json(value: Any, depth: int = 0) -> str:
    """JSON with a line for each row."""
    if depth >= _DEPTH_OF_LINES or not isinstance(value, dict) or not value:
        return json.dumps(value)
    lines = [
        f"{' ' * (depth + 1)}{json.dumps(name)}: {to_json(item, depth + 1)}"
        for name, item in value.items()
    ]
    return "{\n" + ",\n".join(lines) + "}"
