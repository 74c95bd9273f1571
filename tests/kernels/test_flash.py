"""FlashAttention-2's statistics of rows that are not finite, by a copy of what its operator does.

Where tiles of queries do not fill the GPU it splits the keys, and merges the parts: those whose sum
is NaN have an lse of -inf there, so the row's lse is finite beside an output of NaN.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import quorum_attention as qa
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.flash import FlashKernel, _splits_keys
from quorum_attention.kernels.lse_use import lse_is_used, lse_use
from quorum_attention.repeated.whole import Whole, _Whole


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


def test_nothing_is_looked_at_where_nobody_reads_the_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short forward without gradients feels every launch."""
    given = inputs(300, 300, 64, 2, 2)
    given[1][:, :, 3] = torch.nan
    out, lse = operator(*given, 0.0, False, False, scale=0.125)
    counts = []
    for wanted in (True, False):
        made = (out, lse.clone())
        name = "_scaled_dot_product_flash_attention"
        monkeypatch.setattr(torch.ops.aten, name, lambda *a, made=made, **b: made)
        with Counting() as counting, lse_use(wanted):
            _, found = FlashKernel().rectangle_forward(*given, False, 0.125, None)
        counts.append(counting.names)
        assert bool(found.isnan().all()) == wanted
    assert counts[1] == ["nan_to_num_"]
    assert len(counts[0]) <= 8


class Counting(TorchFunctionMode):
    """The functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ != "__get__":  # shapes and the like
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


CALLS: dict[str, tuple[Any, bool]] = {
    "output": (lambda t, **how: qa.attention(*t, **how), False),
    "output with gradients": (lambda t, **how: qa.attention(*_leaves(t), **how), True),
    "lse": (lambda t, **how: qa.attention_with_lse(*t, **how), True),
    "an lse within": (lambda t, **how: _within(t, how), True),
}


def _leaves(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for t in given]


def _within(given: list[torch.Tensor], how: dict[str, Any]) -> None:
    with lse_use(False):
        qa.attention_with_lse(*given, **how)
        assert not lse_is_used()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("levels", [None, (), (3,)])
def test_who_reads_the_lse(
    name: str, levels: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, wanted = CALLS[name]
    usual, seen = CpuKernel.whole_forward, []

    def noted(self: CpuKernel, *given: Any, **more: Any) -> Any:
        seen.append(lse_is_used())
        return usual(self, *given, **more)

    given = [torch.randn(1, 2, 90, 16).half() for _ in range(3)]
    how: dict[str, Any] = {"devices": "cpu"}
    if levels is not None:
        plan = qa.plan(90, heads=2, head_dim=16, dtype=torch.float16, levels=levels, tile=8)
        how |= {"kernel": "cpu", "plan": plan}
    call(given, **how)  # the kernel is tried out
    monkeypatch.setattr(CpuKernel, "whole_forward", noted)
    for _ in range(3):
        call(given, **how)
    assert set(seen) <= {wanted}
    assert bool(seen) or levels is None
    assert lse_is_used()


@pytest.mark.parametrize("records", [False, True])
def test_a_call_that_is_remembered_reads_it_for_gradients(
    records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    request = SimpleNamespace(records=records)
    monkeypatch.setattr(Whole, "forward", lambda *given: seen.append(lse_is_used()) or given[1:3])
    monkeypatch.setattr(_Whole, "apply", lambda *given: seen.append(lse_is_used()))
    Whole(request, "flash").output(*(torch.ones(1),) * 3)  # type: ignore[arg-type]
    assert seen == [records]


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
