"""The native kernel in calls: its options, group bits, and their gradients. (Masks and sinks:
``test_masked.py``.)"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
import torch
from helpers_attention import fresh_generator

import quorum_attention as qa
from quorum_attention.kernels.protocol import Call, Saved
from quorum_attention.kernels.reference import whole_task

N, M, HEADS = 90, 75, 2


def reference(
    query, key, value, *, bias=None, is_causal=False, scale=None, window=(-1, -1), softcap=0.0,
    slopes=None, query_bits=None, key_bits=None,
):  # fmt: skip
    """(out, lse) by hand, every score in memory; tensors (b, h, n, d) of float64 on the CPU."""
    n, m = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (query @ key.mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    apart = torch.arange(n)[:, None] - torch.arange(m)[None]
    if slopes is not None:
        scores = scores - slopes.double()[None, :, None, None] * apart.abs()
    if bias is not None:
        scores = scores + bias
    keep = torch.ones(n, m, dtype=torch.bool)
    if is_causal:
        keep &= apart >= 0
    left, right = window
    if left >= 0:
        keep &= apart <= left
    if right >= 0:
        keep &= apart >= -right
    if query_bits is not None:
        keep &= (query_bits[:, None] & key_bits[None]) == 0
    scores = scores.masked_fill(~keep, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return p @ value, lse


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest value; equal infinities do not differ."""
    found, expected = found.detach().cpu().double(), expected.detach()
    assert not found.isnan().any()
    difference = torch.where(found == expected, 0.0, (found - expected).abs())
    size = expected[expected.isfinite()].abs()
    largest = float(size.max()) if size.numel() else 0.0
    return float(difference.max()) / max(largest, 1e-9)


def check(device: str, dtype=torch.float32, n=N, m=M, key_heads=HEADS, **options) -> None:
    """Bits by ``native_attention``, all else by a ``NativeKernel``."""
    g = fresh_generator()
    shapes = ((HEADS, n, 16), (key_heads, m, 16), (key_heads, m, 24))
    given = [torch.randn(1, *shape, generator=g).to(dtype).to(device) for shape in shapes]
    given = [t.requires_grad_() for t in given]
    bias = None
    if "bias_heads" in options:
        bias = torch.randn(1, options.pop("bias_heads"), 1, M, generator=g).to(dtype)
    call = {"is_causal": options.get("is_causal", False)}
    grad = torch.randn(1, HEADS, n, 24, generator=g).to(dtype)
    if "query_bits" in options:
        bits = {name: options[name].to(device) for name in ("query_bits", "key_bits")}
        out, lse = qa.native_attention(*given, out_dtype=torch.float32, **bits, **call)
        assert not lse.requires_grad
    else:
        own = {"alibi_slopes": options.get("slopes")}
        own |= {name: options[name] for name in ("window", "softcap") if name in options}
        out, lse = qa.attention_with_lse(
            *given, None if bias is None else bias.to(device), enable_gqa=True, devices=device,
            out_dtype=torch.float32, kernel=qa.NativeKernel(**own), **call,
        )  # fmt: skip
    right = [t.detach().cpu().double().requires_grad_() for t in given]
    expected, expected_lse = reference(*right, bias=bias, **options)
    limit = 3e-6 if dtype == torch.float32 else 3e-3
    assert relative(out, expected) < limit
    assert relative(lse, expected_lse) < limit
    found = torch.autograd.grad(out, given, grad.float().to(device))
    wanted = torch.autograd.grad(expected, right, grad.double())
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape == theirs.shape
        if not theirs.any():  # rows of one key
            assert mine.abs().max() < limit
            continue
        assert relative(mine, theirs) < 4 * limit


