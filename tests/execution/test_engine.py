"""Results are the same with any number of slots, and only the rows that visits name are copied."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import TOLERANCE, assert_close, exact, inputs
from helpers_fake_device import FakeDevice, FakeMover
from helpers_plans import unpinned

import quorum_attention as qa
from quorum_attention.execution.engine import StoringError

pytestmark = pytest.mark.usefixtures("one_thread")


def planned(n: int, n_cap: int, *, backward: bool, levels: tuple[int, ...], **more) -> qa.Plan:
    return qa.plan(
        n, heads=4, kv_heads=2, head_dim=8, value_dim=6, dtype=more.pop("dtype"),
        is_causal=True, levels=levels, layout="balanced", n_cap=n_cap, heads_per_group=2,
        backward=backward, **more,
    )  # fmt: skip


@pytest.mark.parametrize("levels", [(7,), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("home", ["device", "host"])
def test_results_do_not_depend_on_the_number_of_slots(levels, dtype, home) -> None:
    """They agree bit for bit: a state that is carried is the one that would be loaded."""
    given = inputs(101, heads=4, kv_heads=2, head_dim=8, value_dim=6, dtype=dtype)
    common = {"is_causal": True, "enable_gqa": True}
    results = []
    for n_cap in (1, 2, 3, 5):
        more = {"levels": levels, "dtype": dtype, "accumulator": home}
        report = qa.Report()
        out, lse = qa.attention_with_lse(
            *given.three, **common, plan=planned(101, n_cap, backward=False, **more), report=report
        )
        grads = qa.attention_backward(
            given.grad_out, *given.three, out, lse, **common,
            plan=planned(101, n_cap, backward=True, **more), report=report,
        )  # fmt: skip
        assert report.forward is not None
        assert report.forward.n_cap == n_cap
        assert report.forward.n_groups == 2
        results.append((out, lse, *grads))
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)
    reference = exact(given, is_causal=True)
    assert_close(results[0][0], reference.out, TOLERANCE[dtype])


def test_more_slots_move_fewer_bytes() -> None:
    """With two slots, shared chunks are carried from slot to slot, not loaded."""
    given = inputs(210, heads=2, dtype=torch.float32)
    moved = []
    for n_cap in (1, 2):
        plan = qa.plan(
            210, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), layout="balanced",
            n_cap=n_cap,
        )  # fmt: skip
        report = qa.Report()
        qa.attention(*given.three, plan=plan, report=report)
        assert report.forward is not None
        moved.append((report.forward.loaded_bytes, report.forward.stored_bytes))
    rows, tasks, quorum = 30 * 2, 7, 3
    in_bytes = tasks * quorum * rows * 3 * 8 * 4
    state = rows * (8 + 1) * 4
    # One slot: every visit but the first of each of the 7 chunks loads its state.
    assert moved[0][0] == in_bytes + (tasks * quorum - 7) * state
    assert moved[1][0] < moved[0][0]
    assert moved[0][1] == moved[1][1] == tasks * quorum * state


@pytest.mark.parametrize("number", [1, 40, 74, 82])
def test_memory_that_runs_out_between_the_copies_of_a_unit_is_not_recovered_from(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied already would be added twice if the unit were computed again."""
    given = inputs(101, heads=4, kv_heads=2, head_dim=8, value_dim=6, dtype=torch.float32)
    reference = exact(given, is_causal=True)
    made = unpinned(
        planned(101, 2, backward=True, levels=(7,), dtype=torch.float32, accumulator="host",
                over_inputs=False)
    )  # fmt: skip
    calls, store = [], FakeMover.store

    def failing(self, *args) -> None:  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) - 1 == number:
            raise torch.OutOfMemoryError("made up")
        store(self, *args)

    monkeypatch.setattr(FakeMover, "store", failing)
    with (
        FakeDevice(),
        pytest.raises(StoringError, match="not known which of them"),
    ):
        qa.attention_backward(
            given.grad_out, *given.three, reference.out.float(), reference.lse.float(),
            is_causal=True, enable_gqa=True, devices="cpu", plan=made,
        )  # fmt: skip
    assert len(calls) == number + 1
