"""A farm whose units share one GPU: from files to files, in a budget, whoever is
killed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.conformance import by_farm

import quorum_attention as qa
from quorum_attention.devices.report import PoolReport
from quorum_attention.ray import Farm

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("ray") is None,
    reason="no GPU, or no Ray",
)

HALF = torch.float16
BUDGET = 256 << 20


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    with Farm(num_cpus=1, num_gpus=0.5, budget=BUDGET) as made:
        yield made


def call(farm: Farm, folder: Path, tokens: int, heads: int, chunks: int) -> PoolReport:
    """Both passes of a causal call from files to files, compared with what one device
    makes of it."""
    report, shapes = PoolReport(), (heads, 1, 1, heads)
    inputs = [torch.randn(1, h, tokens, 64, dtype=HALF) for h in shapes]
    mask = qa.Mask(causal=True, window=(tokens // 2, 0), sinks=torch.randn(heads))
    case: Any = SimpleNamespace(
        inputs=inputs, dtype=HALF, mask=mask, options={"report": report}
    )
    found = by_farm(case, farm, folder, chunks)
    q, k, v, grad_out = (t.cuda() for t in inputs)
    options = {"attn_mask": mask, "enable_gqa": True}
    out, lse = qa.attention_with_lse(q, k, v, **options)
    grads = qa.attention_backward(grad_out, q, k, v, out, lse, **options)
    for got, wanted in zip(found.values(), (out, lse, *grads), strict=True):
        error = (got.cuda().float() - wanted.float()).abs().max()
        assert error <= 6e-3 * wanted.abs().max().clamp_min(1.0).float()
    return report


@pytest.mark.parametrize("chunks", [1, 31])
def test_as_one_call(farm: Farm, tmp_path: Path, chunks: int) -> None:
    call(farm, tmp_path, 20_000, 2, chunks)


def test_tasks_keep_to_their_budget(farm: Farm, tmp_path: Path) -> None:
    """Their rows lie on the device, and what is left is the calls'."""
    report = call(farm, tmp_path, 150_000, 1, 13)
    for passed in (report.forward, report.backward):
        assert passed is not None
        for one in passed.ran:
            made = one.report.forward or one.report.backward
            assert made is None or made.peak_bytes is None or made.peak_bytes <= BUDGET
