"""Plans for kernels of whole tasks under masks that tell what they keep."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers_masks import dense

import quorum_attention as qa
from quorum_attention.kernels.kit import from_score_mod, sliding_window

pytest.importorskip("torch.nn.attention.flex_attention")

CALL: dict[str, Any] = {
    "heads": 8, "head_dim": 64, "dtype": torch.float16, "is_causal": True, "device": "cuda",
}  # fmt: skip


def windowed(reach: int = 4096) -> Any:
    return from_score_mod(None, sliding_window(reach), compiled=True)


@pytest.mark.parametrize("backward", [False, True])
def test_many_tasks_are_trimmed_before_they_are_taken(backward: bool) -> None:
    """Thousands of whole tasks may fit as well, and take a hundred times as long."""
    found = [
        qa.plan(1 << 20, kernel=windowed(), budget=budget, backward=backward, inputs="host", **CALL)
        for budget in ("1GiB", "64MiB")
    ]
    assert all(plan.schedule.trimmed is not None for plan in found)
    assert found[1].predicted_seconds < 30 * found[0].predicted_seconds


def test_plans_and_estimates_of_a_mask() -> None:
    """A window is planned with the pairs that it keeps; a plan runs the call it was made for."""
    sizes = {"heads": 2, "head_dim": 8, "dtype": torch.float32, "device": "cpu"}
    mask = qa.Mask(causal=True, window=(200, 0), sinks=torch.zeros(2))
    window = qa.plan(4096, attn_mask=mask, levels=(7,), **sizes)
    plain = qa.plan(4096, is_causal=True, levels=(7,), **sizes)
    assert window.predicted_seconds < plain.predicted_seconds / 2
    slots = qa.plan(4096, attn_mask=mask, levels=(7,), over_inputs=False, **sizes)
    assert slots.schedule.left_out > 0.3
    q, k, v = (torch.randn(1, 2, 4096, 8) for _ in range(3))
    report = qa.Report()
    found = qa.attention(q, k, v, attn_mask=mask, plan=window, report=report)
    assert report.forward is not None
    assert report.forward.levels == (7,)
    assert torch.allclose(found, qa.attention(q, k, v, attn_mask=mask), atol=1e-5)
    estimate = qa.estimate(4096, attn_mask=mask, **sizes)
    assert estimate.forward.predicted_seconds < plain.predicted_seconds
    with pytest.raises(TypeError, match="mask must be a quorum_attention"):
        qa.plan(4096, attn_mask=torch.zeros(1), **sizes)  # type: ignore[arg-type]


def test_the_earlier_name_of_the_mask_still_works() -> None:
    sizes = {"heads": 2, "head_dim": 8, "dtype": torch.float32, "device": "cpu"}
    mask = qa.Mask(causal=True, window=(200, 0))
    wanted = qa.plan(4096, attn_mask=mask, **sizes).describe()
    for call in (qa.plan, qa.estimate):
        with pytest.warns(DeprecationWarning, match="attn_mask"):
            found = call(4096, mask=mask, **sizes)
        assert wanted in found.describe()
        with pytest.raises(TypeError, match="one argument"):
            call(4096, mask=mask, attn_mask=mask, **sizes)


IDS = torch.arange(3_000) // 350
SHOWN = [
    (qa.Mask(window=(500, 0)), True, "causal, window 500,0"),
    (qa.Mask(chunk=900, offset=0), False, "chunk 900"),
    (qa.Mask(documents=IDS), True, "causal, documents"),
    (qa.Mask(key_lengths=torch.tensor([1_250])), False, "key lengths"),
    (qa.Mask(window=300) | qa.Mask(chunk=500), False, "(window 300) or (chunk 500)"),
    (qa.Mask(sinks=torch.zeros(8), softcap=20.0), True, "causal, softcap 20.0, sinks"),
]


@pytest.mark.parametrize(("mask", "causal", "words"), SHOWN)
def test_header_and_census_are_about_the_mask(mask: qa.Mask, causal: bool, words: str) -> None:
    """Census: every tile of every task as it is run, pair by pair."""
    made = qa.plan(
        3_000, attn_mask=mask, is_causal=causal, levels=(7,), device="cuda", over_inputs=False
    )
    assert made.describe().splitlines()[0].endswith(f"float16, {words}")
    kept, wanted = dense(mask, 1, 1, 3_000, 3_000)[0, 0], Counter[bool | None]()
    tasks = made._trimmed() or list(made.tasks())
    assert len(tasks) == made.n_tasks
    for task in tasks:
        at = torch.cat([torch.arange(s.start, s.stop) for s in task.spans])
        inside = torch.from_numpy(task.mask()) & kept[at][:, at]
        for row in range(0, task.n_tokens, 128):
            # One on the diagonal is told by its other rules; here: below the diagonal.
            for column in range(0, row + 1 if causal else task.n_tokens, 128):
                part = inside[row : row + 128, column : column + 128]
                if causal and column == row:
                    part = part[torch.ones_like(part).tril()]
                wanted[None if part.any() and not part.all() else bool(part.any())] += 1
    found = made.census()
    assert (found.masked_tiles, found.tiles) == (wanted[False], wanted.total())
    # A tile on the diagonal may be mixed by the mask's own causal rule.
    if not causal:
        assert found.clear_tiles == wanted[True]
