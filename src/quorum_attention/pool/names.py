"""The devices of a pool, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quorum_attention.counts import shown
from quorum_attention.execution.device.lookup import every_device, on_host, present


def names_of(devices: str | torch.device | Sequence[str | torch.device]) -> list[str]:
    """Devices as torch writes them, with their numbers.

    Raises:
        ValueError, TypeError, NotImplementedError: none is named, or one that is not here.
    """
    if isinstance(devices, str) and devices == "all":
        every = every_device()
        if not every:
            raise ValueError('devices="all" needs a CUDA device, and there is none here')
        return [str(device) for device in every]
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    if not devices:
        raise ValueError("devices must name at least one device, got none")
    places = [present(device, "devices") for device in devices]
    own = [place for place in places if not on_host(place)]
    if len(set(own)) < len(own):
        raise ValueError(f"devices must name each GPU once, got {shown([str(p) for p in places])}")
    return [str(place) for place in places]


__all__ = ["names_of"]
