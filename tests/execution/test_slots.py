"""A slot's fields: big enough, aligned, and apart unless they share on purpose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.execution.slots import (
    ALIGNMENT,
    SlotLayout,
    aligned,
    backward_layout,
    forward_layout,
)
from quorum_attention.execution.workload import GroupSize, Workload

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHARED = {
    "final_out": "query",
    "final_query": "query",
    "final_key": "key",
    "final_value": "value",
}
workloads = st.builds(
    lambda b, hk, g, nq, nk, d, dv, t: Workload((b,), hk * g, hk, nq, nk, d, dv, t, False),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
)


def extent(layout: SlotLayout, work: Workload, name: str, tokens: int) -> tuple[int, int]:
    field = layout.fields[name]
    rows = min(tokens, work.n_queries if field.axis == "query" else work.n_keys)
    rows = field.rows if field.fixed else rows
    count = layout.group.batch * layout.heads(field.axis) * rows * field.width
    return field.offset, field.offset + count * field.dtype.itemsize


@settings(max_examples=80, deadline=None)
@given(
    work=workloads,
    tokens=st.integers(1, 80),
    result=st.sampled_from(DTYPES),
    backward=st.booleans(),
    scaled=st.booleans(),
)
def test_fields_lie_inside_the_slot_and_overlap_only_where_shared(
    work: Workload, tokens: int, result: torch.dtype, backward: bool, scaled: bool
) -> None:
    group = GroupSize(work.batch, work.kv_heads)
    rows = min(tokens, work.n_queries), min(tokens, work.n_keys)
    if backward:
        layout = backward_layout(work, group, rows, result, scaled=scaled)
    else:
        layout = forward_layout(work, group, rows, result)
    places = {name: extent(layout, work, name, tokens) for name in layout.fields}
    assert layout.slot_bytes % ALIGNMENT == 0
    for name, (start, stop) in places.items():
        assert start % ALIGNMENT == 0
        assert stop <= layout.slot_bytes
        for other, (low, high) in places.items():
            if name == other or SHARED.get(name) == other or SHARED.get(other) == name:
                continue
            assert stop <= low or high <= start, f"{name} overlaps {other}"
    wants_final = result != work.state_dtype
    assert any(name.startswith("final") for name in places) == wants_final


@pytest.mark.parametrize("heads", [1, 2])
def test_carved_fields_are_dense_views_that_do_not_disturb_each_other(heads: int) -> None:
    """Also for a group smaller than the slot was made for."""
    work = Workload((2,), 4, 2, 9, 11, 5, 3, torch.float16, False)
    layout = forward_layout(work, GroupSize(2, 2), (8, 8), torch.float16)
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    apart = [name for name in layout.fields if name not in SHARED]
    views = {name: layout.carve(slot, name, 1, heads, 7) for name in apart}
    for number, view in enumerate(views.values()):
        assert view.is_contiguous()
        view.fill_(number + 1)
    for number, (name, view) in enumerate(views.items()):
        assert bool((view == number + 1).all()), name
    assert views["query"].shape == (1, 2 * heads, 7, 5)
    assert views["value"].shape == (1, heads, 7, 3)
    assert views["state_out"].dtype == torch.float32


@given(st.integers(0, 10_000))
def test_alignment_rounds_up_and_never_down(n: int) -> None:
    assert n <= aligned(n) < n + ALIGNMENT
    assert aligned(n) % ALIGNMENT == 0
