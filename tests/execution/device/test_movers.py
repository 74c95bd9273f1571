"""Rows into and out of slots: by address, in batches, in pitches or by torch, the same rows."""

from __future__ import annotations

import pytest
import torch
from helpers_late_cuda import GPU, LateMover, stand_in
from helpers_movers import HEADS, LAYS, PIECES, ROWS, Lay, loaded, n_bytes, stored

from quorum_attention.execution.device import cuda_mover
from quorum_attention.execution.device.mover import Clock, Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks

# Of page locks, one in so many is refused.
REFUSED = {"none": 0, "every": 1, "every other": 2, "few": 5}


def there_and_back(mover: Mover, far: torch.Tensor, target: torch.Tensor) -> None:
    state = torch.randn(HEADS, ROWS, far.shape[2]).to(far.dtype)
    slot, found = torch.zeros_like(state), torch.empty_like(state)
    wanted, expected = loaded(far), stored(target, state)
    with mover.input_stage(0):
        mover.load(slot, far, PIECES)
    with mover.state_stage(0, 0):
        pass
    with mover.compute_stage(0):
        found.copy_(slot)
    with mover.store_stage(0):
        mover.store(state, target, PIECES)
    mover.finish(wait=True)
    assert torch.equal(found.float(), wanted)
    assert torch.equal(target, expected)
    assert mover.loaded_bytes == mover.stored_bytes == n_bytes(slot)


@pytest.mark.parametrize("lay", LAYS, ids=str)
def test_in_order(lay: Lay) -> None:
    there_and_back(Mover(Clock(), 2), lay.made(), lay.made())


@pytest.mark.parametrize("lay", LAYS, ids=str)
@pytest.mark.parametrize(
    ("refused", "piece_bytes", "runtime"),
    [("none", 64, "batches"), ("every", 96, "old driver"), ("every other", 1000, "batches"),
     ("few", 96, "none"), ("every other", 64, "old driver")],
)  # fmt: skip
def test_on_streams(lay: Lay, refused: str, piece_bytes: int, runtime: str, monkeypatch) -> None:
    """Rows are waited for, whatever way they are copied: until their memory is locked, or not,
    another thread may write to it. No copy reaches from one locked piece into another: the driver
    refuses that."""
    asked: list[int] = []

    def refuse(start: int) -> bool:
        asked.append(start)
        return REFUSED[refused] > 0 and len(asked) % REFUSED[refused] == 0

    driver = stand_in(monkeypatch, refused=refuse, piece_bytes=piece_bytes, buffers=False)
    driver.batches = runtime != "old driver"
    if runtime == "none":
        monkeypatch.setattr(cuda_mover, "cuda_runtime", lambda: None)
    far, target = lay.made(), lay.made()
    with PageLocks([Copied(far, by_address=True), Copied(target, by_address=True)]) as locks:
        mover = LateMover(GPU, 2, locks, Clock())
        for _ in range(2):
            mover.loaded_bytes = mover.stored_bytes = 0
            there_and_back(mover, far, target)
    assert len(asked) > (far.nbytes - piece_bytes) // (2 * piece_bytes)
    assert not driver.locked


@pytest.mark.parametrize("lay", [LAYS[0], LAYS[3]], ids=str)
def test_a_copy_that_fails_is_an_error(lay: Lay, monkeypatch) -> None:
    driver = stand_in(monkeypatch, buffers=False)
    driver.status, driver.batches = 700, False
    far = lay.made()
    with PageLocks(()) as locks, pytest.raises(RuntimeError, match=r"failed: 700"):
        there_and_back(LateMover(GPU, 2, locks, Clock()), far, far.clone())
