"""The filled-up last chunk: all tasks have the same shape, and results do not change."""

from __future__ import annotations

import math
import random

import pytest
import torch
from helpers_attention import GRADIENT_TOLERANCE, TOLERANCE, assert_close, error, exact, inputs
from helpers_not_finite import assert_between, least, most

import quorum_attention as qa
from quorum_attention.decomposition import Task
from quorum_attention.execution.trimming import filled, is_filled


def plan(n: int, backward: bool = False, **others) -> qa.Plan:
    sizes = {"heads": 2, "head_dim": 8, "is_causal": True, "levels": (7,), "tile": 8}
    return qa.plan(n, over_inputs=False, device="cpu", backward=backward, **{**sizes, **others})


def tasks(made: qa.Plan) -> list[Task]:
    return filled(list(made.tasks()), made.decomposition, made.work)


def test_all_tasks_have_the_same_shapes() -> None:
    made = plan(1110)  # seven chunks of 160, less 10 tokens
    found = tasks(made)
    assert {task.n_tokens for task in found} == {480}
    assert sum(is_filled(task, made.work) for task in found) == 3
    assert len({tuple(sorted((r.n_queries, r.n_keys) for r in t.rectangles(True)))
                for t in found}) == 1  # fmt: skip


@pytest.mark.parametrize(
    "others",
    [{"is_causal": False}, {"n_keys": 1000}, {"layout": "balanced"}, {"levels": (7, 7)}],
)
def test_only_where_it_changes_nothing(others) -> None:
    made = plan(1110, **others)
    assert not any(is_filled(task, made.work) for task in tasks(made))


def test_chunks_that_are_wholly_empty_stay_empty() -> None:
    # 13 chunks of 80: the end of the sequence is within the eleventh.
    given = inputs(854, heads=2, head_dim=8, dtype=torch.float64)
    shape = {"dtype": torch.float64, "levels": (13,), "tile": 40}
    made = plan(854, True, **shape)
    assert made.decomposition.chunk_tokens == 80
    ragged = [task for task in tasks(made) if is_filled(task, made.work)]
    assert ragged
    assert all(task.spans[-1].stop == 880 for task in ragged)
    out, lse = qa.attention_with_lse(*given.three, is_causal=True, plan=plan(854, **shape))
    grads = qa.attention_backward(given.grad_out, *given.three, out, lse, is_causal=True, plan=made)
    reference = exact(given, is_causal=True, gradients=True)
    for actual, expected in zip((out, *grads), (reference.out, *reference.grads), strict=True):
        assert_close(actual, expected, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_a_filled_task_may_be_longer_than_the_sequence(seed: int, dtype: torch.dtype) -> None:
    """One task holds every token and the rows that are filled up. The query is strided, because
    only then does the call go through slots."""
    rng = random.Random(seed)
    n, levels = [(1020, (1,)), (511, (3,)), (253, (1,)), (505, (3,))][seed % 4]
    if seed >= 4:
        n = 128 * rng.randint(1, 8) - rng.randint(1, 9)
        levels = rng.choice([(1,), (3,), (7,)])
    heads, width = rng.choice([1, 2]), rng.choice([8, 24])
    given = inputs(n, heads=heads, head_dim=16, value_dim=width, dtype=dtype)
    given.query = given.query.mT.contiguous().mT
    shape = {
        "heads": heads, "head_dim": 16, "value_dim": width, "dtype": dtype, "levels": levels,
        "tile": 128, "n_cap": rng.choice([1, 2]),
    }  # fmt: skip
    plans = [plan(n, backward, **shape) for backward in (False, True)]
    rows = plans[0].schedule.task_rows(plans[0].work)
    assert all(task.n_tokens <= rows[0] for task in tasks(plans[0]))
    out, lse = qa.attention_with_lse(*given.three, is_causal=True, plan=plans[0])
    grads = qa.attention_backward(
        given.grad_out, *given.three, out, lse, is_causal=True, plan=plans[1]
    )
    reference = exact(given, is_causal=True, gradients=True)
    assert_close(out, reference.out, TOLERANCE[dtype])
    assert_close(lse, reference.lse, 5e-5)
    for actual, expected in zip(grads, reference.grads, strict=True):
        assert_close(actual, expected, GRADIENT_TOLERANCE[dtype])


def both(given, plans, **call):  # type: ignore[no-untyped-def]
    """(out, lse, grad_query, grad_key, grad_value) of a causal call by the plans of both passes."""
    call |= {"is_causal": True}
    out, lse = qa.attention_with_lse(*given.three, plan=plans[0], **call)
    grads = qa.attention_backward(given.grad_out, *given.three, out, lse, plan=plans[1], **call)
    return out, lse, *grads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_a_key_without_any_weight_has_no_gradient(
    dtype: torch.dtype, kernel: str, scale: float
) -> None:
    """Scores of -inf give a key weights of 0, and finite gradients; the rows that fill up a chunk
    must not multiply an infinity by 0 either."""
    given = inputs(63, heads=2, head_dim=8, dtype=dtype)
    column = given.query[..., 3]
    column.copy_(column.abs() + 0.1)
    given.key[:, :, 20, 3] = math.copysign(math.inf, -scale)
    sizes = {"dtype": dtype, "kernel": kernel, "tile": 16}
    plans = [plan(63, backward, **sizes) for backward in (False, True)]
    assert any(is_filled(task, plans[0].work) for task in tasks(plans[0]))
    found = both(given, plans, scale=scale)
    reference = exact(given, is_causal=True, scale=scale, gradients=True)
    for number, wanted in ((0, reference.out), (3, reference.grads[1]), (4, reference.grads[2])):
        assert bool(wanted.isfinite().all())
        assert error(found[number], wanted) <= GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
@pytest.mark.parametrize("kernel", ["cpu", "dense"])
def test_what_is_not_finite_goes_where_it_goes_without_them(
    name: str, value: float, kernel: str
) -> None:
    """Single elements and whole rows, the last real row (which is repeated) among them."""
    for row, columns in ((62, 3), (62, slice(None)), (61, 3), (0, 3), (20, 3), (47, slice(None))):
        given = inputs(63, heads=1, head_dim=8, dtype=torch.float64)
        other = {"query": given.key, "key": given.query}.get(name)
        if other is not None:
            other[..., 3] = other[..., 3].abs() + 0.1
        getattr(given, name)[:, :, row, columns] = value
        sizes = {"heads": 1, "dtype": torch.float64, "kernel": kernel, "tile": 16}
        plans = [plan(63, backward, **sizes) for backward in (False, True)]
        kept = torch.ones(63, 63, dtype=torch.bool).tril()
        bounds = least(given, kept, 0.3), most(given, kept, 0.3)
        words = f"{value} in row {row}, columns {columns} of {name}"
        assert_between(both(given, plans, scale=0.3), *bounds, words)
