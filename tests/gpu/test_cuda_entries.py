"""Many small entries, and tokens in any order, on a GPU: right, and by few calls."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from helpers.attention import error
from helpers.entries import VIEWS, count_operators, masked_call
from helpers.few_pairs import drawn_call, largest_excess, results_of

import quorum_attention as qa
from quorum_attention.kernels.masked import packing, pair_bias, ways

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_TOLERANCE = {
    torch.float32: (5e-5, 2e-4),
    torch.float16: (6e-3, 2e-2),
    torch.bfloat16: (4e-2, 0.1),
}


@pytest.mark.parametrize("head_dim", [8, 16, 64])
@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
def test_masks_of_tokens_become_a_bias(
    dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one call or by several, beside learned biases and sinks; or a tensor, where
    the mask is on the GPU and nothing is beside it. Few have what Triton compiles
    for."""
    for number in range(56):
        seed = 1000 * head_dim + 100 * dtype.itemsize + number
        size = random.Random(seed).choice([9, 12, 26])
        monkeypatch.setattr(pair_bias, "_MOST_BYTES", 1 << size)
        masked_call(
            seed,
            dtype=dtype,
            limits=_TOLERANCE[dtype],
            device="cuda",
            head_dim=head_dim,
            mask_device="cpu" if number % 2 else "cuda",
            compiles=number % 14 == 0,
        )


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
def test_packed_masks_of_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is packed, though it would become a bias. Triton compiles for each kind of
    call, which takes most of the time."""
    monkeypatch.setattr(ways, "DEVICES_FOR_BIAS", ())
    monkeypatch.setattr(ways, "_FEW_CALLS", 0)
    monkeypatch.setattr(packing, "_CLEARLY", 0)
    for number in range(12):
        seed = 100 * dtype.itemsize + number
        budget = random.Random(seed).choice([10, 16, 28])
        monkeypatch.setattr(packing, "_DEVICE_BYTES", 1 << budget)
        masked_call(
            seed, dtype=dtype, limits=_TOLERANCE[dtype], device="cuda", plain=True
        )


def masks() -> dict[str, tuple[qa.Mask | None, tuple[int, ...]]]:
    """Masks by name, and the entries, heads and tokens of their calls."""
    lengths = torch.randint(1, 13, (20_000,), device="cuda")
    there = torch.rand(1, 4096, device="cuda") < 0.5
    return {
        "no mask": (None, (20_000, 4, 49)),
        "lengths": (qa.Mask(key_lengths=lengths), (20_000, 4, 12)),
        "padding": (qa.Mask(key_padding=torch.rand(20_000, 12) < 0.7), (20_000, 4, 12)),
        "scattered": (qa.Mask(documents=torch.randint(0, 400, (4096,))), (1, 4, 4096)),
        "missing": (qa.Mask(key_padding=there), (1, 4, 4096)),
    }


@pytest.mark.parametrize(
    "name", ["no mask", "lengths", "padding", "scattered", "missing"]
)
def test_masks_of_entries_take_few_calls(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many masks differ, and wherever their tokens lie; results are those of
    torch. Masks on the GPU become a tensor, those of the host a bias."""
    mask, (n_entries, heads, n_tokens) = masks()[name]
    calls = []
    make = pair_bias.PairBias.bias_of

    def counted(self: Any, *arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return make(self, *arguments)

    monkeypatch.setattr(pair_bias.PairBias, "bias_of", counted)
    shape = n_entries, heads, n_tokens, 32
    three = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    leaves = [tensor.requires_grad_() for tensor in three]
    out = qa.attention(*leaves, attn_mask=mask)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, upstream)
    assert len(calls) == (2 if name in ("padding", "scattered") else 0)
    exact = [tensor.detach().float().requires_grad_() for tensor in three]
    kept = None
    if mask is not None and mask.documents is not None:
        ids = mask.documents
        assert isinstance(ids, torch.Tensor)
        kept = (ids[:, None] == ids).cuda()
    elif mask is not None and mask.key_lengths is not None:
        columns = torch.arange(n_tokens, device="cuda")
        kept = (columns < mask.key_lengths[:, None])[:, None, None]
    elif mask is not None and mask.key_padding is not None:
        kept = mask.key_padding.cuda()[:, None, None]
    scores = exact[0] @ exact[1].mT * shape[-1] ** -0.5
    if kept is not None:
        scores = scores.masked_fill(~kept, -torch.inf)
    wanted = scores.softmax(-1).nan_to_num(0.0) @ exact[2]
    wanted_grads = torch.autograd.grad(wanted, exact, upstream.float())
    for result, right in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        assert error(result, right.nan_to_num(0.0)) < 0.05


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
def test_grouped_heads_on_a_kernel_that_takes_equal_heads(dtype: torch.dtype) -> None:
    """Packed or not: ``efficient`` was handed fewer key heads than query heads."""
    entries, n, m = 300, 3, 8
    shapes = [(entries, 4, n, 16), (entries, 2, m, 16), (entries, 2, m, 16)]
    given = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    lengths = torch.randint(1, m + 1, (entries,))
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    mask = qa.Mask(key_lengths=lengths)
    out = qa.attention(*leaves, mask, enable_gqa=True, kernel="efficient")
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, upstream)
    exact = [tensor.double().requires_grad_() for tensor in given]
    key, value = (tensor.repeat_interleave(2, 1) for tensor in exact[1:])
    is_kept = torch.arange(m) < lengths[:, None]
    scores = exact[0] @ key.mT * 0.25
    scores = scores.masked_fill(~is_kept.cuda()[:, None, None], -torch.inf)
    wanted = scores.softmax(-1) @ value
    wanted_grads = torch.autograd.grad(wanted, exact, upstream.double())
    for result, right in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        assert error(result, right) < 0.05


