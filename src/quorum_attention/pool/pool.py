"""``Pool``: several devices, a worker process each, that compute one call together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count as count_from
from types import TracebackType
from typing import Any

import torch

from quorum_attention.autograd import attend
from quorum_attention.call.arguments import Arguments
from quorum_attention.call.options import Budget, Several, Written
from quorum_attention.counts import whole_number
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.mask import Mask
from quorum_attention.planner.machine import Machine
from quorum_attention.pool.forked import Turn
from quorum_attention.pool.hired import Hired
from quorum_attention.pool.measured import machines
from quorum_attention.pool.messages import Begin
from quorum_attention.pool.names import names_of
from quorum_attention.pool.paces import even, paces_of
from quorum_attention.pool.parts import Part, cut_part, homes_of, joined
from quorum_attention.pool.report import PoolPass, PoolReport
from quorum_attention.pool.request import request_on_several
from quorum_attention.pool.rooms import give_back
from quorum_attention.pool.run import Coordinator
from quorum_attention.pool.speeds import expected_paces
from quorum_attention.pool.totals import Totals
from quorum_attention.pool.workers import Worker, end, end_after, start

# Devices whose paces differ by no more are taken to be alike.
_ALIKE = 1.5
# What a first order of its kind may take beside computing: a CUDA device's context and its
# libraries, compiling, plans; on the host plans only.
_NEW_SECONDS, _NEW_ON_HOST = 2.0, 0.2
_NO_WORKER = "the pool has no worker: it was closed, or all of them were lost"


class Pool(Several):
    """Worker processes, one for each device, that share the work of an attention call.

    A call is cut into parts that do not depend on each other: key/value heads first, then, where
    they do not divide among the devices, rows of the last ones. Workers take a part as soon as they
    have none, so devices of unequal speed end together. Each computes its part as an ordinary call,
    under its own budget, with its own recovery. A worker that is killed, hangs or runs out of
    memory at every depth gives its part back and the others finish.

    Inputs in shared memory (``tensor.share_memory_()``), mapped from files, or on a CUDA device are
    handed over as they are; others are copied into shared memory, and the report says how much.

    Give it to calls as ``devices=``, or use its own ``attention``. Use it as a context manager, or
    ``close`` it; it also ends with the program. Calls of several threads follow one another.

    Args:
        devices: as torch writes them, "cuda:0" or "cpu"; or "all" CUDA devices of this machine.
        threads: threads of each worker, for CPU devices; None: torch's default.

    Raises:
        ValueError, TypeError: ``devices`` names none, or one that is not here.
        RuntimeError: a worker did not start.
    """

    def __init__(
        self, devices: str | Sequence[str | torch.device] = "all", *, threads: int | None = None
    ) -> None:
        names = names_of(devices)
        count = None if threads is None else whole_number(threads, "threads", 1)
        self._threads = count
        self._workers = start(names, count, shelves=True)
        end_after(self, self._workers)
        self._passes = count_from(1)
        self._lock = Turn()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of its workers, also those that are gone."""
        return tuple(self._workers)

    @property
    def devices(self) -> list[str]:
        """The devices whose workers are alive."""
        return [worker.device for worker in self._workers if worker.alive]

    @property
    def names(self) -> list[str]:
        """Their own names, by which one sees whether they are alike."""
        return [worker.name for worker in self._workers if worker.alive]

    @property
    def pins(self) -> bool:
        """Whether any of them copies faster from and to page-locked memory."""
        return any(backend_of(torch.device(device)).pins for device in self.devices)

    def join(self, device: str | torch.device) -> None:
        """Start a worker for one more device, or for one whose worker was lost. It takes part in a
        pass that is running."""
        self._workers.extend(start(names_of([device]), self._threads, shelves=True))

    def mend(self) -> None:
        """Start a worker in the place of each that was lost."""
        with self._lock:
            for number, worker in enumerate(self._workers):
                if not worker.alive or not worker.process.is_alive():
                    worker.kill()
                    self._workers[number] = start([worker.device], self._threads, shelves=True)[0]

    def check_open(self) -> None:
        """Refuse to compute without workers.

        Raises:
            RuntimeError: none is left.
        """
        if not self.devices:
            raise RuntimeError(_NO_WORKER)

    def close(self) -> None:
        """End the workers; the pool is of no use afterwards."""
        end(self._workers)
        give_back()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @uncompiled
    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        dropout_p: float = 0.0,
        dropout_seed: int | None = None,
        budget: Budget | None = None,
        depth: int | str = "auto",
        kernel: str = "auto",
        out: torch.Tensor | None = None,
        progress: Any = None,
        report: PoolReport | None = None,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` on all devices of the pool, with gradients.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, dropout_seed: as
                there; tensors in host memory or on a CUDA device.
            budget: of each device; a list has one for each.
            depth, kernel: as there, of each device.
            out, progress: as there; progress is counted in parts.
            report: filled with what happened.

        Returns:
            (..., heads, n_queries, value_dim), in shared memory if the inputs are in host memory.

        Raises:
            Errors as of ``quorum_attention.attention``; RuntimeError: no worker is left, with what
            was done until then.
        """
        said = Arguments(
            attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, out,
            written=Written(budget, None, depth, kernel, devices=self, progress=progress),
        )  # fmt: skip
        tensors, request = request_on_several(
            "attention", query, key, value, *said, count=len(self._workers), pool_of=lambda: self,
            pool_report=report,
        )  # fmt: skip
        return attend(tensors, request, out)[0]

    def alike(self, budgets: Sequence[int | None], kind: tuple[Any, ...]) -> bool:
        """Whether workers that are alive may be taken to be equally quick.

        Args:
            budgets: of each worker.
            kind: as of ``run``.
        """
        here = self._here().items()
        if len({(w.name, budgets[min(n, len(budgets) - 1)]) for n, w in here}) > 1:
            return False
        paces = self.paces(kind).values()
        return not paces or max(paces) <= _ALIKE * min(paces)

    def _sure(self, kind: tuple[Any, ...], share: float) -> bool:
        """Whether workers that are alike gain by long calls: they copy beside their kernels, and
        were not seen to be unequal; or were so quick that a second order would cost more than
        it evens out.

        Args:
            share: the smallest part over what each has to do.
        """
        here = [worker for worker in self._workers if worker.alive]
        if all(worker.readings.short(kind) for worker in here):
            return True
        paces = self.paces(kind).values()
        overlap = all(backend_of(torch.device(worker.device)).overlaps for worker in here)
        # The first call too: other sizes of orders would have to be planned and prepared later on.
        return overlap and even(paces, share)

    def run(
        self,
        begin: Begin,
        parts: list[Part],
        report: PoolPass,
        totals: Totals | None,
        budgets: Sequence[int | None],
        kind: tuple[Any, ...],
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """Run a pass of parts on the workers; see ``Coordinator``.

        Args:
            totals: adds up gradients; None in a forward.
            budgets: of each worker; those beyond have the last one's.
            kind: pass, dtype, head dimension and what else the time of a pair depends on; with it
                paces are remembered.
            progress: told parts that are done.
        """
        label = "backward" if begin.backward else "forward"

        def ended(part: Part, made: Any) -> None:
            if totals is not None:
                totals.add(part, made)
            if progress is not None:
                progress(len(report.ran), report.parts, label)

        def sums(part: Part) -> Any:
            return None if totals is None else totals.room(part)

        with self._lock:
            paces, alike = self.paces(kind), self.alike(budgets, kind)
            here = list(self._here())
            if not here:  # another thread has closed it meanwhile
                raise RuntimeError(_NO_WORKER)
            report.devices = [worker.label for worker in self._workers]
            report.parts = len(parts)
            hired: list[Hired] = []

            def recruits(wait: bool = False) -> list[Hired]:
                """Workers that have joined since it was asked last."""
                found = [
                    Hired(worker, budgets[min(number, len(budgets) - 1)])
                    for number, worker in enumerate(self._workers[len(hired) :], len(hired))
                ]
                hired.extend(found)
                return found

            work = [part.pairs(begin.sizes) for part in parts]
            share = len(here) * min(work, default=0) / max(1, sum(work))
            coordinator = Coordinator(
                recruits(), begin, parts, sums, ended, report,
                join=partial(joined, begin.sizes), paces=paces,
                alike=alike, recruits=recruits, sure=self._sure(kind, share), new=self._new(kind),
                timed=bool(paces), homes=homes_of(begin.sizes, parts, here) if alike else None,
                usual=self._usual(kind, self._here()), allowed=self._allowed(),
                may_wait=lambda part: totals is None or totals.in_host_memory,
                cut=partial(cut_part, begin.sizes) if totals is None or totals.may_cut else None,
                cut_costs=max(self._allowed().values()),
            )  # fmt: skip
            coordinator.run()
            self._note(kind, coordinator.spent)

    def paces(self, kind: tuple[Any, ...]) -> dict[int, float]:
        """Seconds a pair of each worker: as seen last, or as expected."""
        here = self._here()
        readings = {n: worker.readings for n, worker in here.items()}
        seen = any(one.pace(kind) is not None for one in readings.values())
        if not seen and len({worker.name for worker in here.values()}) <= 1:
            return {}  # alike, and nothing else is known
        return paces_of(readings, kind, self._usual(kind, here))

    def _here(self) -> dict[int, Worker]:
        """Workers that are alive, by number; another thread may close the pool at any time."""
        return {n: worker for n, worker in enumerate(self._workers) if worker.alive}

    def _usual(self, kind: tuple[Any, ...], here: Mapping[int, Worker]) -> dict[int, float]:
        """Seconds a pair that are expected of workers."""
        backward, dtype, head_dim, *_ = kind
        names = [(worker.device, worker.name) for worker in here.values()]
        expected = expected_paces(names, dtype, head_dim, backward=backward)
        return dict(zip(here, expected, strict=True))

    def _allowed(self) -> dict[int, float]:
        """Seconds that what is new to a worker may take beside computing."""
        return {
            number: _NEW_ON_HOST if on_host(torch.device(worker.device)) else _NEW_SECONDS
            for number, worker in enumerate(self._workers)
        }

    def _new(self, kind: tuple[Any, ...]) -> dict[int, float]:
        """Seconds that a first order of a kind may take beside computing, of those to whom it is
        one."""
        return {
            number: seconds
            for number, seconds in self._allowed().items()
            if not self._workers[number].readings.met(kind)
        }

    def _note(self, kind: tuple[Any, ...], spent: Mapping[int, tuple[float, int]]) -> None:
        """Remember how quick each worker was in a pass that is over."""
        took_part = {self._workers[number].name for number in spent}
        for number, worker in enumerate(self._workers):
            if number in spent:
                worker.readings.took_part(kind, *spent[number])
            elif worker.name in took_part:
                worker.readings.was_left_out(kind)

    def measure(
        self, dtype: torch.dtype = torch.float16, head_dim: int = 64, *, alone: bool = False
    ) -> list[Machine]:
        """How quick its devices are now (some seconds): kernels, and copies between each and shared
        host memory. With it ``simulate`` predicts passes (docs/devices.md).

        Args:
            dtype, head_dim: of calls.
            alone: whether one device measures after the other; else all measure at once, as links
                to the host may share what its memory gives.

        Returns:
            the rates of each device whose worker is alive.

        Raises:
            RuntimeError: no worker is left, or one could not measure.
        """
        with self._lock:
            here = list(self._here().values())
            if not here:
                raise RuntimeError(_NO_WORKER)
            runs = [[worker] for worker in here] if alone else [here]
            return [one for run in runs for one in machines(run, dtype, head_dim)]

    def number(self) -> int:
        """A number for a pass."""
        return next(self._passes)


__all__ = ["Pool"]
