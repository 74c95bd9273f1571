"""What a result was measured on: models and versions, nothing that names a particular machine."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

import quorum_attention

_PACKAGES = ("triton", "stream-cqsa", "matplotlib")


def about(device: str) -> dict[str, str]:
    """Device, versions and date; a GPU is asked by another process, so that this one has none."""
    if device != "cuda":
        return _about(device)
    command = [sys.executable, "-m", "quorum_attention.bench.about", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _about(device: str) -> dict[str, str]:
    name = platform.machine() + f", {torch.get_num_threads()} threads"
    found = {"device": torch.cuda.get_device_name() if device == "cuda" else name}
    found |= {
        "quorum-attention": quorum_attention.__version__,
        "source": _source(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _source() -> str:
    """A hash of this package's source, which tells apart versions with the same number."""
    found = hashlib.sha256()
    for path in sorted(Path(quorum_attention.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


if __name__ == "__main__":
    print(json.dumps(_about(sys.argv[1])))
