"""A rank that fails when others count on it: all learn of it, and the group can be used again."""

from __future__ import annotations

import atexit
import gc
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import compare, inputs_of, spawn
from torch.utils.checkpoint import checkpoint

from quorum_attention import distributed as sharded
from quorum_attention.distributed import run, watch
from quorum_attention.distributed.calls import Calls
from quorum_attention.distributed.peers import Peers
from quorum_attention.kernels import DenseKernel

# Heads and key/value heads: exchanged among 2 and 4 ranks, and what is shared otherwise.
HEADS = ((4, 4), (5, 1), (3, 3))
# By how many ranks there are.
FAILING = {2: (0,), 3: (1, 2), 4: (3,)}


class PlantedError(Exception):
    """What a rank fails with here."""


@contextmanager
def planted(
    here: bool, name: str, after: int = 0, kind: type[BaseException] = PlantedError
) -> Iterator[None]:
    """The ``after``-th next call of a method of ``Calls`` fails on this rank."""
    kept, count = getattr(Calls, name), [0]

    def failing(self: Any, *args: Any) -> Any:
        count[0] += 1
        if here and count[0] > after:
            raise kind("out of everything")
        return kept(self, *args)

    setattr(Calls, name, failing)
    try:
        yield
    finally:
        setattr(Calls, name, kept)


def plain(*three: torch.Tensor, **options: Any) -> torch.Tensor:
    return sharded.attention(*three, is_causal=True, enable_gqa=True, **options)


def recomputed(*three: torch.Tensor, **options: Any) -> torch.Tensor:
    out: torch.Tensor = checkpoint(plain, *three, use_reentrant=False, **options)
    return out


def _one_fails(rank: int, group: dist.ProcessGroup, failing: int) -> None:
    ranks, here = group.size(), rank == failing
    says = (
        "out of everything"
        if here
        else rf"rank {failing} failed \(PlantedError: out of everything\)"
    )
    kind = PlantedError if here else RuntimeError
    heads, kv_heads = HEADS[failing % len(HEADS)]
    sizes = [17 + 3 * one for one in range(ranks)]
    torch.manual_seed(failing)
    tensors = inputs_of(heads, kv_heads, sum(sizes), 8, 8, torch.float32, 1)
    start = sum(sizes[:rank])
    options: dict[str, Any] = {"group": group, "lengths": sizes if failing % 2 else None}
    for call in (plain, recomputed):
        mine = [t[:, :, start : start + sizes[rank]].clone().requires_grad_() for t in tensors]
        with planted(here, "_forward"), pytest.raises(kind, match=says):
            call(*mine[:3], **options)
        out = call(*mine[:3], **options)
        with (
            planted(here, "_backward" if call is plain else "_forward"),
            pytest.raises(kind, match=says),
        ):
            out.backward(mine[3])
        # Nothing is left over: what follows is right.
        compare(rank, sizes, tensors, True, **options)


def _in_every_group(rank: int) -> None:
    watch._LOOK_SECONDS = 0.2
    groups = {n: dist.new_group(list(range(n))) for n in (2, 3, 4)}
    of_two = [dist.new_group([0, 1], timeout=timedelta(seconds=30)) for _ in range(6)]
    for ranks, group in groups.items():
        if rank < ranks:
            for failing in FAILING[ranks]:
                _one_fails(rank, group, failing)
    if rank < 2:
        _a_graph_does_not_keep_its_group(rank)
        _one_is_interrupted(rank, of_two)
        _an_error_holds_no_tensors(rank, groups[2])
        _what_was_saved_cannot_be_had(rank, of_two)
        _arguments_of_a_step_do_not_fit(rank, of_two)
    if rank < 3:
        _two_fail(rank, groups[3])
        _a_late_stage(rank, groups[3])
        _a_step_of_decoding(rank, groups[3])
        _a_rank_that_is_slow_is_none_that_failed(rank, groups[3])
        _one_fails_when_all_is_sent(rank, groups[3])
    # Whoever ends takes its messages with it, and others then need not wait to learn of it.
    dist.barrier()


