"""Heads that are left when a device leaves are cut among the others, so that none is idle."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.pool import Pool
from quorum_attention.pool.cut_anew import cut_anew
from quorum_attention.pool.messages import Compute
from quorum_attention.pool.parts import Sizes, cut_part, parts_of
from quorum_attention.pool.report import PoolPass
from quorum_attention.pool.simulate import simulate
from quorum_attention.pool.worker import _obey
from quorum_attention.pool.workers import Worker

ALIKE = dict.fromkeys(range(3), 1.0)


def in_pieces(part: str, count: int) -> list[str]:
    """Of parts that are named by their letters, each of which is as much work."""
    return [part[n::count] for n in range(count)]


@pytest.mark.parametrize(
    ("free", "cut"),
    [
        (["abc"], ["abc"]),
        (["abc", "def", "ghi"], []),  # one for each
        (["abc", "def", "ghi", "jkl"], ["jkl"]),
        (["abc", "def", "ghi", "jkl", "mno"], ["jkl", "mno"]),
        ([], []),
    ],
)
def test_what_does_not_divide_is_cut(free: list[str], cut: list[str]) -> None:
    found = cut_anew(free, len, in_pieces, ALIKE, {}, 0.0)
    assert sorted(found) == cut
    assert all(len(pieces) == 3 for pieces in found.values())


def test_only_if_that_is_worth_it() -> None:
    """Three devices do one head's work of 3 s in 1 s."""
    assert cut_anew(["abc"], len, in_pieces, ALIKE, {}, 1.9)
    assert not cut_anew(["abc"], len, in_pieces, ALIKE, {}, 2.1)
    assert not cut_anew(["abc"], len, lambda part, count: [part], ALIKE, {}, 0.0)
    # One is idle long before the others.
    assert not cut_anew(["abc"], len, in_pieces, ALIKE, {1: 3.0, 2: 3.0}, 0.0)
    assert not cut_anew(["abc"], len, in_pieces, {0: 1.0, 1: 50.0, 2: 50.0}, {}, 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_are_the_part(seed: int) -> None:
    draw = random.Random(seed)
    heads, share = draw.randint(1, 4), draw.choice([1, 1, 3])
    sizes = Sizes(
        2, heads * share, heads, draw.choice([1024, 40_000]), 40_000, draw.random() < 0.7,
        rows_may_be_cut=draw.random() < 0.8,
    )  # fmt: skip
    for part in parts_of(sizes, draw.randint(1, 4)):
        pieces = cut_part(sizes, part, 5)
        assert sum(piece.pairs(sizes) for piece in pieces) == part.pairs(sizes)
        assert len(set(pieces)) == len(pieces)
        rows = sum(piece.heads.length * piece.rows.length for piece in pieces)
        assert rows == part.heads.length * part.rows.length
        assert all(piece.entry == part.entry for piece in pieces)
        if len(pieces) == 5 and share == 1 and sizes.n_queries > 1024:
            work = [piece.pairs(sizes) for piece in pieces]
            assert max(work) - min(work) <= 2 * 128 * sizes.n_keys  # cut at multiples of a tile


def over_ideal(report: PoolPass, lost: int, at: float) -> float:
    """Makespan over one in which what was not done at ``at`` is divided evenly among the others."""
    left = sum(r.stop - max(at, r.start) for r in report.ran if r.device != lost and r.stop > at)
    return report.seconds / (at + left / (len(report.devices) - 1))


@pytest.mark.parametrize(
    ("devices", "heads"), [(2, 8), (3, 8), (4, 8), (8, 8), (4, 32), (8, 32), (3, 5)]
)
@pytest.mark.parametrize("sure", [False, True])
def test_scheduling_costs_next_to_nothing(devices: int, heads: int, sure: bool) -> None:
    """At twenty random moments; whole heads, of which eight devices had one each, took 1.75."""
    sizes = Sizes(1, heads, heads, 1 << 17, 1 << 17, True)
    pairs = sum(part.pairs(sizes) for part in parts_of(sizes, 1))
    draw = random.Random(devices * heads)
    found = []
    for _ in range(20):
        lost, at = draw.randrange(devices), draw.random() / devices
        report = simulate(
            sizes, ["a"] * devices, lambda device, part: part.pairs(sizes) / pairs,
            lost={lost: at}, sure=sure,
        )  # fmt: skip
        assert sorted(one.index for one in report.ran) == list(range(report.parts))
        found.append(over_ideal(report, lost, at))
    assert statistics.median(found) < 1.01
    assert max(found) < 1.05


class Process:
    """What a worker needs of a process, of one that is a thread here."""

    pid, exitcode = 0, None

    def is_alive(self) -> bool:
        return False

    def join(self, seconds: float | None = None) -> None: ...


class Ending:
    """A worker's end of its pipe; it is closed when there is something to compute."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def recv(self) -> Any:
        message = self._pipe.recv()
        if isinstance(message, Compute):
            self._pipe.close()
            raise EOFError
        return message


def start(names: list[str], *options: Any, **more: Any) -> list[Worker]:
    """Workers that are threads; the second one ends with its first part."""
    workers = []
    for number, name in enumerate(names):
        ours, theirs = multiprocessing.Pipe()
        end: Any = Ending(theirs) if number == 1 else theirs
        threading.Thread(target=_obey, args=(torch.device(name), end, None), daemon=True).start()
        workers.append(Worker(name, Process(), ours, name))
    return workers


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_results_of_pieces(monkeypatch: pytest.MonkeyPatch, is_causal: bool, kv_heads: int) -> None:
    """One of three workers ends; each of the others takes some rows of what it had, and gradients
    of their keys are added up."""
    monkeypatch.setattr("quorum_attention.pool.pool._NEW_ON_HOST", 0.0)  # whatever it is worth
    monkeypatch.setattr("quorum_attention.pool.pool.start", start)
    q, grad = (torch.randn(1, 3, 2000, 16) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, 2000, 16) for _ in range(2))
    options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
    out, lse = qa.attention_with_lse(q, k, v, **options)
    wanted = (out, *qa.attention_backward(grad, q, k, v, out, lse, **options))
    for backward in (False, True):
        report = qa.Report()
        with Pool(["cpu"] * 3) as pool:
            more: dict[str, Any] = {**options, "devices": pool, "report": report}
            if backward:
                got = qa.attention_backward(grad, q, k, v, out, lse, **more)
            else:
                got = (qa.attention(q, k, v, **more),)
        assert report.pool is not None
        made = report.pool.backward if backward else report.pool.forward
        assert made is not None
        assert len(made.history) == 2
        assert made.parts > 3
        assert sorted(one.index for one in made.ran) == list(range(made.parts))
        for one, other in zip(got, wanted[1:] if backward else wanted[:1], strict=True):
            assert torch.allclose(one, other, atol=1e-5)
