"""``Pool``: several devices, a worker process each, that compute one call together; the pools that
calls with several ``devices`` share; such a call, checked, and its two passes."""

from __future__ import annotations

import math
import multiprocessing.process
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count as count_from
from multiprocessing.util import Finalize
from threading import Lock, RLock
from typing import Any
from weakref import WeakSet

import torch

from quorum_attention.argument_checks import shown, whole_number
from quorum_attention.autograd import attend
from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.block import WholeCall
from quorum_attention.call.options import Arguments, Budget, CallOptions, DevicePool
from quorum_attention.call.overlap import Mappings
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.validation import Tensors, as_mask, as_tensor
from quorum_attention.devices.buffers import InFile, give_back, share, shared_result
from quorum_attention.devices.partition import pieces_of
from quorum_attention.devices.report import PoolPass, PoolReport, as_one
from quorum_attention.devices.scheduler import BlockQueue, Coordinator, expected_speed
from quorum_attention.devices.sums import GradientSums
from quorum_attention.devices.worker import Worker, WorkerPass, end, pickled, start
from quorum_attention.execution.device.lookup import (
    available_device,
    backend_of,
    every_device,
    on_host,
)
from quorum_attention.execution.report import Report
from quorum_attention.kernels.call_shape import state_dtype
from quorum_attention.kernels.masked.resolve import resolve
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.kernels.result_layout import empty_like_input, result_strides
from quorum_attention.kernels.torch_private import capturing, uncompiled
from quorum_attention.keywords import check_names, helps_with_names
from quorum_attention.mask import Mask, map_tensors
from quorum_attention.passes.run_decision import progress_of
from quorum_attention.units import counted, parse_bytes

# Options of a pool's call that `Pool.attention` does not name.
_OPTIONS = ("budget", "depth", "kernel", "accumulator", "progress", "plan")
# Of a result: where the caller wants it, else its shape and dtype.
_Wanted = tuple[torch.Tensor | None, tuple[int, ...], torch.dtype]


def names_of(devices: str | torch.device | Sequence[str | torch.device]) -> list[str]:
    """Devices as torch writes them, with their numbers.

    Raises:
        ValueError, TypeError, NotImplementedError: none is named, or one that is not here.
    """
    if isinstance(devices, str) and devices == "all":
        every = every_device()
        if not every:
            raise ValueError('devices="all" needs a CUDA device, and there is none here')
        return [str(device) for device in every]
    if isinstance(devices, (str, torch.device)):
        devices = [devices]
    if not devices:
        raise ValueError("devices must name at least one device, got none")
    places = [available_device(device, "devices") for device in devices]
    own = [place for place in places if not on_host(place)]
    if len(set(own)) < len(own):
        raise ValueError(f"devices must name each GPU once, got {shown([str(p) for p in places])}")
    return [str(place) for place in places]


