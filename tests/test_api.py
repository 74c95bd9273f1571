"""``attention()``: empty and mapped inputs, progress, what a report says, plans of
other calls."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers.attention import GRADIENT_TOLERANCE, assert_close, exact, inputs

import quorum_attention as qa
from quorum_attention.execution.report import PassReport
from quorum_attention.progress import bars

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_sequences(n_queries, n_keys, depth, is_causal) -> None:
    given = inputs(n_queries, n_keys)
    for tensor in given.three:
        tensor.requires_grad_()
    out, lse = qa.attention_with_lse(*given.three, depth=depth, is_causal=is_causal)
    assert out.shape == (1, 2, n_queries, 8)
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    out.sum().backward()
    assert not any(t.grad.any() for t in given.three)
    for batch, heads in (((0,), 2), ((1,), 0), ((2, 0), 3), ((), 0)):
        given = inputs(20, batch=batch, heads=heads)
        assert qa.attention(*given.three, depth=depth).shape == given.query.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_arrays(dtype: torch.dtype) -> None:
    """Of NumPy: inputs that may be read alone, and results in float32."""
    given = inputs(300, dtype=dtype)
    wanted = exact(given, gradients=True)
    arrays = [tensor.numpy() for tensor in vars(given).values()]
    for array in arrays:
        array.flags.writeable = False
    (*three, grad_out), (out, *grads) = (
        arrays,
        np.zeros((4, *given.query.shape), np.float32),
    )
    _, lse = qa.attention_with_lse(*three, depth=1, out=out)
    found = qa.attention_backward(
        grad_out, *three, out, lse, depth=1, grads=tuple(grads)
    )
    assert [t.data_ptr() for t in found] == [a.ctypes.data for a in grads]
    results = map(torch.from_numpy, (out, *grads))
    assert_close(results, (wanted.out, *wanted.grads), GRADIENT_TOLERANCE[dtype])


def test_progress_callable_and_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    given, seen = inputs(300), []
    heads, head_dim = given.query.shape[1], given.query.shape[3]
    plan = qa.plan(
        300,
        heads=heads,
        head_dim=head_dim,
        dtype=given.query.dtype,
        levels=(7,),
        over_inputs=False,
    )
    qa.attention(*given.three, plan=plan, progress=lambda *now: seen.append(now))
    assert seen == [(i + 1, 7, "forward") for i in range(7)]
    seen.clear()
    qa.attention(*given.three, depth=1, progress=lambda *now: seen.append(now))
    assert seen[-1] == (7, 7, "forward")
    seen.clear()
    qa.attention(*given.three, depth=0, progress=lambda *now: seen.append(now))
    assert seen == [(1, 1, "forward")]
    seen.clear()
    monkeypatch.setattr(bars, "_PATIENCE", 0.0)
    monkeypatch.setattr(bars, "_console", lambda: None)
    monkeypatch.setattr(bars.Lines, "update", lambda self, *now: seen.append(now))
    qa.attention(*given.three, plan=plan, progress=True)
    assert seen == [(i + 1, 7, "forward") for i in range(7)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_report_says_what_happened(depth: int) -> None:
    given = inputs(300, heads=4, kv_heads=2)
    report = qa.Report()
    assert str(report) == "nothing has run yet"
    three = [t.requires_grad_() for t in given.three]
    levels = (7,) * depth
    qa.attention(*three, depth=depth, enable_gqa=True, report=report).sum().backward()
    for part in (report.forward, report.backward):
        assert part is not None
        assert (part.kernel, part.levels, part.planned_levels) == (
            "cpu",
            levels,
            levels,
        )
        assert part.units == 7**depth * part.n_groups
        assert part.n_groups * part.heads_per_group == 4
        # At depth 1 all tasks run at once where the inputs are; nothing is moved.
        assert (part.loaded_bytes > 0) == (part.stored_bytes > 0) == (depth == 2)
        assert set(part.stages) == {
            "gather",
            "h2d",
            "compute",
            "merge",
            "d2h",
            "scatter",
        }
        assert part.stages["compute"] > 0
        assert part.seconds > 0
        assert part.planned_peak_bytes > 0
        assert part.recoveries == []
    assert report.to_dict()["forward"]["kernel"] == "cpu"
    assert "kernel: cpu" in str(report)


Q = torch.zeros(1, 2, 50, 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_tokens": 49}, "plan was made for n_queries = 49, the call has 50"),
        ({"head_dim": 16}, "head_dim = 16, the call has 8"),
        ({"dtype": torch.float16}, "dtype = torch.float16"),
        ({"is_causal": True}, "is_causal = True, the call has False"),
        ({"batch": 2}, "batch = 2, the call has 1"),
        ({"n_keys": 51}, "n_keys = 51, the call has 50"),
        ({"value_dim": 4}, "value_dim = 4, the call has 8"),
        ({"kv_heads": 1}, "kv_heads = 1, the call has 2"),
    ],
)
def test_a_plan_of_another_call_is_refused(change, says) -> None:
    sizes = {
        "n_tokens": 50,
        "heads": 2,
        "head_dim": 8,
        "dtype": torch.float32,
        **change,
    }
    plan = qa.plan(sizes.pop("n_tokens"), **sizes)
    with pytest.raises(ValueError, match=says):
        qa.attention(Q, Q, Q, plan=plan)


def test_of_calls_small_cut_and_failed() -> None:
    report, outer = qa.Report(), qa.Report()
    q = torch.randn(1, 4, 300, 16, requires_grad=True)
    with qa.using(report=outer):
        qa.attention(q, q, q).sum().backward()  # at once, without a plan
        assert "1 forward, 1 backward" in str(outer)
        qa.attention(q, q, q, report=report, depth=1).sum().backward()
        with pytest.raises(qa.BudgetError):
            qa.attention(q, q, q, budget=100)
    assert (report.total.forwards, report.total.backwards, report.total.cut) == (
        1,
        1,
        2,
    )
    assert (outer.total.forwards, outer.total.backwards, outer.total.cut) == (2, 2, 2)
    assert outer.total.seconds > report.total.seconds > 0
    assert outer.total.peak_bytes == max(
        report.forward.planned_peak_bytes, report.backward.planned_peak_bytes
    )
    # One report given twice counts once.
    with qa.using(report=report):
        qa.attention(q.detach(), q, q, report=report)
    assert report.total.forwards == 2


def test_overlap_is_what_the_longest_stage_hides_of_the_others() -> None:
    for seconds, stages, overlap in (
        (2.5, {"h2d": 0.5, "d2h": 0.5, "compute": 2.0}, 0.5),
        (
            9.0,
            {"h2d": 1.0, "compute": 2.0},
            0.0,
        ),  # something else took time: not negative
        (2.0, {"compute": 2.0}, None),
    ):
        made = PassReport("dense", seconds=seconds, stages=stages)
        assert made.overlap == (None if overlap is None else pytest.approx(overlap))
    plain = json.loads(json.dumps(qa.Report(forward=made).to_dict()))
    assert plain["backward"] is None
    assert plain["forward"].keys() == {*PassReport.__dataclass_fields__, "overlap"}
