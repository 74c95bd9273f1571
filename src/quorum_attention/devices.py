"""Devices by name: which there are, and which are here."""

from __future__ import annotations

from typing import Any

import torch

from quorum_attention.counts import shown


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
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{argument} must be 'cpu' or 'cuda', got {device.type!r}")
    return torch.device("cpu") if device.type == "cpu" else device


def present(name: Any, argument: str) -> torch.device:
    """A device that is here, a CUDA one by its number.

    Raises:
        TypeError, NotImplementedError: as ``named_device``.
        ValueError: as there; or the device is not here.
    """
    device = named_device(name, argument)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"{argument} is {str(device)!r}, but there is no CUDA device here")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(f"{argument} is {str(device)!r}, but there are {count} CUDA device(s)")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