def _one_is_interrupted(rank: int, groups: list[dist.ProcessGroup]) -> None:
    """The other has sent all by then: the last reference to the group would wait for what does not
    come, up to the group's time limit."""
    for heads, kv_heads in HEADS[:2]:
        group = groups.pop()
        q, k, v, _ = inputs_of(heads, kv_heads, 20, 8, 8, torch.float32, 1)
        kind = (RuntimeError, KeyboardInterrupt)[rank]
        with (
            planted(rank == 1, "_forward", kind=KeyboardInterrupt),
            pytest.raises(kind, match="out of everything"),
        ):
            plain(q, k, v, group=group)
        begun = time.monotonic()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert time.monotonic() - begun < 15


def _an_error_holds_no_tensors(rank: int, group: dist.ProcessGroup) -> None:
    """They are free when it is forgotten, and not when garbage is collected: memory that ran out on
    one rank is there for a smaller call."""
    for heads, kv_heads in HEADS[:2]:
        q = torch.randn(1, heads, 20, 8)
        k = torch.randn(1, kv_heads, 20, 8)
        left = weakref.ref(q)
        gc.collect()
        gc.disable()
        try:
            with planted(rank == 0, "_forward"):
                _forgotten(q, k, group)
            del q
            assert left() is None, gc.get_referrers(left())
        finally:
            gc.enable()


def _forgotten(q: torch.Tensor, k: torch.Tensor, group: dist.ProcessGroup) -> None:
    try:
        plain(q, k, k, group=group)
    except (PlantedError, RuntimeError):
        return
    raise AssertionError("no rank has failed")


def _what_was_saved_cannot_be_had(rank: int, groups: list[dist.ProcessGroup]) -> None:
    """On one rank, where the others have begun with the backward."""
    for heads, kv_heads in HEADS[:2]:
        q, k, v, upstream = inputs_of(heads, kv_heads, 20, 8, 8, torch.float32, 1)
        bias = torch.zeros(40, 40, requires_grad=True)
        out = sharded.attention(q.requires_grad_(), k, v, bias, enable_gqa=True, group=groups[-1])
        if rank == 0:
            with torch.no_grad():
                bias += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(upstream)
        del out
        dist.destroy_process_group(groups.pop())
    out = plain(q, k, v, group=groups[-1])
    out.backward(upstream, retain_graph=rank == 1)
    with pytest.raises(RuntimeError, match="through the graph a second time"):
        out.backward(upstream)
    del out
    dist.destroy_process_group(groups.pop())


def _arguments_of_a_step_do_not_fit(rank: int, groups: list[dist.ProcessGroup]) -> None:
    q: Any = torch.randn(1, 2, 1, 8)
    kind = (TypeError, RuntimeError)[rank]
    with pytest.raises(kind, match="attn_mask must be a Mask"):
        sharded.decode(q, q, q, [1] if rank == 0 else None, group=groups[-1])  # type: ignore[arg-type]
    dist.destroy_process_group(groups.pop())
    with pytest.raises(ValueError, match="group must be a process group"):
        sharded.decode(q, q, q, group=3)  # type: ignore[arg-type]


def _a_graph_does_not_keep_its_group(rank: int) -> None:
    group = dist.new_group([0, 1], use_local_synchronization=True)
    kept = []
    for heads, kv_heads in HEADS[:2]:
        for backward in (False, True):
            q, k, v, upstream = inputs_of(heads, kv_heads, 20, 8, 8, torch.float32, 1)
            kept.append(plain(q.requires_grad_(), k, v, group=group))
            if backward:
                kept[-1].backward(upstream, retain_graph=True)
    left = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert left() is None, gc.get_referrers(left())
    with pytest.raises(RuntimeError, match="has been destroyed"):
        kept[0].sum().backward()


def _two_fail(rank: int, group: dist.ProcessGroup) -> None:
    tensors = inputs_of(4, 2, 90, 8, 8, torch.float32, 1)
    mine = [t[:, :, 30 * rank : 30 * rank + 30] for t in tensors[:3]]
    kind = RuntimeError if rank == 1 else PlantedError
    with planted(rank != 1, "_forward"), pytest.raises(kind, match="out of everything"):
        plain(*mine, group=group)
    _all_well(rank, group)


def _a_late_stage(rank: int, group: dist.ProcessGroup) -> None:
    """Messages of earlier stages have been sent, and some of later ones."""
    torch.manual_seed(1)
    q, k, v, _ = inputs_of(8, 8, 90, 8, 8, torch.float32, 1)
    mine = [t[:, :, 30 * rank : 30 * rank + 30] for t in (q, k, v)]
    report = sharded.ShardedReport()
    plain(*mine, group=group, report=report)
    assert report.stages > 1
    for after in range(1, len(report.calls)):
        kind = PlantedError if rank == 2 else RuntimeError
        with planted(rank == 2, "_forward", after), pytest.raises(kind, match="out of everything"):
            plain(*mine, group=group)
    _all_well(rank, group)


