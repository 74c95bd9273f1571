"""A call on several devices: its tensors where workers can have them, and its two passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quorum_attention.call.block import Block, WholeCall
from quorum_attention.call.gradients import Given
from quorum_attention.call.mapped import Mappings
from quorum_attention.call.request import Request, Tensors
from quorum_attention.devices.buffers import Shared, kept_room, made_for
from quorum_attention.devices.mapped import Prefault
from quorum_attention.devices.messages import Begin
from quorum_attention.devices.partition import Sizes
from quorum_attention.devices.report import PoolPass, PoolReport, as_one
from quorum_attention.devices.sums import MaskSum, Sums
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.execution.workload import state_dtype
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.mask import Mask
from quorum_attention.passes import progress_of

if TYPE_CHECKING:
    from quorum_attention.devices.pool import Pool


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of a call as its workers get them.

    Attributes:
        budgets: one for each device of the pool; None: what is free there.
        depth, kernel, accumulator: as in ``api.attention``.
        mask: what is masked beside a mask tensor; no bias and no sinks are in it.
    """

    budgets: tuple[int | None, ...]
    depth: int | str
    kernel: str | InnerKernel
    accumulator: str
    mask: Mask | None


class PoolCall:
    """A call on a pool: runs the passes of a ``Request`` there.

    Inputs that had to be copied into shared memory stay there until the backward.
    """

    def __init__(
        self, pool_of: Callable[[], Pool], asked: Asked, report: PoolReport | None = None
    ) -> None:
        self._pool_of, self._asked = pool_of, asked
        self._report = PoolReport() if report is None else report
        self._watched = report is not None
        self._kept: dict[str, Shared] = {}

    def forward(self, tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse; in shared memory, or on the inputs' device."""
        query, key, value = (t.detach() for t in tensors[:3])
        given, rows = request.out, query.shape[:-1]
        pool = self._pool()
        with self._told(request, backward=False) as report, torch.no_grad():
            mappings = Mappings.now()
            flattened = {"query": flat(query), "key": flat(key), "value": flat(value)}
            handles = self._inputs(pool, report, mappings, flattened, tensors, request)
            results = _Results(query.device, pool.pins)
            lse = results.make(rows, state_dtype(query.dtype))
            if given is None:
                out = results.make((*rows, value.shape[-1]), request.out_dtype)
                target = Shared.made(flat(out))
            else:
                out, target = given.detach(), Shared.written(flat(given.detach()), mappings)
                torch.autograd.graph.increment_version(given)
            handles |= {"out": target, "lse": Shared.made(flat(lse, 2))}
            homes = self._partition(pool, request, backward=False)
            self._run(pool, homes, request, report, handles, query, None, results.fresh)
            if target.tensor.data_ptr() != out.data_ptr():
                out.copy_(target.tensor.reshape(out.shape))
        return (out if given is None else given), lse

    def backward(
        self, tensors: Tensors, request: Request, given: Given
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, and of the mask if it is wanted; in shared memory,
        or on the inputs' device."""
        pool = self._pool()
        three = query, key, value = tuple(t.detach() for t in tensors[:3])
        with self._told(request, backward=True) as report, torch.no_grad():
            mappings = Mappings.now()
            inputs = {
                "query": flat(query), "key": flat(key), "value": flat(value),
                "grad_out": flat(given.grad_out.detach()), "out": flat(given.out.detach()),
                "lse": flat(given.lse.detach(), 2),
            }  # fmt: skip
            if given.grad_lse is not None:
                inputs["grad_lse"] = flat(given.grad_lse.detach(), 2)
            names = ("grad_query", "grad_key", "grad_value")
            try:
                handles = self._inputs(pool, report, mappings, inputs, tensors, request)
                results = _Results(query.device, pool.pins)
                if given.grads is None:
                    made = [results.make(t.shape, t.dtype) for t in three]
                    targets = [Shared.made(flat(t)) for t in made]
                else:
                    made = list(given.grads)
                    targets = [Shared.written(flat(t.detach()), mappings) for t in made]
                    torch.autograd.graph.increment_version(made)
                handles |= dict(zip(names, targets, strict=True))
                homes = self._partition(pool, request, backward=True)
                of_mask = self._of_mask(homes, mappings, results, tensors, request, given)
                if of_mask is not None:
                    made.append(of_mask.result)
                    if of_mask.target is not None:
                        handles["grad_mask"] = of_mask.target
                        targets.append(of_mask.target)
                sums = Sums(self.sizes(request), flat(key), flat(value), of_mask)
                self._run(pool, homes, request, report, handles, query, sums, results.fresh)
                sums.store(targets[1].tensor, targets[2].tensor)
                for result, target in zip(made, targets, strict=False):
                    if target.tensor.data_ptr() != result.data_ptr():
                        result.detach().copy_(target.tensor.reshape(result.shape))
            finally:
                for name in ("grad_out", "out", "lse", "grad_lse"):
                    self._kept.pop(name, None)
        return tuple(made)

    def sizes(self, request: Request) -> Sizes:
        """The sizes of the call, and how it may be cut."""
        work, described = request.work, self._asked.mask is not None
        # Dropped pairs are counted in positions of the whole sequence.
        rows = request.dropout is None
        return Sizes(
            work.batch, work.heads, work.kv_heads, work.n_queries, work.n_keys, work.is_causal,
            rows, all_keys=described or work.mask is not None,
        )  # fmt: skip

    def _pool(self) -> Pool:
        pool = self._pool_of()
        pool.check_open()
        return pool

    def _of_mask(
        self,
        homes: Sequence[Sequence[Block]],
        mappings: Mappings,
        results: _Results,
        tensors: Tensors,
        request: Request,
        given: Given,
    ) -> MaskSum | None:
        """The gradient of the mask, if it is wanted."""
        mask = tensors.mask
        if not given.of_mask or mask is None:
            return None
        batch, result = request.work.batch_shape, given.grad_mask
        if result is None:
            result = results.make(mask.shape, mask.dtype)
            target = Shared.made(flat_mask(result, batch))
        else:
            torch.autograd.graph.increment_version(result)
            target = Shared.written(flat_mask(result.detach(), batch), mappings)
        flattened = flat_mask(mask.detach(), batch)
        # Where the mask is expanded over some batch dimensions, each entry adds to it.
        viewed = flattened.numel() == mask.numel()
        blocks = [block for home in homes for block in home]
        return MaskSum(
            self.sizes(request), self._whole(request), blocks, flattened, result, batch,
            target if viewed else None,
        )  # fmt: skip

    def _whole(self, request: Request) -> WholeCall:
        work = request.work
        return WholeCall(
            (work.batch,), work.heads, work.kv_heads, work.n_queries, work.n_keys,
            self._asked.mask, work.is_causal, request.scale, request.dropout, request.records,
            request.mask_grad,
        )  # fmt: skip

    def _partition(self, pool: Pool, request: Request, backward: bool) -> list[list[Block]]:
        kind = _kind(request, backward)
        return pool.partition(self.sizes(request), self._asked.budgets, kind, self._steady)

    @property
    def _steady(self) -> bool:
        """Whether blocks take as long as their pairs say: nothing but later keys is masked."""
        return self._asked.mask is None or not self._asked.mask.is_structured

    def _run(
        self,
        pool: Pool,
        homes: Sequence[Sequence[Block]],
        request: Request,
        report: PoolPass,
        tensors: dict[str, Shared],
        query: torch.Tensor,
        sums: Sums | None,
        fresh: Sequence[torch.Tensor],
    ) -> None:
        """A pass; ``fresh``: results that nobody has written to."""
        asked, backward, home = self._asked, sums is not None, query.device
        begin = Begin(
            pool.number(), backward, self._whole(request),
            {name: one.handle for name, one in tensors.items()},
            {"depth": asked.depth, "kernel": asked.kernel, "accumulator": asked.accumulator},
            self._watched or request.report is not None, len(set(asked.budgets)) > 1,
        )  # fmt: skip
        # Others do not know this process's streams.
        backend_of(home).synchronize(home)
        budgets = [
            None if b is None else max(0, b - (request.cast_bytes if name == str(home) else 0))
            for b, name in zip(asked.budgets, (w.device for w in pool.workers), strict=False)
        ]
        fresh = [] if all(on_host(torch.device(name)) for name in pool.devices) else fresh
        with Prefault(fresh), progress_of(request) as progress:
            pool.run(
                begin, self.sizes(request), homes, report, sums, budgets, _kind(request, backward),
                self._steady, progress,
            )  # fmt: skip

    def _inputs(
        self,
        pool: Pool,
        report: PoolPass,
        mappings: Mappings,
        flattened: dict[str, torch.Tensor],
        tensors: Tensors,
        request: Request,
    ) -> dict[str, Shared]:
        """Inputs as workers get them."""
        begun, make = time.perf_counter(), (lambda *of: kept_room(*of)[0]) if pool.pins else None
        if tensors.mask is not None:
            flattened["mask"] = flat_mask(tensors.mask.detach(), request.work.batch_shape)
        if tensors.sinks is not None:
            flattened["sinks"] = tensors.sinks.detach()
        for name, tensor in flattened.items():
            if name not in self._kept:
                self._kept[name] = Shared.of(tensor, mappings, make)
                report.copied_bytes += self._kept[name].copied_bytes
        report.copy_seconds = time.perf_counter() - begun
        return {name: self._kept[name] for name in flattened}

    @contextmanager
    def _told(self, request: Request, *, backward: bool) -> Iterator[PoolPass]:
        """A pass's report, in the call's own."""
        report = PoolPass()
        name = "backward" if backward else "forward"
        setattr(self._report, name, report)
        if request.report is not None:
            if request.report.pool is None:
                request.report.pool = self._report
            setattr(request.report.pool, name, report)
        yield report
        made = as_one(report, backward)
        if request.report is not None:
            setattr(request.report, name, made)
        for sums in request.sums:
            sums.total.add(
                made.kernel, backward=backward, seconds=report.seconds, cut=report.parts > 1,
                peak_bytes=made.peak_bytes or made.planned_peak_bytes,
                recoveries=len(made.recoveries), recovery_seconds=made.recovery_seconds,
            )  # fmt: skip


class _Results:
    """Results of a pass, on one device.

    Attributes:
        fresh: those that nobody has touched.
    """

    def __init__(self, device: torch.device, keep: bool) -> None:
        self._device, self._keep = device, keep
        self.fresh: list[torch.Tensor] = []

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """One more."""
        if not (self._keep and on_host(self._device)):
            made, fresh = made_for(shape, dtype, self._device), True
        else:
            made, fresh = kept_room(shape, dtype)
        if fresh:
            self.fresh.append(made)
        return made


def _kind(request: Request, backward: bool) -> tuple[bool, torch.dtype, int]:
    """What the speed of a device depends on most."""
    return backward, request.work.dtype, request.work.head_dim


def flat(tensor: torch.Tensor, last: int = 3) -> torch.Tensor:
    """With one batch dimension before the ``last`` ones; a view where it can be one."""
    count = math.prod(tensor.shape[: tensor.dim() - last])
    return tensor.reshape(count, *tensor.shape[tensor.dim() - last :])


def flat_mask(mask: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """A mask as (batch or 1, heads or 1, n_queries or 1, n_keys or 1); a view where it can be."""
    mask = mask[(None,) * (len(batch) + 3 - mask.dim())]
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


__all__ = ["Asked", "PoolCall", "flat", "flat_mask"]
