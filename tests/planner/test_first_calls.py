"""A kernel that has to be built first is built when calls have lost as much without it: on a
made-up GPU, where building is a wait, and by made-up costs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_made_up_gpu import GPU, forget_files, made_up_gpu, new_kernels, probing

import quorum_attention as qa
from quorum_attention.execution.placement import Placement
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels import ahead, get_kernel
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.kernels.protocol import CallShape
from quorum_attention.planner import decide, first_calls
from quorum_attention.planner.cost import Cost
from quorum_attention.planner.first_calls import alike, not_yet
from quorum_attention.planner.options import Options

BUILDING, AGAIN = (2.1, 3.3), (0.65, 0.07)  # docs/native.md


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The names of the kernels that were tested, and so built."""
    made_up_gpu(monkeypatch, tmp_path)
    found: list[str] = []
    monkeypatch.setattr(probing, "_tried", lambda kernel, question: found.append(kernel.name))
    in_a_new_process(monkeypatch)
    yield found
    assert not ahead.RUNNING


def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    new_kernels(monkeypatch)
    forget_files(monkeypatch)
    monkeypatch.setattr(first_calls, "_lost", {})
    monkeypatch.setattr(first_calls, "_prepared", set())
    monkeypatch.setattr(first_calls, "_there", set())


def asked(kernel: str = "auto", mib: int = 16, tokens: int = 1 << 15) -> decide.Asked:
    """By default a forward of 43 ms on the native kernel, of 110 on cuDNN's."""
    work = Workload((1,), 8, 8, tokens, tokens, 64, 64, torch.float16, True)
    place = Placement("cuda", False, False, torch.float16)
    options = Options(GPU, kernel, budget_bytes=mib << 20)
    return decide.Asked(work, options, place, torch.float16, False, False)


def test_short_calls_do_not_wait_for_a_kernel_until_they_have_lost_as_much(
    built: list[str],
) -> None:
    new = decide.decide(asked())
    assert new.kernel.name == "cudnn"
    assert new.plan is not None
    assert built == ["cudnn"]
    assert "native would take" in new.plan.describe()
    native = decide.decide(asked("native")).plan
    assert native is not None
    loses = new.plan.predicted_seconds - native.predicted_seconds
    assert 0 < loses < 0.2


def calls_until_built(one: decide.Asked) -> tuple[int, list[decide.Decision]]:
    found = []
    for number in range(1, 200):
        found.append(decide.decide(one))
        if found[-1].kernel.name == "native":
            return number, found
    raise AssertionError("never")


