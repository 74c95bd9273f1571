"""One pass on a farm: its units and their states, handed to workers by a pool's coordinator."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from quorum_attention.call.mapped import Mappings
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.buffers import InFile, in_file
from quorum_attention.devices.processes import Turn
from quorum_attention.devices.report import PoolPass
from quorum_attention.devices.scheduler import Coordinator, Schedule
from quorum_attention.farm.crew import Crew
from quorum_attention.farm.data import Back, Piece, Source
from quorum_attention.farm.ledger import Fold, Ledger
from quorum_attention.farm.messages import Begin
from quorum_attention.farm.units import Cut, Head, Joint, Unit, units_of
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.mask import Mask
from quorum_attention.writing import IDENTITY, RUN_UNFINISHED, UNFINISHED, folder_of_now

_numbers = count(1)
# Workers have one pass at a time: two coordinators would hear each other's answers.
_turns: WeakKeyDictionary[Any, Turn] = WeakKeyDictionary()
_lock = Lock()


@dataclass(slots=True)
class Asked:
    """A pass that a farm is asked for.

    Attributes:
        backward: which of the two it is.
        cut: of the call.
        inputs: by name, (batch, heads, rows, ...).
        results: by name, likewise; in files, or in host memory.
        state, dtype: of states; of the output.
        options: keyword arguments of each call.
        mask, sinks, dropout: as in ``Begin``.
        heads: key/value heads to compute; None: all.
        retries: how often a unit may be begun again because its worker was lost.
    """

    backward: bool
    cut: Cut
    inputs: Mapping[str, torch.Tensor]
    results: Mapping[str, torch.Tensor]
    state: torch.dtype
    dtype: torch.dtype
    options: dict[str, Any]
    mask: Mask | None = None
    sinks: torch.Tensor | None = None
    dropout: Dropout | None = None
    heads: Collection[Head] | None = None
    retries: int = 3


def run(crew: Crew, asked: Asked, report: PoolPass) -> None:
    """Run a pass; its results are in place when this returns.

    Raises:
        OutOfMemoryError: memory ran out on every worker.
        RuntimeError: no worker is left, or a unit was begun too often; with what was done.
        Exception: what a worker raised.
    """
    for _ in steps(crew, asked, report):
        pass


def steps(crew: Crew, asked: Asked, report: PoolPass) -> Iterator[set[Head]]:
    """``run``, which stops now and then. Passes of several threads follow one another.

    Yields:
        heads whose results are complete since the last time. Of heads that are cut it is known at
        the end.

    Raises:
        RuntimeError: also where it is asked for within a pass of the same workers.
    """
    with _turn_of(crew).taken():
        try:
            yield from _steps(crew, asked, report)
        finally:
            crew.forget()


def _forked() -> None:
    """In a process that was forked off, maybe while another thread had the lock."""
    global _lock
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _turn_of(crew: Crew) -> Turn:
    with _lock:
        return _turns.setdefault(crew, Turn())


def _steps(crew: Crew, asked: Asked, report: PoolPass) -> Iterator[set[Head]]:
    mappings = Mappings.now()
    results = _files_of(asked.results, mappings)
    inputs: dict[str, Source] = {}
    for name, tensor in asked.inputs.items():
        found = _in_file(tensor, mappings, written=False)
        inputs[name] = crew.kept(tensor) if found is None else found
        if found is None and inputs[name] is not tensor:
            report.copied_bytes += tensor.nbytes
    begin = Begin(
        next(_numbers), asked.backward, asked.cut, inputs, results or {}, None, asked.state,
        asked.dtype, asked.options, asked.mask, asked.sinks, asked.dropout,
    )  # fmt: skip
    if results is None:
        yield from _Run(crew, asked, report).run(begin, _Totals(asked))
        return
    with _folder_beside(next(iter(results.values())).path) as folder:
        states = _States(asked.cut, folder)
        yield from _Run(crew, asked, report).run(replace(begin, folder=folder), states)


@dataclass(slots=True)
class _Run:
    """The units of a pass, and then what is left of states to be brought together."""

    crew: Crew
    asked: Asked
    report: PoolPass
    _begun: dict[Unit | Joint, int] = field(default_factory=dict)

    def run(self, begin: Begin, states: _States | _Totals) -> Iterator[set[Head]]:
        units = units_of(self.asked.cut, self.asked.heads)
        for _ in self._run(begin, units, states, self.report):
            yield states.complete()
        left = states.left()
        if left:
            rest = PoolPass(devices=self.report.devices)
            try:
                for _ in self._run(replace(begin, number=next(_numbers)), left, states, rest):
                    yield set()
            finally:
                self._add(rest)
        yield {(unit.entry, unit.kv.start) for unit in units if unit.task is not None}

    def _run(
        self, begin: Begin, works: Any, states: _States | _Totals, report: PoolPass
    ) -> Iterator[None]:
        report.devices = [hand.label for hand in self.crew.hands]
        report.parts = len(works)
        cut = self.asked.cut

        def given(work: Unit | Joint) -> tuple[Fold, ...] | Back:
            times = self._begun[work] = self._begun.get(work, 0) + 1
            if times > self.asked.retries + 1:
                raise RuntimeError(
                    f"{work.words(cut)} was begun {times - 1} times, and its worker was lost each "
                    f"time, after {len(report.ran)} of {len(works)} units: "
                    + "; ".join(report.history)
                )
            return states.begin(work)

        yield from Coordinator(
            self.crew.hands, begin, Schedule([works], lambda work: work.pairs(cut)),
            {work: number for number, work in enumerate(works)}, given, states.done, report,
            self.crew.listen, self.crew.recruits, self.asked.mask is None,
        ).steps()  # fmt: skip

    def _add(self, rest: PoolPass) -> None:
        report = self.report
        report.devices = rest.devices
        for one in rest.ran:
            one.index += report.parts
            one.start, one.stop = one.start + report.seconds, one.stop + report.seconds
        report.ran += rest.ran
        report.parts += rest.parts
        report.seconds += rest.seconds
        report.history += rest.history


class _States:
    """The states of a pass whose workers keep them in files."""

    def __init__(self, cut: Cut, folder: str) -> None:
        self._folder = folder
        self._complete: set[Head] = set()
        self._ledger = Ledger(cut, lambda key, n: "-".join(map(str, (*key, n))))

    def begin(self, work: Unit | Joint) -> tuple[Fold, ...]:
        self._remove(self._ledger.release(work))
        return self._ledger.claim(work)

    def done(self, work: Unit | Joint, folds: Any) -> None:
        self._remove(self._ledger.done(work))
        if isinstance(work, Unit) and work.task is None:
            self._complete.add((work.entry, work.kv.start))

    def complete(self) -> set[Head]:
        found, self._complete = self._complete, set()
        return found

    def left(self) -> list[Joint]:
        return self._ledger.left()

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, name))


class _Totals:
    """The states of a pass whose workers send them back."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._cut = asked, asked.cut
        self._left: dict[Head, int] = {}
        self._sums: dict[Head, list[torch.Tensor]] = {}
        self._complete: set[Head] = set()

    def begin(self, work: Unit | Joint) -> Back:
        return Back()

    def left(self) -> list[Joint]:
        assert not self._sums, "a task is missing"
        return []

    def complete(self) -> set[Head]:
        found, self._complete = self._complete, set()
        return found

    def done(self, work: Any, back: Any) -> None:
        of, heads = self._cut.sizes, self._cut.query_heads(work)
        rows, keys = Interval(0, of.n_queries), Interval(0, of.n_keys)
        if work.task is None:
            ((_, tensors),) = back.pieces
            self._store(work, heads, rows, keys, tensors)
            self._complete.add((work.entry, work.kv.start))
            return
        head = (work.entry, work.kv.start)
        if head not in self._sums:
            self._left[head] = self._cut.chunks
            self._sums[head] = self._empty(back.pieces[0])
        for piece in back.pieces:
            self._add(self._sums[head], piece)
        self._left[head] -= 1
        if not self._left[head]:
            self._store(work, heads, rows, keys, self._sums.pop(head))

    def _empty(self, like: Piece) -> list[torch.Tensor]:
        of = self._cut.sizes
        lengths = (of.n_queries, of.n_keys, of.n_keys)
        if not self._asked.backward:
            lengths = (of.n_queries, of.n_queries, 0)
        made = [
            torch.zeros((*t.shape[:2], n, *t.shape[3:]), dtype=t.dtype, device="cpu")
            for t, n in zip(like.tensors, lengths, strict=False)
        ]
        if not self._asked.backward:
            made[1].fill_(-torch.inf)
        return made

    def _add(self, sums: list[torch.Tensor], piece: Piece) -> None:
        assert piece.chunk is not None
        rows, keys = self._cut.queries(piece.chunk), self._cut.keys(piece.chunk)
        if not self._asked.backward:
            merge_(*(total[:, :, slice(*rows)] for total in sums), *piece.tensors)
            return
        for total, at, part in zip(sums, (rows, keys, keys), piece.tensors, strict=True):
            add_(total[:, :, slice(*at)], part)

    def _store(self, work: Any, heads: Any, rows: Any, keys: Any, tensors: Any) -> None:
        places: tuple[Interval, ...] = (heads, heads)
        names: tuple[str, ...] = ("out", "lse")
        if self._asked.backward:
            places = (heads, work.kv, work.kv)
            names = ("grad_query", "grad_key", "grad_value")
        for name, at, tensor in zip(names, places, tensors, strict=True):
            if name in self._asked.results:
                self._asked.results[name][work.entry, slice(*at)] = tensor[0]


