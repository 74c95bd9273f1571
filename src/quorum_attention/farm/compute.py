"""What a worker of a farm does: loads the rows of a unit, computes, leaves results or states."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from quorum_attention.api import attention_backward, attention_with_lse
from quorum_attention.call.block import Block, WholeCall
from quorum_attention.call.gradients import given_of
from quorum_attention.call.options import Written
from quorum_attention.call.request import request_of
from quorum_attention.decomposition import EMPTY, Ranges
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.messages import Compute
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.report import Report
from quorum_attention.execution.sampled_rows import without_check_of_rows
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
from quorum_attention.kernels.masked import Sizes, resolve
from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.mask import Mask
from quorum_attention.passes import run_backward, run_forward

# A task's rows lie on the device, if they take no more than this share of the budget; the rest is
# for what kernels allocate.
_RESIDENT = 0.8
# Chunks this long keep a device busy one by one. So a kernel has few shapes to prepare, and a
# backward the gradients of one chunk's keys beside those that are added up, not of all it reads.
_LONG = 65_536
_HOST = torch.device("cpu")
_QKV = ("query", "key", "value")

_Piece = tuple[tuple[int, int], dict[str, Any]]


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
        begin, sizes = self._begin, self._cut.sizes
        rows, keys = Interval(0, sizes.n_queries), Interval(0, sizes.n_keys)
        three = self._read("query", rows), self._read("key", keys), self._read("value", keys)
        mask, causal = self._masked(rows, keys, sinks=self._sinks())
        options = self._options(is_causal=causal)
        written = Written(
            budget=options["budget"], depth=options["depth"], kernel=options["kernel"],
            devices=options["devices"], report=self._report,
        )  # fmt: skip
        dropout = begin.dropout
        p, seed = (0.0, None) if dropout is None else (dropout.p, dropout.seed)
        function = "attention_backward" if begin.backward else "attention"
        tensors, request = request_of(
            function, *three, mask, p, seed, causal, options["scale"], True, None,
            None if begin.backward else begin.dtype, written,
        )  # fmt: skip
        if dropout is not None:
            dropout = dropout.at(self._heads.start, self._work.entry)
            request = replace(request, dropout=dropout)
        if not begin.backward:
            self._leave(None, rows, keys, run_forward(tensors, request))
            return
        upstream, out, lse = (self._read(name, rows) for name in ("grad_out", "out", "lse"))
        given = given_of(tensors, request, upstream, out, lse, None, False, None, three)
        self._leave(None, rows, keys, run_backward(tensors, request, given))

    def statistics(self, chunks: Sequence[int]) -> None:
        """A task of the forward: chunk by chunk of its queries, over the keys of the task."""
        starts, pieces = self._pieces(chunks)
        if not any(pieces):
            self._nothing(chunks)
            return
        key, value = self._keys(chunks, starts)
        for chunk, spans in zip(chunks, pieces, strict=True):
            rows = self._cut.queries(chunk)
            out, lse = self._begun(chunk, rows, value.shape[3])
            if rows.length and spans:
                query = moved(self._read("query", rows), self._place)
                for span, options in self._one_by_one(spans, starts):
                    part, part_lse = attention_with_lse(
                        query, key[:, :, slice(*span)], value[:, :, slice(*span)],
                        out_dtype=self._begin.state, **self._options(**options),
                    )  # fmt: skip
                    merge_(out, lse, part, part_lse.to(self._place))
            self._leave(chunk, rows, self._cut.keys(chunk), (out, lse))

    def gradients(self, chunks: Sequence[int]) -> None:
        """A task of the backward, with the output and log-sum-exp of the whole call."""
        starts, pieces = self._pieces(chunks)
        if not any(pieces):
            self._nothing(chunks)
            return
        key, value = self._keys(chunks, starts)
        state = self._begin.state
        key_grad, value_grad = (torch.zeros_like(t, dtype=state) for t in (key, value))
        query_grads = []
        for chunk, spans in zip(chunks, pieces, strict=True):
            rows = self._cut.queries(chunk)
            query_grads.append(self._empty("query", rows, self._place))
            if not (rows.length and spans):
                continue
            names = ("grad_out", "query", "out", "lse")
            upstream, query, out, lse = (moved(self._read(n, rows), self._place) for n in names)
            for span, options in self._one_by_one(spans, starts):
                keys = slice(*span)
                three = query, key[:, :, keys], value[:, :, keys]
                made: Any = tuple(
                    torch.empty(t.shape, dtype=state, device=self._place) for t in three
                )
                with without_check_of_rows():  # they have other keys than these
                    attention_backward(
                        upstream, *three, out, lse, grads=made, **self._options(**options)
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
        self._nothing((self._work.chunk,))

    def _nothing(self, chunks: Sequence[int]) -> None:
        """Leave the states of chunks without any pair."""
        self._place = _HOST
        for chunk in chunks:
            rows, keys = self._cut.queries(chunk), self._cut.keys(chunk)
            made: Sequence[torch.Tensor]
            if self._begin.backward:
                made = [self._empty(n, at) for n, at in zip(_QKV, (rows, keys, keys), strict=True)]
            else:
                made = self._begun(chunk, rows, self._read("value", Interval(0, 0)).shape[3])
            self._leave(chunk, rows, keys, made)

    def _begun(self, chunk: int, rows: Interval, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Statistics of rows without keys. With sinks, each row has its sink once: in the task that
        its chunk owns."""
        shape, state = (1, self._heads.length, rows.length, width), self._begin.state
        out = torch.zeros(shape, dtype=state, device=self._place)
        lse = torch.full(shape[:3], -torch.inf, dtype=state, device=self._place)
        sinks = self._sinks()
        if sinks is not None and isinstance(self._work, Unit) and chunk == self._work.task:
            lse.copy_(sinks[:, None])
        return out, lse

    def _empty(self, name: str, at: Interval, place: torch.device = _HOST) -> torch.Tensor:
        """Zeros for the gradients of some rows of an input."""
        like = self._read(name, Interval(at.start, at.start))
        shape = (*like.shape[:2], at.length, like.shape[3])
        return torch.zeros(shape, dtype=self._begin.state, device=place)

    def _sinks(self) -> torch.Tensor | None:
        """Those of the unit's heads."""
        sinks = self._begin.sinks
        return None if sinks is None else sinks[self._heads.start : self._heads.stop]

    def _masked(
        self, rows: Interval, keys: Interval, sinks: torch.Tensor | None = None
    ) -> tuple[Mask | torch.Tensor | None, bool]:
        """``attn_mask`` and ``is_causal`` of a call of some rows and keys."""
        sizes, entry = self._cut.sizes, self._work.entry
        whole = WholeCall(
            (sizes.batch,), sizes.heads, sizes.kv_heads, sizes.n_queries, sizes.n_keys,
            self._begin.mask, sizes.is_causal,
        )  # fmt: skip
        found, causal = whole.mask_of(Block(Interval(entry, entry + 1), self._heads, rows, keys))
        bias = None
        if "mask" in self._begin.inputs:
            bias = self._of._inputs["mask"].masked(self._work.entry, self._heads, rows, keys)
        if found is None and sinks is None:
            return bias, causal
        if bias is None and sinks is None:
            return found, causal
        assert not isinstance(found, torch.Tensor)
        return replace(found or Mask(), bias=bias, sinks=sinks), causal

    def _keys(
        self, chunks: Sequence[int], starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a task; on the device, if all rows of the task fit there, with what is
        made of them. Decides ``place``."""
        keys = [self._cut.keys(chunk) for chunk in chunks]
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
        return key, value

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

    def _pieces(self, chunks: Sequence[int]) -> tuple[list[int], list[list[_Piece]]]:
        """Where chunks begin among the keys of a task; and for each chunk of queries the runs of
        those keys that it is computed with, and how."""
        starts = [0]
        for chunk in chunks:
            starts.append(starts[-1] + self._cut.keys(chunk).length)
        masked = self._begin.mask is not None or "mask" in self._begin.inputs
        find = self._under_mask if masked else self._runs
        return starts, [list(find(number, starts, chunks)) for number in range(len(chunks))]

    def _runs(self, number: int, starts: Sequence[int], chunks: Sequence[int]) -> Iterator[_Piece]:
        """Of a call without a mask: keys of other chunks, and those of the owner's own."""
        assert isinstance(self._work, Unit)
        begin, end, all_ = starts[number], starts[number + 1], starts[-1]
        owner = chunks[number] == self._work.task
        if self._cut.sizes.is_causal:
            found = [((0, begin), False)]
            found += [((begin, end), True)] if owner else []
        else:
            found = [((0, all_), False)] if owner else [((0, begin), False), ((end, all_), False)]
        for span, causal in found:
            if span[0] < span[1]:
                yield span, {"is_causal": causal}

    def _under_mask(
        self, number: int, starts: Sequence[int], chunks: Sequence[int]
    ) -> Iterator[_Piece]:
        """Under a mask: chunk by chunk, because masks go by positions. Chunks of which it keeps
        nothing are left out."""
        assert isinstance(self._work, Unit)
        own, causal = chunks[number], self._cut.sizes.is_causal
        rows = self._cut.queries(own)
        for at, other in enumerate(chunks):
            keys = self._cut.keys(other)
            if (other == own and own != self._work.task) or not rows.length or not keys.length:
                continue
            if causal and keys.start >= rows.stop:
                continue
            mask, is_causal = self._masked(rows, keys)
            if not _keeps_nothing(mask, self._heads.length, rows.length, keys.length, is_causal):
                yield (starts[at], starts[at + 1]), {"attn_mask": mask, "is_causal": is_causal}

    @staticmethod
    def _one_by_one(pieces: Sequence[_Piece], starts: Sequence[int]) -> Sequence[_Piece]:
        """Runs of keys cut between chunks, where these are long."""
        if starts[-1] < _LONG * (len(starts) - 1):
            return pieces
        chunks = list(pairwise(starts))
        return [
            ((max(low, begin), min(high, end)), options)
            for (low, high), options in pieces
            for begin, end in chunks
            if max(low, begin) < min(high, end)
        ]

    def _options(self, **more: Any) -> dict[str, Any]:
        return {
            **self._begin.options,
            **more,
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


def _keeps_nothing(mask: Any, heads: int, n_queries: int, n_keys: int, is_causal: bool) -> bool:
    """Whether a mask is known to keep no pair of a call."""
    if not isinstance(mask, Mask):
        return False
    every = Ranges.of(0, n_queries, 0, n_keys)
    geometries = resolve(mask, Sizes(1, heads, n_queries, n_keys), is_causal).geometries
    return all(geometry.verdict(every) == EMPTY for geometry in geometries)


__all__ = ["Pass"]
