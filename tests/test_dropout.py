"""Dropout: the same pairs however a call is cut, wherever it runs, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_attention import Inputs, assert_close, inputs
from helpers_masks import exact as textbooks

import quorum_attention as qa
from quorum_attention.decomposition.intervals import Rows
from quorum_attention.execution import mask_gradient
from quorum_attention.execution.mask_gradient import Tile
from quorum_attention.kernels.dropout import Dropout, dropped

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = ["dense", "cpu"]
NOTHING = qa.Mask()
SEED = 2**40 + 17


def kept(p: float, batch: int, heads: int, n_queries: int, n_keys: int) -> torch.Tensor:
    """Which pairs are not dropped, by the definition."""
    rows = torch.arange(n_queries)
    return ~dropped(Dropout(p, SEED), batch, heads, rows, [Rows(0, n_keys, 0)])


def textbook(given: Inputs, p: float, mask: qa.Mask = NOTHING, **call: Any) -> Any:
    """Results in float64, with the pairs of the definition dropped."""
    scale = given.query.shape[-1] ** -0.5
    return textbooks(*given.three, given.grad_out, mask, scale, dropout=Dropout(p, SEED), **call)


def forward_mask(sizes: tuple[int, ...], p: float, **call: Any) -> torch.Tensor:
    """Which pairs a forward keeps: all weigh the same, and values are columns of the identity."""
    batch, heads, kv_heads, n, m = sizes
    dtype = call.pop("dtype", torch.float32)
    query, key = torch.zeros(batch, heads, n, 4, dtype=dtype), torch.zeros(batch, kv_heads, m, 4)
    value = torch.eye(m, dtype=dtype).expand(batch, kv_heads, m, m)
    return qa.attention(query, key.to(dtype), value, dropout_p=p, enable_gqa=True, **call) != 0


def backward_mask(sizes: tuple[int, ...], p: float, **call: Any) -> torch.Tensor:
    """Which pairs a backward keeps: upstream gradients are columns of the identity, of one query
    head of each group at a time, because their dV are summed."""
    batch, heads, kv_heads, n, m = sizes
    query, key = torch.zeros(batch, heads, n, 4), torch.zeros(batch, kv_heads, m, 4)
    value = torch.ones(batch, kv_heads, m, n)
    out, lse = torch.zeros(batch, heads, n, n), torch.zeros(batch, heads, n)
    found = torch.empty(batch, heads, n, m, dtype=torch.bool)
    shared = heads // kv_heads
    for j in range(shared):
        upstream = torch.zeros(batch, heads, n, n)
        upstream[:, j::shared] = torch.eye(n)
        grads = qa.attention_backward(
            upstream, query, key, value, out, lse, dropout_p=p, enable_gqa=True, **call
        )
        found[:, j::shared] = grads[2].mT != 0
    return found


# Batch, heads, key/value heads, queries, keys.
SIZES = (2, 4, 2, 45, 38)
CUTS: dict[str, dict[str, Any]] = {
    "head groups": {"levels": (), "heads_per_group": 2},
    "two slots": {"levels": (7,), "over_inputs": False, "n_cap": 2},
    "together": {"levels": (7,), "over_inputs": True},
    "depth 2": {"levels": (3, 3)},
    "mixed": {"levels": (1, 7), "heads_per_group": 2, "layout": "balanced"},
}


def planned(kernel: str, cut: str, sizes: tuple[int, ...], value_dim: int, **more: Any) -> qa.Plan:
    batch, heads, kv_heads, n, m = sizes
    return qa.plan(
        n, n_keys=m, heads=heads, kv_heads=kv_heads, head_dim=4, value_dim=value_dim, batch=batch,
        kernel=kernel, dropout_p=0.5, **{"tile": 3, "dtype": torch.float32, **CUTS[cut], **more},
    )  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_pairs_however_a_call_is_cut(kernel: str, cut: str) -> None:
    """Bit for bit those of the definition, forward and backward."""
    sizes, n, m = SIZES, SIZES[3], SIZES[4]
    expected = kept(0.4, *SIZES[:2], n, m)
    named = {"dropout_seed": SEED, "kernel": kernel}
    plan = planned(kernel, cut, sizes, m)
    assert torch.equal(forward_mask(sizes, 0.4, plan=plan, **named), expected)
    plan = planned(kernel, cut, sizes, n, backward=True)
    assert torch.equal(backward_mask(sizes, 0.4, plan=plan, **named), expected)


@pytest.mark.parametrize("kernel", ["auto", *KERNELS])
@pytest.mark.parametrize("depth", [0, 1])
def test_none_and_all(kernel: str, depth: int) -> None:
    """Nothing dropped is the call without dropout; all dropped is 0, as torch has it."""
    given = inputs(60)
    plain = qa.attention_with_lse(*given.three, kernel=kernel, depth=depth)
    same = qa.attention_with_lse(*given.three, kernel=kernel, depth=depth, dropout_p=0)
    assert all(torch.equal(one, other) for one, other in zip(plain, same, strict=True))
    leaves = [t.clone().requires_grad_() for t in given.three]
    out, lse = qa.attention_with_lse(*leaves, kernel=kernel, depth=depth, dropout_p=1.0)
    assert not out.any()
    assert_close(lse, plain[1], 1e-6)
    for grad in torch.autograd.grad(out, leaves, given.grad_out):
        assert not grad.any()


@pytest.mark.parametrize("shape", [(2, 4, 45, 38), (4, 1, 38), (2, 1, 45, 1), (38,)], ids=str)
@pytest.mark.parametrize("tile", [None, Tile(1, 7, 9), Tile(2, 45, 38)], ids=str)
def test_the_gradient_of_a_mask(
    shape: tuple[int, ...], tile: Tile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tile is not None:
        monkeypatch.setattr(mask_gradient, "fitting", lambda *_: tile)
    given = inputs(45, 38, batch=(2,), heads=4, kv_heads=2, head_dim=4, dtype=torch.float64)
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = qa.attention(
        *given.three, mask, 0.3, enable_gqa=True, dropout_seed=SEED, kernel="dense", depth=1
    )
    found = torch.autograd.grad(out, mask, given.grad_out)[0]
    assert_close(found, textbook(given, 0.3, qa.Mask(bias=mask)).grads[3], 1e-11)


def test_a_backward_needs_the_seed() -> None:
    given = inputs(20)
    report = qa.Report()
    out, lse = qa.attention_with_lse(*given.three, dropout_p=0.25, report=report)
    with pytest.raises(ValueError, match="dropout_seed must be given with dropout_p"):
        qa.attention_backward(given.grad_out, *given.three, out, lse, dropout_p=0.25)
    seed = report.forward.dropout_seed
    assert f"dropout: 0.25 of seed {seed}" in str(report)
    grads = qa.attention_backward(
        given.grad_out, *given.three, out, lse, dropout_p=0.25, dropout_seed=seed
    )
    leaves = [t.clone().requires_grad_() for t in given.three]
    again = qa.attention(*leaves, dropout_p=0.25, dropout_seed=seed)
    for one, other in zip(grads, torch.autograd.grad(again, leaves, given.grad_out), strict=True):
        assert torch.equal(one, other)


def test_a_kernel_without_dropout_never_leaves_it_out() -> None:
    """Neither one asked for by name, nor a user's, nor for "auto"."""

    def function(query, key, value, *, is_causal, scale):
        scores = scale * query @ key.mT
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    three = inputs(20).three
    with pytest.raises(NotImplementedError, match="it has no dropout by the position"):
        qa.attention(*three, dropout_p=0.5, kernel=qa.from_lse_function(function))
    with pytest.raises(NotImplementedError, match="it has no dropout by the position"):
        qa.plan(1000, dropout_p=0.5, device="cuda", kernel="cudnn")
