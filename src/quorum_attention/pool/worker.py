"""A worker process: computes parts on one device until its pool is closed or gone."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.errors import BudgetError, OutOfMemoryError
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.mask import Mask
from quorum_attention.pool.messages import Begin, Compute, Done, End, Failed, Ready
from quorum_attention.pool.parts import Part, Sizes
from quorum_attention.pool.shared import opened


def work(device: str, threads: int | None, pipe: Connection) -> None:
    """Obey a pool until it says no more; ``threads``: of a CPU device."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its workers itself
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device)
    backend = backend_of(place)
    with backend.current(place):
        torch.empty(1, device=place)  # opens the device, which takes a while
        pipe.send(Ready(device if on_host(place) else backend.model(place)))
        _obey(place, pipe)


def _obey(place: torch.device, pipe: Connection) -> None:
    passes: dict[int, _Pass] = {}
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return  # the pool is gone
        if message is None:
            return
        if isinstance(message, Begin):
            passes[message.number] = _Pass(message, place)
        elif isinstance(message, End):
            passes.pop(message.number, None)
        else:
            try:
                pipe.send(_answer(passes[message.number], message))
            except BrokenPipeError:
                return


def _answer(one: _Pass, message: Compute) -> Done | Failed:
    begun = time.perf_counter()
    report = Report()
    try:
        one.compute(message, report)
    except Exception as error:
        memory = isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError, MemoryError))
        # A budget is as small for the others.
        memory = memory and not isinstance(error, BudgetError)
        said = error if _can_be_sent(error) else f"{type(error).__name__}: {error}"
        return Failed(message.number, message.index, memory, said, traceback.format_exc())
    return Done(message.number, message.index, time.perf_counter() - begun, report)


def _can_be_sent(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


class _Pass:
    """A pass in a worker."""

    def __init__(self, message: Begin, device: torch.device) -> None:
        self._sizes, self._backward = message.sizes, message.backward
        self._tensors = {name: opened(handle) for name, handle in message.tensors.items()}
        self._options: dict[str, Any] = {**message.options, "enable_gqa": True}
        self._device = device

    def compute(self, message: Compute, report: Report) -> None:
        """Compute a part; its results are in place when this returns."""
        options = {**self._options, "devices": self._device, "report": report}
        part, sizes = message.part, self._sizes
        options |= _masked(sizes, part, self._tensors.get("mask"))
        if self._backward:
            self._gradients(message, options)
        else:
            self._statistics(part, options)
        backend_of(self._device).synchronize(self._device)

    def _statistics(self, part: Part, options: dict[str, Any]) -> None:
        query, key, value = (self._of(n, part) for n in ("query", "key", "value"))
        out, lse = self._of("out", part), self._of("lse", part)
        _, got = attention_with_lse(query, key, value, out=out, **options)
        lse.copy_(got)

    def _gradients(self, message: Compute, options: dict[str, Any]) -> None:
        part = message.part
        names = ("grad_out", "query", "key", "value", "out", "lse")
        grad_out, query, key, value, out, lse = (self._of(name, part) for name in names)
        target = self._of("grad_query", part)
        if message.sums is None:
            grads = target, self._of("grad_key", part), self._of("grad_value", part)
        else:
            # All three in the state's dtype: those of keys and values are added up with others.
            first, second = (opened(handle) for handle in message.sums)
            grads = (
                torch.empty(target.shape, dtype=first.dtype, device=target.device),
                first,
                second,
            )
        attention_backward(grad_out, query, key, value, out, lse, grads=grads, **options)
        if message.sums is not None:
            target.copy_(grads[0])

    def _of(self, name: str, part: Part) -> torch.Tensor:
        """The part of a tensor (batch, heads, rows, ...)."""
        tensor = self._tensors[name][part.entry : part.entry + 1]
        if name in ("key", "value", "grad_key", "grad_value"):
            kv = part.kv(self._sizes)
            return tensor[:, kv.start : kv.stop, : part.n_keys(self._sizes)]
        return tensor[:, part.heads.start : part.heads.stop, part.rows.start : part.rows.stop]


def _masked(sizes: Sizes, part: Part, mask: torch.Tensor | None) -> dict[str, Any]:
    """The arguments of a part's call that say which pairs it keeps.

    Args:
        mask: (batch or 1, heads or 1, rows or 1, keys or 1) of the whole call.
    """
    found: dict[str, Any] = {}
    if mask is not None:
        spans = ((part.entry, part.entry + 1), part.heads, part.rows, (0, sizes.n_keys))
        slices = tuple(
            slice(None) if n == 1 else slice(*span)
            for n, span in zip(mask.shape, spans, strict=True)
        )
        found["attn_mask"] = mask[slices]
    if not sizes.is_causal:
        return found
    if part.rows.start == 0:
        return {**found, "is_causal": True}
    return {"attn_mask": Mask(causal="lower_right", bias=found.get("attn_mask"))}


__all__ = ["work"]
