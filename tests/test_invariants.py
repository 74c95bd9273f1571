"""The promises everything else rests on, one class each."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers_attention import GRADIENT_TOLERANCE, TOLERANCE, assert_close, error, exact, inputs
from helpers_kernels import IdleKernel, WatchedKernel
from helpers_memory import FailingAllocations, usage
from helpers_not_finite import assert_between, least, most, skip_where_rows_touch
from helpers_plans import unpinned
from hypothesis import example, settings
from hypothesis import given as for_all
from hypothesis import strategies as st
from random_calls.case import Scores
from random_calls.draw import draw
from random_calls.run import check

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition

LEVELS = [(), (1,), (3,), (7,), (13,), (3, 7), (7, 3), (3, 3, 3)]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
both_ways = pytest.mark.parametrize("backward", [False, True])
both_kernels = pytest.mark.parametrize("kernel", ["cpu", "dense"])


def one_way(made, backward, **call):
    """One pass of a call, to be run, with more options if it is given some."""
    if not backward:
        return partial(qa.attention, *made.three, **call)
    plain = {n: v for n, v in call.items() if n in ("attn_mask", "is_causal", "enable_gqa")}
    results = qa.attention_with_lse(*made.three, **plain)
    return partial(qa.attention_backward, made.grad_out, *made.three, *results, **call)


def two_ways(made, pins=({}, {}), **call):
    """Output, log-sum-exp and gradients; ``pins``: more options of either pass."""
    out, lse = qa.attention_with_lse(*made.three, **call, **pins[0])
    return out, lse, *qa.attention_backward(made.grad_out, *made.three, out, lse, **call, **pins[1])


@pytest.mark.usefixtures("one_thread")
class TestEveryPairIsComputedExactlyOnce:
    """1: coverage, for any length, mix of levels, layout, depth, causal or not."""

    @settings(max_examples=40, deadline=None)
    @for_all(
        n_queries=st.integers(1, 60),
        n_keys=st.integers(1, 60),
        levels=st.sampled_from(LEVELS),
        layout=st.sampled_from(["aligned", "balanced"]),
        tile=st.integers(1, 9),
        is_causal=st.booleans(),
    )
    @example(33, 33, (1,), "aligned", 2, True)
    def test_pairs_handed_to_the_kernel(self, n_queries, n_keys, levels, layout, tile, is_causal):
        kernel = _KERNEL
        plan = qa.plan(
            n_queries, n_keys=n_keys, heads=1, head_dim=4, dtype=torch.float32, levels=levels,
            layout=layout, tile=tile, is_causal=is_causal, kernel=kernel,
        )  # fmt: skip
        made = inputs(n_queries, n_keys, heads=1, head_dim=4)
        kernel.arm()
        kernel.pairs.clear()
        qa.attention(*made.three, is_causal=is_causal, plan=plan, kernel=kernel)
        kernel.armed = False
        wanted = Counter(
            (i, j) for i in range(n_queries) for j in range(n_keys) if not is_causal or j <= i
        )
        # A last chunk may be filled up: its rows beyond the end are computed, and left out.
        pairs = Counter({pair: n for pair, n in kernel.pairs.items() if pair[0] < n_queries})
        assert pairs == wanted

    @pytest.mark.parametrize("levels", LEVELS)
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("layout", ["aligned", "balanced"])
    @pytest.mark.parametrize("over_inputs", [None, False])
    @pytest.mark.parametrize("n", [61, 255])
    def test_probabilities_read_off_an_identity(
        self, levels, is_causal, layout, over_inputs, n
    ) -> None:
        """With V = identity the output is the matrix of probabilities: a pair left out is 0, a
        pair counted twice is too large; with equal scores both are seen to the last bit or so.

        At 255 the last chunk of a causal task is filled up (padding is at most a share of the
        rows), and one task may then be longer than the sequence."""
        zeros = torch.zeros(1, 1, n, n, dtype=torch.float64)
        plan = qa.plan(
            n, heads=1, head_dim=n, dtype=torch.float64, levels=levels, layout=layout, tile=4,
            is_causal=is_causal, over_inputs=over_inputs,
        )  # fmt: skip
        identity = torch.eye(n, dtype=torch.float64).expand(1, 1, n, n)
        out = qa.attention(zeros, zeros, identity, is_causal=is_causal, plan=plan)
        kept = torch.ones(n, n, dtype=torch.float64)
        kept = kept.tril() if is_causal else kept
        assert_close(out[0, 0], kept / kept.sum(-1, keepdim=True), 1e-14)


_KERNEL = WatchedKernel()


def in_order(monkeypatch: pytest.MonkeyPatch, order: random.Random) -> None:
    """Every pass runs its tasks in an order of its own."""
    usual = Decomposition.tasks

    def shuffled(self: Decomposition):
        tasks = list(usual(self))
        order.shuffle(tasks)
        return iter(tasks)

    monkeypatch.setattr(Decomposition, "tasks", shuffled)


@pytest.mark.usefixtures("one_thread")
class TestTheResultDoesNotDependOnHowItCameAbout:
    """2: task order, residency and recovery history change no more than the last bits; one plan
    on one device is repeatable bit for bit."""

    N = 400

    def plan(self, backward: bool, kernel: str, n_cap: int = 2, **more) -> qa.Plan:
        return qa.plan(
            self.N, heads=2, head_dim=8, dtype=torch.float32, is_causal=True, levels=(7,),
            tile=16, n_cap=n_cap, kernel=kernel, backward=backward, **more,
        )  # fmt: skip

    def both(self, made, kernel: str = "cpu", free: bool = False, fail=(0, 0), **more):
        """Both passes with allocation ``fail[0]`` of the forward and ``fail[1]`` of the backward
        failing (0: none), and how many allocations each made."""
        plans = [self.plan(backward, kernel, **more) for backward in (False, True)]
        if free:
            plans = [unpinned(plan) for plan in plans]
        report = qa.Report()
        call = {"is_causal": True, "report": report}
        with FailingAllocations(fail[0]) as forward:
            out, lse = qa.attention_with_lse(*made.three, plan=plans[0], **call)
        with FailingAllocations(fail[1]) as backward:
            grads = qa.attention_backward(
                made.grad_out, *made.three, out, lse, plan=plans[1], **call
            )
        return (out, lse, *grads), report, (forward.seen, backward.seen)

    @both_kernels
    def test_repeatable_bit_for_bit_and_on_any_residency(self, kernel: str) -> None:
        made = inputs(self.N)
        first, *_ = self.both(made, kernel)
        for more in ({}, {"accumulator": "device"}, {"accumulator": "host"}):
            other, *_ = self.both(made, kernel, **more)
            assert all(map(torch.equal, first, other)), more

    @both_kernels
    @pytest.mark.parametrize("n_cap", [1, 2, 3])
    def test_any_order_of_tasks(self, kernel, n_cap, monkeypatch) -> None:
        made = inputs(self.N)
        usual, *_ = self.both(made, kernel)
        in_order(monkeypatch, random.Random())
        shuffled, *_ = self.both(made, kernel, n_cap=n_cap)
        for one, other in zip(usual, shuffled, strict=True):
            assert error(one, other) < 2e-6

    @both_kernels
    @pytest.mark.parametrize("share", [0.35, 0.7])
    @pytest.mark.parametrize("n_cap", [1, 2])
    def test_any_history_of_recoveries(self, kernel, share, n_cap) -> None:
        made = inputs(self.N)
        usual, _, seen = self.both(made, kernel, free=True, n_cap=n_cap)
        fail = tuple(int(share * count) for count in seen)
        recovered, report, _ = self.both(made, kernel, free=True, fail=fail, n_cap=n_cap)
        assert report.forward.recoveries
        assert report.backward.recoveries
        for one, other in zip(usual, recovered, strict=True):
            assert error(one, other) < 2e-6


MASKS = {
    "none": lambda n: None,
    "rows": lambda n: torch.rand(n, n) > 0.3,
    "heads": lambda n: torch.randn(4, n, n),
    "padding": lambda n: torch.arange(n) < n - 9,
}


class TestTheBudgetIsNeverExceeded:
    """3: what the CPU allocator really handed out, inside operators too, against the plan."""

    N = 900

    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("depth", [0, 1, 2])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @both_ways
    @pytest.mark.parametrize("sizes", ["plain", "grouped"])
    def test_measured_peak(self, mask, depth, dtype, backward, sizes) -> None:
        more = {"kv_heads": 2, "value_dim": 24, "batch": (2,)} if sizes == "grouped" else {}
        made = inputs(self.N, heads=4, head_dim=16, dtype=dtype, **more)
        report = qa.Report()
        call = one_way(
            made, backward, attn_mask=MASKS[mask](self.N), is_causal=sizes == "grouped",
            enable_gqa=True,
        )  # fmt: skip
        found = usage(lambda: call(depth=depth, report=report))
        done = report.backward if backward else report.forward
        assert len(done.levels) == depth
        assert found.peak <= done.planned_peak_bytes
        if depth:  # the promise is not an idle one: within a factor of what is taken
            assert done.planned_peak_bytes <= 4 * found.peak + (8 << 20)

    @both_kernels
    @pytest.mark.parametrize("n_cap", [1, 2, 3])
    @pytest.mark.parametrize("accumulator", ["device", "host"])
    @both_ways
    def test_measured_peak_of_any_residency(self, kernel, n_cap, accumulator, backward) -> None:
        plan = qa.plan(
            400, tile=32, heads=4, head_dim=16, levels=(7,), n_cap=n_cap, accumulator=accumulator,
            heads_per_group=2, kernel=kernel, backward=backward,
        )  # fmt: skip
        call = one_way(inputs(400, heads=4, head_dim=16, dtype=torch.float16), backward)
        assert usage(lambda: call(plan=plan)).peak <= plan.peak_bytes

    @pytest.mark.parametrize("n_cap", [1, 2, 3])
    @pytest.mark.parametrize("accumulator", ["device", "host"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("heads_per_group", [2, 4])
    @both_ways
    def test_all_but_the_kernel_is_counted_to_the_byte(
        self, n_cap, accumulator, dtype, heads_per_group, backward
    ) -> None:
        """With a kernel that allocates nothing, plan and measurement differ by rounding only."""
        kernel = IdleKernel()
        sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 24, "dtype": dtype}
        plan = qa.plan(
            self.N, levels=(7,), layout="balanced", n_cap=n_cap, accumulator=accumulator,
            kernel=kernel, heads_per_group=heads_per_group, backward=backward, **sizes,
        )  # fmt: skip
        call = one_way(inputs(self.N, **sizes), backward, kernel=kernel, enable_gqa=True)
        call(plan=plan)  # the kernel is tried out once
        assert 0 <= plan.peak_bytes - usage(lambda: call(plan=plan)).peak <= 4096

    @pytest.mark.parametrize("lengths", [(16_384, 64), (64, 16_384)], ids=["queries", "keys"])
    @pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
    @both_ways
    def test_measured_peak_where_heads_alone_are_cut(self, lengths, given, backward) -> None:
        """One head group's results at a time; so long that no workspace bound hides a second."""
        n_queries, n_keys = lengths
        made = inputs(n_queries, n_keys, heads=4, head_dim=64)
        plan = qa.plan(
            n_queries, n_keys=n_keys, heads=4, head_dim=64, dtype=torch.float32, levels=(),
            heads_per_group=2, backward=backward,
        )  # fmt: skip
        call, more = one_way(made, backward), {}
        if given and backward:
            more["grads"] = tuple(map(torch.empty_like, made.three))
        elif given:
            more["out"] = torch.empty_like(made.query)
        assert plan.n_groups == 2
        mine = sum(t.nbytes for each in more.values() for t in (each if backward else (each,)))
        assert usage(lambda: call(plan=plan, **more)).peak <= plan.peak_bytes - mine

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("what", ["expanded", "unrounded"])
    def test_copies_that_the_backward_has_to_make_are_counted(self, depth, what) -> None:
        """A gradient of stride 0, an output kept in fp32: no operator takes them as they are."""
        n = 4000
        made = inputs(n, heads=4, head_dim=64, dtype=torch.bfloat16)
        dtype = torch.float32 if what == "unrounded" else None
        out, lse = qa.attention_with_lse(*made.three, out_dtype=dtype)
        given = (torch.ones((), dtype=out.dtype).expand_as(out), *made.three, out, lse)
        report = qa.Report()
        found = usage(lambda: qa.attention_backward(*given, depth=depth, report=report))
        assert found.peak <= report.backward.planned_peak_bytes

    @both_ways
    def test_a_budget_too_small_is_refused_before_any_work(self, backward: bool) -> None:
        call = one_way(inputs(self.N), backward)

        def refused() -> None:
            with pytest.raises(qa.BudgetError) as caught:
                call(budget=5000)
            assert caught.value.smallest_bytes > 5000

        refused()
        assert usage(refused).peak <= 64, "no more than a scalar to ask an element size of"

    def test_a_plan_does_not_lift_a_smaller_budget(self) -> None:
        plan = qa.plan(self.N, heads=2, head_dim=8, dtype=torch.float32, levels=(7,))
        made = inputs(self.N)
        with pytest.raises(qa.BudgetError) as caught:
            qa.attention(*made.three, plan=plan, budget=plan.peak_bytes - 1)
        assert caught.value.smallest_bytes == plan.peak_bytes
        qa.attention(*made.three, plan=plan, budget=plan.peak_bytes)