def _files_of(results: Mapping[str, torch.Tensor], mappings: Mappings) -> dict[str, InFile] | None:
    """Results as parts of files, if all are, in whole rows one after the other."""
    found = {}
    for name, tensor in results.items():
        one = _in_file(tensor, mappings, written=True)
        if one is None or tensor.numel() == 0 or not tensor[0, 0].is_contiguous():
            return None
        if one.path.endswith(RUN_UNFINISHED):
            # Another process may begin that output anew, while workers of this one still write.
            with open(one.path, "rb") as file:
                one = replace(one, identity=file.read(IDENTITY.stop)[IDENTITY])
        found[name] = one
    return found


def _in_file(tensor: torch.Tensor, mappings: Mappings, written: bool) -> InFile | None:
    """The tensor in a file that others may have too: torch's shared memory is no such file."""
    found = in_file(tensor, mappings, written)
    return None if found is None or found.path.startswith("/dev/shm/torch_") else found


@contextmanager
def _folder_beside(path: str) -> Iterator[str]:
    """A folder beside a result, for partial states, removed at the end."""
    name = re.sub(rf"\.[0-9a-f]{{8}}{re.escape(UNFINISHED)}$", "", os.path.basename(path))
    with folder_of_now(f"{name}.states-", os.path.dirname(path)) as folder:
        yield str(folder)


__all__ = ["Asked", "run", "steps"]
