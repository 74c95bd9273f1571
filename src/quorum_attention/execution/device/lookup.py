"""Finds backends and devices by name: which are supported, and which this machine
has."""

from __future__ import annotations

import functools
from typing import Any

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.cuda import Cuda, with_index
from quorum_attention.units import counted

BACKENDS: dict[str, Backend] = {"cpu": Backend(), "cuda": Cuda()}
"""The supported kinds of devices, by torch's names."""
GPU = "cuda"
"""The kind that is planned for where a device need not be here."""

HOST = torch.device("cpu")


@functools.cache
def type_of(device: torch.device) -> str:
    """``device.type``, a text that torch makes anew each time, in 0.7 us."""
    return device.type


def backend_of(device: torch.device) -> Backend:
    """The backend of a device for which ``is_known`` is true."""
    return BACKENDS[type_of(device)]


def is_known(device: torch.device) -> bool:
    """Whether attention can run on ``device``."""
    return device.type in BACKENDS


def on_host(device: torch.device) -> bool:
    """Whether tensors on ``device`` are in host memory."""
    backend = BACKENDS.get(device.type)
    return backend is not None and not backend.own_memory


def best_device() -> torch.device:
    """The current CUDA device if there is one, else the CPU."""
    if not BACKENDS["cuda"].is_here():
        return HOST
    return with_index(torch.device("cuda"))


def every_device() -> list[torch.device]:
    """All CUDA devices of this machine."""
    if not BACKENDS["cuda"].is_here():
        return []
    numbers = range(torch.cuda.device_count())
    return [torch.device("cuda", number) for number in numbers]


def named_device(name: Any, argument: str) -> torch.device:
    """The CPU or CUDA device called ``name``, whether or not this machine has it.

    Args:
        name: a str or a torch.device.
        argument: what messages call it.

    Raises:
        TypeError: ``name`` is neither a str nor a torch.device.
        ValueError: it names no device.
        NotImplementedError: it names a device that is neither a CPU nor a CUDA device.
    """
    if not isinstance(name, (str, torch.device)):
        raise TypeError(
            f"{argument} must be a torch.device or a name such as 'cpu' or 'cuda:0', "
            f"got {shown(name)}"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"{argument} must be 'cpu' or 'cuda', got {shown(name)}"
        ) from None
    if not is_known(device):
        raise NotImplementedError(
            f"{argument} must be 'cpu' or 'cuda', got {device.type!r}"
        )
    return HOST if on_host(device) else device


def available_device(name: Any, argument: str) -> torch.device:
    """The device called ``name``, with its number if it is a CUDA device.

    Raises:
        TypeError, NotImplementedError: as ``named_device``.
        ValueError: ``name`` names no device, or one that this machine does not have.
    """
    device = named_device(name, argument)
    if on_host(device):
        return device
    if not backend_of(device).is_here():
        raise ValueError(
            f"{argument} is {str(device)!r}, but there is no CUDA device here"
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(
            f"{argument} is {str(device)!r}, but there are "
            f"{counted(count, 'CUDA device')}"
        )
    return with_index(device)
