"""While a kernel is tested for the first time, its schedules are searched for; on made-up GPUs,
with tests that take as long as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_made_up_gpu import GPU, made_up_gpu, new_kernels, probing

import quorum_attention as qa
from quorum_attention.execution.placement import Placement
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels import ahead, registry
from quorum_attention.kernels.cudnn import CudnnKernel
from quorum_attention.planner import decide, search
from quorum_attention.planner.options import Options

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine with a made-up GPU, whose kernels nobody has tested yet."""
    made_up_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(probing, "is_proven", lambda *of: False)
    monkeypatch.setattr(probing, "note_proven", lambda *of: None)
    yield
    assert not ahead.RUNNING


class Tests:
    """Tests of kernels: what they answer, and in which threads they were made.

    Attributes:
        made: (kernel, whether it was the main thread).
    """

    __test__ = False

    def __init__(self, answer: Callable[[str], str | None]) -> None:
        self.answer = answer
        self.made: list[tuple[str, bool]] = []

    def __call__(self, kernel: Any, question: object) -> str | None:
        here = threading.current_thread() is threading.main_thread()
        self.made.append((kernel.name, here))
        return self.answer(kernel.name)


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], str | None]], Tests]:
    def begin(answer: Callable[[str], str | None]) -> Tests:
        made = Tests(answer)
        monkeypatch.setattr(probing, "_tried", made)
        return made

    return begin


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Kernels and passes that were searched for."""
    found: list[tuple[str, str]] = []
    search_ = search._searched

    def noted(case: Any, *of: Any) -> Any:
        taken = search_(case, *of)
        found.append((case.kernel.name, case.spec.name))
        return taken

    monkeypatch.setattr(search, "_searched", noted)
    return found


def asked(kernel: str = "auto", budget: int = GIB, tokens: int = 1 << 18) -> decide.Asked:
    work = Workload((1,), 8, 8, tokens, tokens, 64, 64, torch.float16, True)
    place = Placement("cuda", False, False, torch.float16)
    options = Options(GPU, kernel, budget_bytes=budget, depth=1)
    return decide.Asked(work, options, place, torch.float16, True, False)


def both(**given: Any) -> decide.Decision:
    forward = asked(**given)
    return decide.decide_both(forward, replace(forward, backward=True))


def until(there: Callable[[], bool]) -> None:
    """Wait for that, at most a while."""
    for _ in range(2000):
        if there():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came")


def test_both_passes_are_searched_for_while_the_kernel_is_tested(
    tests: Any, searched: list[tuple[str, str]]
) -> None:
    def slow(name: str) -> None:
        # Over only when both have been found.
        until(lambda: len(searched) == 2)

    made = tests(slow)
    found = both()
    assert found.kernel.name == "cudnn"
    assert made.made == [("cudnn", False)]
    assert searched == [("cudnn", "forward"), ("cudnn", "backward")]
    again = both()
    assert again.plan == found.plan
    assert len(made.made) == 1
    assert len(searched) == 2


def test_it_decides_what_it_would_have_decided(tests: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tests(lambda name: None)
    for number, budget in enumerate((GIB, 128 << 20)):
        tokens = (1 << 18) + 128 * number
        monkeypatch.setattr(decide, "_PREPARED", set())
        monkeypatch.setattr(decide, "compile_ahead", lambda *of: True)
        one = both(budget=budget, tokens=tokens)
        monkeypatch.setattr(decide, "_PREPARED", set())
        monkeypatch.setattr(decide, "compile_ahead", lambda *of: False)
        new_kernels(monkeypatch)
        assert both(budget=budget, tokens=tokens).plan == one.plan


def test_a_kernel_that_fails_its_test_is_not_used(tests: Any) -> None:
    made = tests(lambda name: "it returned NaN" if name == "cudnn" else None)
    found = both()
    assert found.kernel.name == "flash"
    assert found.plan is not None
    assert found.plan.kernel == "flash"
    assert made.made == [("cudnn", False), ("flash", True)]


def test_what_a_thread_could_not_answer_is_asked_again(tests: Any) -> None:
    def once(name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise torch.OutOfMemoryError("somebody else had it")

    made = tests(once)
    assert both().kernel.name == "cudnn"
    # The thread tries once more when torch has given back what it held.
    assert made.made == [("cudnn", False), ("cudnn", False), ("cudnn", True)]

    def never(name: str) -> None:
        raise torch.OutOfMemoryError("no memory")

    tests(never)
    narrow = replace(asked().work, head_dim=32, value_dim=32)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        decide.decide(replace(asked(), work=narrow))


def test_where_no_thread_can_be_started_the_caller_tests(
    tests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made = tests(lambda name: None)
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert both().kernel.name == "cudnn"
    assert made.made == [("cudnn", True)]


@pytest.mark.parametrize("why", ["second", "proven", "capturing", "of a user"])
def test_nothing_is_begun_where_there_is_nothing_to_wait_for(
    why: str, tests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a call of a kind that there has been, nor what passed in another process."""
    made = tests(lambda name: None)
    begun: list[str] = []
    monkeypatch.setattr(ahead, "begin", lambda name, *of: begun.append(name))
    if why == "second":
        monkeypatch.setattr(decide, "compile_ahead", lambda *of: False)
    elif why == "proven":
        monkeypatch.setattr(probing, "is_proven", lambda *of: True)
    elif why == "capturing":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="warm-up"):
            both()
        assert begun == made.made == []
        return
    else:

        class Mine(CudnnKernel):
            name = "mine"

        monkeypatch.setitem(registry._KERNELS, "mine", Mine())
        assert both(kernel="mine").kernel.name == "mine"
        assert begun == []
        assert made.made == [("mine", True)]
        return
    assert both().kernel.name == "cudnn"
    assert begun == []
    assert made.made == ([] if why == "proven" else [("cudnn", True)])


def test_a_budget_too_small_is_refused_as_ever(tests: Any) -> None:
    tests(lambda name: None)
    with pytest.raises(qa.BudgetError, match="too small"):
        both(budget=1 << 20, tokens=1 << 14)
