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


def test_alternatives_are_plans_of_their_own_with_other_levels() -> None:
    found = qa.estimate(20_000, budget="2GiB", **CALL)
    levels = [plan.levels for plan in found.alternatives]
    assert len(set(levels)) == len(levels) >= 4
    text = found.describe()
    assert "monolithic call" in text
    assert "fits" in text
    assert "alternatives" in text
    for each in levels[1:]:
        assert " x ".join(map(str, each)) in text


@pytest.mark.parametrize("name", ["levels", "depth", "backward"])
def test_what_it_chooses_itself_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"does not take {name}"):
        qa.estimate(100, **{name: 1}, **CALL)


def test_a_budget_in_which_nothing_fits() -> None:
    with pytest.raises(qa.BudgetError, match="smallest that works"):
        qa.estimate(20_000, budget=100, **CALL)
