"""Gradients of rows of few kept keys at fp16's largest numbers: computed anew where fp32 cannot.

Protects invariant 6: nothing infinite that float64 has not. dP and delta of 1e11 cancel there, and
what fp32 leaves of them, times the key, is more than fp16 holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers_plans import passing

import quorum_attention as qa
from quorum_attention.execution import exact_rows
from quorum_attention.execution.doubts import Doubts
from quorum_attention.kernels.delta import exact_carrier
from quorum_attention.kernels.merge import add_

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
ROUTES = ("uncut", "together", "in slots", "through two slots", "passing", "budget")


def draw(n: int, n_keys: int, *, seed: int, heads: int = 2, width: int = 32) -> Four:
    """Query, key, value and upstream gradient; the last two at the ends of fp16."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn((1, heads, rows, width), generator=g) for rows in (n, n_keys, n_keys, n)
    )
    return q.half(), (4 * k).half(), (v.sign() * 60_000).half(), (grad.sign() * 65_504).half()


def exact(four: Four, kept: torch.Tensor, mask: qa.Mask | None = None) -> list[torch.Tensor]:
    """The gradients in float64, by torch's autograd of the textbook."""
    q, k, v, grad = (t.double() for t in four)
    three = [t.requires_grad_() for t in (q, k, v)]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None and mask.softcap is not None:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    scores = scores.masked_fill(~kept, -torch.inf)
    if mask is not None and mask.sinks is not None:
        sinks = mask.sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        p = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    else:
        p = torch.softmax(scores, -1).nan_to_num(0.0)
    return list(torch.autograd.grad(p @ v, three, grad))


def by_route(route: str, n: int, n_keys: int, heads: int, causal: bool) -> dict[str, object]:
    """What makes a backward take a route."""
    if route == "uncut":
        return {"depth": 0}
    sizes = {
        "n_keys": n_keys, "heads": heads, "head_dim": 32, "dtype": torch.float16,
        "is_causal": causal, "backward": True, "kernel": "cpu", "tile": 8,
    }  # fmt: skip
    plan = qa.plan(
        n, levels=(3,), **sizes, n_cap=2 if route == "through two slots" else 1,
        over_inputs=route == "together",
    )  # fmt: skip
    return {"plan": passing(plan, 32, 16, group=1) if route == "passing" else plan}


def gradients(four: Four, route: str, **call: object) -> tuple[tuple[torch.Tensor, ...], qa.Report]:
    """Gradients by a route, and the report."""
    q, k, v, grad = four
    out, lse = qa.attention_with_lse(q, k, v, kernel="cpu", **call)
    report = qa.Report()
    causal = bool(call.get("is_causal", False))
    order: dict[str, object]
    if route == "budget":
        with pytest.raises(qa.BudgetError) as refused:
            qa.attention_backward(grad, q, k, v, out, lse, kernel="cpu", budget=1, **call)
        order = {"budget": refused.value.smallest_bytes}
    else:
        order = by_route(route, q.shape[2], k.shape[2], q.shape[1], causal)
    found = qa.attention_backward(
        grad, q, k, v, out, lse, kernel="cpu", report=report, **order, **call
    )
    return tuple(found[:3]), report


def check(found: tuple[torch.Tensor, ...], right: list[torch.Tensor], four: Four) -> None:
    """Within what rounding to fp16, and sums in fp32, leave; infinite where it is in truth."""
    q, k, v, grad = (t.double() for t in four)
    # A share of the sizes of the products in dS, summed over the pairs that count.
    pair = 2.0**-20 * float(grad.norm(dim=-1).max() * v.norm(dim=-1).max()) / math.sqrt(32)
    sizes = (float(k.abs().max()), float(q.abs().max()) * q.shape[2], 0.0)
    for name, got, want, size in zip("qkv", found, right, sizes, strict=True):
        allowed = 2.0**-9 * want.abs() + pair * size + 2.0**-9 * 65_504
        fits = want.abs() + allowed < 65_504
        assert bool(got[fits].isfinite().all()), f"d{name}: {int((~got[fits].isfinite()).sum())}"
        off = (got.double() - want).abs()[fits]
        assert bool((off <= allowed[fits]).all()), f"d{name}: {float(off.max()):.3g}"
        assert not bool(got[want.abs() > 66_000].isfinite().any()), f"d{name} is infinite in truth"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("n", [40, 150])
