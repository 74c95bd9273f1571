"""``estimate()``: a dry run of both passes."""

from __future__ import annotations

import pytest
import torch

import quorum_attention as qa

CALL = {"heads": 4, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}


def test_what_fits_and_what_does_not() -> None:
    roomy = qa.estimate(20_000, budget="2GiB", **CALL)
    assert roomy.fits_monolithic
    assert roomy.forward.depth == 0
    with pytest.raises(qa.BudgetError) as refused:
        qa.plan(20000, budget=1, backward=True, **CALL)
    tight = qa.estimate(20_000, budget=refused.value.smallest_bytes, **CALL)
    assert tight.forward.peak_bytes <= tight.budget_bytes
    assert tight.backward.peak_bytes <= tight.budget_bytes
    assert tight.backward.backward
    assert not tight.forward.backward


@pytest.mark.parametrize("name", ["levels", "depth", "backward"])
def test_what_it_chooses_itself_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"does not take {name}"):
        qa.estimate(100, **{name: 1}, **CALL)


def test_alternatives_fit_the_budget() -> None:
    """What does not fit is no alternative."""
    tight = qa.estimate(1 << 20, budget="128MiB", device="cuda", is_causal=True)
    assert len(tight.alternatives) >= 3
    assert all(plan.peak_bytes <= tight.budget_bytes for plan in tight.alternatives)
    seconds = [plan.predicted_seconds for plan in tight.alternatives]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("tokens", [500, 20_000, 65_536])
def test_an_uncut_call_has_one_figure(device: str, tokens: int) -> None:
    found = qa.estimate(tokens, budget="8GiB", device=device, heads=1)
    assert (found.forward.levels, found.forward.n_groups) == ((), 1)
    assert found.monolithic_bytes == found.forward.peak_bytes
    assert found.fits_monolithic
