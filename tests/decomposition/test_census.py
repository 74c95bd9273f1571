"""The tile census: the paper's figures, and a dense count at small lengths."""

import numpy as np
import pytest
from helpers_decomposition import bits, decompositions
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Census, Decomposition, Pairs, census


@pytest.mark.parametrize(
    ("n_tokens", "depth", "masked", "clear", "mixed"),
    [(65_536, 1, 22.0, 77.2, 0.82), (65_536, 2, 38.8, 58.9, 2.30)],
)
def test_the_papers_census(n_tokens, depth, masked, clear, mixed):
    """Appendix A.2: balanced, c = 7, causal, 128 x 128 tiles, pooled over all tasks."""
    tasks = Decomposition(n_tokens, (7,) * depth, "balanced").tasks()
    found = census(tasks, Pairs(n_tokens, n_tokens, True))
    assert round(100 * found.masked, 1) == masked
    assert round(100 * found.clear, 1) == clear
    assert round(100 * found.mixed, 2) == mixed


@settings(max_examples=80, deadline=None)
@given(decompositions(), st.booleans(), st.sampled_from([1, 3, 8, 32]))
def test_census_agrees_with_a_dense_count(decomposition, is_causal, tile):
    """By tile and token, with the paper's OR and AND tests spelled out."""
    masked = clear = mixed = 0
    for task in decomposition.tasks():
        own = bits(task)
        lines = [own[i : i + tile] for i in range(0, len(own), tile)]
        some = [np.bitwise_or.reduce(line) for line in lines]
        every = [np.bitwise_and.reduce(line) for line in lines]
        for row in range(len(lines)):
            for column in range(row + 1 if is_causal else len(lines)):
                if some[row] & some[column] == 0:
                    clear += 1
                elif every[row] & every[column]:
                    masked += 1
                else:
                    mixed += 1
    pairs = Pairs(decomposition.n_tokens, decomposition.n_tokens, is_causal)
    found = census(decomposition.tasks(), pairs, tile)
    assert found == Census(masked, clear, mixed)
