"""The native kernel in calls: its options, group bits, and their gradients. (Masks and
sinks: ``test_masked.py``.)"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
import torch
from helpers.attention import Exact, fresh_generator
from helpers.masks import exact
from helpers.score_mods import check as check_plan
from helpers.score_mods import reference

import quorum_attention as qa
from quorum_attention.kernels.operator_call import Call, Saved, whole_task

N, M, HEADS = 90, 75, 2


def textbook(tensors, *, slopes=None, bias=None, is_causal=False, **mask) -> Exact:
    """In float64; ALiBi is a bias."""
    query, key, value, grad = (t.detach().cpu().float() for t in tensors)
    if slopes is not None:
        apart = (
            torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
        ).abs()
        bias = (0.0 if bias is None else bias) - slopes[:, None, None] * apart
    what = qa.Mask(bias=bias, **mask)
    return exact(
        query, key, value, grad, what, query.shape[-1] ** -0.5, is_causal=is_causal
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest value; equal infinities do not
    differ."""
    found, expected = found.detach().cpu().double(), expected.detach()
    assert not found.isnan().any()
    difference = torch.where(found == expected, 0.0, (found - expected).abs())
    largest = expected.masked_fill(~expected.isfinite(), 0.0).abs().max()
    return float(difference.max() / largest.clamp_min(1e-9))


def check(
    device: str, dtype=torch.float32, n=N, m=M, heads=HEADS, key_heads=None, **options
) -> None:
    """Bits by ``native_attention``, all else by a ``NativeKernel``."""
    g = fresh_generator()
    key_heads = key_heads or heads
    shapes = ((heads, n, 16), (key_heads, m, 16), (key_heads, m, 24), (heads, n, 24))
    *given, grad = (
        torch.randn(1, *shape, generator=g).to(dtype).to(device) for shape in shapes
    )
    given = [t.requires_grad_() for t in given]
    is_causal, bits = options.get("is_causal", False), options.pop("bits", None)
    if "bias_heads" in options:
        bias_heads = options.pop("bias_heads")
        bias = torch.randn(1, bias_heads, 1, M, generator=g).to(dtype)
        options["bias"] = bias.float()
    if bits is not None:
        query_bits, key_bits = (t.to(device) for t in bits)
        out, lse = qa.native_attention(
            *given, out_dtype=torch.float32, is_causal=is_causal, query_bits=query_bits,
            key_bits=key_bits,
        )  # fmt: skip
        options["keeps"] = lambda b, h, q, k: (bits[0][q] & bits[1][k]) == 0
    else:
        own = {name: options[name] for name in ("window", "softcap") if name in options}
        bias = options.get("bias")
        out, lse = qa.attention_with_lse(
            *given, None if bias is None else bias.to(dtype).to(device), enable_gqa=True,
            devices=device, out_dtype=torch.float32, is_causal=is_causal,
            kernel=qa.NativeKernel(alibi_slopes=options.get("slopes"), **own),
        )  # fmt: skip
    want = textbook((*given, grad), **options)
    limit = 3e-6 if dtype == torch.float32 else 3e-3
    assert relative(out, want.out) < limit
    assert relative(lse, want.lse) < limit
    found = torch.autograd.grad(out, given, grad.float())
    for mine, theirs in zip(found, want.grads, strict=True):
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
    "soft cap and causal": {"softcap": 0.7, "is_causal": True},
    "alibi": {"slopes": torch.tensor([0.5, 0.03]), "is_causal": True},
    "all at once": {
        "slopes": torch.tensor([0.5, 0.03]), "softcap": 2.0, "window": (30, 12), "key_heads": 1,
        "bias_heads": 2,
    },
    "bias of all heads": {"bias_heads": 1},
}  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", OPTIONS)
def test_against_float64(name: str, device: str) -> None:
    halves = name in ("window", "alibi", "soft cap and causal")
    for dtype in (torch.float16, torch.float32)[not halves :]:
        check(device, dtype, **OPTIONS[name])


