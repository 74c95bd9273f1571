"""Tasks one by one on inputs as they lie: the same results, whatever fails, in less memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from helpers_attention import assert_close, exact, inputs
from helpers_kernels import WatchedKernel
from helpers_plans import unpinned
from hypothesis import given as drawn
from hypothesis import strategies as st

import quorum_attention as qa
from quorum_attention.decomposition import EMPTY, PARTIAL
from quorum_attention.execution.routes import over_inputs as routes
from quorum_attention.execution.routes.over_inputs import row_owners
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.kernels import Gradients, Statistics, TaskTensors
from quorum_attention.kernels.kit import document, from_score_mod, sliding_window
from quorum_attention.kernels.kit.masks import BlockMask

pytest.importorskip("torch.nn.attention.flex_attention")
pytestmark = pytest.mark.usefixtures("one_thread")

N = 400
TILE = 8
_LATE = BlockMask(
    lambda b, h, q, k: (q >= 130) & (k < 300),
    lambda r: EMPTY if r.queries.stop <= 130 or r.keys.start >= 300 else PARTIAL,
)
MASKS = {
    "window": sliding_window(30),
    "documents": document(torch.arange(N) // 45),
    "rows and keys without a partner": _LATE & sliding_window(40),
    "none": None,
    "nothing at all": BlockMask(lambda b, h, q, k: (q < 0) & (k < 0), lambda r: EMPTY),
}


class InPlace(WatchedKernel):
    """Attention under a mask, task by task on inputs as they lie; fails when told to."""

    own_attention = whole_tasks = sparse = True

    def __init__(self, mask: BlockMask | None, fail_at: set[int] | None = None) -> None:
        super().__init__(fail_at)
        self.mask = mask
        self.inner = from_score_mod(None, mask, compiled=False)
        self.kept_pairs = self.inner.kept_pairs
        self.forward_workspace_bytes = self.inner.forward_workspace_bytes
        self.backward_workspace_bytes = self.inner.backward_workspace_bytes
        self.in_place = 0

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        self._watch(task, lambda: self.inner.forward(task, state))

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        self._watch(task, lambda: self.inner.backward(task, grads))

    def takes_tasks(self, dtype: torch.dtype) -> bool:
        return True

    def task_span(self, task: TaskTensors) -> tuple[slice, slice] | None:
        kept = torch.zeros(task.query.shape[2], task.key.shape[2], dtype=torch.bool)
        for r in task.rectangles:
            q = torch.arange(r.query_start, r.query_stop)[:, None]
            k = torch.arange(r.key_start, r.key_stop)[None]
            keep = torch.ones(r.n_queries, r.n_keys, dtype=torch.bool)
            if self.mask is not None:
                keep &= self.mask(torch.tensor(0), torch.tensor(0), q, k)
            if r.causal:
                keep &= q >= k
            kept[r.query_start : r.query_stop, r.key_start : r.key_stop] |= keep
        if not kept.any():
            return None
        rows, columns = (kept.any(dim).nonzero().flatten() for dim in (1, 0))
        # A little more than it has to be, as a kernel's blocks are.
        return slice(int(rows[0]) // 4 * 4, int(rows[-1]) + 1), slice(
            int(columns[0]), min(task.key.shape[2], int(columns[-1]) + 3)
        )

    def task_forward(self, task: TaskTensors) -> tuple[torch.Tensor, torch.Tensor]:
        self.in_place += 1
        state = Statistics(
            torch.zeros(*task.query.shape[:3], task.value.shape[3], dtype=self._wide(task)),
            torch.full(task.query.shape[:3], -torch.inf, dtype=self._wide(task)),
        )
        self._watch(task, lambda: self.inner.forward(task, state))
        rows = self._known(task)[0]
        return state.out[:, :, rows].to(task.query.dtype), state.lse[:, :, rows]

    def task_backward(self, task, saved):  # type: ignore[no-untyped-def]
        self.in_place += 1
        sums = [torch.zeros(t.shape, dtype=self._wide(task)) for t in
                (task.query, task.key, task.value)]  # fmt: skip
        given = Gradients(saved.grad_out, saved.out, saved.lse, *sums)
        self._watch(task, lambda: self.inner.backward(task, given))
        rows, columns = self._known(task)
        axes = (rows, columns, columns)
        return tuple(s[:, :, a].to(task.query.dtype) for s, a in zip(sums, axes, strict=True))

    def _known(self, task: TaskTensors) -> tuple[slice, slice]:
        span = self.task_span(task)
        assert span is not None, "nobody asks about a task without a span"
        return span

    @staticmethod
    def _wide(task: TaskTensors) -> torch.dtype:
        return torch.promote_types(task.query.dtype, torch.float32)


def plans(given, kernel, is_causal: bool, over_inputs: bool | None = True, **more):  # type: ignore[no-untyped-def]
    """Forward's and backward's."""
    q, k, _ = given.three
    more = {"levels": (7,), "tile": TILE, **more}
    return [
        qa.plan(q.shape[-2], n_keys=k.shape[-2], heads=q.shape[-3], kv_heads=k.shape[-3],
                head_dim=q.shape[-1], dtype=q.dtype, is_causal=is_causal, kernel=kernel,
                batch=q.shape[:-3].numel(), device="cpu", over_inputs=over_inputs,
                backward=backward, **more)
        for backward in (False, True)
    ]  # fmt: skip


def run(given, kernel, is_causal: bool, planned, reports=(None, None)):  # type: ignore[no-untyped-def]
    common = {"is_causal": is_causal, "kernel": kernel, "devices": "cpu", "enable_gqa": True}
    out, lse = qa.attention_with_lse(*given.three, plan=planned[0], report=reports[0], **common)
    return out, lse, *qa.attention_backward(
        given.grad_out, *given.three, out, lse, plan=planned[1], report=reports[1], **common
    )  # fmt: skip


@drawn(st.data(), st.integers(1, 40))
def test_every_row_is_somebodys(data, n: int) -> None:  # type: ignore[no-untyped-def]
    edge = st.integers(0, n)
    span = st.none() | st.tuples(edge, edge).filter(lambda e: e[0] < e[1])
    spans = data.draw(st.lists(span, max_size=5))
    found = row_owners(tuple(spans), n)
    holders = [[] for _ in range(n)]
    for index, one in enumerate(spans):
        for row in range(*(one or (0, 0))):
            holders[row].append(index)
    assert found.n_shared == sum(len(who) > 1 for who in holders)
    assert [row for here in found.unowned for row in range(n)[here]] == [
        row for row in range(n) if not holders[row]
    ]
    places: dict[int, int] = {}
    seen = [[] for _ in range(n)]
    for index, (one, pieces) in enumerate(zip(spans, found.tasks, strict=True)):
        own = range(*(one or (0, 0)))
        assert [row for piece in pieces for row in range(n)[piece.rows]] == list(own)
        for piece in pieces:
            rows = range(n)[piece.rows]
            assert list(own[piece.part]) == list(rows)
            state = range(found.n_shared)[piece.state]
            assert len(state) == (0 if piece.first and piece.last else len(rows))
            for row, at in zip(rows, state, strict=False):
                assert places.setdefault(row, at) == at
            for row in rows:
                seen[row].append((piece.first, piece.last))
                assert holders[row][len(seen[row]) - 1] == index
    assert sorted(places.values()) == list(range(found.n_shared))
    for who in seen:
        assert who == [(at == 0, at == len(who) - 1) for at in range(len(who))]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(N, N), (150, N), (N, 250)])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_through_slots(name: str, sizes, is_causal: bool) -> None:
    given = inputs(*sizes, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64)
    found = []
    for over_inputs in (True, False):
        kernel = InPlace(MASKS[name])
        planned = plans(given, kernel, is_causal, over_inputs)
        route = routes.PerTask if over_inputs else Slots
        assert all(isinstance(p.schedule.route, route) for p in planned)
        found.append(run(given, kernel, is_causal, planned))
        assert bool(kernel.in_place) == (over_inputs and name != "nothing at all")
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_batches_head_groups_and_strided_inputs(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, N, 4, 8, generator=g).to(dtype).transpose(1, 2) for _ in range(4)
    )
    given = inputs(N, heads=4, head_dim=8, dtype=dtype)
    given.query, given.key, given.value, given.grad_out = q, k, v, grad
    kernel = InPlace(None)
    for more in ({}, {"heads_per_group": 2}):
        planned = plans(given, kernel, True, **more)
        assert isinstance(planned[0].schedule.route, routes.PerTask)
        out, _, *grads = run(given, kernel, True, planned)
        right = exact(given, is_causal=True, gradients=True)
        tolerance = 5e-3 if dtype == torch.float16 else 1e-4
        assert_close(out, right.out, tolerance)
        for mine, wanted in zip(grads, right.grads, strict=True):
            assert_close(mine, wanted, tolerance)


@pytest.mark.parametrize("backward", [False, True])
def test_groups_that_are_done_are_not_computed_again(backward: bool) -> None:
    """A failure in the third of four costs what that one had come to, no more."""
    n, kernel = 96, InPlace(None)
    given = inputs(n, heads=4)
    made = qa.plan(
        n, heads=4, head_dim=8, dtype=torch.float32, is_causal=True, levels=(7,), tile=8,
        over_inputs=True, heads_per_group=1, kernel=kernel, device="cpu", backward=backward,
    )  # fmt: skip
    assert isinstance(made.schedule.route, routes.PerTask)
    out, lse = qa.attention_with_lse(*given.three, is_causal=True)
    reference = exact(given, is_causal=True, gradients=True)
    kernel.fail_at = {7 * 2 + 3}
    kernel.arm()
    call = {"is_causal": True, "plan": unpinned(made), "kernel": kernel, "devices": "cpu"}
    if backward:
        got = qa.attention_backward(given.grad_out, *given.three, out, lse, **call)
        wanted = reference.grads
    else:
        got, wanted = (qa.attention(*given.three, **call),), (reference.out,)
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected, 5e-5)
    one = n * (n + 1) // 2
    assert 4 * one <= sum(kernel.pairs.values()) < 5 * one


class Forgetful(InPlace):
    """Looks whether the parts of the task before are gone when the next begins."""

    parts: tuple[weakref.ref, ...] = ()

    def task_forward(self, task: TaskTensors) -> tuple[torch.Tensor, torch.Tensor]:
        return self._watched(super().task_forward(task))

    def task_backward(self, task, saved):  # type: ignore[no-untyped-def]
        return self._watched(super().task_backward(task, saved))

    def task_begins(self) -> None:
        assert not any(part() is not None for part in self.parts)

    def _watched(self, parts):  # type: ignore[no-untyped-def]
        self.task_begins()
        parts = tuple(part.clone() for part in parts)
        self.parts = tuple(map(weakref.ref, parts))
        return parts


def test_one_tasks_results_at_a_time() -> None:
    given = inputs(N, heads=2, head_dim=8)
    kernel = Forgetful(MASKS["window"])
    run(given, kernel, True, plans(given, kernel, True, heads_per_group=1))
    assert kernel.in_place == 28
    kernel.task_begins()


def test_shared_rows_alone_have_a_state() -> None:
    """A window's tasks share few rows: the plan counts those, and at least what is run shares."""
    n = 16384
    for mask, most in ((sliding_window(500), 0.6), (None, 1.0)):
        kernel = InPlace(mask)
        plan = qa.plan(n, levels=(7,), heads=1, head_dim=8, dtype=torch.float16, is_causal=True,
                       kernel=kernel, device="cpu", over_inputs=True)  # fmt: skip
        assert isinstance(plan.schedule.route, routes.PerTask)
        whole = 4 * n * 9 + 4 * n
        assert plan.footprint.accumulators <= most * whole + 4 * n
    tally = plan_of_window = qa.plan(
        n, levels=(7,), heads=1, head_dim=8, dtype=torch.float16, is_causal=True,
        kernel=InPlace(sliding_window(500)), device="cpu", over_inputs=True,
    ).schedule.trimmed  # fmt: skip
    assert tally is not None
    assert plan_of_window is not None
    owners = [(i * 2432, min(n, (i + 1) * 2432 + 500)) for i in range(7)]
    assert tally.shared >= row_owners(tuple(o for o in owners if o[0] < o[1]), n).n_shared
    assert tally.widest >= max(stop - start for start, stop in owners)
