"""The CPU as a computing device: host memory only, and copies do not run beside compute."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from quorum_attention.execution.device.backend import Backend, TrialSizes, cpu_rates


class Cpu(Backend):
    """The backend of the CPU."""

    kind = "cpu"

    def free_bytes(self, device: torch.device) -> int:
        """What Linux calls ``MemAvailable``; elsewhere 16 GiB."""
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            pass
        return 1 << 34  # not Linux: assume this much rather than refuse to work

    def model(self, device: torch.device) -> str:
        """Its name, and how many threads torch uses."""
        return f"cpu {cpu_name()}, {torch.get_num_threads()} threads"

    def rates_of(self, dtype: torch.dtype) -> str:
        """fp16 and bf16 apart: processors have instructions for one or for both."""
        return str(dtype).removeprefix("torch.") if dtype.itemsize == 2 else super().rates_of(dtype)

    def rates(
        self, device: torch.device | None, dtype: torch.dtype, head_dim: int
    ) -> dict[str, Any]:
        """Assumed rates for as many threads as torch has."""
        return cpu_rates(dtype)

    def trial_sizes(self, device: torch.device) -> TrialSizes:
        """Short calls, and copies of 32 MiB."""
        return TrialSizes(2048, 2048, 32 << 20, 0.0, torch.get_num_threads())

    def both_ways(
        self, device: torch.device, n_bytes: int, host: Sequence[torch.Tensor] = ()
    ) -> Callable[[], object]:
        """A function that copies ``n_bytes`` once: on a CPU there is one direction."""
        source, target = host or [
            torch.empty(n_bytes, dtype=torch.uint8, device="cpu") for _ in range(2)
        ]
        return lambda: target.copy_(source)


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The system's name for the CPU's model, on one line."""
    known: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                what, _, value = line.partition(":")
                known.setdefault(what.strip(), value.strip())
    except OSError:
        pass  # not Linux
    # On ARM, Linux gives numbers instead of a name.
    numbers = [known[name] for name in ("CPU implementer", "CPU part") if known.get(name)]
    name = known.get("model name") or " ".join(numbers) or platform.processor()
    return " ".join((name or platform.machine() or "unknown").split())
