"""The promises everything else rests on, one class each."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers.attention import Inputs, assert_close, error, exact, inputs
from helpers.kernels import IdleKernel, WatchedKernel
from helpers.memory import FailingAllocations, usage
from helpers.passes import both_passes, pass_of, smallest_budget
from helpers.plans import unpinned
from hypothesis import example, settings
from hypothesis import given as for_all
from hypothesis import strategies as st
from random_calls.case import Scores
from random_calls.draw import draw
from random_calls.run import check

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition

LEVELS = [(), (1,), (3,), (7,), (13,), (3, 7), (7, 3), (3, 3, 3)]
LAYOUTS = ["aligned", "balanced"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
both_ways = pytest.mark.parametrize("backward", [False, True])
both_kernels = pytest.mark.parametrize("kernel", ["cpu", "dense"])


@pytest.mark.usefixtures("one_thread")
class TestEveryPairIsComputedExactlyOnce:
    """1: coverage, for any length, mix of levels, layout, depth, causal or not."""

    @pytest.mark.slow
    @settings(max_examples=40, deadline=None)
    @for_all(
        n_queries=st.integers(1, 60),
        n_keys=st.integers(1, 60),
        levels=st.sampled_from(LEVELS),
        layout=st.sampled_from(LAYOUTS),
        tile=st.integers(1, 9),
        is_causal=st.booleans(),
    )
    @example(33, 33, (1,), "aligned", 2, True)
    def test_pairs_handed_to_the_kernel(
        self, n_queries, n_keys, levels, layout, tile, is_causal
    ):
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
            (i, j)
            for i in range(n_queries)
            for j in range(n_keys)
            if not is_causal or j <= i
        )
        # A last chunk may be filled up: its rows beyond the end are computed, and left
        # out.
        pairs = Counter(
            {pair: n for pair, n in kernel.pairs.items() if pair[0] < n_queries}
        )
        assert pairs == wanted


_KERNEL = WatchedKernel()


@pytest.mark.usefixtures("one_thread")
class TestTheResultDoesNotDependOnHowItCameAbout:
    """2: task order, residency and recovery history change no more than the last bits;
    one plan on one device is repeatable bit for bit."""

    N = 400

    def both(self, made, kernel: str = "cpu", free: bool = False, fail=(0, 0), **more):
        """Both passes with allocation ``fail[0]`` of the forward and ``fail[1]`` of the
        backward failing (0: none), and how many allocations each made."""
        results, report, seen = None, qa.Report(), []
        for backward in (False, True):
            plan = qa.plan(
                self.N, heads=2, head_dim=8, dtype=torch.float32, is_causal=True, levels=(7,),
                tile=16, kernel=kernel, backward=backward, **{"n_cap": 2, **more},
            )  # fmt: skip
            plan = unpinned(plan) if free else plan
            run = pass_of(
                made, backward, results, plan=plan, is_causal=True, report=report
            )
            with FailingAllocations(fail[backward]) as failing:
                results = (*(results or ()), *run())
            seen.append(failing.seen)
        return results, report, seen

    @both_kernels
    def test_repeatable_bit_for_bit_and_on_any_residency(self, kernel: str) -> None:
        made = inputs(self.N)
        first, *_ = self.both(made, kernel)
        for more in ({}, {"accumulator": "device"}, {"accumulator": "host"}):
            other, *_ = self.both(made, kernel, **more)
            assert all(map(torch.equal, first, other)), more

    @pytest.mark.slow_but_first
    @both_kernels
    @pytest.mark.parametrize("n_cap", [1, 2, 3])
    def test_any_order_of_tasks(self, kernel, n_cap, monkeypatch) -> None:
        made = inputs(self.N)
        usual, *_ = self.both(made, kernel)
        tasks = Decomposition.tasks

        def shuffled(self: Decomposition):
            every = list(tasks(self))
            return iter(random.sample(every, len(every)))

        monkeypatch.setattr(Decomposition, "tasks", shuffled)
        shuffled, *_ = self.both(made, kernel, n_cap=n_cap)
        assert max(map(error, usual, shuffled)) < 2e-6

    @pytest.mark.slow_but_first
    @both_kernels
    @pytest.mark.parametrize("share", [0.35, 0.7])
    @pytest.mark.parametrize("n_cap", [1, 2])
    def test_any_history_of_recoveries(self, kernel, share, n_cap) -> None:
        made = inputs(self.N)
        usual, _, seen = self.both(made, kernel, free=True, n_cap=n_cap)
        fail = tuple(int(share * count) for count in seen)
        recovered, report, _ = self.both(
            made, kernel, free=True, fail=fail, n_cap=n_cap
        )
        assert report.forward.recoveries
        assert report.backward.recoveries
        assert max(map(error, usual, recovered)) < 2e-6


MASKS = {
    "none": lambda n: None,
    "rows": lambda n: torch.rand(n, n) > 0.3,
    "heads": lambda n: torch.randn(4, n, n),
    "padding": lambda n: torch.arange(n) < n - 9,
}


class TestTheBudgetIsNeverExceeded:
    """3: what the CPU allocator really handed out, inside operators too, against the
    plan."""

    N = 900

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @both_ways
    @pytest.mark.parametrize(
        ("sizes", "depth"),
        [("plain", 0), ("plain", 2), ("grouped", 0), ("grouped", 1), ("grouped", 2)],
    )
    def test_measured_peak(self, mask, depth, dtype, backward, sizes) -> None:
        more = (
            {"kv_heads": 2, "value_dim": 24, "batch": (2,)}
            if sizes == "grouped"
            else {}
        )
        made = inputs(self.N, heads=4, head_dim=16, dtype=dtype, **more)
        report = qa.Report()
        call = pass_of(
            made, backward, attn_mask=MASKS[mask](self.N), is_causal=sizes == "grouped",
            enable_gqa=True,
        )  # fmt: skip
        call(depth=depth)  # the kernel is tried out once
        found = usage(lambda: call(depth=depth, report=report))
        done = report.backward if backward else report.forward
        assert len(done.levels) == depth
        assert found.peak <= done.planned_peak_bytes
        if depth:  # the promise is not an idle one: within a factor of what is taken
            assert done.planned_peak_bytes <= 4 * found.peak + (8 << 20)

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("n_cap", [1, 3])
    @pytest.mark.parametrize("accumulator", ["device", "host"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("heads_per_group", [2, 4])
    @both_ways
    def test_all_but_the_kernel_is_counted_to_the_byte(
        self, n_cap, accumulator, dtype, heads_per_group, backward
    ) -> None:
        """With a kernel that allocates nothing, plan and measurement differ by rounding
        only."""
        kernel = IdleKernel()
        sizes = {
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "value_dim": 24,
            "dtype": dtype,
        }
        plan = qa.plan(
            self.N, levels=(7,), layout="balanced", n_cap=n_cap, accumulator=accumulator,
            kernel=kernel, heads_per_group=heads_per_group, backward=backward, **sizes,
        )  # fmt: skip
        call = pass_of(
            inputs(self.N, **sizes), backward, kernel=kernel, enable_gqa=True
        )
        call(plan=plan)  # the kernel is tried out once
        assert 0 <= plan.peak_bytes - usage(lambda: call(plan=plan)).peak <= 4096

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize(
        "lengths", [(16_384, 64), (64, 16_384)], ids=["queries", "keys"]
    )
    @pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
    @both_ways
    def test_measured_peak_where_heads_alone_are_cut(
        self, lengths, given, backward
    ) -> None:
        """One head group's results at a time; so long that no workspace bound hides a
        second."""
        n_queries, n_keys = lengths
        made = inputs(n_queries, n_keys, heads=4, head_dim=64)
        plan = qa.plan(
            n_queries, n_keys=n_keys, heads=4, head_dim=64, dtype=torch.float32, levels=(),
            heads_per_group=2, backward=backward,
        )  # fmt: skip
        call, more = pass_of(made, backward), {}
        if given and backward:
            more["grads"] = tuple(map(torch.empty_like, made.three))
        elif given:
            more["out"] = torch.empty_like(made.query)
        assert plan.n_groups == 2
        mine = sum(
            t.nbytes for each in more.values() for t in (each if backward else (each,))
        )
        assert usage(lambda: call(plan=plan, **more)).peak <= plan.peak_bytes - mine

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize(
        "what", ["expanded", "wider", "unrounded", "sign", "sign and mask"]
    )
    def test_copies_that_a_call_has_to_make_are_counted(self, depth, what) -> None:
        """A gradient of stride 0 or of a wider dtype, an output kept in fp32: no
        operator takes them as they are. The sign of a scale goes to a copy of the
        queries."""
        dtype = {"wider": torch.float16, "sign": torch.float32}.get(
            what.split()[0], torch.bfloat16
        )
        made, report = inputs(2000, heads=4, head_dim=64, dtype=dtype), qa.Report()
        call = {"scale": -0.1, "is_causal": True} if "sign" in what else {}
        if "mask" in what:
            call["attn_mask"] = torch.randn(2000, 2000)
        wide = torch.float32 if what == "unrounded" else None
        results = qa.attention_with_lse(*made.three, out_dtype=wide, **call)
        if what == "expanded":
            made.grad_out = torch.ones((), dtype=dtype).expand_as(made.grad_out)
        elif what == "wider":
            made.grad_out = made.grad_out.float() * 1e6
        for backward in (False, True):
            run = pass_of(made, backward, results, depth=depth, report=report, **call)
            found = usage(run)
            done = report.backward if backward else report.forward
            assert found.peak <= done.planned_peak_bytes

    @both_ways
    def test_a_budget_too_small_is_refused_before_any_work(
        self, backward: bool
    ) -> None:
        call = pass_of(inputs(self.N), backward)

        def refused() -> None:
            with pytest.raises(qa.BudgetError):
                call(budget=5000)

        refused()
        assert usage(refused).peak <= 64, (
            "no more than a scalar to ask an element size of"
        )

    def test_a_plan_does_not_lift_a_smaller_budget(self) -> None:
        plan = qa.plan(self.N, heads=2, head_dim=8, dtype=torch.float32, levels=(7,))
        made = inputs(self.N)
        smallest = smallest_budget(
            lambda most: qa.attention(*made.three, plan=plan, budget=most)
        )
        assert smallest == plan.peak_bytes


@pytest.mark.usefixtures("one_thread")
class TestNothingIsLeftBehind:
    """4: after success or any failure nothing stays allocated, and inputs are
    untouched."""

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize(
        "end", ["success", "pinned", "given up", "other error", "interrupt"]
    )
    @both_ways
    def test_memory_and_inputs(self, end: str, backward: bool) -> None:
        made = inputs(300)
        run = pass_of(made, backward)
        before = [t.clone() for t in run.args]
        kernel, expected = {
            "success": lambda: (WatchedKernel(), None),
            "pinned": lambda: (WatchedKernel({3}), torch.OutOfMemoryError),
            "given up": lambda: (
                WatchedKernel(set(range(1000))),
                torch.OutOfMemoryError,
            ),
            "other error": lambda: (_Failing(ValueError), ValueError),
            "interrupt": lambda: (_Failing(KeyboardInterrupt), KeyboardInterrupt),
        }[end]()
        plan = qa.plan(
            300, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), tile=16, kernel=kernel,
            n_cap=2, backward=backward,
        )  # fmt: skip
        plan = unpinned(plan) if end == "given up" else plan
        held = [kernel]

        def call() -> None:
            run(plan=plan, kernel=held[0])

        call()  # the kernel's own trial, made once, leaves its answer behind
        kernel.arm()

        def ended() -> None:
            with pytest.raises(expected) if expected else nullcontext():
                call()

        assert usage(ended).left == 0
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
            raise self.error(
                "broken"
            )  # a new one: a kept one would keep the call's frames
        super()._watch(task, work)


@pytest.mark.usefixtures("one_thread")
class TestCompletedTasksAreNeverRecomputed:
    """5: whatever fails and when, a task that was done stays done, and the result is
    exact.

    Through slots; on inputs as they lie: execution/test_recovery.py."""

    N = 150

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("n_cap", [1, 3])
    @pytest.mark.parametrize("late", [False, True], ids=["at-once", "half-way"])
    @both_ways
    @pytest.mark.parametrize(
        "fails", [{0}, {6}, {7}, {13}, {2, 3}, {5, 9, 12}], ids=str
    )
    def test_no_pair_is_computed_twice(self, n_cap, late, backward, fails) -> None:
        """Completed tasks and the pieces that deeper ones were cut into tile all pairs
        once; a failure after the state has been changed counts for nothing either."""
        made = inputs(self.N, heads=2)
        kernel = WatchedKernel(fails, late=late)
        plan = qa.plan(
            self.N, heads=2, head_dim=8, dtype=torch.float32, levels=(7,), tile=4, kernel=kernel,
            n_cap=n_cap, heads_per_group=1, backward=backward, is_causal=True,
        )  # fmt: skip
        report, reference = qa.Report(), exact(made, is_causal=True, gradients=True)
        call = pass_of(made, backward, is_causal=True)
        kernel.arm()
        results = call(plan=unpinned(plan), kernel=kernel, report=report)
        done = report.backward if backward else report.forward
        assert_close(results, reference.of(backward), 5e-5)
        assert len([l for l in done.recoveries if "out of memory" in l]) == len(fails)
        once = {
            (i, j): 2 for i in range(self.N) for j in range(i + 1)
        }  # two head groups
        assert dict(kernel.pairs) == once
        assert done.units == len(kernel.completed)


# Where results are not finite, given inputs that are not: the least and the most there
# may be.
Flags = tuple[torch.Tensor, ...]


def skip_where_rows_touch(kernel: str, dtype: torch.dtype) -> None:
    """On processors with AMX torch's bf16 products let a row of NaN reach the row
    before it."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if kernel == "cpu" and dtype == torch.bfloat16 and ask is not None and ask():
        pytest.skip(
            "torch's bf16 products on AMX mix rows of NaN (docs/random-calls.md)"
        )


