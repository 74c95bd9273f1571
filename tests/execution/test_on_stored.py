"""When a pass says of a head group that its results are in place, they are, bit for bit:
what becomes of the process afterwards does not matter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention import (
    GRADIENT_TOLERANCE,
    Inputs,
    assert_close,
    exact,
    inputs,
    sink,
)
from helpers.fake_device import FakeDevice, FakeEvent, FakeStream
from helpers.late_cuda import LateCuda, stand_in
from helpers.plans import passing, unpinned

import quorum_attention as qa
from quorum_attention.call.block import BlockResults, CallBlock, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.execution.device.clock import Clock
from quorum_attention.execution.device.cuda_mover import CudaMover
from quorum_attention.execution.device.lookup import HOST
from quorum_attention.execution.device.mover import Mover
from quorum_attention.execution.head_groups import Group
from quorum_attention.execution.report import Report
from quorum_attention.kernels import CallShape
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.passes.block_call import compute_block

pytestmark = pytest.mark.usefixtures("one_thread")

# The results by name, and whether their heads are those of keys.
FORWARD = {"out": False, "lse": False}
BACKWARD = {"grad_query": False, "grad_key": True, "grad_value": True}


class Watched:
    """The results of a pass, NaN at first, and copies of them as they were when their
    heads were said to be in place."""

    def __init__(self, of_keys: dict[str, bool], results: NamedTensors) -> None:
        self.of_keys = of_keys
        self.results = {
            name: torch.full_like(tensor, float("nan"))
            for name, tensor in results.items()
        }
        self.groups: list[Group] = []
        self._copies: list[NamedTensors] = []

    def _parts(self, group: Group) -> NamedTensors:
        return {
            name: tensor[
                :, group.key_heads if self.of_keys[name] else group.query_heads
            ]
            for name, tensor in self.results.items()
        }

    def on_stored(self, group: Group) -> None:
        self.groups.append(group)
        copies = {name: part.clone() for name, part in self._parts(group).items()}
        self._copies.append(copies)

    def check(self) -> None:
        for group, copies in zip(self.groups, self._copies, strict=True):
            for name, part in self._parts(group).items():
                assert not copies[name].isnan().any(), (name, group)
                assert torch.equal(copies[name], part), (name, group)


def run_both(
    given: Inputs,
    options: tuple[CallOptions, CallOptions],
    device: AbstractContextManager[Any],
    *,
    is_causal: bool,
    grad_lse: torch.Tensor | None = None,
) -> tuple[Watched, Watched]:
    """Both passes, the backward with the forward's results."""
    query, key, value = given.three
    shape = CallShape(
        "cpu", query.dtype, query.shape[1], key.shape[1], query.shape[3],
        value.shape[3], is_causal, batch_shape=(1,), n_queries=query.shape[2],
        n_keys=key.shape[2],
    )  # fmt: skip
    call = WholeCall(shape, records=True)
    block = CallBlock(
        Interval(0, 1),
        Interval(0, shape.heads),
        Interval(0, shape.n_queries),
        Interval(0, shape.n_keys),
    )
    lse = torch.empty(query.shape[:3], dtype=shape.state_dtype)
    forward = Watched(FORWARD, {"out": given.grad_out, "lse": lse})
    grads = dict(zip(BACKWARD, given.three, strict=True))
    backward = Watched(BACKWARD, grads)
    tensors = {"query": query, "key": key, "value": value}
    with device:
        results = BlockResults(
            forward.results["out"], forward.results["lse"], on_stored=forward.on_stored
        )
        compute_block(call, block, tensors, options[0], results)
        tensors |= {"grad_out": given.grad_out, **forward.results}
        if grad_lse is not None:
            tensors["grad_lse"] = grad_lse
        three: Any = tuple(backward.results.values())
        results = BlockResults(grads=three, on_stored=backward.on_stored)
        compute_block(call, block, tensors, options[1], results)
    forward.check()
    backward.check()
    return forward, backward


