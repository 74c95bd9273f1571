"""Calls beyond what one call of an operator may have on a GPU: cut, and right
(docs/kernels.md).

The last entries and heads are compared with float64: it is there that numbers of 32
bits end.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from helpers.attention import Inputs, exact
from helpers.cuda import NAMES, both, errors
from helpers.fa4 import FA4

import quorum_attention as qa
from quorum_attention.kernels import CallShape, get_kernel, why_not
from quorum_attention.kernels.kit import from_score_mod
from quorum_attention.kernels.kit.flex import FlexKernel
from quorum_attention.kernels.limits import NO_LIMIT, CallLimits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
BF16 = torch.bfloat16
# The error of a right result in bf16, as a share of its norm, is below 5e-3.
RIGHT = 1e-2


def leaves(
    shape: tuple[int, int, int, int], n_keys: int, kv_heads: int | None = None
) -> Inputs:
    """Inputs in bf16 for queries of ``shape``, with an upstream gradient."""
    entries, heads, _, width = shape
    of_keys = (entries, heads if kv_heads is None else kv_heads, n_keys, width)
    query, key, value, grad_out = (
        torch.empty(sizes, dtype=BF16, device="cuda").normal_()
        for sizes in (shape, of_keys, of_keys, shape)
    )
    return Inputs(
        query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out
    )


def run(given: Inputs, kernel: str, **call: Any) -> list[torch.Tensor]:
    """The output and the three gradients."""
    if kernel != "auto":
        widths = (
            *given.query.shape[1:2],
            *given.key.shape[1:2],
            *[given.query.shape[-1]] * 2,
        )
        reason = why_not(
            get_kernel(kernel), CallShape("cuda", BF16, *widths, False, True)
        )
        if reason is not None:
            pytest.skip(f"{kernel}: {reason}")
    out = qa.attention(*given.three, kernel=kernel, enable_gqa=True, **call)
    return [out.detach(), *torch.autograd.grad(out, given.three, given.grad_out)]


def errors_of_head(
    results: list[torch.Tensor], given: Inputs, entry: int, key_head: int, **call: Any
) -> dict[str, float]:
    """How far the results of one key/value head of an entry are from float64, as a
    share of the norm."""
    group = given.query.shape[1] // given.key.shape[1]
    queries = (slice(entry, entry + 1), slice(key_head * group, (key_head + 1) * group))
    keys = (slice(entry, entry + 1), slice(key_head, key_head + 1))
    part = Inputs(*(given.query[queries], given.key[keys], given.value[keys]),
                  given.grad_out[queries])  # fmt: skip
    right = exact(part, gradients=True, **call)
    assert right.grads is not None
    found = {}
    for name, result, at, expected in zip(
        NAMES,
        results,
        (queries, queries, keys, keys),
        (right.out, *right.grads),
        strict=True,
    ):
        off = result[at].double() - expected
        found[name] = float(off.norm() / expected.norm())
    return found


def check_corners(results: list[torch.Tensor], given: Inputs, **call: Any) -> None:
    """The first and the last entries and heads."""
    entries, key_heads = given.key.shape[:2]
    for entry in {0, entries // 2, entries - 1}:
        for key_head in {0, key_heads // 2, key_heads - 1}:
            found = errors_of_head(results, given, entry, key_head, **call)
            assert max(found.values()) < RIGHT, (entry, key_head, found)


@pytest.mark.parametrize(
    "kernel", ["auto", "cudnn", "flash", "efficient", FA4, "native"]
)
@pytest.mark.parametrize(
    ("entries", "heads", "kv_heads"),
    [(70_000, 1, 1), (1, 70_000, 70_000), (70_000, 4, 4), (1, 70_000, 35_000)],
)
def test_many_entries_and_heads(
    kernel: str, entries: int, heads: int, kv_heads: int
) -> None:
    """A grid has 65,535 blocks in its second and third dimension."""
    given = leaves((entries, heads, 8, 32), 8, kv_heads)
    check_corners(run(given, kernel), given)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient"])
def test_many_heads_of_one_group(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query heads that share a key/value head are cut as well."""
    # The test before a kernel's first use has groups of the same size, on the CPU.
    monkeypatch.setattr("quorum_attention.kernels.select.probe", lambda *args: None)
    given = leaves((2, 70_000, 8, 32), 8, 1)
    check_corners(run(given, kernel), given)


@pytest.mark.parametrize("kernel", ["auto", "cudnn", "efficient"])
def test_many_entries_under_a_mask(kernel: str) -> None:
    given = leaves((70_000, 2, 8, 32), 8)
    mask = torch.randn(2, 8, 8, dtype=BF16, device="cuda")
    results = run(given, kernel, attn_mask=mask)
    for entry in (0, 65_535, 69_999):
        for head in (0, 1):
            found = errors_of_head(results, given, entry, head, mask=mask[head])
            assert max(found.values()) < RIGHT, (entry, head, found)


