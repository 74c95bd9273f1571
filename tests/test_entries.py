"""Calls of many small entries: right, and by few kernel calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.attention import Inputs, error, exact
from helpers.entries import VIEWS, count_operators, masked_call
from helpers.memory import usage

import quorum_attention as qa
from quorum_attention import dispatch
from quorum_attention.execution import kernel_layout, mask_gradient
from quorum_attention.execution.head_groups import batch_boxes
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.cpu import CpuKernel
from quorum_attention.kernels.kit import sliding_window
from quorum_attention.kernels.masked import packing, ways
from quorum_attention.kernels.masked.choose import kernel_for_mask
from quorum_attention.kernels.masked.kernel import MaskedKernel
from quorum_attention.kernels.masked.whole_calls import WholeCallKernel
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.reference import TiledKernel

pytestmark = pytest.mark.usefixtures("one_thread")
_ENTRIES = (1, 1, 2, 3, 5, 8)


def checked(
    inputs: list[torch.Tensor], bias: torch.Tensor | None, options: dict[str, Any]
) -> None:
    """A call of several batch dimensions, and its gradients, are those of the
    textbook."""
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    learned = [] if bias is None else [bias.detach().requires_grad_()]
    found = qa.attention(*leaves, *learned, **options)
    grads = torch.autograd.grad(found, [*leaves, *learned], inputs[3])
    flat = [t.detach().reshape(-1, *t.shape[-3:]) for t in inputs]
    mask = None
    if bias is not None:
        mask = bias.detach().expand(*found.shape[:-1], inputs[1].shape[-2])
        mask = mask.reshape(-1, *mask.shape[-3:]).clone().requires_grad_()
    scale = inputs[0].shape[-1] ** -0.5
    want = exact(
        Inputs(*flat), mask=mask, is_causal=options.get("is_causal", False), scale=scale,
        gradients=True,
    )  # fmt: skip
    wanted = [want.out.view(found.shape)]
    wanted += [g.view(t.shape) for g, t in zip(want.grads[:3], inputs[:3], strict=True)]
    if bias is not None:
        whole = want.grads[3].view(*found.shape[:-1], -1)
        wanted.append(whole.sum_to_size(bias.shape))
    for name, one, other in zip(
        ("out", *"qkvb"), (found, *grads), wanted, strict=False
    ):
        assert error(one, other) < 1e-5, name


def drawn(
    draw: random.Random,
) -> tuple[list[torch.Tensor], torch.Tensor | None, dict[str, Any]]:
    """A call whose batch dimensions lie in memory in any order."""
    dims = draw.choice([1, 2, 2, 3])
    batch = [draw.choice(_ENTRIES) for _ in range(dims)]
    heads, shared = draw.choice([(1, 1), (2, 1), (4, 2), (3, 3)])
    sides, width = (draw.randint(1, 20), draw.randint(1, 20)), draw.choice([4, 8, 16])
    tensors = []
    for n_heads, n in zip((heads, shared, shared, heads), (0, 1, 1, 0), strict=True):
        shape = [*batch, n_heads, sides[n], width]
        order = list(range(dims + 2))
        draw.shuffle(order)
        order.append(dims + 2)
        lying = torch.randn([shape[dim] for dim in order])
        tensors.append(lying.permute([order.index(dim) for dim in range(dims + 3)]))
    bias = None
    if draw.random() < 0.5:
        whole = [*batch, heads, *sides]
        bias = torch.randn([n if draw.random() < 0.6 else 1 for n in whole])
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": draw.random() < 0.3}
    if draw.random() < 0.3:
        options["budget"] = draw.choice(["8MiB", "16MiB"])
    return tensors, bias, options


def test_batches_that_lie_in_any_order() -> None:
    """Views of several batch dimensions that do not flatten, and biases that span some
    of them."""
    for number in range(40):
        draw = random.Random(number)
        torch.manual_seed(number)
        checked(*drawn(draw))


@pytest.fixture
def gpu_layouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators read what those of a GPU read: rows that begin at words of 16 bytes,
    and queries that are not expanded."""
    backend = SimpleNamespace(word_bytes=16)
    monkeypatch.setattr(kernel_layout, "backend_of", lambda device: backend)
    dispatch._CACHE.clear()
    yield
    dispatch._CACHE.clear()


