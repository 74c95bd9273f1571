"""The fields of a slot are large enough, aligned, and overlap only on purpose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import quorum_attention as qa
from quorum_attention.execution.head_groups import GroupSize
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.execution.slot_layout import (
    LayoutError,
    SlotField,
    SlotLayout,
    slot_layout,
)
from quorum_attention.execution.task_levels import TaskLevels
from quorum_attention.kernels import CallShape, DenseKernel
from quorum_attention.kernels.kit import from_score_mod, sliding_window

KERNELS = {
    "dense": DenseKernel(),
    "window": from_score_mod(None, sliding_window(20), compiled=False),
}
LEVELS = [
    (),
    (1,),
    (3,),
    (7,),
    (13,),
    (1, 1),
    (3, 3),
    (3, 7),
    (7, 3),
    (7, 7),
    (3, 3, 3),
]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 1200),
    other=st.none() | st.integers(1, 1200),
    levels=st.sampled_from(LEVELS),
    layout=st.sampled_from(["aligned", "balanced"]),
    tile=st.sampled_from([1, 8, 16, 128]),
    is_causal=st.booleans(),
    backward=st.booleans(),
    kernel=st.sampled_from(sorted(KERNELS)),
    dtypes=st.sampled_from([(torch.float16, torch.float16), (torch.float16, torch.float32),
                            (torch.float32, torch.float32), (torch.float32, torch.float16)]),
)  # fmt: skip
@example(
    1020,
    None,
    (1,),
    "aligned",
    128,
    True,
    False,
    "dense",
    (torch.float16, torch.float16),
)
@example(
    511, None, (3,), "aligned", 128, True, True, "dense", (torch.float16, torch.float32)
)
def test_every_task_of_a_plan_fits_its_slot(
    n, other, levels, layout, tile, is_causal, backward, kernel, dtypes
) -> None:
    """No task has more rows than the slot was laid out for, whether it is trimmed or
    cut after a recovery, and no two fields that are in use at once share a byte."""
    made = KERNELS[kernel]
    plan = qa.plan(
        n, n_keys=other, heads=2, kv_heads=1, head_dim=4, value_dim=3, dtype=dtypes[0],
        is_causal=is_causal, levels=levels, layout=layout, tile=tile, kernel=made,
        over_inputs=False, device="cpu", backward=backward, n_cap=1,
    )  # fmt: skip
    shape, group = plan.shape, plan.schedule.group
    place = Placement(True, False, torch.float32)
    cutting = TaskLevels(plan.schedule, Problem(shape, made, spec_of(backward), place))
    depth = len(levels)
    planned, tasks = plan.schedule.task_rows(shape), cutting.tasks(depth)
    rows = cutting.schedule(depth).task_rows(shape)
    assert all(a <= b for a, b in zip(rows, planned, strict=True))
    rounds = [(tasks, cutting.schedule(depth))]
    if depth == 1:
        rounds.append((cutting.split_tasks(tasks, 2), cutting.schedule(2)))
    for found, at in rounds:
        rows = at.task_rows(shape)
        spec = spec_of(backward)
        layout_of = slot_layout(spec, shape, group, rows, dtypes[1])
        slot = torch.empty(layout_of.slot_bytes, dtype=torch.uint8)
        for task in found:
            queries, keys = (
                task.count_below(shape.n_queries),
                task.count_below(shape.n_keys),
            )
            taken = []
            for name, field in layout_of.fields.items():
                count = queries if field.axis == "query" else keys
                view = layout_of.carve(slot, name, group.batch, group.kv_heads, count)
                taken.append(
                    (view.data_ptr(), view.data_ptr() + view.nbytes, name, field.over)
                )
            for start, stop, name, over in taken:
                for low, high, another, its in taken:
                    if name != another and another != over and its != name:
                        assert stop <= low or high <= start, (
                            f"{name} lies over {another}"
                        )


def test_a_task_larger_than_its_slot_is_refused() -> None:
    def field(
        name: str, offset: int, width: int = 4, over: str | None = None
    ) -> SlotField:
        return SlotField(name, "query", width, torch.float32, offset, 64 * width, over)

    def layout(*fields: SlotField, size: int = 1024) -> SlotLayout:
        return SlotLayout({f.name: f for f in fields}, size, 1)

    made = layout(field("a", 0), field("b", 256), field("c", 256, over="b"))
    slot = torch.zeros(1024, dtype=torch.uint8)
    assert made.carve(slot, "a", 1, 2, 8).shape == (1, 2, 8, 4)
    for entries, heads, rows in ((2, 2, 8), (1, 3, 8), (1, 2, 9)):
        with pytest.raises(LayoutError, match="'a' has"):
            made.carve(slot, "a", entries, heads, rows)


def test_slots_of_uncut_units_have_their_states_in_one_place() -> None:
    """A second slot takes the bytes of inputs alone."""
    call = CallShape("cuda", torch.bfloat16, 8, 8, 64, 64, batch_shape=(1,))
    sizes = (GroupSize(1, 2), (512, 512), torch.bfloat16)
    common = slot_layout(spec_of(True), call, *sizes, common_states=True)
    apart = slot_layout(spec_of(True), call, *sizes)
    state_bytes = 3 * 2 * 512 * 64 * 4
    assert common.bytes_of(1) == apart.bytes_of(1)
    assert common.bytes_of(2) == apart.bytes_of(2) - state_bytes
    assert common.common is not None
    assert set(common.common.fields) == {
        "state_grad_query",
        "state_grad_key",
        "state_grad_value",
    }