OPTIONS = {
    "causal, more keys": {"is_causal": True, "n": 40},
    "window": {"window": (20, 0), "is_causal": True},
    "window to both sides": {"window": (33, 10)},
    "window of one": {"window": (0, 0)},
    "window to the right": {"window": (-1, 5)},
    "soft cap": {"softcap": 1.5},
    "soft cap and causal": {"softcap": 0.7, "is_causal": True},
    "alibi": {"slopes": torch.tensor([0.5, 0.03]), "is_causal": True},
    "all at once": {
        "slopes": torch.tensor([0.5, 0.03]), "softcap": 2.0, "window": (30, 12), "key_heads": 1,
        "bias_heads": 2,
    },
    "bias of all heads": {"bias_heads": 1},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_against_float64(name: str, dtype: torch.dtype, device: str) -> None:
    check(device, dtype, **OPTIONS[name])


def bits(kind: str, n: int) -> torch.Tensor:
    where = torch.arange(n)
    if kind == "none":
        return torch.zeros(n, dtype=torch.int64)
    if kind == "chunks":
        return (where // 32 % 3 == 1).long() << 63
    if kind == "random":
        return torch.randint(0, 8, (n,))
    if kind == "mixed":
        return (where // 40 % 2).long() * 6 + (torch.rand(n) < 0.05).long()
    return torch.full((n,), 1 << 40, dtype=torch.int64)  # everything masked


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", ["none", "chunks", "random", "mixed", "full"])
def test_group_bits(kind: str, is_causal: bool, device: str) -> None:
    torch.manual_seed(1)
    check(
        device, n=130, m=100, query_bits=bits(kind, 130), key_bits=bits(kind, 100),
        is_causal=is_causal,
    )  # fmt: skip


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_gradients_of_any_size(size: float, sink: bool, device: str) -> None:
    """fp16: loss-scaled gradients neither vanish nor overflow; a sink takes every probability."""
    g, n = fresh_generator(), 160
    q, k, v, grad = (torch.randn(1, 1, n, 16, generator=g) for _ in range(4))
    if sink:
        k[:, :, 3] = 0
        q[..., 0] = k[:, :, 3, 0] = 9.0  # P = 1 for all rows
    q, k, v = q.half(), k.half(), (8 * v).half()  # dP of the large size is beyond fp16
    # A gradient that fp16 can hold, where it is tiny too.
    upstream = (grad * size).half()
    right = [t.double().requires_grad_() for t in (q, k, v)]
    expected, lse = reference(*right, is_causal=True)
    expected.backward(upstream.double())
    grads = gradients(device, (q, k, v), upstream, expected.detach(), lse.detach())
    for mine, theirs in zip(grads, right, strict=True):
        assert mine.isfinite().all()
        assert relative(mine, theirs.grad) < 3e-3


def test_small_probabilities_keep_their_digits(device: str) -> None:
    """P of a row over a million keys is below fp16's normal range; its sums are not lost."""
    g, n = fresh_generator(), 96
    q, k, v, grad = (torch.randn(1, 1, n, 16, generator=g).half() for _ in range(4))
    right = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = reference(*right)
    # As if these were a few of a million keys: the row's sum is that much larger.
    more = math.log(1 << 14)
    p = torch.exp(right[0] @ right[1].mT / 4 - lse.unsqueeze(-1) - more).detach()
    wanted = p.mT @ grad.double()
    inputs = (q, k, v)
    errors = [
        relative(
            gradients(device, inputs, grad, out.detach(), lse.detach() + more, keys)[2], wanted
        )
        for keys in (1 << 20, n)
    ]
    assert errors[0] < 1e-3
    assert errors[1] > 3 * errors[0], "without the lift the digits are lost"


def gradients(device, inputs, upstream, out, lse, n_keys=0) -> list[torch.Tensor]:
    """The backward kernels alone, fp32 results, for n_keys keys to a row."""
    q, k, v = (t.to(device) for t in inputs)
    call = Call(q, k, v, n_keys == 0, 0.25)
    (launch,) = qa.NativeKernel().launches(whole_task(call), "query", "key", whole=True)
    grads = tuple(torch.zeros(t.shape, device=device) for t in (q, k, v))
    rows = Saved(upstream.to(device), out.float().to(device), lse.float().to(device))
    replace(launch, n_keys=n_keys).backward(rows, grads, add=False)
    return list(grads)


def test_bad_arguments(device: str) -> None:
    q, k = (torch.randn(1, 2, n, 16, device=device) for n in (90, 75))
    with pytest.raises(NotImplementedError, match="3 alibi_slopes for 2 query heads"):
        qa.attention(q, k, k, kernel=qa.NativeKernel(alibi_slopes=torch.ones(3)))
    with pytest.raises(ValueError, match="alibi_slopes must be floating"):
        qa.NativeKernel(alibi_slopes=torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="go together"):
        qa.native_attention(q, k, k, query_bits=torch.zeros(90, dtype=torch.int64))
    with pytest.raises(ValueError, match="query_bits must be int64"):
        qa.native_attention(q, k, k, query_bits=torch.zeros(9), key_bits=torch.zeros(75))


def test_what_it_does_not_take_is_refused(device: str) -> None:
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64, device=device)
    with pytest.raises(NotImplementedError, match="float16, bfloat16 and float32"):
        qa.native_attention(q, q, q)
    wide = torch.randn(1, 1, 8, 300, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="1 to 256 with gradients"):
        qa.native_attention(wide, wide, wide)


@pytest.mark.parametrize("widths", [(300, 300), (576, 512)])
def test_wide_heads_forward(widths: tuple[int, int], device: str) -> None:
    g = fresh_generator()
    q = torch.randn(1, 1, 40, widths[0], generator=g).half()
    k = torch.randn(1, 1, 40, widths[0], generator=g).half()
    v = torch.randn(1, 1, 40, widths[1], generator=g).half()
    out, _ = qa.native_attention(*(t.to(device) for t in (q, k, v)), is_causal=True)
    expected, _ = reference(q.double(), k.double(), v.double(), is_causal=True)
    assert relative(out, expected) < 3e-3


@pytest.mark.parametrize("heads_per_group", [2, 1])
def test_slopes_of_a_monolithic_call(heads_per_group: int, device: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """With all heads on the inputs as they lie; a head group goes through a task, which says whose
    slopes it needs."""
    slopes, whole = torch.tensor([0.3, 0.02]), []
    kernel = qa.NativeKernel(alibi_slopes=slopes)
    original = kernel.whole_forward
    monkeypatch.setattr(kernel, "whole_forward", lambda *a: whole.append(1) or original(*a))
    g = fresh_generator()
    q, k, v = (torch.randn(1, 2, 60, 16, generator=g) for _ in range(3))
    plan = qa.plan(
        60, heads=2, head_dim=16, dtype=torch.float32, levels=(), kernel=kernel, device=device,
        inputs="device", is_causal=True, heads_per_group=heads_per_group,
    )  # fmt: skip
    near = [t.to(device) for t in (q, k, v)]
    out = qa.attention(*near, kernel=kernel, plan=plan, devices=device, is_causal=True)
    expected, _ = reference(q.double(), k.double(), v.double(), slopes=slopes, is_causal=True)
    assert relative(out, expected) < 3e-6
    assert len(whole) == (heads_per_group == 2)


def test_uncut_gradients_in_fp32_are_not_rounded_to_16_bits(device: str) -> None:
    g = fresh_generator()
    q, k, v, grad = (torch.randn(1, 1, 120, 16, generator=g).half().to(device) for _ in range(4))
    call = {"kernel": "native", "devices": device, "is_causal": True, "depth": 0}
    out, lse = qa.attention_with_lse(q, k, v, **call)
    grads = [torch.empty(q.shape, device=device) for _ in range(3)]
    qa.attention_backward(grad, q, k, v, out, lse, grads=tuple(grads), **call)
    narrow = qa.attention_backward(grad, q, k, v, out, lse, **call)
    for wide, rounded in zip(grads, narrow, strict=True):
        assert torch.equal(wide.half(), rounded)
        assert not torch.equal(wide, rounded.float())


@pytest.mark.parametrize("levels", [(), (7,), (3, 3)])
@pytest.mark.parametrize("name", ["window", "narrow", "all"])
def test_options_in_a_decomposed_call(name: str, levels, device: str) -> None:
    """Global positions, not those of a task; and tasks without what a narrow window leaves out."""
    n, heads = 130, 1 + (name == "all")
    options = {"window": (9, 2) if name == "narrow" else (50, 20)}
    if name == "all":
        options |= {"softcap": 1.5, "alibi_slopes": torch.tensor([0.3, 0.05])}
    kernel = qa.NativeKernel(**options)
    g = fresh_generator()
    q, k, v = (torch.randn(1, heads, n, 16, generator=g).requires_grad_() for _ in range(3))
    plans = [
        qa.plan(n, heads=heads, head_dim=16, dtype=torch.float32, levels=levels, tile=16,
                kernel=kernel, backward=backward, device=device, heads_per_group=1)
        for backward in (False, True)
    ]  # fmt: skip
    report = qa.Report()
    out, lse = qa.attention_with_lse(
        q.detach(), k.detach(), v.detach(), kernel=kernel, plan=plans[0], devices=device,
        report=report,
    )  # fmt: skip
    assert report.forward is not None
    if name == "narrow" and levels:
        assert report.forward.left_out > 0.2
    grad = torch.randn(out.shape, generator=g)
    grads = qa.attention_backward(
        grad, q.detach(), k.detach(), v.detach(), out, lse, kernel=kernel, plan=plans[1],
        devices=device,
    )  # fmt: skip
    right = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = reference(
        *right, window=options["window"], softcap=options.get("softcap", 0.0),
        slopes=options.get("alibi_slopes"),
    )  # fmt: skip
    expected.backward(grad.double())
    assert relative(out, expected) < 3e-6
    assert relative(lse, expected_lse) < 3e-6
    for mine, theirs in zip(grads, right, strict=True):
        assert relative(mine, theirs.grad) < 1e-5


def test_group_bits_are_saved_for_the_backward(device: str) -> None:
    """Written to in between, they are torch's error, as any saved tensor."""
    q, k, v = (torch.randn(1, 1, 40, 16, device=device, requires_grad=True) for _ in range(3))
    bits = torch.ones(40, dtype=torch.int64, device=device)
    other = torch.full_like(bits, 2)
    qa.native_attention(q, k, v, query_bits=bits, key_bits=other)[0].sum().backward()
    out, _ = qa.native_attention(q, k, v, query_bits=bits, key_bits=other)
    other.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_inputs_go_when_the_backward_has_read_them(device: str) -> None:
    """Though the output stays."""
    leaf = torch.randn(1, 1, 40, 16, device=device, requires_grad=True)
    query = leaf * 2.0
    watch = weakref.ref(query)
    out, _ = qa.native_attention(query, leaf, leaf)
    del query
    out.sum().backward()
    assert watch() is None


def test_slopes_are_the_kernels_own(device: str) -> None:
    """A kernel means the same as long as it lives, whatever is done to the tensor it was given."""
    q = torch.randn(1, 2, 40, 16, device=device)
    slopes = torch.tensor([0.5, 0.03], device=device)
    kernel = qa.NativeKernel(alibi_slopes=slopes)
    before = qa.attention(q, q, q, kernel=kernel)
    slopes.zero_()
    assert torch.equal(qa.attention(q, q, q, kernel=kernel), before)


def test_tables_made_in_inference_mode_serve_a_backward(device: str) -> None:
    """What is kept between calls is of no mode."""
    plain = [torch.randn(1, 1, 90, 16, device=device) for _ in range(3)]
    call = {"is_causal": True, "kernel": qa.NativeKernel(window=30), "depth": 1}
    with torch.inference_mode():
        first = qa.attention(*plain, **call)
    leaves = [t.clone().requires_grad_() for t in plain]
    out = qa.attention(*leaves, **call)
    out.sum().backward()
    assert torch.equal(out.detach(), first.clone())
    assert all(t.grad is not None for t in leaves)


def test_forward_mode_and_transformations_are_refused(device: str) -> None:
    q = torch.randn(1, 1, 16, 16, device=device)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(lambda t: qa.native_attention(t, q, q)[0], (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises((NotImplementedError, RuntimeError)):
            qa.native_attention(dual, q, q)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_leaves_the_others_their_gradients(
    device: str, bad: float
) -> None:
    g = torch.Generator().manual_seed(2)
    given = [torch.randn(1, 2, 20, 16, generator=g).half() for _ in range(3)]
    grad = torch.randn(1, 2, 20, 16, generator=g).half()
    grad[0, 1, 7] = bad
    leaves = [t.to(device).requires_grad_() for t in given]
    qa.native_attention(*leaves)[0].backward(grad.to(device))
    right = [t.detach().double().requires_grad_() for t in given]
    clean = grad.double().nan_to_num(0.0, 0.0, 0.0)
    ((right[0] @ right[1].mT * 0.25).softmax(-1) @ right[2]).backward(clean)
    rows = torch.ones(1, 2, 20, dtype=torch.bool)
    rows[0, 1, 7] = False
    found = leaves[0].grad.cpu()
    assert relative(found[rows], right[0].grad[rows]) < 5e-3
    assert not found[~rows].isfinite().any()


@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_gradient_of_the_lse_by_columns_in_fp16(device: str, size: float, depth: int) -> None:
    """A call of ``attention``: however small values and upstream gradients are."""
    g = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(1, 2, 14, 8, generator=g) for _ in range(4))
    leaves = [t.half().to(device).requires_grad_() for t in (q, k, size * v)]
    results = qa.attention_with_lse(*leaves, depth=depth, kernel="native")
    grad, grad_lse = (1e-3 * grad).half(), torch.randn(1, 2, 14, generator=g)
    found = torch.autograd.grad(results, leaves, (grad.to(device), grad_lse.to(device)))
    right = [t.detach().cpu().double().requires_grad_() for t in leaves]
    scores = right[0] @ right[1].mT * 8**-0.5
    results = (scores.softmax(-1) @ right[2], scores.logsumexp(-1))
    wanted = torch.autograd.grad(results, right, (grad.double(), grad_lse.double()))
    for mine, theirs in zip(found[:2], wanted[:2], strict=True):
        assert relative(mine, theirs) < 5e-3


@pytest.mark.parametrize("depth", [0, 1])
def test_small_rows_beside_large_ones_keep_their_digits(device: str, depth: int) -> None:
    """fp32 upstream gradients of fp16 inputs: row 0 sees key 0 alone, others are of small numbers.

    (tests/execution/test_upstream.py, for kernels that need no Triton.)
    """
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 14, 8, generator=g).half().to(device) for _ in range(3))
    grad_out = 3e-7 * torch.randn(1, 1, 14, 8, generator=g).to(device)
    grad_out[..., 0, :] = 1.0
    call = {"is_causal": True, "kernel": "native"}
    out, lse = qa.attention_with_lse(q, k, v, out_dtype=torch.float32, **call)
    grads = tuple(torch.empty(t.shape, device=t.device) for t in (q, k, v))
    found = qa.attention_backward(grad_out, q, k, v, out, lse, grads=grads, depth=depth, **call)
    s = (q.double() @ k.double().mT * 8**-0.5).cpu()
    s.masked_fill_(torch.ones(14, 14, dtype=torch.bool).triu(1), -torch.inf)
    wanted = s.softmax(-1).mT @ grad_out.double().cpu()
    assert relative(found[2][..., 1:, :], wanted[..., 1:, :]) < 2e-3