def any_view(draw: random.Random, sizes: list[int]) -> torch.Tensor:
    """A tensor of these sizes that is expanded, permuted, sliced or begins anywhere."""
    stored = [1 if draw.random() < 0.2 else size for size in sizes[:-2]]
    stored += sizes[-2:]
    steps = [draw.choice([1, 1, 1, 2]) for _ in sizes]
    gaps = [draw.choice([0, 0, 0, 1, 3]) for _ in sizes]
    order = list(range(len(sizes)))
    if draw.random() < 0.5:
        draw.shuffle(order)
    lying = torch.randn([stored[dim] * steps[dim] + gaps[dim] for dim in order])
    view = lying.permute([order.index(dim) for dim in range(len(sizes))])
    for dim, (size, step, gap) in enumerate(zip(stored, steps, gaps, strict=True)):
        view = view.narrow(dim, gap, size * step)
        view = view[(slice(None),) * dim + (slice(None, None, step),)]
    return view.expand(sizes)


@pytest.mark.usefixtures("gpu_layouts")
def test_views_that_operators_do_not_read() -> None:
    """Expanded, permuted, sliced, misaligned: query, key, value, and the upstream
    gradient."""
    for number in range(60):
        draw = random.Random(number)
        torch.manual_seed(number)
        tensors, bias, options = drawn(draw)
        if tensors[0].dim() == 4 and draw.random() < 0.3:
            tensors = [tensor[0] for tensor in tensors]
            bias = None if bias is None else bias[0]
        views = [any_view(draw, list(tensor.shape)) for tensor in tensors]
        checked(views, bias, options)


@pytest.mark.usefixtures("gpu_layouts")
@pytest.mark.parametrize("has_budget", [False, True], ids=["free", "budget"])
@pytest.mark.parametrize(
    "names",
    [
        ("expanded", "expanded", "inside"),
        ("expanded", "plain", "plain"),
        ("plain", "inside", "plain"),
        ("plain", "misaligned", "expanded"),
        ("two batches", "two batches", "two batches"),
    ],
    ids=" ".join,
)
def test_views_that_operators_do_not_read_take_no_copy_for_each_entry(
    names: tuple[str, ...], has_budget: bool
) -> None:
    """32,768 entries with a query expanded over them took 23 s on a GPU, in copies of
    one entry each. The upstream gradient is expanded, too: it is that of a sum."""
    counts: list[int] = []
    for n_entries in (256, 1024):
        leaves = [
            VIEWS[name](n_entries, heads).requires_grad_()
            for name, heads in zip(names, (8, 2, 2), strict=True)
        ]
        budget = n_entries * (40 << 10) if has_budget else None

        def run(leaves: list[torch.Tensor] = leaves, budget: Any = budget) -> None:
            out = qa.attention(*leaves, enable_gqa=True, budget=budget)
            torch.autograd.grad(out.sum(), leaves)

        counts.append(count_operators(run))
    # Before, some 150 for each entry.
    assert counts[1] - counts[0] < 1024 - 256


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["expanded", "inside", "two batches"])
def test_slots_take_no_copy_for_each_entry(name: str, backward: bool) -> None:
    """All entries of a head group are copied to its slot together, and from it."""
    counts: list[int] = []
    for n_entries in (64, 256):
        plan = qa.plan(
            8,
            batch=n_entries,
            heads=2,
            head_dim=16,
            dtype=torch.float32,
            levels=(3,),
            over_inputs=False,
            backward=backward,
            budget="1GiB",
            device="cpu",
        )
        leaves = [VIEWS[name](n_entries, 2).requires_grad_() for _ in range(3)]
        report = qa.Report()
        call = partial(qa.attention, *leaves, plan=plan, report=report)
        if backward:
            call = partial(torch.autograd.grad, call().sum(), leaves, retain_graph=True)
        counts.append(count_operators(call))
        done = report.backward if backward else report.forward
        assert done is not None
        assert done.loaded_bytes > 0
    assert counts[1] - counts[0] < 256 - 64


