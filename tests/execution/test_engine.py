"""The engine waits for all that it has to, copies the rows that visits name and no
others, and computes the same with any number of slots."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from helpers.attention import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    Inputs,
    assert_close,
    exact,
    inputs,
)
from helpers.fake_device import FakeDevice, FakeMover, ignore_events
from helpers.passes import both_passes, pass_of
from helpers.plans import unpinned

import quorum_attention as qa
from quorum_attention.execution.engine import Engine, StoringError
from quorum_attention.execution.slot_rows import SlotRows, Unit

pytestmark = pytest.mark.usefixtures("one_thread")
N = 101
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6}
CALL = {"is_causal": True, "enable_gqa": True, "devices": "cpu"}


def plans(n_cap: int, *, free: bool = False, **more) -> list[qa.Plan]:
    """Of both passes; ``free`` to recover."""
    more = {"dtype": torch.float16, "levels": (7,), "heads_per_group": 2, **more}
    made = [
        qa.plan(N, **SIZES, is_causal=True, layout="balanced", n_cap=n_cap,
                backward=backward, device="cpu", over_inputs=False, **more)
        for backward in (False, True)
    ]  # fmt: skip
    return [unpinned(plan) for plan in made] if free else made


def both(
    given: Inputs,
    plans,
    device: FakeDevice | None = None,
    report: qa.Report | None = None,
) -> tuple[torch.Tensor, ...]:
    each = tuple({"plan": plan} for plan in plans)
    with device or nullcontext():
        return both_passes(given, each, **CALL, report=report)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("levels", "dtype", "home"),
    [
        ((7,), torch.float16, "host"),
        ((7,), torch.float32, "device"),
        ((7, 3), torch.float16, "device"),
    ],
)
def test_neither_the_number_of_slots_nor_late_copies_change_a_bit(
    levels, dtype, home
) -> None:
    """A state that is carried is the one that would be loaded; nothing is read too
    early."""
    given, results, report = inputs(N, dtype=dtype, **SIZES), [], qa.Report()
    for n_cap in (1, 2, 3) if len(levels) > 1 else (1, 2, 3, 5):
        made = plans(n_cap, levels=levels, dtype=dtype, accumulator=home)
        for device in (None, FakeDevice()):
            results.append(both(given, made, device, report))
            assert (report.forward.n_cap, report.forward.n_groups) == (n_cap, 2)
    assert all(
        torch.equal(a, b)
        for one in results
        for a, b in zip(results[0], one, strict=True)
    )
    assert_close(results[0][0], exact(given, is_causal=True).out, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uncut_groups_have_states_in_one_place_for_all_slots(dtype) -> None:
    """The next group overwrites states, and is computed while results are copied."""
    given = inputs(N, dtype=dtype, **SIZES)
    uncut = {"levels": (), "dtype": dtype}
    expected = both(given, plans(1, **uncut))
    for n_cap in (2, 3):
        made = plans(n_cap, **uncut)
        results = both(given, made, FakeDevice())
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("left_out", ["_ready", "_stored"])
def test_an_event_that_nobody_waits_for_is_noticed(left_out, monkeypatch) -> None:
    """The fake is strict enough: without either of these events results are wrong.
    (Compute is never late, so who waits for it cannot be told.)"""
    given, made = inputs(N, dtype=torch.float16, **SIZES), plans(2)
    right = both(given, made)
    ignore_events(monkeypatch, left_out)
    wrong = both(given, made, FakeDevice())
    assert not all(torch.equal(a, b) for a, b in zip(wrong, right, strict=True))


def test_more_slots_move_fewer_bytes() -> None:
    """With two slots, shared chunks are carried from slot to slot, not loaded."""
    given, moved, report = inputs(210, heads=2, dtype=torch.float32), [], qa.Report()
    for n_cap in (1, 2):
        plan = qa.plan(
            210, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), layout="balanced",
            n_cap=n_cap,
        )  # fmt: skip
        qa.attention(*given.three, plan=plan, report=report)
        moved.append((report.forward.loaded_bytes, report.forward.stored_bytes))
    rows, visits = 30 * 2, 7 * 3
    in_bytes, state = visits * rows * 3 * 8 * 4, rows * (8 + 1) * 4
    # One slot: every visit but the first of each of the 7 chunks loads its state.
    assert moved[0][0] == in_bytes + (visits - 7) * state
    assert moved[1][0] < moved[0][0]
    assert moved[0][1] == moved[1][1] == visits * state


@pytest.mark.parametrize("number", [1, 20, 40, 58])
def test_memory_that_runs_out_between_the_copies_of_a_unit_is_not_recovered_from(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied already would be added twice if the unit were computed again."""
    given = inputs(N, dtype=torch.float32, **SIZES)
    reference = exact(given, is_causal=True)
    plan = plans(2, free=True, dtype=torch.float32, accumulator="host")[1]
    calls, store = [], FakeMover.store

    def failing(self, *args) -> None:
        calls.append(1)
        if len(calls) - 1 == number:
            raise torch.OutOfMemoryError("made up")
        store(self, *args)

    monkeypatch.setattr(FakeMover, "store", failing)
    run = pass_of(
        given, True, (reference.out.float(), reference.lse.float()), **CALL, plan=plan
    )
    with FakeDevice(), pytest.raises(StoringError, match="not known which of them"):
        run()
    assert len(calls) == number + 1