def drawn_plans(
    draw: random.Random, given: Inputs, kernel: str, *, is_causal: bool, streams: bool
) -> list[qa.Plan]:
    """A forward's and a backward's, through slots or with rows that stream by; one or
    two heads at a time."""
    _, heads, n, head_dim = given.query.shape
    kv_heads = given.key.shape[1]
    plans = []
    for backward in (False, True):
        plan = qa.plan(
            n, is_causal=is_causal, dtype=given.query.dtype, backward=backward,
            device="cpu", kernel=kernel, levels=draw.choice([(3,), (7,)]),
            layout="balanced", over_inputs=False, n_cap=draw.randint(1, 3),
            accumulator=draw.choice(["host", "device"]), heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, heads_per_group=heads // kv_heads,
        )  # fmt: skip
        if streams:
            sizes = draw.randint(n // 5, n), draw.randint(n // 5, n)
            n_cap, chunk_slots = draw.randint(1, 3), draw.randint(1, 3)
            plan = passing(plan, *sizes, n_cap=n_cap, chunk_slots=chunk_slots)
        plans.append(plan)
    return plans


@pytest.mark.slow_but_first
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "where", ["cpu", "late", "out of memory", "page locks", "buffers"]
)
def test_results_are_in_place_when_it_is_said(
    where: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose copies are made as late as its events allow, with memory that
    is page-locked or goes through buffers; also when memory runs out in between."""
    draw = random.Random(torch.initial_seed())
    n_said = 0
    for _ in range(6):
        dtype = draw.choice([torch.float16, torch.float32])
        given = inputs(
            draw.randint(30, 90), heads=6, kv_heads=draw.choice([3, 6]), dtype=dtype
        )
        is_causal = draw.random() < 0.5
        plans = drawn_plans(draw, given, "cpu", is_causal=is_causal, streams=streams)
        device: AbstractContextManager[Any] = nullcontext()
        if where == "late":
            device = FakeDevice()
        elif where == "out of memory":
            plans = [unpinned(plan) for plan in plans]
            at = draw.randint(4, 9)
            device = FakeDevice(failing=lambda number, at=at: number == at)
        elif where != "cpu":
            is_refused = where == "buffers"
            stand_in(monkeypatch, refused=lambda start: is_refused)  # noqa: B023
            device = LateCuda()
        options = [
            CallOptions(devices=HOST, plan=plan, report=Report(timed=False))
            for plan in plans
        ]
        passes = run_both(given, (options[0], options[1]), device, is_causal=is_causal)
        n_said += sum(len(watched.groups) for watched in passes)
        wanted = exact(given, is_causal=is_causal, gradients=True)
        found = passes[0].results["out"], *passes[1].results.values()
        assert wanted.grads is not None
        assert_close(found, (wanted.out, *wanted.grads), GRADIENT_TOLERANCE[dtype])
    assert n_said > 6 * 2 * 2


@pytest.mark.parametrize("streams", [False, True])
def test_a_head_that_is_scaled_down_and_run_again_is_said_once(streams: bool) -> None:
    draw = random.Random(torch.initial_seed())
    given = sink(1024, heads=2)
    plans = drawn_plans(draw, given, "auto", is_causal=True, streams=streams)
    reports = [Report(timed=False), Report(timed=False)]
    options = [
        CallOptions(devices=HOST, plan=plan, report=report)
        for plan, report in zip(plans, reports, strict=True)
    ]
    _, backward = run_both(
        given, (options[0], options[1]), FakeDevice(), is_causal=True
    )
    assert reports[1].backward is not None
    assert reports[1].backward.repeated_units > 0
    assert [group.kv_start for group in backward.groups] == [0, 1]


def test_nothing_is_said_where_results_are_cut_to_their_width_at_the_end() -> None:
    """A gradient of the log-sum-exp is computed with a few more columns."""
    given = inputs(60, heads=4)
    plans = drawn_plans(random.Random(1), given, "cpu", is_causal=False, streams=False)
    forward, backward = run_both(
        given,
        (CallOptions(devices=HOST, plan=plans[0]), CallOptions(devices=HOST, depth=1)),
        nullcontext(),
        is_causal=False,
        grad_lse=torch.randn(1, 4, 60),
    )
    assert len(forward.groups) == 4
    assert not backward.groups


def test_what_waits_is_said_in_order_and_only_when_it_has_happened() -> None:
    stream = FakeStream()
    streams = (FakeStream(), FakeStream(), stream)
    mover = Mover(Clock(), 1, streams, FakeEvent)
    done: list[str] = []
    said: list[tuple[str, list[str]]] = []
    for name in ("first", "second"):
        stream.give(lambda name=name: done.append(name))
        mover.when_stored(lambda name=name: said.append((name, list(done))))
    assert not said
    mover.finish(wait=True)
    assert said == [("first", ["first"]), ("second", ["first", "second"])]


def test_heads_are_said_before_the_pass_ends_also_through_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffers always hold the results of the last units: all heads were said at the
    end, so a lost worker's part was computed again as a whole."""
    stand_in(monkeypatch)
    n_said_early: list[int] = []
    n_said = 0
    finish = CudaMover.finish

    def add(self: Watched, group: Group) -> None:
        nonlocal n_said
        n_said += 1

    def count(self: CudaMover, *, wait: bool) -> None:
        n_said_early.append(n_said)
        finish(self, wait=wait)

    monkeypatch.setattr(Watched, "on_stored", add)
    monkeypatch.setattr(CudaMover, "finish", count)
    given = inputs(90, heads=6)
    plans = drawn_plans(random.Random(1), given, "cpu", is_causal=True, streams=False)
    options = [CallOptions(devices=HOST, plan=plan) for plan in plans]
    run_both(given, (options[0], options[1]), LateCuda(), is_causal=True)
    assert n_said == 12
    assert n_said_early[0] >= 4
    assert n_said_early[-1] >= 10


def test_a_late_device_finds_a_mover_that_does_not_wait() -> None:
    """The tests above would see it."""

    @contextmanager
    def impatient() -> Iterator[None]:
        def at_once(self: Mover, notify: Any) -> None:
            notify()

        with pytest.MonkeyPatch.context() as patch, FakeDevice():
            patch.setattr(Mover, "when_stored", at_once)
            yield

    given = inputs(60, heads=4)
    plans = drawn_plans(random.Random(1), given, "cpu", is_causal=True, streams=False)
    options = [CallOptions(devices=HOST, plan=plan) for plan in plans]
    with pytest.raises(AssertionError):
        run_both(given, (options[0], options[1]), impatient(), is_causal=True)


def test_buffers_find_a_mover_that_forgets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A result that waits in a buffer has left the device, and is not in its place."""
    stand_in(monkeypatch, buffer_bytes=1 << 16)
    monkeypatch.setattr(CudaMover, "_write_results", lambda self: None)
    given = inputs(60, heads=4)
    plans = drawn_plans(random.Random(1), given, "cpu", is_causal=True, streams=False)
    plans = [replace(plan) for plan in plans]
    options = [CallOptions(devices=HOST, plan=plan) for plan in plans]
    with pytest.raises(AssertionError):
        run_both(given, (options[0], options[1]), LateCuda(), is_causal=True)
