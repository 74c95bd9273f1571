"""Worker processes: started, told what to compute, listened to and ended by their pool's process;
and what one does, until its pool is closed or gone.

Processes, not threads: threads that issue for two devices wait for each other's interpreter, and
were slower than one device in small budgets.
"""

from __future__ import annotations

import errno
import pickle
import random
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.multiprocessing

from quorum_attention.argument_checks import shown
from quorum_attention.call.block import BlockResults, CallBlock, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.devices.buffers import Handles, MappedBuffers, prefaulting
from quorum_attention.errors import BudgetError, is_out_of_memory
from quorum_attention.execution.device.host_memory import bytes_of_host, is_locked
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.report import Report
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.mask_fields import masks_in
from quorum_attention.kernels.masked.pair_functions import boolean, indexing
from quorum_attention.mask import Keeps, Mask
from quorum_attention.passes.block_call import compute_block

# How often a worker without work looks whether the pool's process has freed memory; and after how
# long it gives back what it holds on its device.
_IDLE_SECONDS, _LONG_SECONDS = 1.0, 10.0
# Until when a worker has to be ready: it imports torch and opens its device. And until the exit
# code of one that has closed its pipe is known.
_START_SECONDS, _EXIT_SECONDS = 180.0, 1.0
# How much workers keep page-locked, all of them the same memory: of the host's.
_MOST_OF_HOST = 1 / 8
_INPUTS = ("query", "key", "value", "grad_out", "out", "lse", "grad_lse")
_GRADS = ("grad_query", "grad_key", "grad_value")
_RESULTS = {"out", "lse", *_GRADS}
_OF_KEYS = ("key", "value", "grad_key", "grad_value")


@dataclass(frozen=True, slots=True)
class WorkerPass:
    """What workers have to know of a pass.

    Attributes:
        number: of the pass, in this pool.
        backward: which of the two it is.
        call: the whole call, without its mask.
        mask: the mask without bias and sinks, ``pickled``; None: there is none.
        tensors: handles by name: query, key, value, bias, sinks, out, lse; grad_out, grad_query,
            grad_key, grad_value, grad_lse.
        options: depth, kernel and accumulator.
    """

    number: int
    backward: bool
    call: WholeCall
    mask: bytes | None = None
    tensors: Handles = field(default_factory=dict)
    options: CallOptions = field(default_factory=CallOptions)


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a block of a pass, in so many bytes of the device; None: in what is free. ``sums``:
    where those of its gradients go that have to be added up, by name: grad_key and grad_value,
    grad_bias."""

    spec: WorkerPass
    block: CallBlock
    budget: int | None = None
    sums: Handles = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A block was computed, and its results are in place; or it was not.

    Attributes:
        number: of the pass.
        report: what the call did.
        error: why it could not be computed; None: it was.
        trace: the traceback in words.
        memory: whether memory ran out at every depth; others may still compute it.
        broken: whether the worker can compute nothing any more, and ends.
    """

    number: int
    report: Report
    error: Exception | None = None
    trace: str = ""
    memory: bool = False
    broken: bool = False


