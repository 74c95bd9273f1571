"""Sharded calls on Gloo processes give what one device gives, whatever ranks,
shards, heads and masks. All share their processes, which take long to start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import compare, exact, inputs_of, random_calls, spawn
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention import distributed as sharded
from quorum_attention.distributed import agreement, groups, strategies
from quorum_attention.distributed.run import run_forward
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.cpu import CpuKernel

# The module; the package gives its function this name.
ATTENTION = sys.modules["quorum_attention.distributed.attention"]


def _all_of_it(rank: int) -> None:
    groups = {
        2: dist.new_group([0, 1]),
        3: dist.new_group([0, 1, 2]),
        5: dist.group.WORLD,
    }
    for ranks, group in groups.items():
        assert group is not None
        if rank < ranks:
            assert not random_calls(1000 * ranks, 8, group)
        if rank < ranks < 5:
            _in_turns(rank, group)
    if rank < 2:
        for check in (
            _what_a_rank_computes_is_cut, _one_rank_alone, _twice, _like_an_earlier_one,
            _prepared_as_long_as_agreed, _dropout_without_a_seed, _no_second_derivative, _recomputed,
            _under_autocast, _settings_of_the_forward, _exact_delta, _a_kernel_of_16_bits,
            _nothing_is_kept, _transforms_are_refused, _tensors_of_functions, _refusals,
        ):  # fmt: skip
            torch.manual_seed(1)
            check(rank, groups[2])


@pytest.mark.slow
def test_on_processes(tmp_path: Path) -> None:
    spawn(_all_of_it, 5, tmp_path)


def _what_a_rank_computes_is_cut(rank: int, group: dist.ProcessGroup) -> None:
    tensors = inputs_of(3, 3, 1400, 16, 16, torch.float32, 1)
    report = compare(rank, [900, 500], tensors, True, depth=1, group=group)
    assert report.imbalance < 1.05
    assert len(report.calls) > 2
    cut = [
        one.forward
        for one in report.calls
        if one.forward is not None and one.forward.levels
    ]
    assert cut, "nothing was cut"
    received = [torch.empty(1) for _ in range(2)]
    dist.all_gather(received, torch.tensor([float(report.forward_bytes)]), group=group)
    assert max(float(r) for r in received) == pytest.approx(
        report.most_forward_bytes, rel=0.01
    )


def _one_rank_alone(rank: int, group: dist.ProcessGroup) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    q = torch.randn(1, 2, 40, 8)
    got = sharded.attention(q, q, q, group=alone, is_causal=True)
    assert torch.allclose(got, qa.attention(q, q, q, is_causal=True), atol=1e-6)


def _twice(rank: int, group: dist.ProcessGroup) -> None:
    q, k, v = (torch.randn(1, 4, 6, 8, requires_grad=True) for _ in range(3))
    out = sharded.attention(q, k, v, group=group, lengths="equal")
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    assert torch.allclose(q.grad, 2 * once)
    with torch.no_grad():
        assert not sharded.attention(q, q, q, group=group).requires_grad


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[tuple[pytest.MonkeyPatch, list[int]]]:
    """Calls are compared as on a GPU. The list gets a number for each comparison."""
    compared: list[int] = []

    def compares(*args: Any) -> list[Any]:
        compared.append(1)
        return groups.all_gather_objects(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "on_host", lambda device: False)
        patch.setattr(ATTENTION, "on_host", lambda device: False)
        patch.setattr(agreement, "all_gather_objects", compares)
        yield patch, compared


def _like_an_earlier_one(rank: int, group: dist.ProcessGroup) -> None:
    """A call like an earlier one is neither checked nor compared again, as on a GPU;
    its results are those of its own numbers. Calls of another kind are compared, and
    all of them again once the group has forgotten them."""
    with as_on_a_gpu() as (patch, compared):

        def number_of_comparisons(
            rows: list[int], heads: int = 4, causal: bool = True
        ) -> int:
            compared.clear()
            tensors = inputs_of(heads, 2, sum(rows), 16, 8, torch.float32, 2)
            compare(rank, rows, tensors, causal, group=group, lengths=tuple(rows))
            return len(compared)

        # Calls with and without gradients differ.
        assert number_of_comparisons([7, 9]) == 2
        assert number_of_comparisons([7, 9]) == 0
        assert number_of_comparisons([7, 9]) == 0
        assert number_of_comparisons([9, 7]) == 2
        assert number_of_comparisons([7, 9], causal=False) == 2
        assert number_of_comparisons([7, 9], heads=2) == 2
        patch.setattr(agreement, "_MAX_CALLS", 1)
        assert number_of_comparisons([7, 9]) == 2


class _ChangingLengths(Sequence[int]):
    """Numbers of rows that its text does not tell."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __getitem__(self, rank: Any) -> Any:
        return self.rows[rank]

    def __len__(self) -> int:
        return len(self.rows)


