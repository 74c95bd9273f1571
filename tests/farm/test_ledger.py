"""Whoever dies when: each task is in each of its chunks once, and nothing is left over."""

from __future__ import annotations

import random

import pytest

from quorum_attention.devices.partition import Sizes
from quorum_attention.farm.ledger import Fold, Ledger
from quorum_attention.farm.units import Cut, Joint, Unit, units_of


class Disk:
    """Files by name with the tasks that are in them; and complete chunks."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.files: dict[str, list[int]] = {}
        self.results: dict[tuple[int, int, int], list[int]] = {}
        self.most = 0

    def compute(self, work: Unit | Joint, folds: tuple[Fold, ...], until: int) -> None:
        """What a worker does to the first ``until`` of its chunks, before it dies or ends."""
        for fold in folds[:until]:
            own = [] if isinstance(work, Joint) or work.task is None else [work.task]
            tasks = own + [task for name in fold.take for task in self.files[name]]
            assert len(set(tasks)) == len(tasks)
            if fold.put is not None:
                assert fold.put not in self.files
                self.files[fold.put] = tasks
            else:
                assert set(tasks) == self.cut.tasks(fold.chunk)
                self.results[work.entry, work.kv.start, fold.chunk] = tasks
        self.most = max(self.most, len(self.files))

    def remove(self, names: list[str]) -> None:
        for name in names:
            self.files.pop(name, None)


@pytest.mark.parametrize("seed", range(60))
def test_random_histories(seed: int) -> None:
    draw = random.Random(seed)
    heads = draw.randint(1, 3)
    cut = Cut(
        Sizes(draw.randint(1, 2), heads, heads, 9000, 9000, True), draw.choice([3, 7, 13, 31])
    )
    disk, count = Disk(cut), 0

    def name(key: tuple[int, int, int], number: int) -> str:
        nonlocal count
        count += 1
        return f"{key}-{number}-{count}"

    ledger = Ledger(cut, name)
    workers = draw.randint(1, 6)
    waiting: list[Unit | Joint] = list(units_of(cut))
    for _ in range(2):
        running: dict[Unit | Joint, tuple[Fold, ...]] = {}
        while waiting or running:
            if waiting and len(running) < workers and draw.random() < 0.6:
                work = waiting.pop(0)
                disk.remove(ledger.release(work))
                running[work] = ledger.claim(work)
            elif running:
                work = draw.choice(list(running))
                folds = running.pop(work)
                if draw.random() < 0.3:
                    disk.compute(work, folds, draw.randint(0, len(folds)))
                    waiting.insert(0, work)
                else:
                    disk.compute(work, folds, len(folds))
                    disk.remove(ledger.done(work))
        waiting = list(ledger.left())
    every = {(e, h, c) for e, h in {(u.entry, u.kv.start) for u in units_of(cut)}
             for c in range(cut.chunks)}  # fmt: skip
    assert disk.results.keys() == every
    assert not disk.files
    # One state of each chunk, and what each worker has claimed and left.
    quorum = len(cut.quorum(0))
    assert disk.most <= len(every) + 4 * workers * quorum


def test_one_worker_leaves_nothing_to_bring_together() -> None:
    cut = Cut(Sizes(1, 1, 1, 9000, 9000, True), 13)
    disk, ledger = Disk(cut), Ledger(cut, lambda key, n: f"{key}{n}")
    for unit in units_of(cut):
        disk.compute(unit, ledger.claim(unit), 99)
        disk.remove(ledger.done(unit))
    assert not ledger.left()
    assert not ledger.names
    assert disk.most <= 13 + 4