def test_it_is_built_once_they_have(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = asked()
    number, decisions = calls_until_built(one)
    first = decisions[0].plan
    last = decisions[-1].plan
    assert first is not None
    assert last is not None
    loses = first.predicted_seconds - last.predicted_seconds
    preparation = first.candidate.cost.preparation
    assert preparation > 0
    expected = next(n for n in range(1, 200) if n * loses + preparation >= BUILDING[0])
    assert 10 < number == expected
    assert built == ["cudnn", "native"]
    assert all(d.plan is not None and d.plan.levels == first.levels for d in decisions[:-1])
    # From then on without asking.
    assert decide.decide(one).plan == last
    assert built == ["cudnn", "native"]
    # In the next process it is on disk, and takes less.
    in_a_new_process(monkeypatch)
    sooner, _ = calls_until_built(one)
    assert sooner == next(n for n in range(1, 200) if n * loses + preparation >= AGAIN[0])
    assert sooner < number


def test_a_call_that_gains_more_than_that_waits(built: list[str]) -> None:
    # 0.68 s instead of 52.
    work = replace(asked(mib=8).work)
    one = replace(asked(mib=8), work=work, needs_grad=True, backward=True)
    assert decide.decide(one).kernel.name == "native"
    assert built == ["cudnn", "native"]


def test_what_only_the_other_fits_waits(built: list[str]) -> None:
    assert decide.decide(asked(mib=4, tokens=1 << 16)).kernel.name == "native"
    assert built == ["cudnn", "native"]


@pytest.mark.parametrize("why", ["deterministic", "alike", "by name", "built"])
def test_where_calls_have_to_be_alike_nothing_is_weighed(why: str) -> None:
    one = asked("native" if why == "by name" else "auto")
    if why == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            found = decide.decide(one)
        finally:
            torch.use_deterministic_algorithms(False)
    elif why == "alike":
        with alike():
            found = decide.decide(one)
    else:
        if why == "built":  # somebody has asked for it by name
            decide.decide(asked("native"))
        found = decide.decide(one)
    assert found.kernel.name == "native"
    assert not first_calls._lost


def test_what_is_only_asked_does_not_count() -> None:
    forward = replace(asked(), needs_grad=True)
    backward = replace(forward, backward=True)
    decide.decide_both(forward, backward)
    (once,) = first_calls._lost.values()
    decide.decide(backward)
    (twice,) = first_calls._lost.values()
    assert 0.1 < once < twice
    in_both = decide.decide(forward, runs=False)
    assert in_both.kernel.name == "cudnn"
    assert list(first_calls._lost.values()) == [twice]


CALL = CallShape("cuda", torch.float16, 8, 8, 64, 64, True, True)


def cost(seconds: float, preparation: float = 0.0) -> Cost:
    return Cost(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, preparation, True, True)


@pytest.mark.parametrize("kept", [False, True])
def test_nobody_loses_more_than_twice_what_has_to_be(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Histories of calls of all lengths, against the best that could have been done."""
    monkeypatch.setattr(probing, "is_built", lambda *of: kept)
    building = sum(AGAIN if kept else BUILDING)
    for _ in range(300):
        kernel = NativeKernel()
        monkeypatch.setattr(first_calls, "_lost", {})
        monkeypatch.setattr(first_calls, "_prepared", set())
        monkeypatch.setattr(first_calls, "_there", set())
        largest = random.choice((0.01, 0.3, 3.0, 30.0))
        calls = [
            (random.choice("abc"), random.uniform(0, largest), random.uniform(0, 0.4))
            for _ in range(random.randint(1, 400))
        ]
        spent, seen = 0.0, set()
        for kind, gain, preparation in calls:
            slower, faster = cost(1 + gain, preparation), cost(1)
            if not_yet(kernel, CALL, GPU, (kind,), slower, faster, counts=True) is None:
                spent += building
                break
            spent += gain + preparation * (kind not in seen)
            seen.add(kind)
        assert spent < 2 * building
        never = sum(gain for _, gain, _ in calls)
        never += sum({kind: prep for kind, _, prep in reversed(calls)}.values())
        assert spent <= 2 * min(never, building) + 1e-9


def test_little_is_remembered_however_many_kinds_there_are() -> None:
    kernel = NativeKernel()
    for number in range(3000):
        call = replace(CALL, head_dim=8 * (1 + number), value_dim=8)
        not_yet(kernel, call, GPU, (number,), cost(1.1), cost(1.0), counts=True)
    assert 0 < len(first_calls._lost) <= 1024
    assert 0 < len(first_calls._prepared) <= 1024
    for number in range(3000):
        call = replace(CALL, head_dim=8 * (1 + number), value_dim=8)
        not_yet(get_kernel("dense"), call, GPU, (number,), cost(1.1), cost(1.0), counts=True)
    assert 0 < len(first_calls._there) <= 1024


def test_a_kernel_that_need_not_be_built_is_never_put_off() -> None:
    assert not_yet(get_kernel("dense"), CALL, GPU, (), cost(2), cost(1), counts=True) is None


def test_parts_of_a_call_on_several_devices_are_alike() -> None:
    from quorum_attention.devices import worker

    seen: list[bool] = []

    class One:
        unequal = False

        def compute(self, *of: Any) -> None:
            seen.append(first_calls._alike.get())
            raise ValueError("of its own")

    class Message:
        number = index = 0

    worker.answer(One(), Message())  # type: ignore[arg-type]
    assert seen == [True]
    assert not first_calls._alike.get()


def test_parts_of_a_call_from_files_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    from quorum_attention import passes
    from quorum_attention.cli import main

    seen: list[bool] = []
    decide_ = passes.decide

    def noted(*of: Any) -> Any:
        seen.append(first_calls._alike.get())
        return decide_(*of)

    monkeypatch.setattr(passes, "decide", noted)
    qkv = {name: torch.randn(1, 2, 64, 16) for name in "qkv"}
    out, lse = qa.attention_with_lse(*qkv.values(), devices="cpu")
    assert seen == [False]
    seen.clear()
    safetensors.torch.save_file(qkv, tmp_path / "qkv")
    forward = {"out": out, "lse": lse.contiguous(), "grad_out": torch.ones_like(out)}
    safetensors.torch.save_file(forward, tmp_path / "forward")
    files = [str(tmp_path / name) for name in ("qkv", "forward", "out")]
    assert main(["run", files[0], files[2], "--device", "cpu"]) == 0
    assert main(["run", "--backward", *files[:2], f"{files[2]}-of", "--device", "cpu"]) == 0
    assert len(seen) >= 4
    assert all(seen)