@pytest.mark.parametrize("block", range(4))
def test_calls_of_few_pairs(block: int) -> None:
    """By torch's products: as exact as their roundings, for every dtype and bias."""
    for number in range(100 * block, 100 * block + 100):
        drawn = drawn_call(number, "cuda")
        excess = largest_excess(drawn, results_of(drawn, kernel="unfused"))
        assert excess < 1.0, f"drawn call {number}: {excess:.3g} of what is allowed"


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_learned_bias_of_many_entries_is_summed_exactly(kv_heads: int) -> None:
    """In fp32, over 262,144 rows, by the kernel that "auto" takes."""
    n_entries = 32_768
    shapes = [(n_entries, heads, 8, 16) for heads in (8, kv_heads, kv_heads)]
    leaves = [torch.randn(shape, device="cuda").requires_grad_() for shape in shapes]
    bias = torch.randn(1, 8, 8, 1, device="cuda", requires_grad=True)
    full_bias = torch.randn(1, 8, 8, 8, device="cuda", requires_grad=True)
    for learned in (bias, full_bias):
        report = qa.Report()
        qa.attention(*leaves, learned, enable_gqa=True, report=report)
        assert report.forward is not None
        assert report.forward.kernel == "unfused"
        out = qa.attention(*leaves, qa.Mask(bias=learned), enable_gqa=True)
        upstream = torch.randn_like(out)
        inputs = [*leaves, learned]
        grads = torch.autograd.grad(out, inputs, upstream)
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        group = 8 // kv_heads
        key, value = (tensor.repeat_interleave(group, 1) for tensor in exact[1:3])
        scores = exact[0] @ key.mT * 0.25 + exact[3]
        wanted = scores.softmax(-1) @ value
        wanted_grads = torch.autograd.grad(wanted, exact, upstream.double())
        for result, right in zip(
            (out, *grads[:3]), (wanted, *wanted_grads[:3]), strict=True
        ):
            assert error(result, right) < 2e-6
        # Its numbers add up to little: roundings are those of what is added.
        terms = upstream.square().sum().sqrt().item()
        assert (grads[3] - wanted_grads[3]).abs().max().item() < 3e-6 * terms


@pytest.mark.parametrize("has_budget", [False, True], ids=["free", "budget"])
@pytest.mark.parametrize("kernel", ["efficient", "native"])
@pytest.mark.parametrize(
    "names",
    [
        ("expanded", "expanded", "inside"),
        ("plain", "inside", "plain"),
        ("plain", "misaligned", "expanded"),
        ("two batches", "two batches", "two batches"),
    ],
    ids=" ".join,
)
def test_views_that_operators_do_not_read_take_no_copy_for_each_entry(
    names: tuple[str, ...], kernel: str, has_budget: bool
) -> None:
    """32,768 entries with a query expanded over them took 23 s, in copies of one entry
    each. Results are those of float64, and take what is planned."""
    counts: list[int] = []
    fewer, more = 256, 4096
    for n_entries in (fewer, more):
        budget = n_entries * (40 << 10) + (8 << 20) if has_budget else None
        torch.manual_seed(0)
        leaves: list[torch.Tensor] = []
        for name, heads in zip(names, (8, 2, 2), strict=True):
            view = VIEWS[name](n_entries, heads)
            # Where it lies stays as it is: ``Tensor.cuda`` would make it dense.
            storage = torch.empty(0, device="cuda").set_(view.untyped_storage().cuda())
            place = view.size(), view.stride(), view.storage_offset()
            leaves.append(storage.as_strided(*place).requires_grad_())
        upstream = torch.randn(1, device="cuda").expand(leaves[0].shape)

        def results(
            leaves: list[torch.Tensor] = leaves,
            upstream: torch.Tensor = upstream,
            **options: Any,
        ) -> list[torch.Tensor]:
            out = qa.attention(*leaves, enable_gqa=True, kernel=kernel, **options)
            return [out, *torch.autograd.grad(out, leaves, upstream)]

        report = qa.Report()
        found = results(budget=budget, report=report)
        counts.append(count_operators(partial(results, budget=budget)))
        for report_of_pass in (report.forward, report.backward):
            assert report_of_pass is not None
            assert report_of_pass.peak_bytes <= report_of_pass.planned_peak_bytes
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        keys_and_values = [t.repeat_interleave(4, -3) for t in exact[1:]]
        scores = exact[0] @ keys_and_values[0].mT * 0.25
        wanted = scores.softmax(-1) @ keys_and_values[1]
        grads = torch.autograd.grad(wanted, exact, upstream.double())
        for result, right in zip(found, (wanted, *grads), strict=True):
            assert error(result, right) < 2e-4
    # A budget leaves twice as many head groups, of some 280 operators each.
    assert counts[1] - counts[0] < more - fewer