def test_a_mask_that_keeps_one_key_of_a_row(n: int, route: str) -> None:
    """dS is 0, and so are dQ and dK; below and above the size that gets an exact delta."""
    four = draw(n, n, seed=n)
    kept = torch.zeros(n, n, dtype=torch.bool)
    kept[torch.arange(n), torch.randint(n, (n,), generator=torch.Generator().manual_seed(1))] = True
    found, report = gradients(four, route, attn_mask=kept)
    check(found, exact(four, kept), four)
    if report.backward.mended_rows:
        assert float(found[0].abs().max()) < 1e-2
        assert float(found[1].abs().max()) < 1e-2


@pytest.mark.parametrize("route", ROUTES)
def test_small_rows_beside_the_largest(route: str) -> None:
    """One row's upstream gradient has all be divided by 2**20, which leaves nothing of the others;
    their gradients are numbers of fp16 all the same."""
    n = 150  # too many pairs for an exact delta
    q, k, v, grad = draw(n, n, seed=31)
    q, k = q / 64, k / 64  # nothing outgrows fp16
    grad[:, :, 0] /= 2
    grad[:, :, 1:] = (grad[:, :, 1:].float() * 1e-9).half()
    v = (v.float() * torch.rand(v.shape, generator=torch.Generator().manual_seed(1))).half()
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    found, _ = gradients((q, k, v, grad), route, is_causal=True)
    right = exact((q, k, v, grad), causal)
    small, largest = right[0][:, :, 2:], float(right[0][:, :, 2:].abs().max())
    assert largest > 0.01
    off = (found[0][:, :, 2:].double() - small).abs().max()
    assert float(off) < 2e-3 * largest


@pytest.mark.parametrize("grads", [torch.float16, torch.float32])
def test_an_upstream_gradient_that_is_divided(grads: torch.dtype) -> None:
    """In fp32, larger than fp16 holds: gradients are multiplied when all has been added up."""
    n = 40
    q, k, v, grad = draw(n, 1, seed=29)
    grad = grad.float() * 100
    out, lse = qa.attention_with_lse(q, k, v, kernel="cpu")
    targets = tuple(torch.empty(t.shape, dtype=grads) for t in (q, k, v))
    found = qa.attention_backward(grad, q, k, v, out, lse, kernel="cpu", grads=targets)
    if grads == torch.float16:
        assert float(found[0].abs().max()) < 1e-2
        assert float(found[1].abs().max()) < 1e-2
    assert bool(found[0].isfinite().all())
    total = grad.double().sum(2)
    most = torch.finfo(grads).max
    assert bool((found[2][:, :, 0].isfinite() == (total.abs() < most)).all())


@pytest.mark.parametrize("route", ROUTES)
def test_one_key(route: str) -> None:
    n = 40
    four = draw(n, 1, seed=5)
    found, _ = gradients(four, route)
    check(found, exact(four, torch.ones(n, 1, dtype=torch.bool)), four)


@pytest.mark.parametrize("route", ROUTES)
def test_the_first_rows_of_a_causal_call(route: str) -> None:
    n = 72
    four = draw(n, n, seed=7)
    found, _ = gradients(four, route, is_causal=True)
    check(found, exact(four, torch.ones(n, n, dtype=torch.bool).tril()), four)