@pytest.mark.parametrize("with_bias", [False, True])
def test_many_windows_take_no_call_each(with_bias: bool) -> None:
    """A backward of 20,000 windows of 49 with a learned bias did not end in a
    minute."""
    given = leaves((20_000, 4, 49, 32), 49)
    bias = None
    if with_bias:
        bias = torch.randn(4, 49, 49, dtype=BF16, device="cuda", requires_grad=True)
    seconds = []
    for _ in range(2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        qa.attention(*given.three, bias).sum().backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    assert seconds[-1] < 1.0, seconds


def needs_memory(gibibytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gibibytes << 30:
        pytest.skip(f"needs {gibibytes} GiB of device memory")


@pytest.mark.parametrize(
    ("kernel", "shape", "n_keys", "kv_heads"),
    [
        ("auto", (1, 32, 530_000, 128), 128, 32),
        ("cudnn", (1, 32, 530_000, 128), 128, 8),
        ("cudnn", (400, 4, 10_496, 128), 128, 4),
        ("cudnn", (1, 32, 1_049_000, 128), 128, 32),
        ("flash", (800, 4, 10_496, 128), 128, 4),
        ("flash", (60_000, 4, 66, 128), 66, 4),
        ("efficient", (1, 32, 1_049_000, 128), 128, 32),
        ("efficient", (1, 32, 128, 128), 1_049_000, 32),
        ("native", (1, 32, 128, 128), 1_049_000, 32),
    ],
    ids=str,
)
def test_large_tensors(
    kernel: str, shape: tuple[int, ...], n_keys: int, kv_heads: int
) -> None:
    """Tensors of 2**31 and 2**32 elements and more."""
    needs_memory(90)
    given = leaves(shape, n_keys, kv_heads)
    check_corners(run(given, kernel), given)


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_large_tensors_with_tokens_before_heads(kernel: str) -> None:
    needs_memory(90)
    query, key = (1, 530_000, 32, 128), (1, 128, 32, 128)
    sizes = (query, key, key, query) if kernel == "cudnn" else (key, query, query, key)
    tensors = [
        torch.empty(shape, dtype=BF16, device="cuda").normal_().transpose(1, 2)
        for shape in sizes
    ]
    given = Inputs(*(t.requires_grad_() for t in tensors[:3]), tensors[3])
    check_corners(run(given, kernel), given)


def test_a_head_that_is_too_large_by_itself() -> None:
    """Its rows are cut. (The sums over its rows are too long for 16-bit products to be
    checked.)"""
    needs_memory(90)
    given = leaves((1, 1, 33_600_000, 64), 128)
    out, grad_query, *_ = run(given, "cudnn")
    rows = slice(33_598_000, 33_600_000)
    part = Inputs(
        given.query[:, :, rows], given.key, given.value, given.grad_out[:, :, rows]
    )
    right = exact(part, gradients=True)
    assert right.grads is not None
    for result, expected in ((out, right.out), (grad_query, right.grads[0])):
        off = result[:, :, rows].double() - expected
        assert off.norm() < RIGHT * expected.norm()


# Few sizes: cuDNN prepares each for 40 ms and more.
_ENTRIES, _HEADS, _LENGTHS = (1, 6), ((4, 4), (6, 2)), (130, 260)


def random_limits(r: random.Random) -> CallLimits:
    return CallLimits(
        r.choice([3, NO_LIMIT]),
        r.choice([2, 3, NO_LIMIT]),
        r.choice([130 * 64, 260 * 64 * 4, NO_LIMIT]),
        r.choice([130 * 64, 260 * 64 * 4, NO_LIMIT]),
        r.choice(["call", "several entries", "entry", "head"]),
    )


@pytest.mark.parametrize("kernel", [FA4, "cudnn", "flash", "efficient"])
def test_drawn_calls_within_small_limits(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the textbook with such limits is tested without a GPU
    (tests/kernels/test_limits.py)."""
    run(
        leaves((1, 2, 130, 64), 130), kernel
    )  # skipped, if the kernel does not work here
    monkeypatch.setattr("quorum_attention.kernels.select.probe", lambda *args: None)
    r = random.Random(torch.initial_seed())
    for _ in range(40 if kernel == "cudnn" else 120):
        limited = type(get_kernel(kernel))()
        limited.forward_limits = random_limits(r)
        limited.backward_limits = random_limits(r)
        heads, kv_heads = r.choice(_HEADS)
        n_queries, n_keys = r.choice(_LENGTHS), r.choice(_LENGTHS)
        given = leaves((r.choice(_ENTRIES), heads, n_queries, 64), n_keys, kv_heads)
        mask = None
        if kernel in ("cudnn", "efficient") and r.random() < 0.4:
            sizes = [r.choice([1, size]) for size in (*given.query.shape[:3], n_keys)]
            mask = torch.randn(sizes, dtype=BF16, device="cuda")
        is_causal = mask is None and r.random() < 0.3
        results = both(given, kernel=limited, mask=mask, is_causal=is_causal)
        found = errors(results, given, mask=mask, is_causal=is_causal)
        assert max(found.values()) < RIGHT, (
            found,
            limited.forward_limits,
            given.query.shape,
        )


def test_entries_of_compiled_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is given the numbers of entries in the whole call."""
    kernel = from_score_mod(
        lambda score, b, h, q, k: score * (1 + b % 3), compiled=True
    )
    given = leaves((7, 2, 128, 64), 128)
    whole = run_with(given, kernel)
    monkeypatch.setattr(FlexKernel, "entries_limit", 3)
    for cut, uncut in zip(run_with(given, kernel), whole, strict=True):
        assert (cut.double() - uncut.double()).norm() < RIGHT * uncut.double().norm()


def run_with(given: Inputs, kernel: Any) -> list[torch.Tensor]:
    out = qa.attention(*given.three, kernel=kernel)
    return [out.detach(), *torch.autograd.grad(out, given.three, given.grad_out)]
