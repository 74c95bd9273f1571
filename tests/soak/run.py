"""Makes calls until the time is over; a row of readings every so often, and a verdict."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from soak import kinds, others
from soak.meters import children, read, shared_names, thread_names, watch_page_locks
from soak.outcome import Kind, Outcome, Where
from soak.verdict import complaints, growth

KINDS = [*kinds.KINDS, *others.KINDS]


@dataclass
class Soak:
    """One run.

    Attributes:
        where, seed: which machine, which calls.
        say: takes lines for people.
        rows: of readings, oldest first.
        calls, spent, steps: by name of a kind.
        events, wrong, skipped: so far.
    """

    where: Where
    seed: int
    say: Callable[[str], None] = print
    rows: list[dict[str, Any]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    spent: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    _before: set[str] = field(default_factory=set)

    def run(self, seconds: float, every: float, only: set[str] | None = None) -> bool:
        """Whether nothing was wrong, nothing grew and nothing was left."""
        began = time.monotonic()
        watch_page_locks()
        self._before = shared_names()
        torch.set_num_threads(1)
        kinds = [k for k in self._here() if only is None or k.name in only]
        here = [kind for kind in kinds if not kind.beside]
        for kind in here:  # the warm-up: what is made once is made, libraries are loaded
            self.step(kind)
        after_warm_up = self._settled()
        self._row(began)
        shown = time.monotonic()
        beside: dict[str, threading.Thread] = {}
        while time.monotonic() - began < seconds:
            for kind in kinds:
                if kind.beside and not (kind.name in beside and beside[kind.name].is_alive()):
                    beside[kind.name] = threading.Thread(target=self.step, args=(kind,))
                    beside[kind.name].start()
            if here:
                self.step(min(here, key=lambda k: self.spent[k.name] / k.share))
            if time.monotonic() - shown >= every or not here:
                for thread in beside.values():
                    thread.join()
                shown = time.monotonic()
                self._row(began)
        for thread in beside.values():
            thread.join()
        self._row(began)
        ended = self._settled()
        self.complaints = complaints(self.rows, after_warm_up, ended)
        if ended["children"] > after_warm_up["children"]:
            self.complaints.append(f"processes left: {children()}")
        if ended["threads"] > after_warm_up["threads"]:
            self.complaints.append(f"Python's threads: {thread_names()}")
        return not self.wrong and not self.complaints

    def step(self, kind: Kind) -> None:
        """Some calls of a kind; the number of the step says which."""
        number, began = self.steps[kind.name], time.monotonic()
        self.steps[kind.name] += 1
        try:
            outcome = kind.step(self.where, self.source(kind.name, number))
        except Exception:
            outcome = Outcome(1, [traceback.format_exc()])
        self.spent[kind.name] += time.monotonic() - began
        self.calls[kind.name] += outcome.calls
        self.events.update(f"{kind.name}: {event}" for event in outcome.events)
        for words in outcome.wrong:
            text = f"--only {kind.name!r} --step {number} --seed {self.seed}: {words}"
            self.wrong.append(text)
            self.say(f"WRONG {text}")

    def source(self, name: str, number: int) -> random.Random:
        """What decides everything about one step."""
        return random.Random(zlib.crc32(f"{self.seed} {name} {number}".encode()))

    def data(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "seed": self.seed, "device": self.where.device, "torch": torch.__version__,
            "calls": dict(self.calls), "seconds": {k: round(s, 1) for k, s in self.spent.items()},
            "events": dict(self.events), "skipped": self.skipped, "wrong": self.wrong,
            "growth": {name: round(added) for name, added in growth(self.rows).items()},
            "complaints": self.complaints, "rows": self.rows,
        }  # fmt: skip

    def _here(self) -> list[Kind]:
        for kind in KINDS:
            why = kind.missing(self.where)
            if why:
                self.skipped[kind.name] = why
        return [kind for kind in KINDS if kind.name not in self.skipped]

    def _row(self, began: float) -> None:
        if self.steps["devices"]:
            others.start_workers()  # in each row as many, whatever has just been killed or closed
        _forget()
        row: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        row |= asdict(read(self.where.folder, self._before))
        row |= {"calls": sum(self.calls.values()), "wrong": len(self.wrong)}
        self.rows.append(row)
        self.say(
            f"{row['seconds']:7.0f} s {row['calls']:7} calls {row['wrong']:3} wrong"
            f"  rss {row['rss'] >> 20} MiB, of no file {row['anonymous'] >> 20}, device "
            f"{row['device_allocated'] >> 20}/{row['device_reserved'] >> 20}, locked "
            f"{row['page_locked'] >> 20}+{row['pinned'] >> 20}, {row['descriptors']} descriptors, "
            f"{row['threads']} threads, {row['children']} children of "
            f"{row['children_anonymous'] >> 20} MiB, "
            f"files {row['shared_files']}+{row['temporary_files']}"
        )

    def _settled(self) -> dict[str, Any]:
        """A reading with pools closed, and some patience for what is on its way out."""
        from multiprocessing import resource_sharer

        from quorum_attention import pool

        pool.close()
        resource_sharer.stop(timeout=5)  # type: ignore[attr-defined]
        _forget()
        until = time.monotonic() + 5
        while children() and time.monotonic() < until:
            time.sleep(0.05)
        return asdict(read(self.where.folder, self._before))


def _forget() -> None:
    """What the harness remembers, torch's compiler, and the package's caches of bounded size: they
    take an hour to be full. What has no bound stays, and is seen to grow."""
    from random_calls import kernels

    kernels._scores.cache_clear()
    torch._dynamo.reset()
    for found in gc.get_objects():
        if (
            type(found) is functools._lru_cache_wrapper
            and (found.__module__ or "").startswith("quorum_attention")
            and found.cache_parameters()["maxsize"] is not None
        ):
            found.cache_clear()
