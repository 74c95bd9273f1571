"""A worker process: computes parts on one device until its pool is closed or gone."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from socket import socket
from typing import Any, Protocol

import torch

from quorum_attention.call.gradients import given_of
from quorum_attention.call.options import Written
from quorum_attention.call.request import Request, Tensors, request_of
from quorum_attention.errors import BudgetError, is_out_of_memory
from quorum_attention.execution.device.cuda import Handed
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.device.page_locks import is_locked
from quorum_attention.execution.report import Report
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.mask import Mask
from quorum_attention.passes import run_backward, run_forward
from quorum_attention.planner.first_calls import alike
from quorum_attention.pool.local import Local
from quorum_attention.pool.masked import bias_at, masked
from quorum_attention.pool.measured import measured
from quorum_attention.pool.messages import (
    Begin,
    Begun,
    Compute,
    Done,
    End,
    Ended,
    Failed,
    Measure,
    Ready,
)
from quorum_attention.pool.openings import Openings, most_locked_bytes
from quorum_attention.pool.parts import Part
from quorum_attention.pool.rule import check_rules
from quorum_attention.pool.shared import InFile, opened
from quorum_attention.pool.shelf import never_wait, taken
from quorum_attention.pool.touched import Touching

# How often a worker without work looks whether the pool's process has freed memory; and after how
# long it gives back what it holds on its device.
_IDLE_SECONDS, _LONG_SECONDS = 1.0, 10.0
# Tensors of a pass that are large.
_GRADS = ("grad_query", "grad_key", "grad_value")
_ROWS = ("query", "key", "value", "grad_out", "out", "lse", "grad_lse", *_GRADS)


def work(device: str, threads: int | None, pipe: Connection, outlet: socket | None = None) -> None:
    """Obey a pool until it says no more.

    Args:
        threads: of a CPU device.
        outlet: of its shelf.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its workers itself
    if threads is not None:
        torch.set_num_threads(threads)
    if outlet is not None:
        never_wait(outlet)
    place = torch.device(device)
    backend = backend_of(place)
    with backend.current(place):
        torch.empty(1, device=place)  # opens the device, which takes a while
        pipe.send(Ready(device if on_host(place) else backend.model(place)))
        _obey(place, pipe, outlet)


def _obey(place: torch.device, pipe: Connection, outlet: socket | None) -> None:
    passes: dict[int, _Pass] = {}
    met: set[Any] = set()
    well = True
    kept = backend_of(place).kept
    openings = Openings(None if kept is None else kept.locker, most_locked_bytes())
    while True:
        try:
            if not passes:
                _wait(place, pipe, openings)
            # After a failure nothing is taken that waits: the pool takes it back.
            message = _next(pipe, outlet if passes and well else None)
        except (EOFError, OSError):
            return  # the pool is gone
        if message is None:
            return
        if isinstance(message, Begin):
            # There is one at a time: of what is still here the pool was interrupted as it said so.
            _end(passes, list(passes))
            passes[message.number] = _Pass(message, place, openings, met)
        elif isinstance(message, Measure):
            if not _sent(pipe, measured(place, message)):
                return
        elif isinstance(message, End):
            _end(passes, [message.number])
            if message.confirm and not _sent(pipe, Ended(message.number)):
                return
        else:
            if outlet is not None and not _sent(pipe, Begun(message.number, message.index)):
                return
            said = _answer(passes[message.number], message)
            well = isinstance(said, Done)
            if not _sent(pipe, said):
                return


def _end(passes: dict[int, _Pass], numbers: Iterable[int]) -> None:
    """Passes are over; a pool that is interrupted may say so of one that never began here."""
    for number in numbers:
        one = passes.pop(number, None)
        if one is not None:
            one.end()


def _answer(one: _Pass, message: Compute) -> Done | Failed:
    said = answer(one, message)
    return replace(said, opening=one.opening, new=one.new) if isinstance(said, Done) else said


def _next(pipe: Connection, outlet: socket | None) -> Any:
    """The order that waits, or the next message."""
    while outlet is not None:
        found = taken(outlet)
        if found is not None:
            return found
        if pipe in wait([pipe, outlet]):
            break
    return pipe.recv()


def _sent(pipe: Connection, message: object) -> bool:
    try:
        pipe.send(message)
    except ConnectionError:
        return False
    return True


def _wait(place: torch.device, pipe: Connection, openings: Openings) -> None:
    """Wait for a message; let go of memory meanwhile: at once of what the pool's process has freed,
    after a while of what is held on the device."""
    waited = 0.0
    while waited < _LONG_SECONDS or openings:
        if pipe.poll(_IDLE_SECONDS):
            return
        waited += _IDLE_SECONDS
        openings.forget_gone()
        if waited == _LONG_SECONDS:
            openings.unlock()
            backend_of(place).give_back_cached()


class Computing(Protocol):
    """A pass in a worker."""

    @property
    def unequal(self) -> bool:
        """Whether other workers may have more memory."""

    def compute(self, message: Compute, report: Report) -> None:
        """Compute a part; its results are in place when this returns."""