def _prepared_as_long_as_agreed(rank: int, group: dist.ProcessGroup) -> None:
    """What is prepared for a call ends with the agreement on it: of two ranks, one that
    has its call prepared would send rows while the other, whose strides are new,
    compares the call. Lengths are read at every call if their text may stay the same.
    """
    with as_on_a_gpu() as (patch, compared):
        patch.setattr(agreement, "_MAX_CALLS", 2)
        for tokens in (11, 12, 13):
            q = torch.randn(1, 2, tokens, 8)
            agreement.agreed_calls(group).names.clear()
            agreement.agreed_calls(group).names.add("another call")
            compared.clear()
            for _ in range(2):
                sharded.attention(q, q, q, group=group, lengths="equal")
            assert len(compared) == 2, "the call was the last that the group remembers"
        patch.setattr(agreement, "_MAX_CALLS", 99)
        scaled = [torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(2)]
        scaled[1] = scaled[1].mT.contiguous().mT
        compared.clear()
        for q_of_call, scale in zip(scaled, (0.0, -0.0), strict=True):
            sharded.attention(
                *(q_of_call,) * 3, group=group, lengths="equal", scale=scale
            )
        assert len(compared) == 1, "zeros of both signs are one scale"
        lengths = _ChangingLengths([13, 13])
        sharded.attention(q, q, q, group=group, lengths=lengths)
        lengths.rows.append(13)
        with pytest.raises(ValueError, match="an entry for each of 2 ranks"):
            sharded.attention(q, q, q, group=group, lengths=lengths)


def _no_second_derivative(rank: int, group: dist.ProcessGroup) -> None:
    """It is an error, and no zero, where heads are exchanged whole and where they are
    not."""
    for heads in (2, 1):
        q = torch.randn(1, heads, 10, 8, requires_grad=True)
        out = sharded.attention(q, q, q, group=group)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(
            RuntimeError, match="second derivatives of quorum_attention"
        ):
            (q.sum() + grad.square().sum()).backward()


