"""The CPU as a device: its memory, and what it says of itself."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.execution.device.cpu import Cpu
from quorum_attention.execution.memory import is_out_of_memory

HOST = torch.device("cpu")


def test_an_arena_that_cannot_be_had_fails_in_a_way_that_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        Cpu().allocate(1 << 60, HOST)
    assert is_out_of_memory(caught.value)


def test_an_arena_has_exactly_the_bytes_asked_for() -> None:
    arena = Cpu().allocate(12_345, HOST)
    assert (arena.numel(), arena.dtype) == (12_345, torch.uint8)


def test_free_bytes_are_what_the_system_says() -> None:
    """A plausible number: not the default for unknown systems, and not more than there is."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        total = int(next(lines).split()[1]) * 1024
    assert 0 < Cpu().free_bytes(HOST) <= total