@alike()
def answer(one: Computing, message: Compute) -> Done | Failed:
    """Compute a part, and say how that ended."""
    begun = time.perf_counter()
    report = Report()
    try:
        one.compute(message, report)
    except Exception as error:
        # A budget is as small for the others, or theirs are others.
        memory = is_out_of_memory(error) and (one.unequal or not isinstance(error, BudgetError))
        said = _as_sent(error)
        # After an error of its own a CUDA device takes nothing more from this process.
        broken = not memory and "CUDA error" in str(error)
        trace = traceback.format_exc()
        return Failed(message.number, message.index, memory, said, trace, broken)
    return Done(message.number, message.index, time.perf_counter() - begun, report)


def _as_sent(error: BaseException) -> BaseException | str:
    """It as the pool gets it, else its text. Not itself: with it the frames of the part, and their
    tensors, would stay."""
    with suppress(Exception):
        said = pickle.loads(pickle.dumps(error))
        if type(said) is type(error):
            return said
    return f"{type(error).__name__}: {error}"


class _Pass:
    """A pass in a worker.

    Args:
        met: the sizes of all that was computed before; added to.

    Attributes:
        opening: seconds that the last part took to open and lock memory.
        new: whether it was the first of its sizes.
    """

    def __init__(
        self, message: Begin, device: torch.device, openings: Openings, met: set[Any]
    ) -> None:
        self._met = met
        self._rules_are_checked = False
        self.opening, self.new = 0.0, False
        self._sizes, self._backward = message.sizes, message.backward
        # Opened with the first part: a pass may be over, and its memory gone, before this worker
        # has heard that it began.
        self._handles = message.tensors
        self._tensors: dict[str, torch.Tensor] = {}
        # Of the part that is being computed: where gradients go that are added up.
        self._sums: dict[str, torch.Tensor] = {}
        self._openings = openings
        self._options, self._budget, self._device = message.options, message.budget, device

    def end(self) -> None:
        """The pass is over. What was never opened is given back all the same."""
        for handle in () if self._tensors else self._handles.values():
            if isinstance(handle, Handed):
                handle.release()

    @property
    def unequal(self) -> bool:
        """Whether budgets differ."""
        return bool(self._options.get("unequal"))

    def compute(self, message: Compute, report: Report) -> None:
        """Compute a part; its results are in place when this returns."""
        begun = time.perf_counter()
        self._sums = {name: opened(handle) for name, handle in (message.sums or {}).items()}
        if not self._tensors:
            open_ = self._openings.open
            self._tensors = {name: open_(handle) for name, handle in self._handles.items()}
            self._openings.forget_unused()
        sizes = self._sizes_of(message.part)
        self.new = sizes not in self._met
        self._met.add(sizes)
        unlocked = self._unlocked(message)
        self.opening = time.perf_counter() - begun
        try:
            with Touching(unlocked):
                if self._backward:
                    at = self._gradients(message, report)
                else:
                    at = self._statistics(message.part, report)
                at.store()
        finally:
            self._wait()
        self._sums = {}

    def _wait(self) -> None:
        """Until kernels and copies are done, also those of a part that has failed.

        Before that no tensor of another process is let go of: torch then takes its memory out of
        this process, and waits for the current stream of the device that has it, but not for other
        devices and streams that may still use it. So tensors of a part are referred to by the pass.
        """
        every = (*self._tensors.values(), *self._sums.values())
        for device in {self._device, *(t.device for t in every)}:
            backend_of(device).synchronize(device)

    def _sizes_of(self, part: Part) -> Any:
        """What plans, and shapes that kernels prepare for, depend on most."""
        asked, names = self._options, ("query", "key", "value", "mask")
        tensors = [self._tensors[name] for name in names if name in self._tensors]
        # Rows and keys by powers of two: where devices are not alike hardly two parts have as many.
        rows = part.rows.length.bit_length(), part.rows.start > 0
        keys = part.n_keys(self._sizes).bit_length()
        options = tuple(str(asked.get(name)) for name in ("kernel", "depth", "accumulator"))
        return (
            self._backward, part.heads.length, part.kv(self._sizes).length, rows, keys,
            self._budget, options, asked.get("mask") is not None, self._sizes.is_causal,
            tuple((t.dtype, t.device, t.shape[-1]) for t in tensors),
        )  # fmt: skip

    def _unlocked(self, message: Compute) -> list[torch.Tensor]:
        """Lock what should stay so; what is left, of which pages have to be made first."""
        if not backend_of(self._device).pins:
            return []
        # Ordinary files are not read ahead of time.
        mapped = {
            name: self._of(name, message.near or message.part)
            for name in _ROWS
            if isinstance(h := self._handles.get(name), InFile) and h.in_memory
        }
        written = _GRADS if self._backward else ("out", "lse")
        for name in message.sums or ():
            mapped.pop(name, None)
        results = [mapped[name] for name in written if name in mapped]
        inputs = [tensor for name, tensor in mapped.items() if name not in written]
        # The driver would map their pages one after the other.
        with Touching(tensor for tensor in inputs if not is_locked(tensor)) as touching:
            touching.wait()
        self._openings.lock(inputs, results)
        return [tensor for tensor in mapped.values() if not is_locked(tensor)]

    def _statistics(self, part: Part, report: Report) -> Local:
        at = self._local(part, ("query", "key", "value", "out"))
        query, key, value = (at.read(self._of(n, part)) for n in ("query", "key", "value"))
        out, lse = at.result(self._of("out", part)), self._of("lse", part)
        tensors, request = self._request(part, (query, key, value), at, report, out=out)
        _, made = run_forward(tensors, request)
        at.results.append((lse, made))
        return at

    def _gradients(self, message: Compute, report: Report) -> Local:
        part = message.part
        names = ("query", "key", "value", "grad_out", "out", "lse")
        at = self._local(part, (*names, "grad_query", "grad_key", "grad_value"))
        query, key, value, grad_out, out, lse = (at.read(self._of(n, part)) for n in names)
        grad_lse = at.read(self._of("grad_lse", part)) if "grad_lse" in self._tensors else None
        sums, target = self._sums, self._of("grad_query", part)
        if "grad_key" not in sums:
            keys = (self._of(name, part) for name in ("grad_key", "grad_value"))
            grads = (at.result(target), *(at.result(one) for one in keys))
        else:
            # All three in the state's dtype: those of keys and values are added up with others.
            first, second = (at.result(sums[name]) for name in ("grad_key", "grad_value"))
            made = torch.empty(target.shape, dtype=first.dtype, device=first.device)
            grads = (made, first, second)
            at.results.append((target, made))
        of_mask = sums.get("grad_mask")
        if of_mask is None and "grad_mask" in self._tensors:
            whole = self._tensors["grad_mask"]
            of_mask = whole[bias_at(whole.shape, self._sizes, part)]
        three = query, key, value
        tensors, request = self._request(part, three, at, report)
        given = given_of(
            tensors, request, grad_out, out, lse, grads,
            False if of_mask is None else at.result(of_mask), grad_lse, three,
        )  # fmt: skip
        run_backward(tensors, request, given)
        return at

    def _local(self, part: Part, names: Iterable[str]) -> Local:
        free = self._budget
        if free is None:
            free = backend_of(self._device).free_bytes(self._device)
        return Local(self._device, free // 2, (self._of(name, part) for name in names))

    def _request(
        self,
        part: Part,
        three: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        at: Local,
        report: Report,
        out: torch.Tensor | None = None,
    ) -> tuple[Tensors, Request]:
        """The part's own call."""
        asked, mask = self._options, self._tensors.get("mask")
        described: Mask | None = asked.get("mask")
        if described is not None and not self._rules_are_checked:
            check_rules(described, self._device)
            self._rules_are_checked = True
        sinks = self._tensors.get("sinks")
        attn_mask, causal = masked(self._sizes, part, described, mask, sinks)
        if isinstance(attn_mask, torch.Tensor):
            attn_mask = at.read(attn_mask)
        elif attn_mask is not None:
            changes = {n: getattr(attn_mask, n) for n in ("bias", "sinks")}
            changes = {n: None if t is None else at.read(t) for n, t in changes.items()}
            attn_mask = replace(attn_mask, **changes)
        budget = None if self._budget is None else max(0, self._budget - at.copied_bytes)
        watched = asked.get("watched", True)
        written = Written(
            budget=budget, depth=asked["depth"], kernel=asked["kernel"],
            accumulator=asked["accumulator"], devices=self._device,
            report=report if watched else None, total=report,
        )  # fmt: skip
        dropout: Dropout | None = asked.get("dropout")
        p, seed = (0.0, None) if dropout is None else (dropout.p, dropout.seed)
        function = "attention_backward" if self._backward else "attention"
        tensors, request = request_of(
            function, *three, attn_mask, p, seed, causal, asked["scale"], True, out, None, written
        )
        if dropout is not None:
            dropout = dropout.at(part.heads.start, part.entry)
        # A gradient may follow: the kernel that is chosen has to have one.
        return tensors, replace(
            request, dropout=dropout, records=asked.get("records", False),
            mask_grad=asked.get("mask_grad", False),
        )  # fmt: skip

    def _of(self, name: str, part: Part) -> torch.Tensor:
        """The part of a tensor (batch, heads, rows, ...)."""
        tensor = self._tensors[name][part.entry : part.entry + 1]
        if name in ("key", "value", "grad_key", "grad_value"):
            kv = part.kv(self._sizes)
            return tensor[:, kv.start : kv.stop, : part.n_keys(self._sizes)]
        return tensor[:, part.heads.start : part.heads.stop, part.rows.start : part.rows.stop]


__all__ = ["answer", "work"]