class Pool(DevicePool, AbstractContextManager["Pool"]):
    """Worker processes, one for each device, that share the work of an attention call.

    A call is cut into independent parts: by key/value heads, and by rows if the heads do not divide
    among the devices. Each device has its own parts, by its speed, and takes over those of slower
    devices at the end. A part is an ordinary call, with its own budget and recovery. If a worker is
    killed, or runs out of memory at every depth, the others finish its parts.

    Inputs in shared memory (``tensor.share_memory_()``) or mapped from files are not copied; others
    are copied into shared memory, and the report counts the bytes.

    Give it to calls as ``devices=``, or use its own ``attention``. Use it as a context manager, or
    ``close`` it; it also ends with the program. Calls from several threads run one after the other.

    Args:
        devices: as torch writes them, "cuda:0" or "cpu"; or "all" CUDA devices of this machine.
        threads: threads of each worker, for CPU devices; None: torch's default.

    Raises:
        ValueError, TypeError: ``devices`` names none, or one that is not here.
        RuntimeError: a worker did not start.
    """

    @helps_with_names
    def __init__(
        self, devices: str | Sequence[str | torch.device] = "all", *, threads: int | None = None
    ) -> None:
        names = names_of(devices)
        self._threads = None if threads is None else whole_number(threads, "threads", 1)
        self.workers = start(names, self._threads)  # also those that are gone
        # When nobody refers to the pool any more, or the program ends: by itself Python would only
        # ask workers to end, and wait for one that is stopped for ever.
        Finalize(self, end, (self.workers,), exitpriority=1)
        self._lock, self._within = RLock(), False
        self.numbers = count_from(1)  # of passes
        _every.add(self)

    @contextmanager
    def alone(self) -> Iterator[list[Worker]]:
        """The workers for one call, or for what changes them; others wait.

        Raises:
            RuntimeError: this thread has one already, and would wait for itself.
        """
        with self._lock:
            if self._within:
                raise RuntimeError(
                    "a call began within another one of the same workers (from its progress=, "
                    "say): it would wait for itself"
                )
            try:
                self._within = True
                yield self.workers
            finally:
                self._within = False

    @property
    def devices(self) -> list[str]:
        """The devices whose workers are alive."""
        return [worker.device for worker in self.workers if worker.alive]

    def join(self, device: str | torch.device) -> None:
        """Start a worker for one more device, or for one whose worker was lost."""
        with self.alone() as workers:
            workers.extend(start(names_of([device]), self._threads))

    def mend(self) -> None:
        """Start a worker in the place of each that was lost."""
        with self.alone() as workers:
            for number, worker in enumerate(workers):
                if not worker.alive or not worker.process.is_alive():
                    worker.kill()
                    workers[number] = start([worker.device], self._threads)[0]

    def close(self) -> None:
        """End the workers, after a call of another thread; the pool is of no use afterwards."""
        with self.alone() as workers:
            end(workers)
        give_back()

    def __exit__(self, *_: object) -> None:
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
        out: torch.Tensor | None = None,
        report: PoolReport | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """``quorum_attention.attention`` on all devices of the pool, with gradients.

        Args:
            query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, dropout_seed,
                out: as there; tensors in host memory or on a CUDA device.
            report: filled with what happened.
            options: budget, of each device, a list has one for each; depth, kernel, accumulator and
                progress, as there; progress is counted in parts.

        Returns:
            (..., heads, n_queries, value_dim), in shared memory if the inputs are in host memory.

        Raises:
            Errors as of ``quorum_attention.attention``; RuntimeError: no worker is left, with what
            was done until then.
        """
        check_names("Pool.attention", options, _OPTIONS)
        filled = None if report is None else Report(pool=report)
        arguments = Arguments(
            attn_mask, dropout_p, dropout_seed, is_causal, scale, enable_gqa, out,
            options=CallOptions(**options, devices=self, report=filled),
        )  # fmt: skip
        return attend(*request_on_devices("attention", query, key, value, arguments), out)[0]


_every: WeakSet[Pool] = WeakSet()
_pools: dict[tuple[str, ...], Pool] = {}
_lock = Lock()


def _forked() -> None:
    """In a process that was forked off, maybe while another thread had a lock: the workers are its
    parent's. Two processes that talk to one worker would read each other's answers."""
    global _lock
    _lock = Lock()
    _pools.clear()
    for pool in list(_every):
        pool._lock, pool._within = RLock(), False
        for worker in pool.workers:
            worker.alive = False
            worker.pipe.close()
            # Python would end them, as its own children, when this process ends.
            multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_forked)


def kept_pool(names: tuple[str, ...]) -> Pool:
    """The pool of these devices that calls share. It is started where there is none; a worker of it
    that was lost is started again.

    Raises:
        ValueError, TypeError, RuntimeError: as ``Pool``.
    """
    with _lock:
        pool = _pools.get(names)
        if pool is None:
            pool = _pools[names] = Pool(names)
            return pool
    # Without the lock: this waits for a call of another thread, whose progress= may ask for a pool
    # as well.
    pool.mend()
    return pool


def close() -> None:
    """End the workers of calls with several ``devices``; the next such call starts others.

    They end with the program in any case. Until then each holds a CUDA context.
    """
    with _lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


def request_on_devices(
    function: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Arguments
) -> tuple[Tensors, Request]:
    """``request_of``, where ``devices`` may be several or a pool.

    Raises:
        Errors as of ``request_of``; NotImplementedError: what several devices cannot do, by name.
    """
    options = arguments.options
    pool: Any = options.devices
    if isinstance(pool, Pool):
        count, pool_of = len(pool.workers), lambda: pool
    else:
        names = tuple(names_of(pool))
        count, pool_of = len(names), partial(kept_pool, names)
        if count == 1:
            one = options._replace(devices=names[0])
            return request_of(function, query, key, value, arguments._replace(options=one))
    budgets = _budgets(options.budget, count)
    check_options(options)
    if isinstance(query, torch.Tensor) and capturing(query.device):
        raise NotImplementedError(
            "devices cannot be several while a CUDA graph is captured: every replay would give the "
            "results of now, because other processes compute them; name one device"
        )
    query, key = as_tensor(query, "query"), as_tensor(key, "key")
    attn_mask, home = as_mask(arguments.attn_mask, query, key), query.device
    mask = attn_mask if isinstance(attn_mask, Mask) else None
    if mask is not None:
        # Bias and sinks are tensors of the request; the rest is sent as it is.
        attn_mask = Mask(bias=mask.bias, sinks=mask.sinks)
    # This process computes nothing: its own request is of where the inputs are.
    here = options._replace(budget=None, kernel="auto", devices=home)
    arguments = arguments._replace(attn_mask=attn_mask, options=here)
    tensors, request = request_of(function, query, key, value, arguments)
    sent = None
    if mask is not None:
        mask, shape = replace(mask, bias=None, sinks=None), request.shape
        resolve(mask, shape)
        # Now: the caller may write to its tensors before the backward.
        mask = map_tensors(mask, lambda tensor, name: tensor.detach().cpu())
        sent = pickled(mask, shape, home.type)
    worker_options = CallOptions(
        depth=options.depth, kernel=options.kernel, accumulator=options.accumulator
    )
    steady = mask is None or not mask.is_structured
    runner = PoolCall(pool_of, budgets, worker_options, sent, steady)
    return tensors, replace(request, runner=runner)