def bits(kind: str, n: int) -> torch.Tensor:
    where = torch.arange(n)
    return {
        "none": torch.zeros(n, dtype=torch.int64),
        "chunks": (where // 32 % 3 == 1).long() << 63,
        "random": torch.randint(0, 8, (n,)),
        "mixed": (where // 40 % 2).long() * 6 + (torch.rand(n) < 0.05).long(),
        "full": torch.full((n,), 1 << 40, dtype=torch.int64),  # everything masked
    }[kind]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("kind", "is_causal"),
    [("mixed", False), ("none", True), ("chunks", False), ("chunks", True), ("random", True),
     ("full", False)],
)  # fmt: skip
def test_group_bits(kind: str, is_causal: bool, device: str) -> None:
    torch.manual_seed(1)
    check(
        device,
        n=130,
        m=100,
        heads=1,
        bits=(bits(kind, 130), bits(kind, 100)),
        is_causal=is_causal,
    )


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_gradients_of_any_size(size: float, sink: bool, device: str) -> None:
    """fp16: loss-scaled gradients neither vanish nor overflow; a sink takes every
    probability."""
    g, n = fresh_generator(), 160
    q, k, v, grad = (torch.randn(1, 1, n, 16, generator=g) for _ in range(4))
    if sink:
        k[:, :, 3] = 0
        q[..., 0] = k[:, :, 3, 0] = 9.0  # P = 1 for all rows
    q, k, v = q.half(), k.half(), (8 * v).half()  # dP of the large size is beyond fp16
    # A gradient that fp16 can hold, where it is tiny too.
    upstream = (grad * size).half()
    want = textbook((q, k, v, upstream), is_causal=True)
    grads = gradients(device, (q, k, v), upstream, want.out, want.lse)
    for mine, theirs in zip(grads, want.grads, strict=True):
        assert mine.isfinite().all()
        assert relative(mine, theirs) < 3e-3


def test_small_probabilities_keep_their_digits(device: str) -> None:
    """P of a row over a million keys is below fp16's normal range; its sums are not
    lost."""
    g, n = fresh_generator(), 96
    q, k, v, grad = (torch.randn(1, 1, n, 16, generator=g).half() for _ in range(4))
    want = textbook((q, k, v, grad))
    # As if these were a few of a million keys: the row's sum is that much larger.
    more = math.log(1 << 14)
    p = torch.exp(q.double() @ k.double().mT / 4 - want.lse.unsqueeze(-1) - more)
    wanted, rows = p.mT @ grad.double(), (grad, want.out, want.lse + more)
    errors = [
        relative(gradients(device, (q, k, v), *rows, keys)[2], wanted)
        for keys in (1 << 20, n)
    ]
    assert errors[0] < 1e-3
    assert errors[1] > 3 * errors[0], "without the lift the digits are lost"


def gradients(device, inputs, upstream, out, lse, n_keys=0) -> list[torch.Tensor]:
    """The backward kernels alone, fp32 results, for n_keys keys to a row."""
    q, k, v = (t.to(device) for t in inputs)
    call = Call(q, k, v, n_keys == 0, 0.25)
    task = whole_task(call)
    (launch,) = qa.NativeKernel().task_launches(
        task, "query", "key", is_whole_call=True
    )
    grads = tuple(torch.zeros(t.shape, device=device) for t in (q, k, v))
    rows = Saved(upstream.to(device), out.float().to(device), lse.float().to(device))
    replace(launch, n_keys=n_keys).backward(rows, grads, add=False)
    return list(grads)


def test_what_it_does_not_take_is_refused(device: str) -> None:
    q, k, wide = (
        torch.randn(1, 2, *at, device=device) for at in ((90, 16), (75, 16), (8, 300))
    )
    zeros = torch.zeros(90)
    for call, error, words in (
        (lambda: qa.attention(q, k, k, kernel=qa.NativeKernel(alibi_slopes=torch.ones(3))),
         NotImplementedError, "3 alibi_slopes for 2 query heads"),
        (lambda: qa.NativeKernel(alibi_slopes=zeros.int()), ValueError, "must be floating"),
        (lambda: qa.native_attention(q, k, k, query_bits=zeros.long()), ValueError, "go together"),
        (lambda: qa.native_attention(q, k, k, query_bits=zeros, key_bits=zeros[:75]), ValueError,
         "query_bits must be int64"),
        (lambda: qa.native_attention(*[q.double()] * 3), NotImplementedError,
         "float16, bfloat16 and float32"),
        (lambda: qa.native_attention(*[wide.requires_grad_()] * 3), NotImplementedError,
         "1 to 256 with gradients"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("widths", [(300, 300), (576, 512)])
def test_wide_heads_forward(widths: tuple[int, int], device: str) -> None:
    g = fresh_generator()
    widths = (widths[0], *widths)
    q, k, v = (torch.randn(1, 1, 40, width, generator=g).half() for width in widths)
    out, _ = qa.native_attention(*(t.to(device) for t in (q, k, v)), is_causal=True)
    wanted = textbook((q, k, v, torch.zeros(out.shape)), is_causal=True)
    assert relative(out, wanted.out) < 3e-3


def test_uncut_gradients_in_fp32_are_not_rounded_to_16_bits(device: str) -> None:
    g = fresh_generator()
    q, k, v, grad = (
        torch.randn(1, 1, 120, 16, generator=g).half().to(device) for _ in range(4)
    )
    call = {"kernel": "native", "devices": device, "is_causal": True, "depth": 0}
    out, lse = qa.attention_with_lse(q, k, v, **call)
    grads = [torch.empty(q.shape, device=device) for _ in range(3)]
    qa.attention_backward(grad, q, k, v, out, lse, grads=tuple(grads), **call)
    narrow = qa.attention_backward(grad, q, k, v, out, lse, **call)
    for wide, rounded in zip(grads, narrow, strict=True):
        assert torch.equal(wide.half(), rounded)
        assert not torch.equal(wide, rounded.float())


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("options", "levels", "heads_per_group"),
    [
        ({"window": (50, 20)}, (7,), 1),
        ({"window": (9, 2)}, (3, 3), 1),
        (
            {"window": (50, 20), "softcap": 1.5, "slopes": torch.tensor([0.3, 0.05])},
            (3,),
            1,
        ),
        ({"slopes": torch.tensor([0.3, 0.05])}, (), 2),
        ({"slopes": torch.tensor([0.3, 0.05])}, (), 1),
    ],
    ids=["window", "narrow", "all", "uncut", "uncut, by heads"],
)
def test_options_in_a_decomposed_call(
    options: dict, levels, heads_per_group: int, device: str
) -> None:
    """Global positions, not those of a task; tasks without what a narrow window leaves
    out; slopes of heads on the inputs as they lie, and of each head group."""
    own = {
        "alibi_slopes" if name == "slopes" else name: what
        for name, what in options.items()
    }
    g, heads = fresh_generator(), 2 if "slopes" in options else 1
    tensors = [
        torch.randn(1, heads, 130 if levels else 60, 16, generator=g) for _ in range(4)
    ]

    cap, slopes = options.get("softcap"), options.get("slopes", torch.zeros(2)).double()
    left, right = options.get("window", (130, 130))

    def score_mod(s, b, h, q, k):
        return (cap * torch.tanh(s / cap) if cap else s) - slopes[h] * (q - k).abs()

    def mask_mod(b, h, q, k):
        return (q - k <= left) & (k - q <= right)

    def right_results(*three):
        return reference(*three, (score_mod, mask_mod, False))

    plan = {
        "levels": levels,
        "tile": 16,
        "heads_per_group": heads_per_group,
        "device": device,
    }
    check_plan(qa.NativeKernel(**own), tensors, right_results, False, **plan)


def test_group_bits_are_copied(device: str) -> None:
    """What is written to them later is not read by the backward."""
    q, k, v = (
        torch.randn(1, 1, 40, 16, device=device, requires_grad=True) for _ in range(3)
    )
    bits = torch.ones(40, dtype=torch.int64, device=device)
    other = torch.arange(40, device=device) % 4
    out, _ = qa.native_attention(q, k, v, query_bits=bits, key_bits=other)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    other.zero_()
    for mine, before in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), first, strict=True
    ):
        assert torch.equal(mine, before)


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
    """A kernel means the same as long as it lives, whatever is done to the tensor it
    was given."""
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
    *given, grad = torch.randn(
        4, 1, 2, 20, 16, generator=torch.Generator().manual_seed(2)
    ).half()
    grad[0, 1, 7] = bad
    leaves = [t.to(device).requires_grad_() for t in given]
    qa.native_attention(*leaves)[0].backward(grad.to(device))
    right = textbook((*given, grad.nan_to_num(0.0, 0.0, 0.0))).grads[0]
    rows = torch.ones(1, 2, 20, dtype=torch.bool)
    rows[0, 1, 7] = False
    found = leaves[0].grad.cpu()
    assert relative(found[rows], right[rows]) < 5e-3
    assert not found[~rows].isfinite().any()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_gradient_of_the_lse_by_columns_in_fp16(
    device: str, size: float, depth: int
) -> None:
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
