"""Devices by kind, and what their allocators round to."""

from __future__ import annotations

import torch

from quorum_attention.execution.device.lookup import BACKENDS, backend_of, is_known, on_host


def test_devices_by_kind() -> None:
    assert backend_of(torch.device("cuda", 3)) is BACKENDS["cuda"]
    assert on_host(torch.device("cpu"))
    assert not on_host(torch.device("cuda"))
    # Neither: such tensors are refused elsewhere, with a name.
    assert not is_known(torch.device("meta"))
    assert not on_host(torch.device("meta"))


def test_rounding_is_what_allocators_do() -> None:
    small, large = [100, 1 << 20], [(1 << 20) + 1]
    assert BACKENDS["cpu"].rounding(small + large) == 3 * 512
    assert BACKENDS["cuda"].rounding(small) == 2 * 512
    assert BACKENDS["cuda"].rounding(small + large) == 3 * 512 + (1 << 20)
