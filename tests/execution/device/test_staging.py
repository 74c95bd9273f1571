"""Copies through page-locked buffers, and to and from slots: every byte, in order,
given back."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from pathlib import Path

import pytest
import torch
from helpers.attention import GRADIENT_TOLERANCE, Inputs, assert_close, exact, inputs
from helpers.conformance import in_files
from helpers.late_cuda import GPU, LateCuda, LateEvent, LateMover, LateStream, stand_in
from helpers.movers import HEADS, LAYS, PIECES, ROWS, Lay, loaded, n_bytes, stored
from helpers.passes import both_passes
from helpers.plans import passing

import quorum_attention as qa
from quorum_attention.execution.control.visits import Rows
from quorum_attention.execution.device import cuda_mover, staging
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.cuda_mover import contiguous_runs
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.device.page_locks import Copied, PageLocks
from quorum_attention.execution.device.staging import BatchedCopies, Staging

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_a_failed_stage_noted_is_not_written(monkeypatch) -> None:
    driver = stand_in(monkeypatch)
    copies, stream = BatchedCopies(driver), LateStream()
    ring = Staging(lambda n: torch.zeros(n, dtype=torch.uint8), LateEvent, copies)
    near, far = (
        torch.ones(300, dtype=torch.uint8),
        torch.full((300,), 7, dtype=torch.uint8),
    )
    ring.move(near.data_ptr(), far.data_ptr(), 100, stream, up=False)
    copies.flush(stream)
    ring.ended(stream, given_up=False)
    ring.move(near.data_ptr(), far.data_ptr() + 100, 100, stream, up=False)
    copies.forget()
    ring.ended(stream, given_up=True)
    stream.synchronize()
    ring.finish()
    assert far.tolist() == [1] * 100 + [7] * 200


def laid_out(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """The same values, maybe not at an aligned address, with gaps, or heads last."""
    room = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
    return draw.choice([
        tensor,
        room[draw.randint(1, 3) :][: tensor.numel()].view(tensor.shape).copy_(tensor),
        torch.nn.functional.pad(tensor, (0, 3))[..., :-3],
        tensor.transpose(-2, -3).contiguous().transpose(-2, -3),
    ])  # fmt: skip


def a_call(draw: random.Random, n: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """Inputs and plans of a random call through slots, or passing by."""
    heads = draw.choice([(4, 2), (2, 2), (3, 1)])
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": 8, "value_dim": 8}
    causal = draw.random() < 0.6
    given = inputs(n, dtype=dtype, **sizes)
    plans = []
    for backward in (False, True):
        made = qa.plan(
            n, is_causal=causal, dtype=dtype, backward=backward, device="cpu", kernel="cpu",
            levels=draw.choice([(7,), (3,), (7, 3)]), layout="balanced", over_inputs=False,
            n_cap=draw.randint(1, 3),
            heads_per_group=draw.choice([heads[0] // heads[1], heads[0]]), **sizes,
        )  # fmt: skip
        if draw.random() < 0.5:
            size = draw.randint(n // 6, n + 9), draw.randint(n // 6, n + 9)
            made = passing(
                made,
                *size,
                group=draw.randint(1, heads[1]),
                n_cap=draw.randint(1, 3),
                chunk_slots=draw.randint(1, 3),
            )
        plans.append(made)
    return given, plans, causal


def both(given: Inputs, plans, causal: bool, rooms=({}, {})):  # type: ignore[no-untyped-def]
    """Output and gradients."""
    each = tuple(
        {"plan": plan, **room} for plan, room in zip(plans, rooms, strict=True)
    )
    with LateCuda():
        out, _, *grads = both_passes(
            given, each, is_causal=causal, enable_gqa=True, devices="cpu"
        )
    return out, *grads


def grant_few_threads(monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> None:
    """Refuse two of three threads."""
    start = threading.Thread.start

    def maybe(thread: threading.Thread) -> None:
        if draw.random() < 0.7:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", maybe)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("locked", ["nothing", "some", "no buffers", "few threads"])
def test_random_calls_are_exact(locked: str, monkeypatch, tmp_path: Path) -> None:
    """Inputs in files mapped to be read, in memory with gaps or odd addresses,
    overlapping; results that are given, or not; with all page locks refused, or two of
    three, or two of three threads that lock and copy."""
    draw = random.Random(torch.initial_seed())
    some = locked in ("some", "few threads")
    if locked == "few threads":
        grant_few_threads(monkeypatch, draw)
    driver = stand_in(
        monkeypatch,
        refused=lambda start: not some or start // 2048 % 3 > 0,
        buffers=locked != "no buffers",
    )
    for number in range(8):
        monkeypatch.setattr(staging, "BUFFER_BYTES", draw.choice([256, 1024, 1 << 16]))
        dtype = draw.choice([torch.float16, torch.float32, torch.float64])
        given, plans, causal = a_call(draw, draw.randint(20, 90), dtype)
        kind = draw.choice(["files", "memory", "one tensor"])
        if kind == "files":
            given = Inputs(**in_files(tmp_path / str(number), vars(given)))
        elif kind == "one tensor":
            # Keys are values, and where heads are as many, queries.
            same = given.query if given.query.shape == given.key.shape else given.key
            given = Inputs(
                given.query if same is given.key else same, same, same, given.grad_out
            )
        else:
            given = Inputs(*(laid_out(t, draw) for t in (*given.three, given.grad_out)))
        rooms = {}, {}
        if draw.random() < 0.5:
            out, *grads = (
                laid_out(torch.zeros(t.shape, dtype=t.dtype), draw)
                for t in (given.grad_out, *given.three)
            )
            rooms = {"out": out}, {"grads": tuple(grads)}
        copied = driver.copied
        found = both(given, plans, causal, rooms)
        wanted = exact(given, is_causal=causal, gradients=True)
        assert_close(found, (wanted.out, *wanted.grads), GRADIENT_TOLERANCE[dtype])
        assert driver.copied > copied or locked == "no buffers" or kind == "memory"
        assert not driver.locked


def test_a_missing_wait_is_noticed(monkeypatch) -> None:
    """The stand-in is strict enough: buffers that are used again at once give wrong
    results."""
    stand_in(monkeypatch, buffer_bytes=256)
    given, plans, causal = a_call(random.Random(3), 80, torch.float32)
    right = both(given, plans, causal)
    monkeypatch.setattr(LateEvent, "synchronize", lambda self: None)
    wrong = both(given, plans, causal)
    assert not all(torch.equal(a, b) for a, b in zip(wrong, right, strict=True))


@pytest.mark.parametrize("at", [1, 3, 6])
def test_buffers_are_freed_after_a_failure_too(at: int, monkeypatch) -> None:
    """And what was done before it is in its place: the pass goes on from there."""
    stand_in(monkeypatch, buffer_bytes=512)
    made: list[weakref.ref[Staging]] = []
    given, plans, causal = a_call(random.Random(at), 60, torch.float32)
    move = Staging.move

    def failing(self, *where, up) -> None:  # type: ignore[no-untyped-def]
        if up:
            made.append(weakref.ref(self))
            if len(made) == at:
                raise ZeroDivisionError
        move(self, *where, up=up)

    monkeypatch.setattr(Staging, "move", failing)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            both(given, plans, causal)
        assert [ring() for ring in made] == [None] * at
    finally:
        gc.enable()
    found = both(given, plans, causal)
    wanted = exact(given, is_causal=causal, gradients=True)
    assert_close(found[0], wanted.out, GRADIENT_TOLERANCE[torch.float32])


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
def test_on_streams(
    lay: Lay, refused: str, piece_bytes: int, runtime: str, monkeypatch
) -> None:
    """Rows are waited for, whatever way they are copied: until their memory is locked,
    or not, another thread may write to it. No copy reaches from one locked piece into
    another: the driver refuses that."""
    asked: list[int] = []

    def refuse(start: int) -> bool:
        asked.append(start)
        return REFUSED[refused] > 0 and len(asked) % REFUSED[refused] == 0

    driver = stand_in(
        monkeypatch, refused=refuse, piece_bytes=piece_bytes, buffers=False
    )
    driver.batches = runtime != "old driver"
    if runtime == "none":
        monkeypatch.setattr(cuda_mover, "cuda_runtime", lambda: None)
    far, target = lay.made(), lay.made()
    with PageLocks(
        [Copied(far, by_address=True), Copied(target, by_address=True)]
    ) as locks:
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


@pytest.mark.parametrize("order", ["dense", "entries inside heads", "every other"])
@pytest.mark.parametrize("refused", REFUSED)
def test_entries_on_streams(order: str, refused: str, monkeypatch) -> None:
    """Several batch entries at once, whatever lies between them, and all of their rows
    or some."""
    monkeypatch.setattr(cuda_mover, "RUN_BYTES", 500)
    asked: list[int] = []

    def refuse(start: int) -> bool:
        asked.append(start)
        return REFUSED[refused] > 0 and len(asked) % REFUSED[refused] == 0

    stand_in(monkeypatch, refused=refuse, piece_bytes=96, buffers=False)
    for pieces in ((Rows(0, ROWS, 0),), (Rows(0, 5, 0), Rows(6, 12, 5))):
        far, target = (torch.randn(6, HEADS, ROWS, 8) for _ in range(2))
        if order == "entries inside heads":
            far, target = (
                torch.randn(HEADS, 6, ROWS, 8).transpose(0, 1) for _ in range(2)
            )
        elif order == "every other":
            far, target = far[::2], target[::2]
        slot = torch.zeros(far.shape)
        with PageLocks(
            [Copied(far, by_address=True), Copied(target, by_address=True)]
        ) as locks:
            mover = LateMover(GPU, 2, locks, Clock())
            with mover.input_stage(0):
                mover.load(slot, far, pieces)
            with mover.state_stage(0, 0):
                pass
            with mover.compute_stage(0):
                pass
            with mover.store_stage(0):
                mover.store(slot, target, pieces)
            mover.finish(wait=True)
        for piece in pieces:
            local = slice(piece.local, piece.local + piece.length)
            rows = slice(piece.start, piece.stop)
            assert torch.equal(slot[:, :, local], far[:, :, rows])
            assert torch.equal(target[:, :, rows], far[:, :, rows])
        n_rows = sum(piece.length for piece in pieces)
        moved = slot[:, :, :n_rows].nbytes
        assert mover.loaded_bytes == mover.stored_bytes == moved


def test_short_heads_are_copied_many_at_a_time() -> None:
    """32,768 entries of 8 heads in host memory were 262,144 copies of each tensor.
    Long heads are one copy each."""
    slot, far = torch.empty(500, 8, 8, 16), torch.empty(500, 8, 8, 16)
    assert [*contiguous_runs(slot, far, 512)] == [(0, 0, 500 * 8 * 512)]
    longer_heads = torch.empty(500, 8, 9, 16)
    assert len([*contiguous_runs(slot, longer_heads, 512)]) == 4000
    by_head = torch.empty(8, 500, 8, 16).transpose(0, 1)
    assert len([*contiguous_runs(slot, by_head, 512)]) == 4000
    slot, far = torch.empty(2, 3, 1 << 17, 16), torch.empty(2, 3, 1 << 17, 16)
    head_bytes = 4 << 21
    assert [*contiguous_runs(slot, far, head_bytes)] == [
        (number * head_bytes, number * head_bytes, head_bytes) for number in range(6)
    ]
