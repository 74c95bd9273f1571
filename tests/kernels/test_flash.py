"""FlashAttention-2's statistics of rows that are not finite, by a copy of what its operator does.

Where tiles of queries do not fill the GPU it splits the keys, and merges the parts: those whose sum
is NaN have an lse of -inf there, so the row's lse is finite beside an output of NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quorum_attention.kernels.flash import FlashKernel, _splits_keys


def operator(query: Any, key: Any, value: Any, p: Any, causal: Any, _: Any, *, scale: float) -> Any:
    """(out, lse) as torch's operator returns them."""
    rows, keys = query.shape[2], key.shape[2]
    shared = query.shape[1] // key.shape[1]
    k, v = (t.repeat_interleave(shared, 1).double() for t in (key, value))
    scores = query.double() @ k.mT * scale
    if causal:
        scores.masked_fill_(torch.ones(rows, keys, dtype=torch.bool).triu(1), -torch.inf)
    step = 256 if query.shape[-1] <= 64 else 128
    outs, lses = [], []
    for start in range(0, keys, step):
        part = scores[..., start : start + step]
        largest = part.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)
        p = (part - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
        total = p.sum(-1, keepdim=True)
        bad = total.isnan() | (total == 0)
        outs.append(p @ v[..., start : start + step, :] / torch.where(bad, 1.0, total))
        lse = (largest + total.log()).squeeze(-1)
        lses.append(lse.masked_fill(bad.squeeze(-1), torch.inf if keys <= step else -torch.inf))
    every = torch.stack(lses)
    lse = every.logsumexp(0).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    out = sum(o * (e - lse).exp().unsqueeze(-1) for o, e in zip(outs, every, strict=True))
    if keys <= step:
        out = outs[0]
    return out.to(query.dtype), lse.float()


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_scaled_dot_product_flash_attention"
    monkeypatch.setattr(torch.ops.aten, name, operator, raising=False)


def inputs(n: int, n_keys: int, width: int, heads: int, key_heads: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(n + n_keys)
    sizes = ((heads, n), (key_heads, n_keys), (key_heads, n_keys))
    return [torch.randn(2, *size, width, generator=g).half() for size in sizes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("whole_row", [False, True])
@pytest.mark.parametrize(("n", "width"), [(299, 64), (156, 128), (100, 16)])
def test_an_lse_is_not_finite_where_it_is_not_in_truth(
    n: int, width: int, whole_row: bool, where: str, what: str, causal: bool
) -> None:
    given = inputs(n, n, width, 4, 2)
    at = {"query": 0, "key": 1, "value": 2}[where]
    place = (1, 1, n // 3) if whole_row else (1, 1, n // 3, 5)
    given[at][place] = float(what)
    out, lse = FlashKernel().rectangle_forward(*given, causal, 0.125, None)
    q, k = given[0].double(), given[1].double().repeat_interleave(2, 1)
    scores = q @ k.mT * 0.125
    if causal:
        scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    right = scores.logsumexp(-1)
    assert torch.equal(lse.isfinite(), right.isfinite())
    fine = right.isfinite()
    assert float((lse[fine] - right[fine]).abs().max()) < 1e-3
    assert bool(out[~fine].isnan().all())


def test_another_number_of_the_value_does_not_matter() -> None:
    """Rows of a head whose values are not finite in the first column are left as they are."""
    given = inputs(300, 300, 64, 2, 2)
    given[2][0, 0, 3, 0] = torch.nan
    given[1][0, 1, 3] = torch.nan
    _, lse = FlashKernel().rectangle_forward(*given, False, 0.125, None)
    assert bool(lse[0, 1].isnan().all())
    assert bool(lse[0, 0].isfinite().all())
    assert bool(lse[1].isfinite().all())


@pytest.mark.parametrize(
    ("n", "n_keys", "heads", "splits"),
    [(64, 256, 1, False), (64, 257, 1, True), (1, 4000, 300, True), (1, 4000, 1600, False),
     (20_480, 20_480, 1, False), (0, 300, 2, False)],
)  # fmt: skip
def test_only_where_keys_may_be_split(n: int, n_keys: int, heads: int, splits: bool) -> None:
    """Calls that fill the GPU (made up: of 160 multiprocessors) take what they took."""
    query, key = torch.empty(1, heads, n, 64), torch.empty(1, max(1, heads // 4), n_keys, 64)
    if not torch.cuda.is_available():
        assert _splits_keys(query, key) == splits
