"""The fake device: the engine waits for all that it has to, and copies run beside compute."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import TOLERANCE, assert_close, exact, inputs
from helpers_fake_device import FakeDevice, FakeMover, ignore_events
from helpers_plans import unpinned

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
N = 101


def plan(n_cap: int, *, backward: bool, **more) -> qa.Plan:  # type: ignore[no-untyped-def]
    return qa.plan(
        N, heads=4, kv_heads=2, head_dim=8, value_dim=6, is_causal=True, layout="balanced",
        n_cap=n_cap, heads_per_group=2, backward=backward, device="cpu", over_inputs=False,
        **{"dtype": torch.float16, "levels": (7,), **more},
    )  # fmt: skip


def both_passes(n_cap: int, report: qa.Report | None = None, **more):  # type: ignore[no-untyped-def]
    dtype = more.get("dtype", torch.float16)
    given = inputs(N, heads=4, kv_heads=2, head_dim=8, value_dim=6, dtype=dtype)
    call = {"is_causal": True, "enable_gqa": True, "devices": "cpu", "report": report}
    free = more.pop("unpinned", False)
    plans = [plan(n_cap, backward=backward, **more) for backward in (False, True)]
    if free:
        plans = [unpinned(made) for made in plans]

    def run(device: FakeDevice | None):  # type: ignore[no-untyped-def]
        if device is not None:
            with device:
                return run(None)
        out, lse = qa.attention_with_lse(*given.three, **call, plan=plans[0])
        grads = qa.attention_backward(given.grad_out, *given.three, out, lse, **call, plan=plans[1])
        return out, lse, *grads

    return given, run


@pytest.mark.parametrize("n_cap", [1, 2, 3, 5])
@pytest.mark.parametrize("levels", [(7,), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nothing_is_read_before_it_is_there(n_cap, levels, dtype) -> None:
    """With every copy as late as it may be the results are those of copies made at once."""
    given, run = both_passes(n_cap, levels=levels, dtype=dtype)
    for late, at_once in zip(run(FakeDevice()), run(None), strict=True):
        assert torch.equal(late, at_once)
    assert_close(run(FakeDevice())[0], exact(given, is_causal=True).out, TOLERANCE[dtype])


@pytest.mark.parametrize("left_out", ["_ready", "_stored"])
def test_an_event_that_nobody_waits_for_is_noticed(left_out, monkeypatch) -> None:
    """The fake is strict enough: without either of these events results are wrong. (Compute is
    never late, so who waits for it cannot be told.)"""
    _, run = both_passes(2)
    right = run(None)
    ignore_events(monkeypatch, left_out)
    wrong = run(FakeDevice())
    assert not all(torch.equal(a, b) for a, b in zip(wrong, right, strict=True))


@pytest.mark.parametrize("n_cap", [1, 3])
def test_made_up_failures_are_recovered_from(n_cap) -> None:
    """A unit that fails runs again; those that are done do not."""
    report = qa.Report()
    given, run = both_passes(n_cap, report, unpinned=True)
    device = FakeDevice(failing=lambda number: number == 5)
    out = run(device)[0]
    assert_close(out, exact(given, is_causal=True).out, TOLERANCE[torch.float16])
    assert report.forward is not None
    first = report.forward.recoveries[0]
    if n_cap > 1:
        assert f"n_cap {n_cap} -> {n_cap - 1}" in first
        assert report.forward.units == 14
    else:
        assert "depth 1 -> 2" in first


@pytest.mark.parametrize("failures", [0, 2])
@pytest.mark.parametrize("n_cap", [1, 2, 4])
def test_what_has_been_left_is_never_copied_again(n_cap, failures, monkeypatch) -> None:
    """A device may unlock it while other head groups compute."""
    left: list[tuple[int, int]] = []
    copied = [0]

    def addresses(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    def watched(name: str, far: int) -> None:
        copy = getattr(FakeMover, name)

        def checked(self, *given):  # type: ignore[no-untyped-def]
            pieces = [given[far][:, piece.start : piece.stop] for piece in given[2]]
            for head in (head for rows in pieces for head in rows):
                start, stop = addresses(head)
                assert not any(a < stop and start < b for a, b in left)
                copied[0] += 1
            copy(self, *given)

        monkeypatch.setattr(FakeMover, name, checked)

    def noted(self, tensors) -> None:  # type: ignore[no-untyped-def]
        for start, stop in map(addresses, (head for tensor in tensors for head in tensor)):
            assert not any(a < stop and start < b for a, b in left), "named twice"
            left.append((start, stop))

    watched("load", 1)
    watched("store", 0)
    monkeypatch.setattr(FakeMover, "release", noted)
    given = inputs(N, heads=4, kv_heads=2, head_dim=8, value_dim=6, dtype=torch.float16)
    made = plan(n_cap, backward=True)
    made = unpinned(made) if failures else made
    call = {"is_causal": True, "enable_gqa": True, "devices": "cpu"}
    out, lse = qa.attention_with_lse(*given.three, **call)
    lse = lse.contiguous()  # torch's operator has the heads of a token beside each other
    fails = iter([3, 5][:failures])
    at = next(fails, 0)

    def failing(unit: int) -> bool:
        nonlocal at
        if unit != at:
            return False
        at = next(fails, 0)
        return True

    with FakeDevice(failing=failing):
        qa.attention_backward(given.grad_out, *given.three, out, lse, **call, plan=made)
    assert copied[0] > 100
    # One of the two head groups: query, out, its gradient, lse and dQ, of two heads each, and key,
    # value, dK and dV. After a failure a group may be the last of its attempt: until the end.
    assert len(left) == 5 * 2 + 4 or (failures and not left)


def test_an_arena_that_is_too_large_is_made_smaller() -> None:
    report = qa.Report()
    given, run = both_passes(3, report, unpinned=True)
    slot = plan(3, backward=False).footprint.slots // 3
    out = run(FakeDevice(memory_bytes=2 * slot))[0]
    assert_close(out, exact(given, is_causal=True).out, TOLERANCE[torch.float16])
    assert report.forward is not None
    assert report.forward.n_cap == 2


def test_copies_run_beside_compute_with_a_second_slot() -> None:
    """By the made-up clock: with one slot the three stages add up, with more they overlap."""
    spent = {}
    for n_cap in (1, 2, 3):
        report = qa.Report()
        _, run = both_passes(n_cap, report)
        device = FakeDevice(bytes_per_second=4e6, unit_seconds=2e-3)
        run(device)
        assert report.forward is not None
        stages = report.forward.stages
        # Seven tasks of two head groups.
        assert stages["compute"] == pytest.approx(14 * 2e-3)
        assert stages["h2d"] > 0
        assert stages["d2h"] > 0
        spent[n_cap] = device.seconds
    assert spent[2] < 0.8 * spent[1]
    assert spent[3] <= spent[2]