def _refusals(rank: int, group: dist.ProcessGroup) -> None:
    """Before anything is sent, on all ranks alike; autocast is as an argument."""
    q = torch.randn(1, 2, 10, 8)
    for wrong, name in (
        ({"query": q.to(torch.int32)}, "query must be"),
        ({"key": q[:, :, :3]}, "heads and tokens"),
        ({"attn_mask": 3}, "attn_mask"),
        ({"report": 3}, "report"),
        ({"depth": -1}, "depth"),
        ({"kernel": "none such"}, "none such"),
        ({"attn_mask": Mask(documents=torch.zeros(7, dtype=torch.int64))}, "documents"),
        ({"attn_mask": torch.zeros(10, 10)}, r"attn_mask.*broadcast"),
        ({"attn_mask": Mask(sinks=torch.zeros(3))}, "sinks"),
        ({"lengths": 10}, "lengths must be 'equal' or"),
        ({"lengths": "even"}, "lengths must be 'equal', got 'even'"),
    ):
        named = {"query": q, "key": q, "value": q, "group": group, **wrong}
        with pytest.raises((TypeError, ValueError), match=name):
            sharded.attention(**named)  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match="dtype"),
        torch.autocast("cpu", enabled=rank == 0),
    ):
        sharded.attention(q, q, q, group=group)
    documents = torch.zeros(20, dtype=torch.int64)
    k = q.clone().requires_grad_()
    out = sharded.attention(k, k, k, Mask(documents=documents), group=group)
    documents[3] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def _tensors_of_functions(rank: int, group: dist.ProcessGroup) -> None:
    """A tensor that a mask's function reads and that is written to before the backward
    is an error, as it is on one device."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    reach = torch.tensor(3)
    rule = Mask(keeps=lambda b, h, i, j: (i - j).abs() < reach)
    q = torch.randn(1, 2, 10, 8, requires_grad=True)
    out = sharded.attention(q, q, q, rule, group=alone)
    reach.fill_(7)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def _in_turns(rank: int, group: dist.ProcessGroup) -> None:
    """Heads that divide by the ranks are exchanged in turns, whole, and nothing is
    added up."""
    n_head_groups = strategies.n_head_groups
    strategies.n_head_groups = lambda flops, records: 3
    ranks = group.size()
    sizes, dtype, element = {
        2: ([5, 12], torch.float64, 8),
        3: ([7, 0, 4], torch.bfloat16, 4),  # calls this small are widened
    }[ranks]
    tensors = inputs_of(8 * ranks, 4 * ranks, sum(sizes), 16, 8, dtype, 2)
    report = compare(rank, sizes, tensors, ranks == 2, group=group, lengths=sizes)
    assert (report.way, report.stages, report.kept) == ("heads exchanged", 3, True)
    assert len(report.calls) == 6
    if rank != sizes.index(max(sizes)):
        foreign, own = sum(sizes) - sizes[rank], sizes[rank] * (ranks - 1)
        inward, back = 8 * 16 + 4 * 16 + 4 * 8, 8 * 8
        assert report.forward_bytes == 2 * element * (foreign * inward + own * back)
        assert report.backward_bytes == 2 * element * (foreign * back + own * inward)
    strategies.n_head_groups = n_head_groups


def _dropout_without_a_seed(rank: int, group: dist.ProcessGroup) -> None:
    q = torch.randn(1, 2, 8, 8)
    first, second = (
        sharded.attention(q, q, q, dropout_p=0.5, group=group) for _ in range(2)
    )
    assert not torch.equal(first, second)


def _recomputed(rank: int, group: dist.ProcessGroup) -> None:
    """Under a checkpoint all ranks recompute, also those that had nothing to
    compute."""
    q, upstream = (torch.randn(1, 1, 6, 8, dtype=torch.float64) for _ in range(2))
    for reentrant in (False, True):
        grads = []
        for checkpointed in (False, True):
            x = q.clone().requires_grad_()

            def call(x: torch.Tensor) -> torch.Tensor:
                return sharded.attention(
                    x, x, x, group=group, dropout_p=0.3, dropout_seed=2
                )

            out = (
                checkpoint(call, x, use_reentrant=reentrant)
                if checkpointed
                else call(x)
            )
            out.backward(upstream)
            grads.append(x.grad)
        assert torch.equal(*grads)


def _under_autocast(rank: int, group: dist.ProcessGroup) -> None:
    q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sharded.attention(q, k, v, group=group)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    # The forward decides: a backward under autocast has the forward's precision.
    for heads in (2, 1):
        x = torch.randn(1, heads, 8, 8, requires_grad=True)
        grads = []
        for is_enabled in (False, True):
            out = sharded.attention(x, x, x, group=group)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
                grads += torch.autograd.grad(out.square().sum(), x)
        assert torch.equal(*grads)


def _settings_of_the_forward(rank: int, group: dist.ProcessGroup) -> None:
    """The backward has the settings of its forward, also outside of their block, and in
    a block of others."""
    q = torch.randn(1, 2, 700, 8, requires_grad=True)
    for of_forward, of_backward, levels in ((1, 0, (7,)), (0, 1, ())):
        report = sharded.ShardedReport()
        with qa.using(depth=of_forward):
            out = sharded.attention(q, q, q, group=group, report=report)
        with qa.using(depth=of_backward):
            out.sum().backward()
        _, backward = report.calls
        assert backward.backward is not None
        assert backward.backward.levels == levels
    for heads in (2, 1):
        q = torch.randn(1, heads, 700, 8, requires_grad=True)
        out = sharded.attention(q, q, q, group=group)
        with qa.using(budget=1024):  # too small for any call
            out.sum().backward()


def _exact_delta(rank: int, group: dist.ProcessGroup) -> None:
    """The setting holds for these calls too: it was ignored without a word."""
    for heads, kv_heads in ((2, 2), (3, 1)):
        tensors = inputs_of(heads, kv_heads, 300, 16, 16, torch.bfloat16, 1)
        query, key, value = (9 * tensor for tensor in tensors[:3])
        wanted = exact([query, key, value, tensors[3]], causal=False)[1]
        rows = slice(150 * rank, 150 * rank + 150)
        errors = []
        for is_exact in (False, True):
            leaf = query[:, :, rows].clone().requires_grad_()
            with qa.using(exact_delta=is_exact):
                out = sharded.attention(
                    leaf,
                    key[:, :, rows],
                    value[:, :, rows],
                    enable_gqa=True,
                    group=group,
                )
            assert out.dtype == torch.bfloat16
            out.backward(tensors[3][:, :, rows])
            assert leaf.grad is not None
            errors.append(float((leaf.grad.double() - wanted[:, :, rows]).norm()))
        assert errors[1] < 0.4 * errors[0]


class _KernelOf16Bits(CpuKernel):
    """It takes 16 bits alone, as vendors' kernels of a GPU do."""

    name = "of 16 bits"

    def refusal(self, shape: CallShape) -> str | None:
        if shape.dtype.itemsize != 2:
            return f"it takes 16 bits, not {shape.dtype}"
        return super().refusal(shape)