@pytest.mark.parametrize("failures", [(), (3, 5)])
@pytest.mark.parametrize("n_cap", [1, 2, 4])
def test_what_has_been_left_is_never_copied_again(n_cap, failures, monkeypatch) -> None:
    """A device may unlock it while other head groups compute; after a failure too."""
    left: list[tuple[int, int]] = []
    copied = [0]

    def check_not_left(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum(
            (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start, stop = (
            tensor.data_ptr(),
            tensor.data_ptr() + (last + 1) * tensor.element_size(),
        )
        assert not any(a < stop and start < b for a, b in left)
        return start, stop

    def watched(name: str, far: int) -> None:
        copy = getattr(FakeMover, name)

        def checked(self, *given):
            for piece in given[2]:
                for entry in given[far]:
                    for head in entry[:, piece.start : piece.stop]:
                        check_not_left(head)
                        copied[0] += 1
            copy(self, *given)

        monkeypatch.setattr(FakeMover, name, checked)

    watched("load", 1)
    watched("store", 0)
    monkeypatch.setattr(
        FakeMover,
        "release",
        lambda self, tensors: left.extend(
            check_not_left(head) for t in tensors for entry in t for head in entry
        ),
    )
    given = inputs(N, dtype=torch.float16, **SIZES)
    out, lse = qa.attention_with_lse(*given.three, **CALL)
    lse = (
        lse.contiguous()
    )  # torch's operator has the heads of a token beside each other
    remaining = list(failures)

    def failing(unit: int) -> bool:
        return bool(remaining) and unit == remaining[0] and bool(remaining.pop(0))

    run = pass_of(
        given, True, (out, lse), **CALL, plan=plans(n_cap, free=bool(failures))[1]
    )
    with FakeDevice(failing=failing):
        found = run()
    assert not remaining
    wanted = exact(given, is_causal=True, gradients=True).grads
    assert_close(found, wanted, GRADIENT_TOLERANCE[torch.float16])
    assert copied[0] > 100
    # One of the two head groups: query, out, its gradient, lse and dQ, of two heads
    # each, and key, value, dK and dV. After a failure a group may be the last of its
    # attempt: until the end.
    assert len(left) == 5 * 2 + 4 or (failures and not left)


@pytest.mark.parametrize(("n_cap", "order"), [(1, "cscscs"), (2, "ccscsc")])
def test_a_unit_is_stored_when_the_next_one_was_launched(
    n_cap: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may wait for page locks before it stores: the device computes then."""
    events: list[str] = []
    compute, store = Engine._compute, SlotRows.store

    def noted_compute(engine: Engine, unit: Unit) -> None:
        events.append("c")
        compute(engine, unit)

    def noted_store(rows: SlotRows, unit: Unit) -> None:
        events.append("s")
        store(rows, unit)

    monkeypatch.setattr(Engine, "_compute", noted_compute)
    monkeypatch.setattr(SlotRows, "store", noted_store)
    plan = plans(n_cap, dtype=torch.float32)[0]
    pass_of(inputs(N, dtype=torch.float32, **SIZES), False, **CALL, plan=plan)()
    assert "".join(events).startswith(order)
    assert events.count("c") == events.count("s") == 14


def test_copies_run_beside_compute_with_a_second_slot() -> None:
    """By the made-up clock: with one slot the three stages add up, with more they
    overlap."""
    spent = {}
    for n_cap in (1, 2, 3):
        report, device = (
            qa.Report(),
            FakeDevice(bytes_per_second=4e6, unit_seconds=2e-3),
        )
        both(inputs(N, dtype=torch.float16, **SIZES), plans(n_cap), device, report)
        stages = report.forward.stages
        # Seven tasks of two head groups.
        assert stages["compute"] == pytest.approx(14 * 2e-3)
        assert min(stages["h2d"], stages["d2h"]) > 0
        spent[n_cap] = device.seconds
    assert spent[2] < 0.8 * spent[1]
    assert spent[3] <= spent[2]
