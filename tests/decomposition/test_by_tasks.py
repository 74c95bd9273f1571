"""The equations of the package in a few lines (examples/by_tasks.py), against torch in
float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.decomposition import decompositions
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "by_tasks.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("by_tasks", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BY_TASKS = load_example()


@settings(max_examples=15, deadline=None)
@given(
    decomposition=decompositions(), is_causal=st.booleans(), seed=st.integers(0, 1000)
)
def test_tasks_add_up_to_attention(
    decomposition: Decomposition, is_causal: bool, seed: int
) -> None:
    """Merged outputs and added gradients of all tasks are those of the whole call."""
    generator = torch.Generator().manual_seed(seed)
    n_tokens = decomposition.n_tokens
    query, key, value, grad_out = torch.randn(
        4, n_tokens, 8, dtype=torch.float64, generator=generator
    )
    inputs = torch.stack([query, key, value]).requires_grad_()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=is_causal
    )
    (expected_grads,) = torch.autograd.grad(expected, inputs, grad_out)

    out, lse = BY_TASKS.attention_by_tasks(query, key, value, decomposition, is_causal)
    grads = BY_TASKS.gradients_by_tasks(
        query, key, value, out, lse, grad_out, decomposition, is_causal
    )

    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack(grads), expected_grads, rtol=0, atol=1e-12)


def test_the_example_prints_small_differences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    BY_TASKS.main()
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert lines["tasks"] == "21"
    assert float(lines["output"]) < 1e-13
    assert float(lines["gradients"]) < 1e-12
