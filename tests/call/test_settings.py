"""Settings of a context: who wins, where they hold, and that blocks may end in any
order."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import signature

import pytest
import torch
from helpers.attention import Inputs, assert_close
from helpers.passes import both_passes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.settings import (
    checked_settings,
    current_settings,
    set_process_settings,
    using,
    with_current_settings,
)
from quorum_attention.devices import Pool
from quorum_attention.files.file_call import file_call

pytestmark = pytest.mark.usefixtures("one_thread")


def q(n: int = 60) -> torch.Tensor:
    return torch.randn(1, 2, n, 8, dtype=torch.float64)


def levels(report: qa.Report, which: str = "forward") -> int:
    return len(getattr(report, which).levels)


def asked(**call: object) -> tuple[int, ...]:
    """How deep a call is cut, forward and backward."""
    report = qa.Report()
    leaf = q().requires_grad_()
    qa.attention(leaf, leaf, leaf, report=report, **call).sum().backward()
    return levels(report), levels(report, "backward")


def test_a_call_s_own_arguments_win_and_plans_do() -> None:
    with qa.using(depth=1, kernel="dense"):
        assert asked() == (1, 1)
        assert asked(depth=2) == (2, 2)
        with qa.using(depth="auto"):
            assert asked() == (0, 0)
        plan = qa.plan(60, heads=2, head_dim=8, dtype=torch.float64, levels=(3,))
        with qa.using(depth=2, budget="1KiB", accumulator="host"):
            assert asked(plan=plan) == (1, 1), "a plan says all that it pins"
    assert asked() == (0, 0)


def test_all_three_functions_and_the_result_is_the_same() -> None:
    given, report = Inputs(*(q() for _ in range(4))), qa.Report()
    plain = both_passes(given)
    with qa.using(depth=1, kernel="dense", report=report):
        assert_close(both_passes(given), plain, 1e-12)
        assert_close(qa.attention(*given.three), plain[0], 1e-12)
    assert (report.total.forwards, report.total.backwards, report.total.cut) == (
        2,
        1,
        3,
    )
    assert set(report.total.kernels) == {"dense"}
    assert report.forward is None, "only the total is filled"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"depth": -1}, "depth"),
        ({"kernel": "none of these"}, "no kernel is named"),
        # A recomputation outside of the block would have the gradient of another
        # function.
        ({"kernel": qa.LongNetKernel([(30, 1)])}, "settings say how calls are run"),
        ({"kernel": qa.NativeKernel(window=(3, 0))}, "exact attention"),
        ({"devices": "mars"}, "devices"),
        ({"report": []}, "report"),
    ],
)
def test_nonsense_is_refused_by_name_before_the_block(
    bad: dict[str, object], says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        qa.using(**bad)
    assert current_settings() is None


def test_as_a_decorator_of_functions_and_generators() -> None:
    @qa.using(depth=1)
    def deep(times: int) -> None:
        assert current_settings()["depth"] == 1
        if times:
            deep(times - 1)
        assert current_settings()["depth"] == 1

    @qa.using(depth=2)
    def generator() -> Iterator[int]:
        for _ in range(2):
            yield current_settings()["depth"]

    deep(3)
    for depth in generator():
        assert depth == 2
        assert current_settings() is None, (
            "between its steps the caller has its own settings"
        )
    with pytest.raises(TypeError, match="asynchronous function"):

        @qa.using(depth=1)
        async def both() -> AsyncIterator[int]:
            yield 1


def test_a_thread_begins_without_and_takes_a_context_that_it_is_given() -> None:
    with qa.using(depth=1), ThreadPoolExecutor(1) as pool:
        context = contextvars.copy_context()
        assert pool.submit(current_settings).result() is None
        assert pool.submit(context.run, current_settings).result() == {"depth": 1}


fields = st.fixed_dictionaries(
    {},
    optional={
        "budget": st.sampled_from([None, "1GiB", 5000]),
        "depth": st.sampled_from(["auto", 0, 1]),
        "kernel": st.sampled_from(["auto", "cpu", "dense"]),
        "accumulator": st.sampled_from(["auto", "host"]),
    },
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(fields, st.sampled_from("bbbep"), st.integers(0, 5)), max_size=14
    )
)
def test_whatever_the_order_in_which_blocks_begin_and_end(moves) -> None:  # type: ignore[no-untyped-def]
    """Against the definition: of the open blocks, in the order of their beginning, the
    last that names a field wins; below them lies the process's own layer."""
    plain = {"budget": None, "depth": "auto", "kernel": "auto", "accumulator": "auto"}
    base: dict[str, object] = {}
    opened: list[tuple[using, dict[str, object]]] = []
    try:
        for layer, move, which in moves:
            if move == "b":
                opened.append((using(**layer), layer))
                opened[-1][0].__enter__()
            elif move == "e" and opened:
                opened.pop(which % len(opened))[0].__exit__(None, None, None)
            elif move == "p":
                base = layer
                set_process_settings(checked_settings(using, base) if base else None)
            said = [base, *(fields for _, fields in opened)]
            wanted = {k: [plain[k], *(s[k] for s in said if k in s)][-1] for k in plain}
            found = with_current_settings(CallOptions())
            assert {k: getattr(found, k) for k in plain} == wanted
    finally:
        set_process_settings(None)
        for block, _ in opened:
            block.__exit__(None, None, None)
    assert current_settings() is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_in_a_thread_of_autograd_s_has_the_settings_too(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA has such threads; here one of our own stands in for them: with torch's
    context in its thread-local objects, and a backward under way."""
    found = []

    def work() -> None:
        torch._C._stash_obj_in_tls("context", context)
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1)
        found.append(current_settings())
        torch._C._remove_obj_from_tls("context")
        found.append(current_settings())

    with qa.using(depth=1):
        context = contextvars.copy_context()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        monkeypatch.undo()
        assert found[0]["depth"] == 1
        assert found[1] is None
        report, leaf = qa.Report(), q().requires_grad_()
        out = checkpoint(
            lambda t: qa.attention(t, t, t, report=report),
            leaf,
            use_reentrant=use_reentrant,
        )
        out.sum().backward()
    assert levels(report) == levels(report, "backward") == 1
    assert report.total.forwards == 2, "recomputed"


@pytest.mark.parametrize("function", [qa.attention, Pool.attention, file_call])
def test_the_same_defaults_everywhere(function) -> None:  # type: ignore[no-untyped-def]
    usual = {**Arguments._field_defaults, **CallOptions._field_defaults}
    usual.pop("options")
    known = {
        n: p.default for n, p in signature(function).parameters.items() if n in usual
    }
    assert {"attn_mask", "dropout_p", "dropout_seed", "is_causal"} <= known.keys()
    assert known == {name: usual[name] for name in known}
