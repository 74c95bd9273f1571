"""Rates that are assumed of a device nobody measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.execution.device.backend import by_head_dim, cpu_rates, h200_rates


@settings(max_examples=60, deadline=None)
@given(
    table=st.dictionaries(
        st.integers(1, 256),
        st.tuples(st.floats(1, 1000), st.floats(1, 1000)),
        min_size=1,
        max_size=5,
    ),
    head_dim=st.integers(1, 300),
)
def test_between_measured_head_dims(table, head_dim: int) -> None:  # type: ignore[no-untyped-def]
    for at in range(2):
        known = [both[at] for both in table.values()]
        found = by_head_dim(table, head_dim)[at]
        assert min(known) * (1 - 1e-9) <= found <= max(known) * (1 + 1e-9)
        if head_dim in table:
            assert found == pytest.approx(table[head_dim][at])


def test_wide_dtypes_and_threads() -> None:
    assert h200_rates(torch.float32, 64)["flops"] < h200_rates(torch.float16, 64)["flops"] / 5
    assert h200_rates(torch.float16, 64)["flops"] < h200_rates(torch.float16, 128)["flops"]
    before = torch.get_num_threads()
    one = cpu_rates(torch.float32)["flops"] / before
    torch.set_num_threads(before + 1)
    try:
        assert cpu_rates(torch.float32)["flops"] == pytest.approx(one * (before + 1))
    finally:
        torch.set_num_threads(before)
