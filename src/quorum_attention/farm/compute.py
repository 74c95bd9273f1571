"""What a worker of a farm does: loads the rows of a unit, computes, leaves results or states."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.farm.data import (
    Back,
    Piece,
    Reader,
    moved,
    read_state,
    write_rows,
    write_state,
)
from quorum_attention.farm.ledger import Fold
from quorum_attention.farm.messages import Begin
from quorum_attention.farm.units import Joint, Unit
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.pool.messages import Compute

# A task's rows lie on the device, if they take no more than this share of the budget; the rest is
# for what kernels allocate.
_RESIDENT = 0.8
# Chunks this long keep a device busy one by one: a backward then has the gradients of one chunk's
# keys beside those that are added up, not of all that it reads.
_LONG = 65_536
_HOST = torch.device("cpu")


class Pass:
    """A pass in a worker.

    Args:
        begin: the pass.
        device: where to compute.
        budget: bytes of it; None: what is free.
    """

    def __init__(self, begin: Begin, device: torch.device, budget: int | None) -> None:
        self._begin, self._cut = begin, begin.sizes
        self._device, self._budget = device, budget
        self._inputs = {name: Reader(source) for name, source in begin.inputs.items()}

    def compute(self, message: Compute, report: Report) -> None:
        """Compute a unit, or bring states together; what is to be left is there when this returns.

        Args:
            message: its ``sums`` say what to do with the states of the unit's chunks, or take what
                is to be sent back.
        """
        work: Unit | Joint = message.part
        one = _Work(self, work, message.sums, report)
        if isinstance(work, Joint):
            one.join()
        elif work.task is None:
            one.heads()
        elif self._begin.backward:
            one.gradients(self._cut.quorum(work.task))
        else:
            one.statistics(self._cut.quorum(work.task))
        backend_of(self._device).synchronize(self._device)

    def free(self) -> int:
        """Bytes of the device that a unit may take."""
        if self._budget is not None:
            return self._budget
        return int(backend_of(self._device).free_bytes(self._device) * 0.9)


class _Work:
    """One unit."""

    def __init__(
        self, of: Pass, work: Unit | Joint, given: tuple[Fold, ...] | Back, report: Report
    ) -> None:
        self._of, self._begin, self._cut = of, of._begin, of._cut
        self._work, self._given, self._report = work, given, report
        self._heads = self._cut.query_heads(work)
        self._folds = {fold.chunk: fold for fold in given} if isinstance(given, tuple) else {}
        self._place, self._left = of._device, of._budget

    def heads(self) -> None:
        """Whole heads, by one call; inputs as they lie, results in host memory."""
        sizes, options = self._cut.sizes, self._options(is_causal=self._cut.sizes.is_causal)
        rows, keys = Interval(0, sizes.n_queries), Interval(0, sizes.n_keys)
        if "mask" in self._begin.inputs:
            options["attn_mask"] = self._of._inputs["mask"].masked(self._work.entry, self._heads)
        query, key, value = (
            self._read(n, r) for n, r in zip(_QKV, (rows, keys, keys), strict=True)
        )
        if not self._begin.backward:
            options["out_dtype"] = self._begin.dtype
            made = attention_with_lse(query, key, value, **options)
            self._leave(None, rows, keys, made)
            return
        rest: Any = (self._read(name, rows) for name in ("out", "lse"))
        self._leave(
            None, rows, keys,
            attention_backward(self._read("grad_out", rows), query, key, value, *rest, **options),
        )  # fmt: skip

    def statistics(self, chunks: Sequence[int]) -> None:
        """A task of the forward: chunk by chunk of its queries, over the keys of the task."""
        key, value, starts = self._keys(chunks, states=1)
        state = self._begin.state
        for number, chunk in enumerate(chunks):
            rows = self._cut.queries(chunk)
            query = moved(self._read("query", rows), self._place)
            shape = (1, self._heads.length, rows.length, value.shape[3])
            out = torch.zeros(shape, dtype=state, device=self._place)
            lse = torch.full(shape[:3], -torch.inf, dtype=state, device=self._place)
            if rows.length:
                for span, causal in self._spans(number, starts, chunk):
                    part, part_lse = attention_with_lse(
                        query, key[:, :, slice(*span)], value[:, :, slice(*span)],
                        out_dtype=state, **self._options(is_causal=causal),
                    )  # fmt: skip
                    merge_(out, lse, part, part_lse.to(self._place))
            self._leave(chunk, rows, self._cut.keys(chunk), (out, lse))

    def gradients(self, chunks: Sequence[int]) -> None:
        """A task of the backward, with the output and log-sum-exp of the whole call."""
        key, value, starts = self._keys(chunks, states=3)
        state = self._begin.state
        key_grad, value_grad = (torch.zeros_like(t, dtype=state) for t in (key, value))
        query_grads = []
        for number, chunk in enumerate(chunks):
            rows = self._cut.queries(chunk)
            names = ("grad_out", "query", "out", "lse")
            upstream, query, out, lse = (moved(self._read(n, rows), self._place) for n in names)
            query_grads.append(torch.zeros_like(query, dtype=state))
            if not rows.length:
                continue
            for span, causal in self._one_by_one(self._spans(number, starts, chunk), starts):
                keys = slice(*span)
                three = query, key[:, :, keys], value[:, :, keys]
                made: Any = tuple(
                    torch.empty(t.shape, dtype=state, device=self._place) for t in three
                )
                attention_backward(
                    upstream, *three, out, lse, grads=made, **self._options(is_causal=causal)
                )
                targets = query_grads[-1], key_grad[:, :, keys], value_grad[:, :, keys]
                for target, part in zip(targets, made, strict=True):
                    add_(target, part)
                del made, part
        for number, chunk in enumerate(chunks):
            keys = slice(starts[number], starts[number + 1])
            three = query_grads[number], key_grad[:, :, keys], value_grad[:, :, keys]
            self._leave(chunk, self._cut.queries(chunk), self._cut.keys(chunk), three)

    def join(self) -> None:
        """Bring the states of one chunk together, which is what leaving an empty one does."""
        assert isinstance(self._work, Joint)
        chunk = self._work.chunk
        rows, keys = self._cut.queries(chunk), self._cut.keys(chunk)
        self._place, state = _HOST, self._begin.state

        def empty(name: str, at: Interval) -> torch.Tensor:
            like = self._read(name, Interval(at.start, at.start))
            return torch.zeros((*like.shape[:2], at.length, like.shape[3]), dtype=state)

        if self._begin.backward:
            spans = (rows, keys, keys)
            made = tuple(empty(n, at) for n, at in zip(_QKV, spans, strict=True))
        else:
            width = empty("value", Interval(0, 0)).shape[3]
            out = torch.zeros((1, self._heads.length, rows.length, width), dtype=state)
            made = out, torch.full(out.shape[:3], -torch.inf, dtype=state)
        self._leave(chunk, rows, keys, made)

    def _keys(
        self, chunks: Sequence[int], states: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Keys and values of a task, and where its chunks begin among them; on the device, if all
        rows of the task fit there, with what is made of them. Decides ``place``."""
        keys = [self._cut.keys(chunk) for chunk in chunks]
        starts = [0]
        for at in keys:
            starts.append(starts[-1] + at.length)
        if not on_host(self._of._device):
            queries = sum(self._cut.queries(chunk).length for chunk in chunks)
            taken = self._bytes(queries, starts[-1])
            free = self._of.free()
            if taken > free * _RESIDENT:
                self._place = _HOST
            elif self._of._budget is not None:
                self._left = free - taken
        key, value = (
            torch.cat([moved(self._read(name, at), self._place) for at in keys], 2)
            for name in ("key", "value")
        )
        return key, value, starts

    def _bytes(self, queries: int, keys: int) -> int:
        """Bytes of a task's rows on the device, at most: twice the keys while they are put
        together, inputs, states, and the gradients of one call."""
        none = Interval(0, 0)
        by_query, by_key = (
            sum(
                t.shape[1] * t.shape[3] * t.element_size()
                for t in (self._read(name, none) for name in names)
            )
            for names in (("query",), ("key", "value"))
        )
        words = self._begin.state.itemsize / self._read("query", none).element_size()
        chunk = queries / max(1, len(self._cut.quorum(0)))
        if not self._begin.backward:
            # The keys twice, a chunk's queries, its state three times: merged, made, and as read.
            return int(2 * keys * by_key + chunk * by_query * (1 + 4 * words))
        # Keys, their gradients, those of a call, queries' gradients, a chunk's inputs and gradient.
        tasks = len(self._cut.quorum(0))
        at_once = keys / tasks if keys >= _LONG * tasks else keys
        made = ((1 + words) * keys + words * at_once) * by_key + words * queries * by_query
        # While chunks are put together they are there twice, before there are gradients of them.
        return int(max(made, 2 * keys * by_key) + chunk * by_query * (4 + 2 * words))

    def _spans(
        self, number: int, starts: Sequence[int], chunk: int
    ) -> list[tuple[tuple[int, int], bool]]:
        """Which of the task's keys a chunk of queries sees, in runs; and whether a run is causal:
        those of other chunks, and its own where it is the owner."""
        assert isinstance(self._work, Unit)
        begin, end, all_ = starts[number], starts[number + 1], starts[-1]
        owner = chunk == self._work.task
        if self._cut.sizes.is_causal:
            found = [((0, begin), False)]
            found += [((begin, end), True)] if owner else []
        else:
            found = [((0, all_), False)] if owner else [((0, begin), False), ((end, all_), False)]
        return [(span, causal) for span, causal in found if span[0] < span[1]]

    @staticmethod
    def _one_by_one(
        spans: list[tuple[tuple[int, int], bool]], starts: Sequence[int]
    ) -> list[tuple[tuple[int, int], bool]]:
        """Runs of keys cut between chunks, where these are long."""
        if starts[-1] < _LONG * (len(starts) - 1):
            return spans
        chunks = list(pairwise(starts))
        return [
            ((max(low, begin), min(high, end)), causal)
            for (low, high), causal in spans
            for begin, end in chunks
            if max(low, begin) < min(high, end)
        ]

    def _options(self, is_causal: bool) -> dict[str, Any]:
        return {
            **self._begin.options,
            "is_causal": is_causal,
            "enable_gqa": True,
            "budget": self._left,
            "devices": self._of._device,
            "report": self._report,
        }

    def _read(self, name: str, rows: Interval) -> torch.Tensor:
        heads = self._work.kv if name in ("key", "value") else self._heads
        return self._of._inputs[name](self._work.entry, heads, rows)

    def _leave(
        self, chunk: int | None, rows: Interval, keys: Interval, made: Sequence[torch.Tensor]
    ) -> None:
        """Leave what was computed: complete rows, or the state of a chunk."""
        if isinstance(self._given, Back):
            self._given.pieces.append(Piece(chunk, tuple(t.cpu() for t in made)))
            return
        if chunk is not None:
            fold, folder = self._folds[chunk], self._begin.folder or ""
            for name in fold.take:
                self._take(made, read_state(os.path.join(folder, name), made))
            if fold.put is not None:
                write_state(os.path.join(folder, fold.put), made)
                return
        entry, results = self._work.entry, self._begin.results
        if self._begin.backward:
            write_rows(results["grad_query"], entry, self._heads, rows, made[0])
            write_rows(results["grad_key"], entry, self._work.kv, keys, made[1])
            write_rows(results["grad_value"], entry, self._work.kv, keys, made[2])
        else:
            write_rows(results["out"], entry, self._heads, rows, made[0])
            if "lse" in results:
                write_rows(results["lse"], entry, self._heads, rows, made[1])

    def _take(self, mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
        parts = [moved(t, self._place) for t in theirs]
        if self._begin.backward:
            for target, part in zip(mine, parts, strict=True):
                add_(target, part)
        else:
            merge_(mine[0], mine[1], parts[0], parts[1])


_QKV = ("query", "key", "value")

__all__ = ["Pass"]
