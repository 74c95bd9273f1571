"""Words of a group are of that group alone, and no more than it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from helpers_processes import run_python

from quorum_attention.distributed import board, watch
from quorum_attention.distributed.board import Board, Word


class Group:
    """A rank of a group of two."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes one rank; all have one store."""
    store = dist.HashStore()
    monkeypatch.setattr(board, "_store_of", lambda group: store)
    return Group


def test_a_group_made_again_hears_nothing_of_the_one_before(group: Any) -> None:
    """It may have the same name, and so the same place in the store."""
    for _ in range(3):
        here, there = [Board.of(group(rank), Board.made(group(rank))) for rank in (0, 1)]
        assert here is not None
        assert there is not None
        assert here.word() is None
        assert not here.all_see(1)
        assert not here.waiting()
        assert there.first(1)
        assert not here.first(1)
        there.tell(Word(1, 1, "gone", drains=False))
        there.see(1)
        there.wait(1, 1, "something")
        assert here.word() == Word(1, 1, "gone", False)
        assert here.all_see(1)
        assert here.waiting() == {1: (1, 1, "something")}


def test_a_group_without_a_store_has_no_words(monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
    monkeypatch.setattr(board, "_store_of", lambda group: None)
    assert Board.made(group(0)) == 0
    assert Board.of(group(0), 0) is None


DRY = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from quorum_attention import distributed
from quorum_attention.distributed.exchange import Delivery, Parcel
from quorum_attention.distributed.watch import Watch

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
for heads in (4, 8):
    for _ in range(3):
        q = torch.randn(1, heads, 30, 8, requires_grad=True)
        distributed.attention(q, q, q, lengths="equal").sum().backward()
with Watch(dist.group.WORLD, True) as watch:  # this rank only gets something
    parcels = [Parcel(1, 0, (4, 3), torch.float32)]
    (got,) = Delivery(parcels, dist.group.WORLD, torch.device("cpu"), watch).contents()
    assert got.shape == (4, 3)
    watch.end()
"""


def test_a_dry_run_is_no_disagreement() -> None:
    """torch's fake backend sends nothing, so no marks come either."""
    ran = run_python(DRY)
    assert ran.returncode == 0, ran.stderr


def test_a_store_that_keeps_nothing_is_no_error(
    monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
    monkeypatch.setattr(board, "_store_of", lambda group: dist.Store())
    assert Board.made(group(0)) == 0


def test_who_waits_for_hours_does_not_fill_the_store() -> None:
    """And still hears that another rank waits for something else."""
    one: Any = SimpleNamespace(_looks=0, _number=7, _what="a", _group=Group(0))
    said: list[int] = []
    theirs = {1: (7, 0, "b")}
    talk: Any = SimpleNamespace(
        wait=lambda number, time, what: said.append(time), waiting=lambda: theirs
    )
    found: list[Any] = []
    seen: dict[int, tuple[int, str]] = {}
    for _ in range(3600):
        found.append(watch.Watch._apart(one, talk, seen))
    assert found == [None] * 3600  # it said so once, long ago
    assert len(said) < 400
    for looks in range(20):
        theirs[1] = (7, looks, "b")
        found.append(watch.Watch._apart(one, talk, seen))
    assert any(found)