@pytest.mark.usefixtures("one_thread")
class TestNothingIsLeftBehind:
    """4: after success or any failure nothing stays allocated, and inputs are untouched."""

    @pytest.mark.parametrize("end", ["success", "pinned", "given up", "other error", "interrupt"])
    @both_ways
    def test_memory_and_inputs(self, end: str, backward: bool) -> None:
        n = 300
        made = inputs(n)
        run = one_way(made, backward)
        before = [t.clone() for t in run.args]
        kernel = {
            "success": WatchedKernel(),
            "pinned": WatchedKernel({3}),
            "given up": WatchedKernel(set(range(1000))),
            "other error": _Failing(ValueError),
            "interrupt": _Failing(KeyboardInterrupt),
        }[end]
        kernel.name = "watched"
        plan = qa.plan(
            n, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), tile=16, kernel=kernel,
            n_cap=2, backward=backward,
        )  # fmt: skip
        plan = unpinned(plan) if end == "given up" else plan
        ending: list[str] = []
        held = [kernel]

        def call() -> None:
            try:
                run(plan=plan, kernel=held[0])
                ending.append("success")
            except (ValueError, KeyboardInterrupt, torch.OutOfMemoryError) as failure:
                ending.append(type(failure).__name__)

        call()  # the kernel's own trial, made once, leaves its answer behind
        kernel.arm()
        left = usage(call).left
        expected = {"success": "success", "other error": "ValueError",
                    "interrupt": "KeyboardInterrupt"}.get(end, "OutOfMemoryError")  # fmt: skip
        assert ending[-1] == expected
        assert left == 0
        assert all(map(torch.equal, run.args, before))
        watch = weakref.ref(kernel)
        held.clear()
        del kernel
        gc.collect()
        assert watch() is None, "what was found out about a kernel keeps it"

    def test_autograd_lets_go_with_its_graph(self) -> None:
        made = inputs(300)
        three = [t.requires_grad_() for t in made.three]

        def call() -> None:
            out = qa.attention(*three, depth=1)
            torch.autograd.grad(out.sum(), three)

        call()
        gc.collect()
        assert usage(call).left == 0