MASKS: dict[str, Callable[[int], tuple[qa.Mask, torch.Tensor]]] = {
    "window of 1": lambda n: (
        qa.Mask(causal=True, window=(0, 0)), torch.eye(n, dtype=torch.bool)
    ),
    "documents of 1": lambda n: (
        qa.Mask(documents=torch.arange(n)), torch.eye(n, dtype=torch.bool)
    ),
    "length 1": lambda n: (
        qa.Mask(key_lengths=torch.tensor([1])), (torch.arange(n) < 1).expand(n, n)
    ),
    "sinks": lambda n: (
        qa.Mask(causal=True, window=(1, 0), sinks=torch.tensor([0.5, -3.0])),
        torch.ones(n, n, dtype=torch.bool).tril() & torch.ones(n, n, dtype=torch.bool).triu(-1),
    ),
    "soft cap": lambda n: (
        qa.Mask(causal=True, softcap=2.0), torch.ones(n, n, dtype=torch.bool).tril()
    ),
}  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", list(MASKS))
def test_a_description_of_few_keys(name: str, depth: int) -> None:
    n = 40
    mask, kept = MASKS[name](n)
    four = draw(n, n, seed=len(name))
    q, k, v, grad = four
    out, lse = qa.attention_with_lse(q, k, v, attn_mask=mask, depth=depth)
    found = qa.attention_backward(grad, q, k, v, out, lse, attn_mask=mask, depth=depth)
    check(tuple(found[:3]), exact(four, kept, mask), four)


def test_an_ordinary_call_is_not_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it runs, on any route, with sinks that overflow and are scaled down too."""
    monkeypatch.setattr(
        "quorum_attention.passes.mend_rows_", lambda *of: pytest.fail("computed anew")
    )
    n = 72
    g = torch.Generator().manual_seed(3)
    four = tuple(torch.randn(1, 2, n, 32, generator=g).half() for _ in range(4))
    for route in ROUTES:
        gradients(four, route, is_causal=True)


def test_a_gradient_too_large_in_truth_is_infinite_again() -> None:
    """One key has all rows' upstream gradients. The report says how many rows were looked at."""
    q, k, v, grad = draw(40, 40, seed=11)
    grad = grad / 8
    mask = qa.Mask(key_lengths=torch.tensor([1]))
    report = qa.Report()
    out, lse = qa.attention_with_lse(q, k, v, attn_mask=mask, kernel="cpu")
    found = qa.attention_backward(
        grad, q, k, v, out, lse, attn_mask=mask, kernel="cpu", report=report, depth=0
    )
    total = grad.double().sum(2)
    assert bool((total.abs() > 66_000).any()), "nothing is too large"
    assert bool(found[2][:, :, 0][total.abs() > 66_000].isinf().all())
    assert bool(found[2][:, :, 0][total.abs() < 65_000].isfinite().all())
    assert float(found[0].abs().max()) < 1e-2
    assert report.backward.mended_rows
    assert report.backward.cells()["rows computed anew"] == str(report.backward.mended_rows)
    assert "computed anew in float64" in str(report)


@pytest.mark.parametrize("where", ["query", "grad_out", "key"])
def test_rows_of_inputs_that_are_not_finite_stay_as_they_are(where: str) -> None:
    """A NaN in one row of the inputs is not made a number of, and others are mended beside it."""
    n = 40
    q, k, v, grad = draw(n, n, seed=13)
    {"query": q, "grad_out": grad, "key": k}[where][0, 0, 3, 0] = math.nan
    kept = torch.eye(n, dtype=torch.bool)
    found, _ = gradients((q, k, v, grad), "in slots", attn_mask=kept)
    assert bool(found[0][0, 0, 3].isnan().any())
    assert bool(found[0][0, 1].isfinite().all())
    if where != "key":
        others = torch.arange(n) != 3
        assert bool(found[0][0, 0, others].isfinite().all())


