"""The devices that a caller names, as torch writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quorum_attention.argument_checks import shown
from quorum_attention.execution.device.lookup import (
    available_device,
    every_device,
    on_host,
)


def device_names(
    devices: str | torch.device | Sequence[str | torch.device],
) -> list[str]:
    """Return devices as torch writes them, with their numbers.

    Raises:
        ValueError, TypeError, NotImplementedError: none is named, or one that is not
            here.
    """
    if isinstance(devices, str) and devices == "all":
        cuda_devices = every_device()
        if not cuda_devices:
            raise ValueError(
                'devices="all" needs a CUDA device, and there is none here'
            )
        return [str(device) for device in cuda_devices]
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    if not devices:
        raise ValueError("devices must name at least one device, got none")
    available = [available_device(device, "devices") for device in devices]
    names = [str(device) for device in available]
    gpus = [device for device in available if not on_host(device)]
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"devices must name each GPU once, got {shown(names)}")
    return names