@dataclass(eq=False)
class Worker:
    """A worker process.

    Attributes:
        device: as torch writes it.
        process, pipe: to talk to it.
        name: the device's own name.
        alive: whether it has not ended, nor been given up.
    """

    device: str
    process: Any
    pipe: Connection
    name: str = ""
    alive: bool = True

    def send(self, message: object) -> bool:
        """Send a message; False if the worker is gone."""
        # Before: that something cannot be sent is not the worker's fault.
        said = pickle.dumps(message)
        try:
            self.pipe.send_bytes(said)
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it at once, if it has not ended. It holds nothing that outlives it."""
        if self.alive:
            self.alive = False
            self.process.kill()
            self.process.join()
            self.pipe.close()


def start(devices: Sequence[str], threads: int | None) -> list[Worker]:
    """A worker for each device, ready to compute.

    Raises:
        RuntimeError: one did not start, and all are ended.
    """
    context, workers = torch.multiprocessing.get_context("spawn"), list[Worker]()
    try:
        for device in devices:
            ours, theirs = context.Pipe()
            name, told = f"quorum-attention {device}", (device, threads, theirs)
            process = context.Process(target=work, args=told, name=name, daemon=True)
            with theirs:
                process.start()
            workers.append(Worker(device, process, ours))
        limit = time.monotonic() + _START_SECONDS
        for worker in workers:
            _wait_for(worker, max(0.0, limit - time.monotonic()))
    except BaseException:  # an interrupt, or no more files or processes may be had
        end(workers)
        raise
    return workers


def _wait_for(worker: Worker, seconds: float) -> None:
    """Wait until a worker is ready.

    Raises:
        RuntimeError: it is not.
    """
    try:
        if worker.pipe.poll(seconds):
            worker.name = worker.pipe.recv()
            return
    except (EOFError, OSError):
        worker.process.join(_EXIT_SECONDS)
    raise RuntimeError(
        f"the worker of {worker.device} did not start (exit code {worker.process.exitcode}): a "
        "program that uses several devices has to be in a file, which workers import, with its "
        'work under `if __name__ == "__main__":`'
    )


def end(workers: Sequence[Worker]) -> None:
    """End workers; they are gone when this returns."""
    for worker in workers:
        worker.kill()


def listen(workers: Mapping[int, Worker]) -> list[tuple[int, Answer | None]]:
    """What workers say next, by number; None instead of an answer from one that is gone."""
    numbers: dict[Any, int] = {worker.pipe: number for number, worker in workers.items()}
    heard: list[tuple[int, Answer | None]] = []
    for pipe in wait(list(numbers)):
        try:
            heard.append((numbers[pipe], workers[numbers[pipe]].pipe.recv()))
        except Exception:  # it is gone, or says what nobody understands
            heard.append((numbers[pipe], None))
    return heard


def functions_of(mask: Mask) -> list[Keeps]:
    """The functions of a mask and of the masks within it."""
    return [one.keeps for one in masks_in(mask) if one.keeps is not None]


def pickled(mask: Mask, shape: CallShape, device: str) -> bytes:
    """A mask without bias and sinks, as it is sent to workers: its functions by their names.

    A global that a function reads may have another value in a worker, so some of its answers are
    sent along. A difference that touches none of them is not seen.

    Args:
        shape: the call's sizes.
        device: where answers are computed.

    Raises:
        NotImplementedError: a function cannot be sent.
    """
    sizes = shape.batch, shape.heads, shape.n_queries, shape.n_keys
    sampled = sizes, random.SystemRandom().getrandbits(63), device
    answers = [_answers(keeps, *sampled) for keeps in functions_of(mask)]
    try:
        return pickle.dumps((mask, sampled, answers))
    except Exception as error:
        raise NotImplementedError(
            "Mask.keeps must be sent to other processes where several devices compute: use a "
            f"function of a module, not one made inside another function ({error})"
        ) from None


def opened(data: bytes) -> Mask:
    """The mask, in a worker.

    Raises:
        NotImplementedError: a function cannot be imported here.
        RuntimeError: a function keeps other pairs than in the process that made the call.
    """
    try:
        mask, sampled, answers = pickle.loads(data)
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            "Mask.keeps must be a function that other processes can import where several devices "
            f"compute: put it into a module ({error})"
        ) from error
    for keeps, wanted in zip(functions_of(mask), answers, strict=True):
        if _answers(keeps, *sampled) != wanted:
            raise RuntimeError(
                f"the mask function {shown(keeps)} keeps other pairs in a worker than in the "
                "process that made the call: a worker imports it by its name, and what it reads "
                "differs there. Give values as defaults (def near(b, h, q, k, n=n): ...)"
            )
    return cast(Mask, mask)


def _answers(keeps: Keeps, sizes: tuple[int, ...], seed: int, device: str) -> list[bool]:
    """Which of some hundred pairs of a call a function keeps: half of them anywhere, half at every
    order of magnitude of the distance."""
    if 0 in sizes:
        return []
    with torch.device("cpu"):  # no generator of the caller's moves on
        draw = torch.Generator().manual_seed(seed)
        *others, query, key = (torch.randint(n, (512,), generator=draw) for n in sizes)
        away = sizes[3] ** torch.rand(256, generator=draw) - torch.rand(256, generator=draw)
        away *= torch.randint(2, (256,), generator=draw) * 2 - 1
        key[::2] = (query[::2] + away.long()).clamp(0, sizes[3] - 1)
    at = [numbers.to(device) for numbers in (*others, query, key)]
    kept: list[bool] = torch.vmap(indexing(boolean(keeps)))(*at).tolist()
    return kept


def work(device: str, threads: int | None, pipe: Connection) -> None:
    """Obey a pool until it is gone.

    Args:
        threads: of a CPU device.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its workers itself
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device)
    backend = backend_of(place)
    with backend.current(place):
        torch.empty(1, device=place)  # opens the device, which takes a while
        pipe.send(backend.model(place))  # it is ready
        with suppress(EOFError, OSError):  # the pool is gone
            _obey(place, pipe)


