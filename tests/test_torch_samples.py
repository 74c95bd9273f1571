"""torch's own samples of ``scaled_dot_product_attention``: none is refused, all are as
torch's.

They are those that torch's operator tests run (``OpInfo``), in every dtype, with
gradients and without; plain, cut, and inside a budget.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.attention import GRADIENT_TOLERANCE, TOLERANCE, assert_close, error
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import quorum_attention as qa
from quorum_attention.decomposition import Rows
from quorum_attention.kernels.dropout import Dropout, dropped

pytest.importorskip(
    "expecttest", reason="torch's samples need it: the dev extra installs it"
)
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

    def run(
        self, attention: Any, dtype: torch.dtype, **call: Any
    ) -> list[torch.Tensor]:
        """The result, and the gradient of every tensor."""
        args, kwargs = self.leaves(dtype)
        out = attention(*args, **kwargs, **call)
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        inputs = [t for t in inputs if t.requires_grad]
        if not inputs:
            assert not out.requires_grad
            return [out]
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(
            out.shape
        )
        weight = weight.to(self.dtype).to(dtype)
        return [out, *torch.autograd.grad(out, inputs, weight)]


SEED = 123


def _torchs(query, key, value, *, dropout_p=0.0, **call):
    """torch's function; one that drops, by torch's own textbook with the pairs that we
    drop."""
    if not dropout_p:
        return sdpa(query, key, value, **call)
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    pairs = (*batch, query.shape[-3], query.shape[-2], key.shape[-2])
    rows, keys = torch.arange(pairs[-2]), [Rows(0, pairs[-1], 0)]
    drops = dropped(Dropout(dropout_p, SEED), batch.numel(), pairs[-3], rows, keys)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, call.pop("attn_mask", None), dropout_p, call.pop("is_causal", False),
        ~drops.view(pairs), **call,
    )[0]  # fmt: skip


def _fused(query, key, value, **call):
    """torch's fused function, which takes four dimensions."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in (query, key, value)))
    three = [t.expand(*batch, *t.shape[-2:]) for t in (query, key, value)]
    one = len(batch) == 1
    out = sdpa(*(t[None] if one else t for t in three), **call)
    return out[0] if one else out


CALLS = ({"depth": 1}, {"kernel": "dense"}, {"budget": "16 MiB"})


@pytest.mark.slow
def test_every_sample_is_torchs(tmp_path: Path) -> None:
    """Shape, dtype, results and gradients (of the mask too), within what the dtype
    allows, or as exact as torch's fused call: as it is, and in one of three other ways
    in turn."""
    path = tmp_path / "samples.pt"
    program = [sys.executable, "-m", "helpers.torch_samples", str(path)]
    subprocess.run(program, cwd=Path(__file__).parent, check=True, timeout=120)
    made: dict[str, list[Any]] = torch.load(path, weights_only=False)
    found = [Sample(*one) for one in made["samples"]]
    assert not made["errors"], (
        "torch has calls that it expects to raise: try them here as well"
    )
    # As many as torch 2.11 has, at the least; with masks, causal ones, and gradients.
    assert len(found) >= 200
    assert any("attn_mask" in one.kwargs and one.requires_grad for one in found)
    assert any(one.drops and one.requires_grad for one in found)
    for turn, one in enumerate(found):
        with sdpa_kernel(SDPBackend.MATH):
            torchs = one.run(_torchs, one.dtype)
            exact = one.run(_torchs, torch.float64)
        # torch computes three dimensions, and dropout, without a fused kernel. An
        # output that is rounded to 16 bits is what a fused backward has of rows of
        # nearly one key.
        narrow = one.requires_grad and one.dtype.itemsize == 2
        fused = one.run(_fused, one.dtype) if narrow and not one.drops else torchs
        widest = 2.5 if narrow and one.drops else 1
        for call in ({}, CALLS[turn % len(CALLS)]):
            mine = one.run(qa.attention, one.dtype, dropout_seed=SEED, **call)
            for number, (ours, other, true) in enumerate(
                zip(mine, torchs, exact, strict=True)
            ):
                assert (ours.shape, ours.dtype) == (other.shape, other.dtype)
                limit = (GRADIENT_TOLERANCE if number else TOLERANCE)[
                    one.dtype
                ] * widest
                assert_close(ours, true, max(limit, 1.5 * error(fused[number], true)))
