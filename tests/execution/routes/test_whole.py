"""One kernel call for a whole head group, and the scaled backward where its gradients overflow."""

from __future__ import annotations

from typing import Any

import torch
from helpers_attention import inputs

import quorum_attention as qa
from quorum_attention.execution.routes import over_inputs


class Elsewhere(torch.Tensor):
    """As if it lay on another device, until it is moved."""

    def to(self, *args: Any, **named: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).to(*args, **named)


def test_an_lse_that_is_elsewhere_is_moved_for_the_scaled_backward(monkeypatch) -> None:
    """torch's efficient attention reads it where it lies, whatever that is."""
    seen = []
    usual = over_inputs.compute_group

    def compute_group(job, *rest, **named):  # type: ignore[no-untyped-def]
        seen.append(type(job.tensors["lse"]))
        return usual(job, *rest, **named)

    monkeypatch.setattr(over_inputs, "compute_group", compute_group)
    n = 200  # more pairs than gradients are computed from materialised scores
    made = inputs(n, heads=2, head_dim=8, dtype=torch.float16)
    with torch.no_grad():
        made.value.fill_(9.0).mul_(torch.randn(made.value.shape).sign())
    grad_out = torch.full_like(made.grad_out, 6e4)
    out, lse = qa.attention_with_lse(*made.three, devices="cpu")
    report = qa.Report()
    qa.attention_backward(
        grad_out,
        *made.three,
        out,
        lse.as_subclass(Elsewhere),
        report=report,
        kernel="cpu",
        devices="cpu",
    )
    assert report.backward.accumulator == "none"
    assert seen, "nothing overflowed"
    assert set(seen) == {torch.Tensor}
