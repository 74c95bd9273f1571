"""Devices by name and by kind: which there are, and which are here."""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.counts import shown
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.cpu import Cpu
from quorum_attention.execution.device.cuda import Cuda, numbered

BACKENDS: dict[str, Backend] = {"cpu": Cpu(), "cuda": Cuda()}
"""By torch's name of the kind of device."""

HOST = torch.device("cpu")


def backend_of(device: torch.device) -> Backend:
    """The interface of a device that ``is_known``."""
    return BACKENDS[device.type]


def is_known(device: torch.device) -> bool:
    """Whether attention can run there."""
    return device.type in BACKENDS


def on_host(device: torch.device) -> bool:
    """Whether what lies there lies in host memory."""
    backend = BACKENDS.get(device.type)
    return backend is not None and not backend.own_memory


def best_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return numbered(torch.device("cuda")) if BACKENDS["cuda"].is_here() else HOST


def named_device(name: Any, argument: str) -> torch.device:
    """A CPU or CUDA device by its name, whether or not it is here.

    Raises:
        TypeError: ``name`` is neither a str nor a torch.device.
        ValueError: it names no device.
        NotImplementedError: it names one that is neither a CPU nor a CUDA device.
    """
    if not isinstance(name, (str, torch.device)):
        raise TypeError(
            f"{argument} must be a torch.device or a name such as 'cpu' or 'cuda:0', "
            f"got {shown(name)}"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{argument} must be 'cpu' or 'cuda', got {shown(name)}") from None
    if not is_known(device):
        raise NotImplementedError(f"{argument} must be 'cpu' or 'cuda', got {device.type!r}")
    return HOST if on_host(device) else device


def present(name: Any, argument: str) -> torch.device:
    """A device that is here, a CUDA one by its number.

    Raises:
        TypeError, NotImplementedError: as ``named_device``.
        ValueError: as there; or the device is not here.
    """
    device = named_device(name, argument)
    if on_host(device):
        return device
    if not backend_of(device).is_here():
        raise ValueError(f"{argument} is {str(device)!r}, but there is no CUDA device here")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(f"{argument} is {str(device)!r}, but there are {count} CUDA device(s)")
    return numbered(device)
