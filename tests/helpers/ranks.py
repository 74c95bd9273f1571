"""Sharded calls on processes of a Gloo group, compared with a float64 reference."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import quorum_attention as qa
from helpers.attention import Inputs
from helpers.attention import exact as textbook
from helpers.conformance import NAMES, Case, Found, learning, wrong_calls
from helpers.processes import warm_forks
from quorum_attention import Mask
from quorum_attention import distributed as sharded

TOLERANCES = {
    torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2,
}  # fmt: skip


# Where a process has its tensors.
HOME = [torch.device("cpu")]


def spawn(
    work: Any, ranks: int, folder: Path, *args: Any, backend: str = "gloo"
) -> None:
    """Run ``work(rank, *args)`` on the ranks of a group; fails if one of them fails.

    Three and more are forks of one process, which has imported torch for all of them:
    importing it takes longer than most of what they do. Two have nothing in common, not
    even the order of their sets; nor have any on a GPU, which no fork can use.
    """
    told = (ranks, str(folder / f"store-{ranks}"), work, args, backend)
    forks = ranks > 2 and not torch.cuda.is_available()
    if forks:
        warm_forks()
    mp.start_processes(
        _run, told, nprocs=ranks, start_method="forkserver" if forks else "spawn"
    )


def _run(
    rank: int, ranks: int, store: str, work: Any, args: tuple[Any, ...], backend: str
) -> None:
    # Before there is a group: imported later, it keeps the default one for good. Not at
    # the top of
    # this file: it imports Triton, which other tests have to tell first that it
    # interprets.
    import torch._dynamo

    # A process that ends looks at all of it time and again: a second for what torch is
    # made of.
    gc.freeze()
    torch.set_num_threads(1)
    if backend == "nccl":
        HOME[0] = torch.device("cuda", rank)
        torch.cuda.set_device(HOME[0])
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    group = weakref.ref(dist.group.WORLD)
    try:
        work(rank, *args)
    finally:
        dist.destroy_process_group()
    # What still holds it here holds its threads, and one that is busy when Python ends
    # may abort.
    gc.collect()
    holders = [str(one)[:300] for one in gc.get_referrers(group())] if group() else []
    assert group() is None, f"the group is destroyed, and still held by {holders}"


def inputs_of(
    heads: int,
    kv_heads: int,
    tokens: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    batch: int,
) -> list[torch.Tensor]:
    """Query, key, value and upstream gradient of the whole sequence."""
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)]
    return [
        torch.randn(batch, h, tokens, d, dtype=dtype).to(HOME[0]) for h, d in shapes
    ]


def exact(tensors: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """Output and gradients in float64, with all scores at once."""
    found = textbook(Inputs(*tensors), is_causal=causal, gradients=True)
    assert found.grads is not None
    return [found.out, *found.grads]


def compare(
    rank: int,
    sizes: list[int],
    tensors: list[torch.Tensor],
    causal: bool,
    **options: Any,
) -> sharded.ShardedReport:
    """A call and its backward against the reference, and against the same call on one
    device."""
    start, stop = [0, *accumulate(sizes)][rank : rank + 2]
    mine = [t[:, :, start:stop].clone() for t in tensors]
    for t in mine[:3]:
        t.requires_grad_()
    report = sharded.ShardedReport()
    out = sharded.attention(
        *mine[:3], is_causal=causal, enable_gqa=True, report=report, **options
    )
    out.backward(mine[3])
    one = [t.clone().requires_grad_() for t in tensors[:3]]
    whole = qa.attention(*one, is_causal=causal, enable_gqa=True)
    whole.backward(tensors[3])
    # Without a report, and without gradients, a call takes a shorter way.
    with torch.no_grad():
        quick = sharded.attention(
            *mine[:3], is_causal=causal, enable_gqa=True, **options
        )
    found = [out, *(t.grad for t in mine[:3]), quick]
    alone = [whole, *(t.grad for t in one), whole]
    names = (
        "out",
        "grad of query",
        "grad of key",
        "grad of value",
        "out without report",
    )
    wanted = exact(tensors, causal)
    wanted.append(wanted[0])
    for name, got, single, true in zip(names, found, alone, wanted, strict=True):
        assert got is not None
        assert single is not None
        top = true.abs().max().clamp_min(1.0)
        error = (
            ((got.double() - true[:, :, start:stop]).abs() / top).amax()
            if got.numel()
            else 0.0
        )
        by_one = (single.double() - true).abs().max() / top
        allowed = TOLERANCES[got.dtype] + 2 * by_one
        assert error <= allowed, (name, float(error), float(by_one), str(report), sizes)
    return report


def by_ranks(case: Case, group: dist.ProcessGroup | None) -> Found:
    """Every rank's rows, put together on all of them; the gradients of a bias and of
    sinks, added up."""
    rank, ranks, draw = dist.get_rank(group), dist.get_world_size(group), case.draw
    n = case.inputs[0].shape[-2]
    cuts = sorted(draw.randint(0, n) for _ in range(1, ranks))
    if draw.random() < 0.4:
        cuts = [n * number // ranks for number in range(1, ranks)]
    rows = slice(*[0, *cuts, n][rank : rank + 2])
    mine = [t[..., rows, :].to(HOME[0]) for t in case.inputs]
    if draw.random() < 0.3:  # heads beside each other
        mine = [t.transpose(-2, -3).contiguous().transpose(-2, -3) for t in mine]
    leaves = [t.clone().requires_grad_() for t in mine[:3]]
    mask, more = learning(case)
    if isinstance(mask, Mask):  # of this rank's rows alone
        for name in ("documents", "key_padding"):
            field = getattr(mask, name)
            if field is not None and draw.random() < 0.5:
                own = tuple(
                    t[..., rows]
                    for t in (field if isinstance(field, tuple) else [field])
                )
                mask = replace(
                    mask, **{name: own if isinstance(field, tuple) else own[0]}
                )
    sizes = [stop - start for start, stop in pairwise([0, *cuts, n])]
    options = {"lengths": sizes} if draw.random() < 0.3 else {}
    out = sharded.attention(
        *leaves, mask, enable_gqa=True, group=group, **options, **case.options
    )
    out.backward(mine[3])
    found: list[Any] = [None] * ranks
    parts = [t.detach().cpu() for t in (out, *(leaf.grad for leaf in leaves))]
    dist.all_gather_object(
        found,
        (parts, {name: leaf.grad.cpu() for name, leaf in more.items()}),
        group=group,
    )
    whole = {
        name: torch.cat(each, dim=-2)
        for name, each in zip(
            ("out", *NAMES[2:]),
            zip(*(one for one, _ in found), strict=True),
            strict=True,
        )
    }
    for name in more:
        parts = torch.stack([sums[name] for _, sums in found])
        whole[name] = parts.double().sum(0).to(parts.dtype)
    return whole


def random_calls(first: int, count: int, group: dist.ProcessGroup | None = None) -> int:
    """Calls of drawn shapes and masks, the same on all ranks of a group; how many are
    wrong."""
    return wrong_calls(lambda case: by_ranks(case, group), first, count, alike=True)


def count_wrong(rank: int, first: int, count: int) -> None:
    """``random_calls``, and how many were wrong."""
    wrong = torch.tensor(random_calls(first, count))
    dist.all_reduce(wrong)  # a call is counted by each rank that finds it wrong
    if rank == 0:
        print(f"{dist.get_world_size()} ranks: {count} calls, {int(wrong)} wrong")