@pytest.mark.usefixtures("gpu_layouts")
@pytest.mark.parametrize("mask", ["key_lengths", "documents"])
def test_masks_of_entries_over_views_that_operators_do_not_read(mask: str) -> None:
    """They are packed as they are for other inputs: operators get a copy of what they
    cannot read. Each entry was several calls."""
    counts: list[int] = []
    for names in (("plain",) * 3, ("expanded", "plain", "inside")):
        leaves = [
            VIEWS[name](256, heads).requires_grad_()
            for name, heads in zip(names, (8, 2, 2), strict=True)
        ]
        torch.manual_seed(0)
        if mask == "key_lengths":
            rule = qa.Mask(key_lengths=torch.randint(1, 9, (256,)))
        else:
            rule = qa.Mask(documents=torch.randint(0, 3, (256, 8)))

        def results(
            leaves: list[torch.Tensor] = leaves, rule: qa.Mask = rule
        ) -> list[torch.Tensor]:
            out = qa.attention(*leaves, rule, enable_gqa=True)
            return [out, *torch.autograd.grad(out.sum(), leaves)]

        counts.append(count_operators(results))
        dense = [leaf.detach().clone().contiguous() for leaf in leaves]
        wanted = results([leaf.requires_grad_() for leaf in dense])
        for result, right in zip(results(), wanted, strict=True):
            assert error(result, right) < 1e-6
    assert counts[1] < counts[0] + 100


@pytest.mark.usefixtures("gpu_layouts")
@pytest.mark.parametrize("kind", ["plain", "expanded", "inside", "two batches"])
def test_views_that_operators_do_not_read_take_the_memory_that_is_planned(
    kind: str,
) -> None:
    """Both passes, with a budget and without one, under a bias that is cut with
    them."""
    leaves = [VIEWS[kind](2048, heads).requires_grad_() for heads in (8, 2, 2)]
    bias = torch.randn(leaves[0].shape[0], *(1,) * (leaves[0].dim() - 3), 8, 8)
    upstream = torch.randn(leaves[0].shape)
    budget: int | None = None
    for _ in range(2):
        report = qa.Report()
        call = partial(
            qa.attention,
            *leaves,
            bias,
            enable_gqa=True,
            budget=budget,
            report=report,
        )
        used = usage(call)
        assert report.forward is not None
        assert used.peak <= report.forward.planned_peak_bytes
        used = usage(partial(torch.autograd.grad, call(), leaves, upstream))
        assert report.backward is not None
        assert used.peak <= report.backward.planned_peak_bytes
        budget = int(0.6 * report.backward.planned_peak_bytes)


def test_a_run_of_entries_is_few_boxes() -> None:
    """Their indices, in order; at most two boxes for each batch dimension, less one."""
    for batch_shape in ((), (5,), (3, 4), (2, 1, 3), (3, 2, 2, 2)):
        indices = list(product(*map(range, batch_shape)))
        for start, stop in combinations(range(len(indices) + 1), 2):
            boxes = list(batch_boxes(range(start, stop), batch_shape))
            assert len(boxes) <= max(1, 2 * len(batch_shape) - 1)
            found: list[tuple[int, ...]] = []
            for box in boxes:
                positions = [range(part.start, part.stop) for part in box]
                found += product(*positions)
            assert found == indices[start:stop]