class _Failing(WatchedKernel):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def _watch(self, task, work) -> None:
        if self.armed and len(self.started) == 4:
            raise self.error("broken")  # a new one: a kept one would keep the call's frames
        super()._watch(task, work)


@pytest.mark.usefixtures("one_thread")
class TestCompletedTasksAreNeverRecomputed:
    """5: whatever fails and when, a task that was done stays done, and the result is exact.

    Through slots; on inputs as they lie: execution/test_recovery.py."""

    N = 300

    @pytest.mark.parametrize("n_cap", [1, 3])
    @pytest.mark.parametrize("late", [False, True], ids=["at-once", "half-way"])
    @both_ways
    @pytest.mark.parametrize("fails", [{0}, {6}, {7}, {13}, {2, 3}, {5, 9, 12}], ids=str)
    def test_no_pair_is_computed_twice(self, n_cap, late, backward, fails) -> None:
        """Completed tasks and the pieces that deeper ones were cut into tile all pairs once; a
        failure after the state has been changed counts for nothing either."""
        made = inputs(self.N, heads=2)
        kernel = WatchedKernel(fails, late=late)
        plan = qa.plan(
            self.N, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), tile=8, kernel=kernel,
            n_cap=n_cap, heads_per_group=1, backward=backward, is_causal=True,
        )  # fmt: skip
        report, reference = qa.Report(), exact(made, is_causal=True, gradients=True)
        call = one_way(made, backward, is_causal=True)
        kernel.arm()
        results = call(plan=unpinned(plan), kernel=kernel, report=report)
        done = report.backward if backward else report.forward
        results = results if backward else (results,)
        wanted = reference.grads if backward else (reference.out,)
        for actual, expected in zip(results, wanted, strict=True):
            assert_close(actual, expected, 5e-5)
        assert len([l for l in done.recoveries if "out of memory" in l]) == len(fails)
        once = {(i, j): 2 for i in range(self.N) for j in range(i + 1)}  # two head groups
        assert dict(kernel.pairs) == once
        assert done.units == len(kernel.completed)