def check_options(options: CallOptions) -> None:
    """Raise NotImplementedError for options that several devices cannot have."""
    if options.plan is not None:
        raise NotImplementedError(
            "plan is for one device; several plan their parts by themselves: give budget, depth "
            "or kernel"
        )
    kernel = options.kernel
    if not isinstance(kernel, str):
        raise NotImplementedError(
            f"kernel must be a name where several devices compute, got {shown(kernel)}: other "
            "processes do not have the object"
        )
    if kernel != "auto":
        named = get_kernel(kernel)
        if named.own_attention or named.plain_variant is not None:
            raise NotImplementedError(
                f"kernel {kernel!r} computes another attention, of positions in the whole call; "
                "several devices have parts of it: name one device"
            )


def _budgets(budget: Budget | None, count: int) -> tuple[int | None, ...]:
    """A budget for each device.

    Raises:
        ValueError, TypeError: it makes no sense.
    """
    each = budget if isinstance(budget, (list, tuple)) else [budget] * count
    if len(each) != count:
        raise ValueError(
            f"budget must be one number of bytes or one for each of the "
            f"{counted(count, 'device')}, got {len(each)}"
        )
    return tuple(None if one is None else parse_bytes(one) for one in each)


def _input_of_result(name: str, tensors: Tensors) -> torch.Tensor | None:
    """The input whose layout a result has; None: dimensions are in order."""
    query, key, value = tensors[:3]
    results = {"out": query, "grad_query": query, "grad_key": key, "grad_value": value}
    return results.get(name)


def _empty_result(
    shape: tuple[int, ...], dtype: torch.dtype, home: torch.device, like: torch.Tensor | None
) -> torch.Tensor:
    """An uninitialised tensor for a result, in shared memory where the inputs are on the host."""
    if not on_host(home):
        if like is None:
            return torch.empty(shape, dtype=dtype, device=home)
        return empty_like_input(like, shape, dtype)
    if like is None or like.is_contiguous() or 0 in shape:
        return shared_result(shape, dtype)
    flat = shared_result((math.prod(shape),), dtype)
    return flat.as_strided(shape, result_strides(like, shape))