def _obey(place: torch.device, pipe: Connection) -> None:
    kept = backend_of(place).pinned
    mapped = MappedBuffers(None if kept is None else kept.locker, bytes_of_host(_MOST_OF_HOST))
    worker, waited = BlockWorker(place, mapped), 0.0
    while True:
        # Soon lets go of what the pool's process has freed, after a while of what is held on the
        # device.
        if not pipe.poll(_IDLE_SECONDS):
            waited += _IDLE_SECONDS
            worker.end_pass()
            mapped.forget_gone()
            if waited == _LONG_SECONDS:
                mapped.unlock()
                backend_of(place).give_back_cached()
            continue
        message, waited = pipe.recv(), 0.0
        pipe.send(worker.answer(message))


class BlockWorker:
    """What a worker process does.

    Args:
        device: where it computes.
        mapped: the memory of other processes that it has.
    """

    def __init__(self, device: torch.device, mapped: MappedBuffers) -> None:
        self._device, self._mapped = device, mapped
        self.end_pass()

    def end_pass(self) -> None:
        """Let go of the tensors of the last pass."""
        self._number, self._tensors = -1, dict[str, torch.Tensor]()

    def answer(self, message: Compute) -> Answer:
        """Compute a block, and say how that ended."""
        spec, report = message.spec, Report(timed=False)
        try:
            if spec.number != self._number:
                self._begin(spec)
            try:
                self._compute(message, report)
            finally:  # also of a block that has failed: another worker may compute it next
                backend_of(self._device).synchronize(self._device)
        except Exception as error:
            memory = is_out_of_memory(error) and not isinstance(error, BudgetError)
            memory |= isinstance(error, OSError) and error.errno == errno.ENOMEM  # not mapped
            # After an error of its own a CUDA device takes nothing more from this process.
            broken = not memory and "CUDA error" in str(error)
            trace = traceback.format_exc()
            return Answer(spec.number, report, _as_sent(error), trace, memory, broken)
        return Answer(spec.number, report)

    def _begin(self, spec: WorkerPass) -> None:
        self.end_pass()
        self._mapped.begin_pass()
        tensors = {name: self._mapped.open(handle) for name, handle in spec.tensors.items()}
        bias, sinks = (tensors.pop(name, None) for name in ("bias", "sinks"))
        mask = Mask() if spec.mask is None else opened(spec.mask)
        mask = replace(mask, bias=bias, sinks=sinks)
        # Inputs first: not all may fit what may be locked.
        for name in sorted(tensors, key=_RESULTS.__contains__):
            self._mapped.lock(spec.tensors[name], result=name in _RESULTS)
        self._call = replace(spec.call, mask=mask if mask.set_fields() else None)
        self._tensors, self._number = tensors, spec.number

    def _compute(self, message: Compute, report: Report) -> None:
        spec, block = message.spec, message.block
        views = {
            name: self._call.cut(tensor, block, of_keys=name in _OF_KEYS)
            for name, tensor in self._tensors.items()
            if name not in message.sums
        }
        names = _INPUTS if spec.backward else _INPUTS[:3]
        inputs = {name: views[name] for name in names if name in views}
        options = spec.options._replace(
            devices=self._device, budget=message.budget, total=report, report=report,
        )  # fmt: skip
        # Pages of results that are new are made beside; not those of ordinary files.
        fresh = [
            view for name, view in views.items()
            if name in _RESULTS and spec.tensors[name].in_memory and not is_locked(view)
        ]  # fmt: skip
        with prefaulting(fresh if backend_of(self._device).own_memory else ()):
            if not spec.backward:
                results = BlockResults(out=views["out"])
                _, lse = compute_block(self._call, block, inputs, options, results)
                views["lse"].copy_(lse)
                return
            targets = views | {name: handle.open() for name, handle in message.sums.items()}
            query, key, value = (targets[name] for name in _GRADS)
            if query.dtype != key.dtype:  # the others are added up with those of other blocks
                query = torch.empty_like(query, dtype=key.dtype)
            results = BlockResults(
                grads=(query, key, value), grad_mask=targets.get("grad_bias", False)
            )
            compute_block(self._call, block, inputs, options, results)
            if query is not targets["grad_query"]:
                targets["grad_query"].copy_(query)


def _as_sent(error: Exception) -> Exception:
    """It as the pool gets it, else its text. Not itself: with it the frames of the part, and their
    tensors, would stay."""
    with suppress(Exception):
        sent = pickle.loads(pickle.dumps(error))
        if type(sent) is type(error):
            return sent
    return RuntimeError(f"{type(error).__name__}: {error}")
