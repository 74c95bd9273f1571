"""Where accumulators and results live: what is asked of a place, whatever device it is on."""

from __future__ import annotations

import pytest
import torch
from helpers_fake_device import FakeDevice

import quorum_attention as qa
from quorum_attention.execution.device.residency import empty, travelling

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_host_memory_that_is_not_there_is_refused_with_what_is_missing() -> None:
    with FakeDevice(memory_bytes=1000):
        assert empty((10, 25), torch.float32, HOST, "the output").shape == (10, 25)
        with pytest.raises(qa.OutOfMemoryError) as raised:
            empty((251,), torch.float32, HOST, "the output")
    said = str(raised.value)
    assert said.startswith("the output takes 1004 B of host memory and 4 B of that is missing")


def test_accumulators_that_cannot_be_page_locked_are_pageable(monkeypatch) -> None:
    """torch's own failure, beside a GPU: slower, and no failure of the call."""
    asked = []
    make = torch.empty

    def refusing(*sizes, pin_memory=False, **more):  # type: ignore[no-untyped-def]
        asked.append(pin_memory)
        if pin_memory:
            raise torch.OutOfMemoryError("no more page-locked memory")
        return make(*sizes, **more)

    monkeypatch.setattr(torch, "empty", refusing)
    made = travelling((3, 4), torch.float32, HOST, GPU)
    assert asked == [True, False]
    assert made.shape == (3, 4)
    assert travelling((2,), torch.float64, HOST, HOST).dtype == torch.float64
    assert asked == [True, False, False]