def _a_kernel_of_16_bits(rank: int, group: dist.ProcessGroup) -> None:
    """A kernel that was asked for and takes 16 bits alone is not given small calls in
    fp32."""
    for heads in (2, 1):
        q = torch.randn(1, heads, 10, 8).bfloat16().requires_grad_()
        grads = []
        for kernel in ("auto", _KernelOf16Bits()):
            out = sharded.attention(q, q, q, kernel=kernel, group=group)
            grads += torch.autograd.grad(out.sum(), q)
        assert torch.allclose(*grads, atol=0.05, rtol=0.05)


def _nothing_is_kept(rank: int, group: dist.ProcessGroup) -> None:
    """Without gradients no gathered rows are kept, whatever the inputs ask for."""
    q = torch.randn(1, 2, 10, 8, requires_grad=True)
    numbers_of_tensors = []

    def counted_forward(*args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        out, saved = run_forward(*args)
        numbers_of_tensors.append(len(saved))
        return out, saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ATTENTION, "run_forward", counted_forward)
        sharded.attention(q, q, q, group=group)
        with torch.no_grad():
            sharded.attention(q, q, q, group=group)
    assert numbers_of_tensors == [5, 0]


def _transforms_are_refused(rank: int, group: dist.ProcessGroup) -> None:
    """By name and before anything is sent, so that the group is as good as before."""

    def attend(query: torch.Tensor) -> torch.Tensor:
        return sharded.attention(query, query, query, group=group)

    q = torch.randn(2, 2, 10, 8)
    learned = q.clone().requires_grad_()
    out = attend(learned)
    calls: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda query: attend(query).sum())(q),
        lambda: torch.func.vmap(attend)(q[:, None]),
        lambda: torch.autograd.grad(
            out, learned, torch.ones(3, *out.shape), is_grads_batched=True
        ),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"torch\.func transformations"):
            call()
        assert torch.equal(attend(q), out)
