"""A function that runs twice, the second time like the first.

Dropout (an adapter's, say) drops the same again, and autocast is that of the first run, wherever
the second one runs. torch's checkpoints keep the same things.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quorum_attention.execution.device.lookup import BACKENDS, on_host


class Repeat:
    """Runs of a function on one device: first ones, and later each of them again by its number."""

    def __init__(self, device: torch.device) -> None:
        self._kind = kind = device.type
        self._known = kind in BACKENDS
        self._devices = [] if on_host(device) or not self._known else [device]
        self._casts = torch.amp.is_autocast_available(kind)
        self._dtype = torch.get_autocast_dtype(kind) if self._casts else None
        self._enabled = self._casts and torch.is_autocast_enabled(kind)
        self._states: list[tuple[torch.Tensor, ...]] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note what random numbers come next, and run."""
        if self._known:
            there: Any = getattr(torch, self._kind)
            states = (there.get_rng_state(device) for device in self._devices)
            self._states.append((torch.get_rng_state(), *states))
        with self._autocast():
            yield

    @contextmanager
    def again(self, number: int) -> Iterator[None]:
        """The run ``number`` (from 0) once more; random numbers go on as if it had not been."""
        kind = self._kind if self._known else "cpu"
        with (
            torch.random.fork_rng(self._devices, self._known, device_type=kind),
            self._autocast(),
        ):
            if self._known:
                host, *others = self._states[number]
                torch.set_rng_state(host)
                for device, state in zip(self._devices, others, strict=True):
                    getattr(torch, self._kind).set_rng_state(state, device)
            yield

    def _autocast(self) -> Any:
        # Without the cache: older torch hands a cast made without gradients on to the calls after
        # it in the region, and the weight gets no gradient of theirs.
        kind = self._kind if self._casts else "cpu"
        return torch.autocast(kind, self._dtype, self._enabled, cache_enabled=False)


__all__ = ["Repeat"]
