"""While a CUDA graph is captured, what a replay would not do again is refused by name.

On a GPU: tests/gpu/test_cuda_graphs.py.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.call import capture
from quorum_attention.execution import slot_rows
from quorum_attention.kernels import device_copies

N = 12
LENGTHS = torch.tensor([3, 7])
IDS = torch.arange(N) // 5
PADDING = torch.ones(2, N, dtype=torch.bool)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks see a capture; nothing is captured."""
    monkeypatch.setattr(capture, "capturing", lambda device: True)
    monkeypatch.setattr(device_copies, "capturing", lambda device: True)


def call(mask: Any = None, **options: Any) -> torch.Tensor:
    query, key, value = (torch.randn(2, 3, N, 8) for _ in range(3))
    return qa.attention(query, key, value, mask, **options)


@pytest.mark.parametrize(
    ("mask", "fields"),
    [
        (qa.Mask(key_lengths=LENGTHS), "Mask.key_lengths"),
        (qa.Mask(documents=IDS), "Mask.documents"),
        (qa.Mask(documents=(IDS, IDS)), "Mask.documents"),
        (qa.Mask(key_padding=PADDING), "Mask.key_padding"),
        (qa.Mask(causal=True, documents=IDS, key_padding=PADDING),
         "Mask.documents and Mask.key_padding"),
        (qa.Mask(causal=True) | qa.Mask(key_lengths=LENGTHS), "Mask.key_lengths"),
        (qa.Mask(every=(qa.Mask(window=2), qa.Mask(documents=IDS))), "Mask.documents"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("captured")
def test_what_the_host_reads_is_refused(mask: qa.Mask, fields: str) -> None:
    """A second call with the same mask finds it resolved, and would read nothing."""
    for _ in range(2):
        with pytest.raises(
            NotImplementedError, match=f"^{fields} cannot be given while a CUDA"
        ):
            call(mask)


@pytest.mark.usefixtures("captured")
def test_what_the_device_reads_is_not_refused() -> None:
    bias = torch.randn(3, N, N)
    assert call(bias).shape == (2, 3, N, 8)
    mask = qa.Mask(causal=True, window=4, softcap=3.0, bias=bias, sinks=torch.zeros(3))
    assert call(mask).shape == (2, 3, N, 8)


def test_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, here = torch.device("cuda", 0), torch.zeros(1, 1, 4, 8)
    there = torch.empty(0, device="meta")
    monkeypatch.setattr(capture, "capturing", lambda device: True)
    for arguments, name in (
        ((here, None, None), "query, key and value"),
        ((there, here, None), "attn_mask"),
        ((there, here, qa.Mask(bias=here)), "Mask.bias"),
        ((there, None, qa.Mask(sinks=torch.zeros(1))), "Mask.sinks"),
    ):
        with pytest.raises(
            NotImplementedError, match=f"^{name} cannot be on cpu while"
        ):
            capture.check_capture(
                device if arguments[0] is here else there.device, *arguments
            )


@pytest.mark.usefixtures("captured")
def test_what_a_graph_reads_at_replays_is_kept() -> None:
    """The graph has addresses only: tables whose mask is gone must not be given to
    others."""
    table = torch.arange(5)
    alive = weakref.ref(table)
    device_copies.to_device(table, torch.device("cpu"))
    kernel = qa.NativeKernel(window=2)
    kernel_alive = weakref.ref(kernel)
    capture.keep_for_replays(kernel, torch.device("cpu"))
    del table, kernel
    gc.collect()
    assert alive() is not None
    assert kernel_alive() is not None
    device_copies._READ_BY_GRAPHS.clear()
    capture._KERNELS_OF_GRAPHS.clear()


def test_slots_are_refused_before_the_host_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's error came in the middle, and spoilt the program's random numbers."""
    monkeypatch.setattr(slot_rows, "capturing", lambda device: True)
    call()
    with pytest.raises(NotImplementedError, match=r"slots .* give kernel='native'"):
        call(kernel="dense", depth=1)
