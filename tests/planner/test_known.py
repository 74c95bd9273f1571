"""What a search has found is found again in the next process: the same schedule and price."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quorum_attention.execution.case import Case, Placement
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.trimming import pairs_of
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels import get_kernel
from quorum_attention.kernels.native import NativeKernel
from quorum_attention.planner import known, search
from quorum_attention.planner.machine import assumed
from quorum_attention.planner.search import Candidate, Wish

HOST = Placement("cuda", False, False, torch.float16)
MACHINE = assumed("cuda", torch.float16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, on a machine that is taken for one with a GPU."""
    monkeypatch.setenv("QUORUM_ATTENTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(BACKENDS["cuda"], "is_here", lambda: True)
    known._known.cache_clear()
    yield tmp_path / "cache"
    known._known.cache_clear()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many numbers as there have been searches."""
    made: list[int] = []
    searched = search._searched

    def counted(*given: Any) -> Candidate:
        made.append(len(made))
        return searched(*given)

    monkeypatch.setattr(search, "_searched", counted)
    return made


def work(tokens: int = 1 << 18, heads: int = 8, **more: Any) -> Workload:
    return Workload((1,), heads, heads, tokens, tokens, 64, 64, torch.float16, True, **more)


def chosen(
    call: Workload, budget: int, *, backward: bool = False, kernel: Any = None, **more: Any
) -> Candidate:
    """What is chosen in a new process."""
    known._known.cache_clear()
    kernel = kernel or get_kernel("cudnn")
    wish = Wish(budget, **more.pop("wish", {}))
    place = more.get("place", HOST)
    return search._choose.__wrapped__(  # type: ignore[attr-defined, no-any-return]
        call, wish, pairs_of(call, kernel), kernel, place, more.get("machine", MACHINE),
        backward=backward,
    )  # fmt: skip


def test_the_same_schedule_is_found_again_without_a_search(searches: list[int]) -> None:
    for number in range(6):
        call = work(random.choice((100_000, 1 << 18, 1 << 20)) + number, random.choice((1, 8)))
        budget = random.choice((128, 300, 1024)) << 20
        backward = bool(number % 2)
        first = chosen(call, budget, backward=backward)
        count = len(searches)
        again = chosen(call, budget, backward=backward)
        assert again == first
        assert again.why
        assert len(searches) == count


def test_anything_else_is_searched_for(searches: list[int], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    call, budget = work(), 300 << 20
    chosen(call, budget)
    chosen(call, budget + 1)
    chosen(work(heads=4), budget)
    chosen(call, budget, wish={"n_cap": 1})
    chosen(call, budget, backward=True)
    chosen(call, budget, kernel=get_kernel("flash"))
    chosen(call, budget, machine=replace(MACHINE, flops=MACHINE.flops / 2))
    chosen(call, budget, place=replace(HOST, result_dtype=torch.float32))
    monkeypatch.setattr(known, "_code", lambda: "another version")
    chosen(call, budget)
    assert len(searches) == 9


def test_a_kernel_with_options_and_what_has_no_plain_name_are_not_remembered(folder: Path) -> None:
    @dataclass(frozen=True)
    class Masked(Workload):
        mask_of: object = None

    call = work()
    for case in (
        Case(call, NativeKernel(window=100), spec_of(False), HOST),
        Case(Masked((1,), 8, 8, 99, 99, 64, 64, torch.float16, True, mask_of=object()),
             get_kernel("cudnn"), spec_of(False), HOST),
        Case(call, get_kernel("cudnn"), spec_of(False), replace(HOST, device_type="cpu")),
    ):  # fmt: skip
        assert known.name_of(case, Wish(1), MACHINE) is None
    assert known.name_of(Case(call, get_kernel("cudnn"), spec_of(False), HOST), Wish(1), MACHINE)
    assert not folder.exists()


@pytest.mark.parametrize("text", ["{", "[]", "nothing", "huge", "short", "other length", "deep"])
def test_a_broken_file_is_as_good_as_none(text: str, folder: Path, searches: list[int]) -> None:
    call, budget = work(), 300 << 20
    first = chosen(call, budget)
    path = folder / "plans.json"
    entries = json.loads(path.read_text())
    (name,) = entries
    if text == "nothing":
        entries[name] = None
    elif text == "huge":  # its slots do not fit the budget
        entries[name][1] = [3]
    elif text == "short":
        entries[name] = entries[name][:4]
    else:
        entries[name][0] = 4096
    whole = "[" * 100_000 if text == "deep" else text
    path.write_text(whole if whole[0] in "{[" else json.dumps(entries))
    assert chosen(call, budget) == first
    assert len(searches) == 2


def test_a_folder_that_cannot_be_written_does_no_harm(folder: Path, searches: list[int]) -> None:
    folder.write_text("a file")
    first = chosen(work(), 300 << 20)
    assert chosen(work(), 300 << 20) == first
    assert len(searches) == 2


def test_the_file_does_not_grow_for_ever(folder: Path) -> None:
    chosen(work(), 300 << 20)
    path = folder / "plans.json"
    (entry,) = json.loads(path.read_text()).values()
    path.write_text(json.dumps({str(n): entry for n in range(known._MOST + 50)}))
    chosen(work(heads=2), 300 << 20)
    assert len(json.loads(path.read_text())) == known._MOST
