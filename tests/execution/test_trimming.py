"""The sizes of trimmed tasks, and what is remembered about them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.trimming import (
    tally,
    trimmed_tasks,
)
from quorum_attention.kernels.kit import from_score_mod, sliding_window

N = 4096


@settings(max_examples=30, deadline=None)
@given(
    window=st.integers(1, 3000),
    levels=st.sampled_from([(3,), (7,), (7, 7)]),
    tile=st.sampled_from([16, 128]),
    is_causal=st.booleans(),
    backward=st.booleans(),
)
def test_the_tally_is_that_of_the_tasks(window, levels, tile, is_causal, backward) -> None:  # type: ignore[no-untyped-def]
    kernel = from_score_mod(None, sliding_window(window), compiled=False)
    shape = Decomposition(N, levels, "aligned", tile)
    tasks, sizes_of_tasks = trimmed_tasks(shape, (N, N, is_causal), kernel, backward)
    counted = tally(shape, (N, N, is_causal), kernel, backward)
    assert counted == sizes_of_tasks
    sizes = [task.n_tokens for task in tasks]
    assert counted.n_tasks == len(sizes) <= shape.n_tasks
    assert counted.tokens == sum(sizes) <= counted.before
    assert counted.before == sum(task.n_tokens for task in shape.tasks())
    assert counted.largest == max(sizes) <= shape.max_task_tokens
    assert 0.0 <= counted.left_out < 1.0