def test_a_budget_cuts_views_of_two_batch_dimensions_anywhere() -> None:
    """Head groups end within a row of the batch; a bias spans one dimension of it."""
    tensors = [torch.randn(7, 90, 4, 16, 16).transpose(-1, -2) for _ in range(3)]
    bias = torch.randn(7, 1, 1, 16, 16)
    report = qa.Report()
    whole = qa.attention(*tensors, bias, report=report)
    assert report.forward is not None
    assert report.forward.n_groups == 1
    budget = int(0.7 * report.forward.planned_peak_bytes)
    cut = qa.attention(*tensors, bias, budget=budget, report=report)
    assert report.forward.n_groups > 1
    wanted = [tensor.contiguous() for tensor in tensors]
    for result in (whole, cut):
        assert torch.equal(result, qa.attention(*wanted, bias))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries of kernel calls of several entries, which no test of a
    kernel before its first use has."""
    shapes: list[tuple[int, ...]] = []
    for name in ("rectangle_forward", "rectangle_backward"):
        run = getattr(CpuKernel, name)

        def counted(self: Any, call: Any, *saved: Any, run: Any = run) -> Any:
            if call.query.shape[0] > 1:
                shapes.append(tuple(call.query.shape))
            return run(self, call, *saved)

        monkeypatch.setattr(CpuKernel, name, counted)
    return shapes


@pytest.mark.parametrize(
    ("stored", "order", "n_calls"),
    [((8, 500), (1, 0), 1), ((500, 8), (1, 0), 8), ((4000,), (0,), 1)],
    ids=str,
)
def test_small_entries_go_many_to_a_call(
    calls: list[tuple[int, ...]],
    stored: tuple[int, ...],
    order: tuple[int, ...],
    n_calls: int,
) -> None:
    """One call for each run of entries along the last batch dimension, or one of a
    copy."""
    dims = len(stored)
    lying = torch.randn(*stored, 4, 16, 16)
    three = [
        lying.permute(*order, dims, dims + 1, dims + 2).requires_grad_()
        for _ in range(3)
    ]
    calls.clear()
    qa.attention(*three, budget="1GiB").sum().backward()
    assert len(calls) == 2 * n_calls


@pytest.mark.parametrize("rows", [1, 12])
def test_a_mask_of_each_entry_with_grouped_heads_takes_few_calls(
    calls: list[tuple[int, ...]], rows: int
) -> None:
    """Its entries and key heads are no one dimension, so entries ran one by one: 13
    times torch's seconds."""
    query = torch.randn(500, 6, 12, 8).requires_grad_()
    key, value = (torch.randn(500, 3, 12, 8).requires_grad_() for _ in range(2))
    kept = torch.rand(500, 1, rows, 12) < 0.7
    upstream = torch.randn(query.shape)
    three = [query, key, value]
    calls.clear()
    out = qa.attention(*three, kept, enable_gqa=True)
    grads = torch.autograd.grad(out, three, upstream)
    # Some are of the test before the kernel's first use.
    assert len(calls) < 20
    repeated = [query, *(t.repeat_interleave(2, 1) for t in (key, value))]
    wanted = qa.attention(*repeated, kept)
    for result, right in zip(
        (out, *grads),
        (wanted, *torch.autograd.grad(wanted, three, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(result, right, rtol=0, atol=1e-6)


def test_a_budget_that_holds_a_part_of_the_entries_cuts_between_many_of_them(
    calls: list[tuple[int, ...]],
) -> None:
    """Not into calls of one entry each."""
    three = [torch.randn(4000, 4, 16, 16) for _ in range(3)]
    whole = qa.plan(
        16, batch=4000, heads=4, head_dim=16, dtype=torch.float32, device="cpu"
    )
    for share in (0.9, 0.8):
        report = qa.Report()
        calls.clear()
        budget = int(share * whole.peak_bytes)
        found = qa.attention(*three, budget=budget, report=report)
        assert report.forward is not None
        assert 2 <= len(calls) == report.forward.n_groups <= 16
        assert torch.equal(found, qa.attention(*three))


def test_the_gradient_of_a_shared_bias_takes_many_entries_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles hold entries as they hold heads."""
    tiles = []
    begin = mask_gradient.BackwardRows.__init__

    def counted(self: Any, block: Any, saved: Any) -> None:
        tiles.append(block)
        begin(self, block, saved)

    monkeypatch.setattr(mask_gradient.BackwardRows, "__init__", counted)
    for batch in (1, 3000):
        three = [torch.randn(3000, 2, 8, 8) for _ in range(3)]
        bias = torch.randn(batch, 2, 8, 8, requires_grad=True)
        tiles.clear()
        qa.attention(*three, bias).sum().backward()
        assert 1 <= len(tiles) <= 12


def test_tokens_in_any_order_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that would be run by blocks are packed as well, one or many cells at a
    time."""
    monkeypatch.setattr(packing, "_CLEARLY", 0)
    monkeypatch.setattr(ways, "_FEW_CALLS", 0)
    for number in range(60):
        monkeypatch.setattr(
            packing, "_HOST_BYTES", 1 << random.Random(number).choice([10, 15, 23])
        )
        masked_call(number)


def entries_of(n_entries: int, n: int = 12) -> list[torch.Tensor]:
    return [torch.randn(n_entries, 2, n, 8, requires_grad=True) for _ in range(3)]


MASKS = {
    "lengths": lambda: (qa.Mask(key_lengths=torch.randint(1, 13, (3000,))), 3000, 12),
    "padding": lambda: (qa.Mask(key_padding=torch.rand(3000, 12) < 0.7), 3000, 12),
    "windows": lambda: (qa.Mask(documents=torch.randint(0, 2, (500, 49))), 500, 49),
    "scattered": lambda: (qa.Mask(documents=torch.randint(0, 400, (2048,))), 1, 2048),
    "missing": lambda: (qa.Mask(key_padding=torch.rand(1, 1024) < 0.5), 1, 1024),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_of_entries_take_few_calls(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many masks differ, and wherever their tokens lie."""
    mask, n_entries, n = MASKS[kind]()
    three = entries_of(n_entries, n)
    shapes = []
    for name in ("rectangle_forward", "rectangle_backward"):
        run = getattr(CpuKernel, name)

        def counted(self: Any, call: Any, *saved: Any, run: Any = run) -> Any:
            shapes.append(call.query.shape)
            return run(self, call, *saved)

        monkeypatch.setattr(CpuKernel, name, counted)
    qa.attention(*three, attn_mask=mask).sum().backward()
    assert 2 <= len(shapes) <= 40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["sinks", "out_dtype"])
def test_packed_calls_of_unlike_dtypes(dtype: torch.dtype, kind: str) -> None:
    """A kernel asked for results that are not rounded cuts a packed call of grouped
    heads with several cells, and returns one with a single cell rounded: to write the
    one beside the other raised torch's error."""
    options: dict[str, Any] = {"enable_gqa": True}
    rules: dict[str, Any] = {"window": (9, 0)}
    if kind == "sinks":
        rules["sinks"] = torch.randn(6).to(dtype)
    else:
        options["out_dtype"] = torch.float32
    for number in range(12):
        torch.manual_seed(number)
        query = torch.randn(3, 6, 60, 16).to(dtype)
        key, value = (torch.randn(3, 3, 60, 16).to(dtype) for _ in range(2))
        ids = (torch.rand(3, 60) < 0.04).cumsum(-1)
        mask = qa.Mask(documents=ids, **rules)
        out = qa.attention(query, key, value, mask, **options)
        wide = [t.double() for t in (query, key, value)]
        wanted = qa.attention(*wide, mask, enable_gqa=True)
        assert error(out, wanted) < 4 * torch.finfo(dtype).eps


def test_padding_is_not_read() -> None:
    """What lies in tokens that are not there may be anything."""
    there = torch.rand(500, 12) < 0.6
    query, key, value = (t.detach() for t in entries_of(500))
    clean = qa.attention(query, key, value, attn_mask=qa.Mask(key_padding=there))
    for tensor in (key, value):
        tensor.masked_fill_(~there[:, None, :, None], torch.nan)
    found = qa.attention(query, key, value, attn_mask=qa.Mask(key_padding=there))
    assert torch.equal(found, clean)
    assert not clean[~there.any(1)].any()


def test_a_packed_call_stays_within_its_bytes() -> None:
    """What is gathered is counted."""
    given, report = entries_of(4000), qa.Report()
    mask = qa.Mask(key_lengths=torch.randint(1, 13, (4000,)))
    with torch.no_grad():
        used = usage(lambda: qa.attention(*given, attn_mask=mask, report=report))
    assert report.forward is not None
    assert used.peak <= report.forward.planned_peak_bytes
    out = qa.attention(*given, attn_mask=mask, report=report)
    used = usage(lambda: torch.autograd.grad(out, given, torch.ones_like(out)))
    assert report.backward is not None
    assert used.peak <= report.backward.planned_peak_bytes


def test_a_mask_of_calls_with_other_sizes_is_packed_where_its_kernel_takes_their_biases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was chosen for a narrow call is not what a wider one of the same mask
    gets."""
    refuse = CpuKernel.refusal

    def refuses_wide_biases(self: CpuKernel, shape: CallShape) -> str | None:
        is_wide = shape.bias is not None and shape.head_dim > 8
        return "it takes no such bias" if is_wide else refuse(self, shape)

    monkeypatch.setattr(CpuKernel, "refusal", refuses_wide_biases)
    mask = qa.Mask(key_lengths=torch.randint(1, 13, (3000,)))
    device = torch.device("cpu")
    kernels = []
    for width in (8, 32):
        shape = CallShape(
            "cpu",
            torch.float32,
            2,
            2,
            width,
            width,
            batch_shape=(3000,),
            n_queries=12,
            n_keys=12,
        )
        kernels += kernel_for_mask(
            mask, "cpu", shape, device, needs_grad=True, tried=False
        )[1:]
    assert [type(kernel) for kernel in kernels] == [WholeCallKernel, MaskedKernel]


def test_a_mask_is_packed_where_its_kernel_takes_grouped_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator that takes as many key heads as query heads was handed fewer, and
    failed."""

    def takes_equal_heads(
        self: CpuKernel, shape: CallShape, tokens: int, all_heads: bool
    ) -> bool:
        return shape.heads == shape.kv_heads

    monkeypatch.setattr(CpuKernel, "takes_whole", takes_equal_heads)
    mask = qa.Mask(key_lengths=torch.randint(1, 13, (3000,)))
    kernels: list[Any] = []
    for kv_heads in (2, 1):
        shape = CallShape(
            "cpu",
            torch.float32,
            2,
            kv_heads,
            8,
            8,
            batch_shape=(3000,),
            n_queries=12,
            n_keys=12,
        )
        kernels += kernel_for_mask(
            mask, "cpu", shape, torch.device("cpu"), needs_grad=True, tried=False
        )[1:]
    assert [type(kernel) for kernel in kernels] == [WholeCallKernel, MaskedKernel]


@pytest.mark.parametrize("batch", [(64,), (8, 8)])
@pytest.mark.parametrize("sides", [(1, 5), (3, 8)])
@pytest.mark.parametrize(
    "rules",
    [{}, {"window": 2}, {"softcap": 3.0}, {"chunk": 2}, {"sinks": torch.ones(2)}],
    ids=["causal", "window", "softcap", "chunk", "sinks"],
)
def test_keys_that_no_causal_query_sees(
    batch: tuple[int, ...], sides: tuple[int, int], rules: dict[str, Any]
) -> None:
    """Many entries with more keys than queries are one kernel call, not several for
    each entry; those keys have gradients of zero."""
    n, m = sides
    query, key, value = (torch.randn(*batch, 2, rows, 8) for rows in (n, m, m))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    mask = qa.Mask(causal=True, **rules) if rules else None
    report = qa.Report()
    out = qa.attention(*leaves, mask, is_causal=not rules, report=report)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert (report.forward.units, report.backward.units) == (1, 1)
    seen = [
        t.detach().requires_grad_() for t in (query, key[..., :n, :], value[..., :n, :])
    ]
    expected = qa.attention(*seen, mask, is_causal=not rules)
    wanted = torch.autograd.grad(expected.sum(), seen)
    torch.testing.assert_close(out, expected)
    for grad, part in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad[..., : part.shape[-2], :], part)
        assert not grad[..., part.shape[-2] :, :].any()


def near(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.1 * (q - k).abs()


class OwnKernel(TiledKernel):
    """A kernel that can neither be called by rectangles nor takes masks."""

    name = "own"
    operator = False


@pytest.mark.parametrize(
    "mask",
    [None, qa.Mask(causal=True), qa.Mask(sinks=torch.zeros(2))],
    ids=["none", "causal", "sinks"],
)
@pytest.mark.parametrize(
    "kernel",
    [qa.from_score_mod(near), qa.from_score_mod(near, sliding_window(3)), OwnKernel()],
    ids=["scores", "window", "own"],
)
def test_causal_calls_of_kernels_that_take_no_masks(
    kernel: Kernel, mask: qa.Mask | None
) -> None:
    """With more keys than queries, they were refused from nine entries on: "cannot run
    a call under a Mask"."""
    query, key, value = (torch.randn(9, 2, rows, 8) for rows in (5, 9, 9))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    options: Any = {"kernel": kernel, "is_causal": mask is None or not mask.causal}
    out = qa.attention(*leaves, mask, **options)
    grads = torch.autograd.grad(out.sum(), leaves)
    entries = [
        qa.attention(*(t[i : i + 1] for t in leaves), mask, **options) for i in range(9)
    ]
    expected = torch.cat(entries)
    wanted = torch.autograd.grad(expected.sum(), leaves)
    torch.testing.assert_close((out, *grads), (expected, *wanted))