@pytest.mark.parametrize("left", [None, 300 << 10])
@pytest.mark.parametrize("dropped", [0.0, 0.4])
@pytest.mark.parametrize("shape", [(70, 150), (150, 70), (1, 9)])
def test_rows_by_tiles_are_those_of_the_whole(
    shape: tuple[int, int], dropped: float, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads, a mask, two batch dimensions, dropout, tiles of a few rows: gradients that are
    all doubtful come out as float64 has them."""
    from quorum_attention.execution.call import Call
    from quorum_attention.execution.mask_gradient import Upstream
    from quorum_attention.execution.masks import MaskView, mask_shape
    from quorum_attention.execution.workload import Workload
    from quorum_attention.kernels import get_kernel
    from quorum_attention.kernels.dropout import Dropout

    n, n_keys = shape
    monkeypatch.setattr(exact_rows, "_MOST_ROWS", 16)
    g = torch.Generator().manual_seed(17)
    q = torch.randn(2, 1, 4, n, 8, generator=g).half()
    k, v = (torch.randn(2, 1, 2, n_keys, 8, generator=g).half() for _ in range(2))
    grad = torch.randn(2, 1, 4, n, 8, generator=g).half()
    bias = torch.randn(2, 1, 1, n, n_keys, generator=g).half()
    bias.masked_fill_(torch.rand(bias.shape, generator=g) < 0.3, -torch.inf)
    work = Workload(
        (2, 1), 4, 2, n, n_keys, 8, 8, torch.float16, is_causal=True, mask=mask_shape(bias, 2),
        dropout=dropped > 0,
    )  # fmt: skip
    drop = Dropout(dropped, 5) if dropped else None
    call = Call(
        work, q, k, v, MaskView(bias, 2), 0.3, torch.device("cpu"), get_kernel("cpu"), None, drop
    )
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    keys, values = (t.repeat_interleave(2, 2) for t in wide[1:])
    scores = 0.3 * (wide[0] @ keys.mT) + bias.double()
    late = torch.ones(n, n_keys, dtype=torch.bool).triu(1)
    p = torch.softmax(scores.masked_fill(late, -torch.inf), -1).nan_to_num(0.0)
    if drop is not None:
        from quorum_attention.decomposition import Rows
        from quorum_attention.kernels.dropout import dropped as dropped_pairs

        gone = dropped_pairs(drop, 2, 4, torch.arange(n), [Rows(0, n_keys, 0)]).view(p.shape)
        p = p.masked_fill(gone, 0.0) * drop.rescale
    # Rows without keys have NaN for a gradient in autograd.
    right = [t.nan_to_num(0.0) for t in torch.autograd.grad(p @ values, wide, grad.double())]
    made = tuple(torch.full_like(t, torch.inf, dtype=torch.float32) for t in (q, k, v))
    out = (p @ values).detach()
    lse = torch.logsumexp(scores.masked_fill(late, -torch.inf), -1).detach().float()
    upstream = Upstream(grad, out.half(), lse)
    count = exact_rows.mend_rows_(call, upstream, made, Doubts(outgrown=True), left)
    empty = (scores.masked_fill(late, -torch.inf) == -torch.inf).all(-1)
    for got, want in zip(made, right, strict=True):
        assert bool(got.isfinite().all())
        if not bool(empty.any()):
            assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)
    assert count == 2 * (4 * n + 2 * n_keys)


def few_in_truth(n: int, *, seed: int) -> Four:
    """Values and upstream gradients so large that dK outgrows fp16, and dV does not."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn((1, 1, n, 16), generator=g).half() for _ in range(2))
    v = (100 * torch.randn((1, 1, n, 16), generator=g) + 30_000).half()
    return q, k, v, (10_000 * torch.randn((1, 1, n, 16), generator=g)).clamp(-6e4, 6e4).half()


@pytest.mark.parametrize("n", [64, 600])
def test_keys_that_are_a_part_of_their_rows(n: int) -> None:
    """The lse and the output are of all keys, the call is of some: its gradients are of all rows'
    probabilities, and not as if its keys were all there are."""
    q, k, v, grad = few_in_truth(n, seed=n)
    right = exact((q, k, v, grad), torch.ones(n, n, dtype=torch.bool))
    out, lse = qa.attention_with_lse(q, k, v)
    for part in (slice(0, 40), slice(40, n)):
        report = qa.Report()
        found = qa.attention_backward(
            grad, q, k[:, :, part], v[:, :, part], out, lse, kernel="cpu", report=report
        )
        # Gradients of so few pairs come from materialised scores, in fp32.
        assert bool(report.backward.mended_rows) == (n == 600)
        # Not so the key's: the output's rounding, times values of 30,000, is most of it.
        want = right[2][:, :, part]
        assert torch.allclose(
            found[2].double(), want, rtol=0.01, atol=0.01 * float(want.abs().max())
        )


@pytest.mark.parametrize("lse", [math.nan, math.inf])
@pytest.mark.parametrize("route", ROUTES)
def test_a_row_that_is_broken_by_keys_elsewhere_stays_so(lse: float, route: str) -> None:
    """Its query and these keys are finite, and so would its gradients be, if these were all."""
    q, k, v, grad = (torch.randn(1, 2, 48, 32).half() for _ in range(4))
    out, whole = qa.attention_with_lse(q, k, v)
    out[:, :, 5], whole[:, :, 5] = torch.nan, lse
    call = by_route(route, 48, 48, 2, causal=False)
    found = qa.attention_backward(grad, q, k, v, out, whole, **call)
    p = torch.exp(q.double() @ k.double().mT / math.sqrt(32) - whole.double().unsqueeze(-1))
    assert bool(found[0][:, :, 5].isnan().all())
    assert bool(found[0][:, :, :5].isfinite().all())
    assert bool(found[1].isnan().all())
    assert torch.equal(found[2].isnan(), (p.mT @ grad.double()).isnan())


@pytest.mark.parametrize("of", ["query", "value"])
def test_nobody_waits_for_what_is_infinite_in_truth(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that was scaled by too much: one row tells, and no head of many pairs is computed
    anew. Where that row is not infinite in truth, the head is."""
    monkeypatch.setattr(exact_rows, "_FEW_PAIRS", 16)
    n = 200
    q, k, v, grad = draw(n, n, seed=41)
    if of == "value":
        v, grad = v / 60_000, grad.abs()
    found, report = gradients((q, k, v, grad), "together")
    assert not bool(found[0 if of == "query" else 2].isfinite().all())
    assert report.backward.mended_rows == 0
    q, k, v, grad = draw(n, n, seed=42)
    one = torch.zeros(n, n, dtype=torch.bool)
    one[torch.arange(n), torch.randint(n, (n,), generator=torch.Generator().manual_seed(1))] = True
    found, report = gradients(
        (q, (400 * k).clamp(-6e4, 6e4), v, grad / 8), "together", attn_mask=one
    )
    assert report.backward.mended_rows
    assert all(bool(got.isfinite().all()) for got in found)


def test_a_delta_beyond_fp16_is_noted() -> None:
    """A carrier holds three numbers of fp16; where they are not enough, its rows are named."""
    g = torch.Generator().manual_seed(19)
    q, k = (torch.randn(1, 1, 6, 48, generator=g).half() for _ in range(2))
    v = (torch.randn(1, 1, 6, 48, generator=g).sign() * 60_000).half()
    # Two keys of about the same weight: the output is rounded, and its products are large.
    grad = (v.sign() * 1_000).half()
    p = torch.softmax(q.double() @ k.double().mT, -1)
    out, lse = (p @ v.double()).half(), torch.logsumexp(q.double() @ k.double().mT, -1).float()
    carried = exact_carrier(grad, q, k, v, out, lse, None, False, 1.0)
    assert carried.missed is not None
    assert carried.missed.shape == lse.shape
    small = exact_carrier(grad, q, k, (v / 60_000).half(), out / 60_000, lse, None, False, 1.0)
    assert small.missed is None


def test_flags_tell_what_overflows_from_what_outgrows_fp16() -> None:
    """Bit 1: a part that is not finite. Bit 2: a sum of finite parts that fp16 cannot hold."""
    for part, times, expected in ((40_000.0, 1, 0), (40_000.0, 2, 2), (math.inf, 1, 3)):
        target = torch.zeros(1, 2, 5, 3)
        flags = torch.zeros(1, 2, dtype=torch.int32)
        source = torch.zeros(1, 2, 5, 3)
        source[0, 1, 4, 2] = part
        for _ in range(times):
            add_(target, source.half(), 1.0, None, flags, narrow=True)
        assert flags.tolist() == [[0, expected]]
        wide = torch.zeros(1, 2, dtype=torch.int32)
        add_(target, source.half(), 1.0, None, wide)
        assert wide.tolist() == [[0, expected & 1]]