@pytest.mark.usefixtures("one_thread")
class TestNoNonFiniteNumberOfOurOwn:
    """6: NaN and infinity only where the float64 reference has them."""

    @staticmethod
    def check(
        made, tolerance: float, depth: int, kernel: str, gradients: float = 4.0, **call
    ) -> None:
        pin = {
            "attn_mask": call.get("mask"), "is_causal": call.get("is_causal", False),
            "depth": depth, "kernel": kernel,
        }  # fmt: skip
        out, lse, *grads = two_ways(made, **pin)
        reference = exact(made, gradients=True, **call)
        for found in (out, *grads):
            assert bool(found.isfinite().all())
        assert not lse.isnan().any()
        assert torch.equal(lse == -torch.inf, reference.lse == -torch.inf)
        assert_close(out, reference.out, tolerance)
        for actual, expected in zip(grads, reference.grads, strict=True):
            assert_close(actual, expected, gradients * tolerance)

    @pytest.mark.parametrize("spread", [100.0, 1000.0])
    @pytest.mark.parametrize("depth", [0, 1, 2])
    @both_kernels
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_scores_of_several_hundred_and_more(self, spread, depth, kernel, dtype) -> None:
        made = inputs(300, dtype=dtype, spread=spread)
        # Scores are rounded before they are exponentiated: an error that grows with their size.
        tolerance = (1e-6 if dtype == torch.float32 else 1e-13) * spread
        # The more so in gradients: nearly every row has one key, and the few with two nearly alike
        # make the largest element. Of 300 draws the worst was 4.5 times ``tolerance``.
        self.check(made, tolerance, depth, kernel, gradients=20.0, is_causal=True)

    @pytest.mark.parametrize("depth", [0, 1, 2])
    @both_kernels
    @pytest.mark.parametrize("kind", ["boolean", "additive", "huge", "chunks"])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_rows_and_tasks_without_keys(self, depth, kernel, kind, is_causal) -> None:
        n = 300
        made = inputs(n)
        mask = torch.rand(n, n) > 0.5
        mask[::5] = False
        if kind == "additive":
            mask = torch.zeros(n, n).masked_fill_(~mask, -torch.inf)
        elif kind == "huge":
            # Every row keeps a key: the lse of a row of -1e30 alone cannot tell how many there are.
            mask.fill_diagonal_(True)
            mask = torch.zeros(n, n).masked_fill_(~mask, -1e30)
        elif kind == "chunks":
            mask[:, 60:] = False  # most rectangles hold nothing for anybody
        self.check(made, 2e-5, depth, kernel, mask=mask, is_causal=is_causal)

    @pytest.mark.parametrize("dtype", DTYPES)
    @both_kernels
    @pytest.mark.parametrize("over_inputs", [None, False])
    def test_inputs_that_are_not_finite(self, dtype, kernel, over_inputs) -> None:
        """A NaN or an infinity in one element of one input, few keys and many, in last chunks that
        are filled up and in others, beside queries or keys of one sign (all scores -inf, no weight,
        no gradient) and of both: nothing that comes of it disappears, and nothing else is
        touched."""
        skip_where_rows_touch(kernel, dtype)
        seed = random.SystemRandom().randrange(1 << 31)
        draw = random.Random(seed)
        for number in range(30):
            n, tile = draw.choice([1, 2, 3, 5, 17, 70]), draw.choice([1, 8])
            m, is_causal = draw.choice([n, n, 1, 3, 16, 77]), draw.random() < 0.5
            filled = draw.random() < 0.4
            if filled:
                n, tile, is_causal = draw.choice([47, 63]), 8, True
                m = n
            made = inputs(n, m, heads=1, head_dim=8, dtype=dtype)
            name = draw.choice(["query", "key", "value", "grad_out"])
            tensor, value = getattr(made, name), draw.choice([math.nan, math.inf, -math.inf])
            row, column = draw.randrange(tensor.shape[-2]), draw.randrange(8)
            other = {"query": made.key, "key": made.query}.get(name)
            if other is not None and draw.random() < 0.5:
                other[..., column] = other[..., column].abs() + 0.1
            tensor[..., row, column] = value
            kept = torch.ones(n, m, dtype=torch.bool)
            kept = kept.tril() if is_causal else kept
            mask = None
            if draw.random() < 0.3 and not filled:
                mask = torch.rand(n, m) < 0.8
                mask[:, 0] = True  # rows without keys are a matter of their own
                kept &= mask
            levels, scale = draw.choice([(), (3,), (7,), (3, 3)]), draw.choice([0.3, 0.3, -0.3])
            layout = draw.choice(["balanced", "aligned"])
            if filled:
                levels, layout = draw.choice([(1,), (3,), (7,)]), "aligned"
            sizes = {
                "heads": 1, "n_keys": m, "head_dim": 8, "dtype": dtype, "levels": levels,
                "layout": layout, "tile": tile, "kernel": kernel,
                "is_causal": is_causal, "over_inputs": over_inputs,
            }  # fmt: skip
            call = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
            pins = [{"plan": qa.plan(n, backward=way, **sizes)} for way in (False, True)]
            results = two_ways(made, pins, **call)
            what = f"seed {seed}, number {number}: {value} in row {row} of {name}, {sizes}, {call}"
            assert_between(results, least(made, kept, scale), most(made, kept, scale), what)

    @pytest.mark.parametrize("dtype", DTYPES)
    @both_kernels
    def test_calls_over_parts_of_the_keys(self, dtype, kernel) -> None:
        """As on several devices: each part is given the output and the log-sum-exp of all, and does
        not see the key that made a row what it is."""
        skip_where_rows_touch(kernel, dtype)
        seed = random.SystemRandom().randrange(1 << 31)
        draw = random.Random(seed)
        for number in range(25):
            n, m = draw.choice([5, 17, 40]), draw.choice([6, 31, 77])
            made = inputs(n, m, heads=1, head_dim=8, dtype=dtype)
            name = draw.choice(["query", "key", "value", "grad_out"])
            tensor, value = getattr(made, name), draw.choice([math.nan, math.inf, -math.inf])
            row = draw.randrange(tensor.shape[-2])
            tensor[..., row, draw.randrange(8)] = value
            cut = draw.randrange(1, m)
            out, lse = qa.attention_with_lse(*made.three, scale=0.3, kernel=kernel)
            parts = [
                qa.attention_backward(
                    made.grad_out, made.query, made.key[..., keys, :], made.value[..., keys, :],
                    out, lse, scale=0.3, kernel=kernel,
                )
                for keys in (slice(0, cut), slice(cut, m))
            ]  # fmt: skip
            (dq, *first), (more, *second) = parts
            grads = (dq + more, *(torch.cat(pair, -2) for pair in zip(first, second, strict=True)))
            kept = torch.ones(n, m, dtype=torch.bool)
            what = f"seed {seed}, number {number}: {value} in row {row} of {name}, {n} {m} {cut}"
            bounds = least(made, kept, 0.3), most(made, kept, 0.3)
            assert_between((out, lse, *grads), *bounds, what)

    @pytest.mark.parametrize("offset", [-3e4, 3e4])
    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_huge_log_sum_exp(self, offset: float, depth: int) -> None:
        n = 300
        made = inputs(n, dtype=torch.float64)
        mask = torch.full((n, 1), offset, dtype=torch.float64)
        self.check(made, 1e-10, depth, "cpu", mask=mask)

    @pytest.mark.parametrize("kernel", ["auto", "dense"])
    @pytest.mark.parametrize("content", ["sink", "normal", "spread rows"])
    def test_fp16_gradients_near_the_edges_of_fp16(self, content: str, kernel: str) -> None:
        """Sinks, few keys, loss-scaled gradients, on every route; new ones every time."""
        first = random.SystemRandom().randrange(1 << 30)
        for seed in range(first, first + 15):
            grad = random.Random(seed).choice(["loss scaled", "wide range", "uniform", "positive"])
            case = replace(
                draw(seed), dtype="float16", kernel=kernel, content=content, grad=grad, mask=None,
                mask_grad=False, dropout=0.0, scores=Scores(), failure=None, lse_grad=None,
            )  # fmt: skip
            verdict = check(case)
            assert verdict.outcome == "right", str(verdict)

    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_fp16_at_its_extremes(self, depth: int) -> None:
        """Values near the largest fp16, whose sums overflow it though their means do not."""
        made = inputs(300, dtype=torch.float16)
        made.value = (made.value.sign() * 60_000).to(torch.float16)
        out = qa.attention(*made.three, depth=depth)
        assert bool(out.isfinite().all())
        assert_close(out, exact(made).out, TOLERANCE[torch.float16])
        assert_close(
            qa.attention(*made.three, depth=depth, out_dtype=torch.float32), exact(made).out,
            GRADIENT_TOLERANCE[torch.float16],
        )  # fmt: skip