def _a_step_of_decoding(rank: int, group: dist.ProcessGroup) -> None:
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 9, 8)
    kind, kernel = (PlantedError, _Failing()) if rank == 0 else (RuntimeError, "auto")
    with pytest.raises(kind, match="out of everything"):
        sharded.decode(q, k, k, group=group, kernel=kernel)  # type: ignore[arg-type]
    sharded.decode(q, k, k, group=group)


def _a_rank_that_is_slow_is_none_that_failed(rank: int, group: dist.ProcessGroup) -> None:
    kept = Calls._forward

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(2.5 * watch._LOOK_SECONDS)  # the others look twice meanwhile
        return kept(self, *args)

    if rank == 1:
        Calls._forward = slow  # type: ignore[method-assign]
    try:
        _all_well(rank, group)
    finally:
        Calls._forward = kept  # type: ignore[method-assign]


def _one_fails_when_all_is_sent(rank: int, group: dist.ProcessGroup) -> None:
    """The others have their results, and hear of it when they next wait for that rank."""
    torch.manual_seed(2)
    tensors = inputs_of(5, 1, 60, 8, 8, torch.float32, 1)
    mine = [t[:, :, 20 * rank : 20 * rank + 20] for t in tensors[:3]]
    kept, watch._GONE_SECONDS = run._merged, 0.5
    if rank == 2:
        run._merged = _raising
    try:
        if rank == 2:
            with pytest.raises(PlantedError):
                plain(*mine, group=group)
            return
        assert plain(*mine, group=group).isfinite().all()
    finally:
        run._merged = kept
    with pytest.raises(
        RuntimeError, match=r"rank 2 failed \(PlantedError.*earlier call.*cannot be used"
    ):
        plain(*mine, group=group)


def _raising(*args: Any) -> Any:
    raise PlantedError("late")


def _all_well(rank: int, group: dist.ProcessGroup) -> None:
    torch.manual_seed(3)
    tensors = inputs_of(4, 2, 90, 8, 8, torch.float32, 1)
    compare(rank, [30, 40, 20], tensors, True, group=group)


class _Pause:
    """Lets other threads have the interpreter while it ends."""

    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(0.5)


def _holds_the_interpreter() -> None:
    sys.setswitchinterval(1000)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        pass


def _the_others_end_as_this_one_does(rank: int) -> None:
    """Messages left over fail then, in a thread that could end the process."""
    watch._LOOK_SECONDS = 0.2
    group = dist.new_group([0, 1, 2])
    _one_fails_when_all_is_sent(rank, group)
    dist.barrier()
    if rank == 0:
        vars(sys)["_pause"] = _Pause()
        atexit.register(_holds_the_interpreter)
    else:
        time.sleep(1)


class _Failing(DenseKernel):
    """A kernel that does not compute."""

    def forward(self, *args: Any, **named: Any) -> Any:
        raise PlantedError("out of everything")


def test_messages_left_over_do_not_abort_a_process_that_ends(tmp_path: Path) -> None:
    spawn(_the_others_end_as_this_one_does, 3, tmp_path, forked=False)


def test_an_error_may_be_among_its_own_causes() -> None:
    error, other = PlantedError("one"), PlantedError("other")
    error.__cause__, other.__cause__ = other, error
    watch._clear(error)


def _where_all_meet(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    assert Peers.of(group).monitored
    for failing in (0, 1, 0):
        _one_fails(rank, group, failing)
    both = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    for _ in range(5):
        with planted(True, "_forward"), pytest.raises((PlantedError, RuntimeError)):
            plain(*both, group=group)
    tensors = inputs_of(4, 2, 50, 8, 8, torch.float32, 1)
    compare(rank, [30, 20], _same(tensors), True, group=group)


def _same(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """On all ranks those of the first."""
    for tensor in tensors:
        dist.broadcast(tensor, 0)
    return tensors


def test_one_fails_where_all_meet_before_each_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the others wait where they cannot look, before: for half an hour."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    spawn(_where_all_meet, 2, tmp_path)


def test_one_of_several_fails(tmp_path: Path) -> None:
    spawn(_in_every_group, 4, tmp_path)
