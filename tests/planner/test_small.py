"""Calls that are run whole without a plan: asked about once for all of about their length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.execution.case import Placement
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels import get_kernel
from quorum_attention.planner import policy
from quorum_attention.planner.small import is_small, rounded

CPU = torch.device("cpu")
PLACE = Placement("cpu", True, False, torch.float32)
WORK = Workload((1,), 2, 2, 100, 100, 16, 16, torch.float32, True)


@settings(max_examples=80, deadline=None)
@given(n_queries=st.integers(0, 5000), n_keys=st.integers(0, 5000), is_causal=st.booleans())
def test_lengths_are_rounded_up_to_few(n_queries: int, n_keys: int, is_causal: bool) -> None:
    work = replace(WORK, n_queries=n_queries, n_keys=n_keys, is_causal=is_causal)
    found = rounded(work)
    if is_causal and n_queries != n_keys:
        assert found is work
        return
    for n, up in ((n_queries, found.n_queries), (n_keys, found.n_keys)):
        assert n <= up <= max(policy.SHORTEST, 2 * n - 1)
        assert up & (up - 1) == 0
    assert rounded(found) is found


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_short_and_lies_well_is_small(backward: bool) -> None:
    kernel = get_kernel("cpu")

    def small(work: Workload = WORK, place: Placement = PLACE) -> bool:
        return is_small(work, kernel, place, CPU, backward=backward)

    assert small()
    assert not small(replace(WORK, n_queries=1 << 20, n_keys=1 << 20))
    assert not small(place=replace(PLACE, resident=False))
    assert not small(place=replace(PLACE, dense_rows=False))
    assert not small(replace(WORK, batch_shape=(2, 2)))
