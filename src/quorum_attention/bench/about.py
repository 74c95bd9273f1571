"""What a result was measured on: models and versions, nothing that names a particular machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform

import torch

import quorum_attention

_PACKAGES = ("triton", "stream-cqsa", "matplotlib")


def about(device: str) -> dict[str, str]:
    """Device, versions, date."""
    name = platform.machine() + f", {torch.get_num_threads()} threads"
    found = {"device": torch.cuda.get_device_name() if device == "cuda" else name}
    found |= {
        "quorum-attention": quorum_attention.__version__,
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