def least(given: Inputs, kept: torch.Tensor, scale: float) -> Flags:
    """Of out, lse and the gradients, with sums over kept pairs alone and P = exp(S -
    lse): a NaN or an infinity goes where it is used, and nowhere else."""
    q, k, v, do = (t.double() for t in (*given.three, given.grad_out))

    def product(
        pairs: torch.Tensor, rows: torch.Tensor, used: torch.Tensor
    ) -> torch.Tensor:
        every = pairs.unsqueeze(-1) * rows.unsqueeze(-3)
        return torch.where(used.unsqueeze(-1), every, 0.0).sum(dim=-2)

    scores = torch.where(kept, scale * (q @ k.mT), -math.inf)
    lse = scores.logsumexp(dim=-1)
    p = torch.where(
        kept, torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), 0.0
    )
    out = product(p, v, kept)
    ds = torch.where(kept, p * (do @ v.mT - (do * out).sum(dim=-1, keepdim=True)), 0.0)
    grads = (
        product(ds, k, kept),
        product(ds.mT, q, kept.mT),
        product(p.mT, do, kept.mT),
    )
    return _flags(out, lse, *grads)


def most(given: Inputs, kept: torch.Tensor, scale: float) -> Flags:
    """Of the same, by autograd through a masked softmax: NaN times a probability of 0
    is NaN."""
    q, k, v = (t.double().requires_grad_() for t in given.three)
    scores = scale * (q @ k.mT) + torch.zeros(kept.shape).masked_fill_(~kept, -math.inf)
    out = scores.softmax(dim=-1) @ v
    grads = torch.autograd.grad(out, (q, k, v), given.grad_out.double())
    return _flags(out.detach(), scores.detach().logsumexp(dim=-1), *grads)