@dataclass(eq=False)
class PoolCall:
    """A call on a pool: runs the passes of a ``Request`` there.

    Inputs that had to be copied into shared memory stay there until the backward.

    Attributes:
        pool_of: gives the pool, for each pass.
        budgets: one for each device of the pool; None: what is free there.
        options: depth, kernel and accumulator.
        mask: what is masked beside a bias, pickled for workers.
        steady: whether blocks take as long as their pairs say.
    """

    pool_of: Callable[[], Pool]
    budgets: tuple[int | None, ...]
    options: CallOptions
    mask: bytes | None
    steady: bool
    _kept: dict[str, tuple[InFile, torch.Tensor]] = field(default_factory=dict)
    _process: int = field(default_factory=os.getpid)

    def forward(self, tensors: Tensors, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse; in shared memory, or on the inputs' device."""
        if self._kept:
            raise NotImplementedError("devices cannot be several under torch.vmap")
        query, _, value = tensors[:3]
        rows = tuple(query.shape[:-1])
        wanted: dict[str, _Wanted] = {
            "out": (request.out, (*rows, value.shape[-1]), request.out_dtype),
            "lse": (None, rows, state_dtype(query.dtype)),
        }
        out, lse = self._run(tensors, request, {}, wanted)
        return out, lse

    def backward(
        self, tensors: Tensors, request: Request, backward_inputs: BackwardInputs
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of query, key and value, and of the bias if it is wanted; in shared memory,
        or on the inputs' device."""
        upstream = {
            "grad_out": backward_inputs.grad_out,
            "out": backward_inputs.out,
            "lse": backward_inputs.lse,
        }
        if backward_inputs.grad_lse is not None:
            upstream["grad_lse"] = backward_inputs.grad_lse
        names = ("grad_query", "grad_key", "grad_value")
        wanted: dict[str, _Wanted] = {
            name: (grad, tuple(t.shape), t.dtype)
            for name, grad, t in zip(
                names, backward_inputs.grads or (None,) * 3, tensors[:3], strict=True
            )
        }
        bias = tensors.bias if backward_inputs.grad_mask is not False else None
        sums = GradientSums(self._whole(request), tensors.key, tensors.value, bias)
        made = self._run(tensors, request, upstream, wanted, sums)
        if bias is None or sums.bias is None:
            return made
        result = backward_inputs.grad_mask
        if not isinstance(result, torch.Tensor):
            result = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
        with torch.no_grad():
            return (*made, result.copy_(sums.bias))

    def _run(
        self,
        tensors: Tensors,
        request: Request,
        upstream: dict[str, torch.Tensor],
        wanted: dict[str, _Wanted],
        sums: GradientSums | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """A pass; its results."""
        if self._process != os.getpid():  # the other process may use that memory again
            self._process = os.getpid()
            self._kept.clear()
        pool, home, mappings = self.pool_of(), tensors.query.device, cache(Mappings.now)
        with self._reported(request, backward=sums is not None) as report, torch.no_grad():
            named = dict(zip(("query", "key", "value", "bias", "sinks"), tensors, strict=False))
            inputs = {name: t for name, t in {**named, **upstream}.items() if t is not None}
            new = {n: share(t.detach(), mappings) for n, t in inputs.items() if n not in self._kept}
            report.copied_bytes = sum(
                own.nbytes for n, (_, own) in new.items() if own.data_ptr() != inputs[n].data_ptr()
            )
            self._kept |= {name: new[name] for name in named if name in new}
            handles = {name: (new.get(name) or self._kept[name])[0] for name in inputs}
            results: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
            devices = [torch.device(name) for name in pool.devices]
            for name, (given, shape, dtype) in wanted.items():
                if given is not None:
                    torch.autograd.graph.increment_version(given)
                else:
                    like = _input_of_result(name, tensors)
                    if on_host(home) and any(backend_of(d).own_memory for d in devices):
                        like = None  # page-locked head by head
                    given = _empty_result(shape, dtype, home, like)
                handles[name], own = share(given.detach(), mappings, written=True)
                results[name] = given, own
            spec = WorkerPass(
                next(pool.numbers), sums is not None, self._whole(request), self.mask, handles,
                self.options,
            )  # fmt: skip
            with progress_of(request) as progress, pool.alone() as workers:
                budgets = [self._budget(n, w, request, home) for n, w in enumerate(workers)]
                schedule = self._schedule(spec, request, workers, budgets)
                Coordinator(workers, spec, schedule, budgets, report, sums, progress).run()
            if sums is not None:
                sums.store(results["grad_key"][1], results["grad_value"][1])
            for given, made in results.values():
                if made.data_ptr() != given.data_ptr():
                    given.detach().copy_(made)
        return tuple(given for given, _ in results.values())

    def _whole(self, request: Request) -> WholeCall:
        how = request.scale, request.dropout, request.records, request.mask_grad
        return WholeCall(request.shape, None, *how)

    def _budget(
        self, number: int, worker: Worker, request: Request, home: torch.device
    ) -> int | None:
        """Bytes for a worker's device, less what inputs that were cast take there; a worker that
        has joined has as many as the last one."""
        budget = self.budgets[min(number, len(self.budgets) - 1)]
        held = request.cast_bytes if worker.device == str(home) else 0
        return None if budget is None else max(0, budget - held)

    def _schedule(
        self,
        spec: WorkerPass,
        request: Request,
        workers: Sequence[Worker],
        budgets: Sequence[int | None],
    ) -> BlockQueue:
        here = {number: worker for number, worker in enumerate(workers) if worker.alive}
        if not here:
            raise RuntimeError(
                "the pool has no worker: it was closed, all of them were lost, or they belong to "
                "the process that this one was forked from (give the devices by name)"
            )
        shape = request.shape
        speeds = {
            n: expected_speed(w.device, w.name, shape.dtype, shape.head_dim, backward=spec.backward)
            for n, w in here.items()
        }
        alike = self.steady and len({(w.name, budgets[n]) for n, w in here.items()}) == 1
        alike &= all(backend_of(torch.device(w.device)).own_memory for w in here.values())
        return BlockQueue(shape, speeds, pieces_of(shape, speeds, uniform_cost=alike))

    @contextmanager
    def _reported(self, request: Request, *, backward: bool) -> Iterator[PoolPass]:
        """A pass's report, in the call's own."""
        report, name = PoolPass(), "backward" if backward else "forward"
        if request.report is not None:
            request.report.pool = request.report.pool or PoolReport()
            setattr(request.report.pool, name, report)
        yield report
        made = as_one(report, backward)
        if request.report is not None:
            setattr(request.report, name, made)
        for total_report in request.reports_with_totals:
            total_report.total.add(made, backward=backward)
