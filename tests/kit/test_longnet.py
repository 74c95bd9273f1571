"""Dilated attention: its multiplicity in float64, and exactness relative to itself."""

from __future__ import annotations

import pytest
import torch
from helpers.attention import softmax
from helpers.score_mods import check, random

import quorum_attention as qa

MIXTURE = [(32, 1), (64, 2), (128, 4)]


def reference(query, key, value, settings, is_causal):
    """Pairs counted as often as settings keep them."""
    n, m, heads = query.shape[2], key.shape[2], query.shape[1]
    q, k = torch.arange(n)[None, :, None], torch.arange(m)[None, None]
    h = torch.arange(heads)[:, None, None]
    count = torch.zeros(heads, n, m, dtype=torch.float64)
    for w, r in settings:
        count += (q // w == k // w) & (q % r == h % r) & (k % r == h % r)
    if is_causal:
        count = count * (k <= q)
    scores = query @ key.mT * query.shape[-1] ** -0.5 + torch.log(count.clamp_min(1))
    return softmax(scores.masked_fill(count == 0, -torch.inf), value)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("settings", "levels", "is_causal"),
    [
        (MIXTURE, (7,), True), (MIXTURE, (3, 3), False), (MIXTURE, (), True),
        ([(64, 4)], (7,), False), ([(64, 4)], (), True), ([(1, 1)], (3, 3), True),
        ([(512, 8), (16, 1)], (7,), True), ([(512, 8), (16, 1)], (), False),
    ],
    ids=str,
)  # fmt: skip
def test_against_float64(settings, levels, is_causal) -> None:
    def exact(*three):
        return reference(*three, settings, is_causal)

    kernel = qa.LongNetKernel(settings)
    how = {"levels": levels, "tile": 16, "heads_per_group": 2}
    check(kernel, random(300, heads=5, width=8), exact, is_causal, **how)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_full_precision_inside() -> None:
    """With 16-bit tokens a cut call then differs from the uncut one by its final
    rounding alone."""
    kernel = qa.LongNetKernel(MIXTURE, full_precision=True)
    how = {"heads": 5, "dtype": torch.bfloat16, "device": "cpu", "n_tokens": 150,
           "levels": [(3,)], "other_sizes": False}  # fmt: skip
    found = qa.check_kernel(kernel, **how)
    assert found.exact
    rounded = qa.check_kernel(qa.LongNetKernel(MIXTURE), **how)
    assert rounded.exact, str(rounded)
    for name in ("out", "grad_key", "grad_value"):
        worst, other = (max(c.errors[name] for c in f.cases) for f in (found, rounded))
        assert worst < other, name


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="positive multiple of its dilation"):
        qa.LongNetKernel([(30, 4)])
    with pytest.raises(ValueError, match="at least one"):
        qa.LongNetKernel([])
    q, k = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8)
    with pytest.raises(NotImplementedError, match="as many key heads"):
        qa.attention(
            q, k, k, enable_gqa=True, kernel=qa.LongNetKernel(MIXTURE), devices="cpu"
        )