def _flags(*results: torch.Tensor) -> Flags:
    return tuple(map(not_finite, results))


def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """NaN or infinite; an lse of -inf is that of a row without keys, and as it should
    be."""
    rows = tensor.dim() == 3
    return tensor.isnan() | (tensor == torch.inf) if rows else ~tensor.isfinite()


def assert_between(
    results: tuple[torch.Tensor, ...], least: Flags, most: Flags, what: str
) -> None:
    """None that the reference has has disappeared, and none has appeared."""
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    for name, result, some, every in zip(names, results, least, most, strict=True):
        found = not_finite(result)
        # The two differ both ways: a row with a score of +inf is NaN throughout in a
        # softmax.
        assert not bool((some & every & ~found).any()), f"{name} lost a NaN: {what}"
        assert not bool((found & ~some & ~every).any()), (
            f"{name} has a NaN of its own: {what}"
        )


@pytest.mark.usefixtures("one_thread")
class TestNoNonFiniteNumberOfOurOwn:
    """6: NaN and infinity only where the float64 reference has them."""

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("depth", [0, 1, 2])
    @both_kernels
    @pytest.mark.parametrize(
        "kind", ["boolean", "additive", "lowest", "chunks", "huge"]
    )
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_rows_and_tasks_without_keys(self, depth, kernel, kind, is_causal) -> None:
        """And with a log-sum-exp of 3e4, above and below 0."""
        n, tolerance = 300, 2e-5
        mask = torch.rand(n, n) > 0.5
        mask[::5] = False
        if kind == "additive":
            mask = torch.zeros(n, n).masked_fill_(~mask, -torch.inf)
        elif kind == "lowest":
            # Every row keeps a key: the lse of a row of -1e30 alone cannot tell how
            # many there are.
            mask.fill_diagonal_(True)
            mask = torch.zeros(n, n).masked_fill_(~mask, -1e30)
        elif kind == "chunks":
            mask[:, 60:] = False  # most rectangles hold nothing for anybody
        elif kind == "huge":
            mask, tolerance = torch.full((n, 1), 3e4, dtype=torch.float64), 1e-10
            mask[::2] = -3e4
        made = inputs(n, dtype=mask.dtype if kind == "huge" else torch.float32)
        out, lse, *grads = both_passes(
            made, attn_mask=mask, is_causal=is_causal, depth=depth, kernel=kernel
        )
        reference = exact(made, mask=mask, is_causal=is_causal, gradients=True)
        assert all(bool(found.isfinite().all()) for found in (out, *grads))
        assert not lse.isnan().any()
        assert torch.equal(lse == -torch.inf, reference.lse == -torch.inf)
        assert_close(out, reference.out, tolerance)
        assert_close(grads, reference.grads, 4 * tolerance)

    @staticmethod
    def broken(
        draw: random.Random, n: int, m: int, dtype: torch.dtype
    ) -> tuple[Inputs, str]:
        """A NaN or an infinity in one element of one input, maybe beside queries or
        keys of one sign (all scores -inf, no weight, no gradient)."""
        made = inputs(n, m, heads=1, head_dim=8, dtype=dtype)
        name = draw.choice(["query", "key", "value", "grad_out"])
        tensor, value = (
            getattr(made, name),
            draw.choice([math.nan, math.inf, -math.inf]),
        )
        row, column = draw.randrange(tensor.shape[-2]), draw.randrange(8)
        other = {"query": made.key, "key": made.query}.get(name)
        if other is not None and draw.random() < 0.5:
            other[..., column] = other[..., column].abs() + 0.1
        tensor[..., row, column] = value
        return made, f"{value} in row {row} of {name}, {n} x {m}"

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("dtype", DTYPES)
    @both_kernels
    @pytest.mark.parametrize("over_inputs", [None, False])
    def test_inputs_that_are_not_finite(self, dtype, kernel, over_inputs) -> None:
        """Few keys and many, in last chunks that are filled up and in others: nothing
        that comes of it disappears, and nothing else is touched."""
        skip_where_rows_touch(kernel, dtype)
        draw = random.Random(seed := random.SystemRandom().randrange(1 << 31))
        for number in range(30):
            n, tile = draw.choice([1, 2, 3, 5, 17, 70]), draw.choice([1, 8])
            m, is_causal = draw.choice([n, n, 1, 3, 16, 77]), draw.random() < 0.5
            levels, layout = draw.choice([(), (3,), (7,), (3, 3)]), draw.choice(LAYOUTS)
            if filled := draw.random() < 0.4:
                n, tile, is_causal = draw.choice([47, 63]), 8, True
                m, levels, layout = n, draw.choice([(1,), (3,), (7,)]), "aligned"
            made, what = self.broken(draw, n, m, dtype)
            kept, mask = torch.ones(n, m, dtype=torch.bool), None
            kept = kept.tril() if is_causal else kept
            if draw.random() < 0.3 and not filled:
                mask = torch.rand(n, m) < 0.8
                mask[:, 0] = True  # rows without keys are a matter of their own
                kept &= mask
            scale = draw.choice([0.3, 0.3, -0.3])
            sizes = {
                "heads": 1, "n_keys": m, "head_dim": 8, "dtype": dtype, "levels": levels,
                "layout": layout, "tile": tile, "kernel": kernel,
                "is_causal": is_causal, "over_inputs": over_inputs,
            }  # fmt: skip
            call = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
            plans = tuple(
                {"plan": qa.plan(n, backward=way, **sizes)} for way in (False, True)
            )
            results = both_passes(made, plans, **call)
            what = f"seed {seed}, number {number}: {what}, {sizes}, {call}"
            assert_between(
                results, least(made, kept, scale), most(made, kept, scale), what
            )

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("dtype", DTYPES)
    @both_kernels
    def test_calls_over_parts_of_the_keys(self, dtype, kernel) -> None:
        """As on several devices: each part is given the output and the log-sum-exp of
        all, and does not see the key that made a row what it is."""
        skip_where_rows_touch(kernel, dtype)
        draw = random.Random(seed := random.SystemRandom().randrange(1 << 31))
        for number in range(25):
            n, m = draw.choice([5, 17, 40]), draw.choice([6, 31, 77])
            made, what = self.broken(draw, n, m, dtype)
            cut = draw.randrange(1, m)
            out, lse = qa.attention_with_lse(*made.three, scale=0.3, kernel=kernel)
            (dq, *first), (more, *second) = (
                qa.attention_backward(
                    made.grad_out, made.query, made.key[..., keys, :], made.value[..., keys, :],
                    out, lse, scale=0.3, kernel=kernel,
                )
                for keys in (slice(0, cut), slice(cut, m))
            )  # fmt: skip
            grads = (
                dq + more,
                *(torch.cat(pair, -2) for pair in zip(first, second, strict=True)),
            )
            bounds = [flags(made, torch.ones(n, m) > 0, 0.3) for flags in (least, most)]
            what = f"seed {seed}, number {number}: {what}, {cut}"
            assert_between((out, lse, *grads), *bounds, what)

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("kernel", ["auto", "dense"])
    @pytest.mark.parametrize("content", ["sink", "normal", "spread rows"])
    def test_fp16_gradients_near_the_edges_of_fp16(
        self, content: str, kernel: str
    ) -> None:
        """Sinks, few keys, loss-scaled gradients, on every route; new ones every
        time."""
        first = random.SystemRandom().randrange(1 << 30)
        for seed in range(first, first + 15):
            grad = random.Random(seed).choice(
                ["loss scaled", "wide range", "uniform", "positive"]
            )
            case = replace(
                draw(seed), dtype="float16", kernel=kernel, content=content, grad=grad, mask=None,
                mask_grad=False, dropout=0.0, scores=Scores(), failure=None, lse_grad=None,
            )  # fmt: skip
            verdict = check(case)
            assert verdict.outcome == "right", str(verdict)
