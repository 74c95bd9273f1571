"""torch's own samples of ``scaled_dot_product_attention``: none is refused, all are as torch's.

They are those that torch's operator tests run (``OpInfo``), in every dtype, with gradients and
without; plain, cut, and inside a budget.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers_attention import GRADIENT_TOLERANCE, TOLERANCE, assert_close
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import quorum_attention as qa

pytest.importorskip("expecttest", reason="torch's samples need it: the dev extra installs it")
pytestmark = pytest.mark.usefixtures("one_thread")


class Sample(NamedTuple):
    """A call, as torch's tests make it."""

    dtype: torch.dtype
    requires_grad: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def drops(self) -> bool:
        return bool(self.kwargs.get("dropout_p"))

    def leaves(self, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as new tensors of ``dtype``."""

        def leaf(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if not value.is_floating_point():
                return value
            return value.to(dtype, copy=True).requires_grad_(self.requires_grad)

        return tuple(map(leaf, self.args)), {n: leaf(v) for n, v in self.kwargs.items()}

    def run(self, attention: Any, dtype: torch.dtype, **call: Any) -> list[torch.Tensor]:
        """The result, and the gradient of every tensor."""
        args, kwargs = self.leaves(dtype)
        out = attention(*args, **kwargs, **call)
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        inputs = [t for t in inputs if t.requires_grad]
        if not inputs:
            assert not out.requires_grad
            return [out]
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
        weight = weight.to(self.dtype).to(dtype)
        return [out, *torch.autograd.grad(out, inputs, weight)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    path = tmp_path_factory.mktemp("samples") / "samples.pt"
    program = Path(__file__).with_name("helpers_torch_samples.py")
    subprocess.run([sys.executable, str(program), str(path)], check=True, timeout=120)
    found: dict[str, list[Any]] = torch.load(path, weights_only=False)
    return found


@pytest.fixture(scope="module")
def samples(made: dict[str, list[Any]]) -> list[Sample]:
    found = [Sample(*one) for one in made["samples"]]
    assert not made["errors"], "torch has calls that it expects to raise: try them here as well"
    # As many as torch 2.11 has, at the least; with masks, causal ones, and gradients.
    assert len(found) >= 200
    assert any("attn_mask" in one.kwargs and one.requires_grad for one in found)
    return found


@pytest.mark.parametrize(
    "call", [{}, {"depth": 1}, {"kernel": "dense"}, {"budget": "16 MiB"}], ids=str
)
def test_every_sample_is_torchs(samples: list[Sample], call: dict[str, Any]) -> None:
    """Shape, dtype, results and gradients (of the mask too), within what the dtype allows."""
    ran = 0
    for one in samples:
        if one.drops:
            continue
        found = one.run(qa.attention, one.dtype, **call)
        with sdpa_kernel(SDPBackend.MATH):
            torchs = one.run(sdpa, one.dtype)
            exact = one.run(sdpa, torch.float64)
        for number, (mine, other, true) in enumerate(zip(found, torchs, exact, strict=True)):
            assert mine.shape == other.shape
            assert mine.dtype == other.dtype
            limit = GRADIENT_TOLERANCE if number else TOLERANCE
            assert_close(mine, true, limit[one.dtype])
        ran += 1
    assert ran >= 100


def test_only_samples_with_dropout_are_refused(samples: list[Sample]) -> None:
    """By name, as not supported."""
    for one in samples:
        if one.drops:
            with pytest.raises(NotImplementedError, match="dropout_p must be"):
                one.run(qa.attention, one.dtype)
