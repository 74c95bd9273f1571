"""A worker process, what it is told and what it answers: computes blocks on one device until its
pool is closed or gone."""

from __future__ import annotations

import pickle
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from quorum_attention.call.block import AttnMask, Block, BlockResults, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.devices.buffers import (
    Handles,
    InFile,
    MappedBuffers,
    opened,
    prefaulting,
)
from quorum_attention.errors import BudgetError, is_out_of_memory
from quorum_attention.execution.device.cuda import Handed
from quorum_attention.execution.device.lookup import HOST, backend_of, on_host
from quorum_attention.execution.device.page_locks import is_locked, of_host
from quorum_attention.execution.report import Report
from quorum_attention.kernels.masked.functions import boolean, indexing
from quorum_attention.mask import Keeps, Mask
from quorum_attention.passes import compute_block

# How often a worker without work looks whether the pool's process has freed memory; and after how
# long it gives back what it holds on its device.
_IDLE_SECONDS, _LONG_SECONDS = 1.0, 10.0
# How much a worker keeps page-locked: of the host's memory.
_MOST_OF_HOST = 1 / 16
# Bytes that lie beside a result on another GPU, on their way into it.
_PIECE_BYTES = 8 << 20
_INPUTS = ("query", "key", "value", "grad_out", "out", "lse", "grad_lse")
_GRADS = ("grad_query", "grad_key", "grad_value")
_OF_KEYS = ("key", "value", "grad_key", "grad_value")


@dataclass(frozen=True, slots=True)
class Begin:
    """A pass begins.

    Attributes:
        number: of the pass, in this pool.
        backward: which of the two it is.
        call: the whole call; its mask has no bias and no sinks.
        tensors: handles by name: query, key, value, mask, out, lse; grad_out, grad_query, grad_key,
            grad_value; grad_lse, sinks.
        options: ``CallOptions``'s depth, kernel and accumulator.
        watched: whether somebody reads the report.
        unequal: whether other workers may have more memory.
        budget: bytes that each block may take on the device; None: what is free.
    """

    number: int
    backward: bool
    call: WholeCall
    tensors: Handles = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    watched: bool = True
    unequal: bool = False
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a block of the pass that has begun. ``sums``: where those of its gradients go that
    have to be added up, by name: grad_key and grad_value, grad_mask."""

    number: int
    block: Block
    sums: Handles = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class End:
    """A pass is over: let go of its tensors, and say so if ``confirm``."""

    number: int
    confirm: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has let go of a pass's tensors."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """The results of a block are in place, after so many seconds of the worker's."""

    number: int
    seconds: float
    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """A block could not be computed.

    Attributes:
        memory: whether memory ran out at every depth; others may still compute it.
        error: the exception, if it can be sent, else its text.
        trace: the traceback in words.
        broken: whether the worker can compute nothing any more, and ends.
    """

    number: int
    memory: bool
    error: BaseException | str
    trace: str
    broken: bool = False


def sample_pairs(work: Sequence[int]) -> list[tuple[int, ...]]:
    """Some hundred pairs of a call of (batch entries, heads, queries, keys), drawn anew each time:
    for each query keys at every order of magnitude of the distance, and anywhere."""
    draw = random.SystemRandom()  # no generator of the caller's moves on
    batch, heads, n_queries, n_keys = work
    pairs: list[tuple[int, ...]] = []
    for number in range(512 if 0 not in work else 0):
        query, key = draw.randrange(n_queries), draw.randrange(n_keys)
        if number % 2:
            away = int(n_keys ** draw.random()) - draw.randrange(2)
            key = min(n_keys - 1, max(0, query + draw.choice((-1, 1)) * away))
        pairs.append((draw.randrange(batch), draw.randrange(heads), query, key))
    return pairs


def answers(keeps: Keeps, pairs: Sequence[tuple[int, ...]], device: torch.device) -> list[bool]:
    """Which pairs a function of a mask keeps."""
    at = [torch.tensor(numbers, device=device) for numbers in zip(*pairs, strict=True)]
    return torch.vmap(indexing(boolean(keeps)))(*at).tolist() if at else []


@dataclass(frozen=True)
class Rule:
    """A function of a mask as workers get it: by its name.

    A global that it reads may have another value in a worker, so some of its answers are sent
    along. A difference that touches none of them is not seen.
    """

    pickled: bytes
    name: str
    pairs: list[tuple[int, ...]]
    kept: list[bool]

    def __call__(self, *at: Any) -> torch.Tensor:
        """Never called: it is a function for ``Mask``'s checks alone."""
        raise TypeError("a rule that was sent has to be opened")

    def open(self, device: torch.device) -> Keeps:
        """The function.

        Raises:
            NotImplementedError: it cannot be imported here.
            RuntimeError: it keeps other pairs than in the process that made the call.
        """
        try:
            keeps: Keeps = pickle.loads(self.pickled)
        except Exception as error:
            raise NotImplementedError(
                f"Mask.keeps must be a function that other processes can import where several "
                f"devices compute, and {self.name} cannot be ({type(error).__name__}: {error}): "
                "put it into a module"
            ) from error
        if answers(keeps, self.pairs, device) != self.kept:
            raise RuntimeError(
                f"the mask function {self.name} keeps other pairs in a worker than in the process "
                "that made the call: a worker imports it by its name, and what it reads differs "
                "there. Give values as defaults (def near(b, h, q, k, n=n): ...)"
            )
        return keeps


_Change = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def changed(part: Any, tensor: _Change = _same, keeps: _Change = _same) -> Any:
    """A mask, or a field of one, with its tensors and its functions changed."""
    if isinstance(part, torch.Tensor):
        return tensor(part)
    if isinstance(part, tuple):
        return tuple(changed(one, tensor, keeps) for one in part)
    if not isinstance(part, Mask):
        return part
    found = {one.name: changed(getattr(part, one.name), tensor, keeps) for one in fields(part)}
    return Mask(**found | {"keeps": None if part.keeps is None else keeps(part.keeps)})


def work(device: str, threads: int | None, pipe: Connection) -> None:
    """Obey a pool until it says no more.

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
        pipe.send(device if on_host(place) else backend.model(place))  # it is ready
        with suppress(EOFError, OSError):  # the pool is gone
            _obey(place, pipe)


def _obey(place: torch.device, pipe: Connection) -> None:
    current: _Pass | None = None
    kept = backend_of(place).pinned
    mapped = MappedBuffers(None if kept is None else kept.locker, of_host(_MOST_OF_HOST))
    while True:
        if current is None:
            _wait(place, pipe, mapped)
        message = pipe.recv()
        if message is None:
            return
        if isinstance(message, Begin):
            # There is one at a time: of what is still here the pool was interrupted as it said so.
            if current is not None:
                current.end()
            current = _Pass(message, place, mapped)
        elif isinstance(message, End):
            # A pool that is interrupted may say so of one that never began here.
            if current is not None and current.number == message.number:
                current.end()
                current = None
            if message.confirm:
                pipe.send(Ended(message.number))
        elif current is not None:
            pipe.send(answer(current, message))


def _wait(place: torch.device, pipe: Connection, mapped: MappedBuffers) -> None:
    """Wait for a message; let go of memory meanwhile: at once of what the pool's process has freed,
    after a while of what is held on the device."""
    waited = 0.0
    while waited < _LONG_SECONDS or mapped:
        if pipe.poll(_IDLE_SECONDS):
            return
        waited += _IDLE_SECONDS
        mapped.forget_gone()
        if waited == _LONG_SECONDS:
            mapped.unlock()
            backend_of(place).give_back_cached()


def answer(one: _Pass, message: Compute) -> Done | Failed:
    """Compute a block, and say how that ended."""
    begun = time.perf_counter()
    report = Report()
    try:
        one.compute(message, report)
    except Exception as error:
        # A budget is as small for the others, or theirs are others.
        memory = is_out_of_memory(error) and (one.unequal or not isinstance(error, BudgetError))
        # After an error of its own a CUDA device takes nothing more from this process.
        broken = not memory and "CUDA error" in str(error)
        said, trace = _as_sent(error), traceback.format_exc()
        return Failed(message.number, memory, said, trace, broken)
    return Done(message.number, time.perf_counter() - begun, report)


def _as_sent(error: BaseException) -> BaseException | str:
    """It as the pool gets it, else its text. Not itself: with it the frames of the part, and their
    tensors, would stay."""
    with suppress(Exception):
        said = pickle.loads(pickle.dumps(error))
        if type(said) is type(error):
            return said
    return f"{type(error).__name__}: {error}"


class _Pass:
    """A pass in a worker."""

    def __init__(self, message: Begin, device: torch.device, mapped: MappedBuffers) -> None:
        self.number, self.unequal = message.number, message.unequal
        self._begin, self._device, self._mapped = message, device, mapped
        # Opened with the first part: a pass may be over, and its memory gone, before this worker
        # has heard that it began.
        self._tensors: dict[str, torch.Tensor] = {}
        self._call: WholeCall = message.call
        # Of the part that is being computed: where gradients go that are added up.
        self._sums: dict[str, torch.Tensor] = {}

    def end(self) -> None:
        """The pass is over. What was never opened is given back all the same."""
        for handle in () if self._tensors else self._begin.tensors.values():
            if isinstance(handle, Handed):
                handle.release()

    def compute(self, message: Compute, report: Report) -> None:
        """Compute a part; its results are in place when this returns."""
        self._sums = {name: opened(handle) for name, handle in message.sums.items()}
        if not self._tensors:
            self._open()
        views = {
            name: self._call.cut(tensor, message.block, of_keys=name in _OF_KEYS)
            for name, tensor in self._tensors.items()
            if name in _INPUTS or name in _GRADS
        }
        try:
            with prefaulting(self._unlocked(views)):
                self._compute(message.block, views, report).store()
        finally:
            self._synchronize()
        self._sums = {}

    def _open(self) -> None:
        handles = self._begin.tensors
        self._mapped.begin_pass()
        self._tensors = {name: self._mapped.open(handle) for name, handle in handles.items()}
        call, bias, sinks = self._call, self._tensors.get("mask"), self._tensors.get("sinks")
        mask: AttnMask = call.mask
        if isinstance(mask, Mask):
            mask = changed(mask, keeps=lambda rule: rule.open(self._device))
        if mask is None and sinks is None:
            mask = bias
        elif bias is not None or sinks is not None:
            assert not isinstance(mask, torch.Tensor)
            mask = replace(mask or Mask(), bias=bias, sinks=sinks)
        self._call = replace(call, mask=mask)

    def _synchronize(self) -> None:
        """Until kernels and copies are done, also those of a part that has failed.

        Before that no tensor of another process is let go of: torch then takes its memory out of
        this process, and waits for the current stream of the device that has it, but not for other
        devices and streams that may still use it. So tensors of a part are referred to by the pass.
        """
        every = (*self._tensors.values(), *self._sums.values())
        for device in {self._device, *(t.device for t in every)}:
            backend_of(device).synchronize(device)

    def _unlocked(self, views: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Lock what should stay so; what is left, of which pages have to be made first."""
        if not backend_of(self._device).own_memory:
            return []
        # Ordinary files are not read ahead of time.
        mapped = {
            name: view
            for name, view in views.items()
            if isinstance(h := self._begin.tensors[name], InFile)
            and h.in_memory
            and name not in self._sums
        }
        written = _GRADS if self._begin.backward else ("out", "lse")
        results = [view for name, view in mapped.items() if name in written]
        inputs = [view for name, view in mapped.items() if name not in written]
        # The driver would map their pages one after the other.
        with prefaulting((view for view in inputs if not is_locked(view)), wait=True):
            pass
        self._mapped.lock(inputs, results)
        return [view for view in mapped.values() if not is_locked(view)]

    def _compute(self, block: Block, views: dict[str, torch.Tensor], report: Report) -> Local:
        free = self._begin.budget
        if free is None:
            free = backend_of(self._device).free_bytes(self._device)
        at = Local(self._device, free // 2, views.values())
        names = _INPUTS if self._begin.backward else _INPUTS[:3]
        inputs = {name: at.read(views[name]) for name in names if name in views}
        results = self._gradients(views, at) if self._begin.backward else BlockResults(
            out=at.result(views["out"])
        )  # fmt: skip
        mask, causal = self._call.mask_of(block)
        masked = changed(mask, at.read), causal
        budget = self._begin.budget
        written = CallOptions(
            **self._begin.options, devices=self._device, total=report,
            budget=None if budget is None else max(0, budget - at.copied_bytes),
            report=report if self._begin.watched else None,
        )  # fmt: skip
        made = compute_block(self._call, block, inputs, written, results, masked)
        if not self._begin.backward:
            at.results.append((views["lse"], made[1]))
        return at

    def _gradients(self, views: dict[str, torch.Tensor], at: Local) -> BlockResults:
        sums, target = self._sums, views["grad_query"]
        if "grad_key" not in sums:
            query, key, value = (at.result(views[name]) for name in _GRADS)
        else:
            # All three in the state's dtype: those of keys and values are added up with others.
            key, value = (at.result(sums[name]) for name in ("grad_key", "grad_value"))
            query = torch.empty(target.shape, dtype=key.dtype, device=key.device)
            at.results.append((target, query))
        of_mask = sums.get("grad_mask")
        grad_mask = False if of_mask is None else at.result(of_mask)
        return BlockResults(grads=(query, key, value), grad_mask=grad_mask)


class Local:
    """The tensors of one part, where its device can have them.

    Memory of another GPU is no operand of an attention call. So inputs there are copied to this
    device, where the budget has room for them, and to host memory where it has not; results made
    here are copied there at the end.

    No kernel of this device may write there: the memory is another process's, and a kernel of one
    GPU that writes to such memory of another one is an illegal access, after which the process can
    compute nothing more. Copies by the driver reach it. torch has them where both sides are
    contiguous and of one dtype, and launches a kernel of the source's GPU where they are not.

    Args:
        device: what computes it.
        room: bytes that copies may take there.
        tensors: all of the part's.

    Attributes:
        results: (where it belongs, where it was made) of each result that has to be copied.
        copied_bytes: of copies on the device, which count against the part's budget.
    """

    def __init__(self, device: torch.device, room: int, tensors: Iterable[torch.Tensor]) -> None:
        self._device = self._place = device
        if sum(t.nbytes for t in tensors if not self._is_here(t)) > room:
            self._place = HOST
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copied_bytes = 0

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input, copied if it is on another GPU."""
        if self._is_here(tensor):
            return tensor
        self.copied_bytes += 0 if on_host(self._place) else tensor.nbytes
        return tensor.to(self._place)

    def result(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where to make a result: its own place, or one here."""
        if self._is_here(tensor):
            return tensor
        self.copied_bytes += 0 if on_host(self._place) else tensor.nbytes
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._place)
        self.results.append((tensor, made))
        return made

    def store(self) -> None:
        """Copy results to where they belong."""
        for target, made in self.results:
            put(target, made)
        self.results.clear()

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return on_host(tensor.device) or tensor.device == self._device


def put(target: torch.Tensor, made: torch.Tensor) -> None:
    """Copy a result to where it belongs, by no kernel of the device where it was made if that is on
    another one (see the top of this file)."""
    if _is_near(target, made):
        target.copy_(made)
        return
    for there, here in _in_pieces(target, made):
        sent = here.to(there.dtype).contiguous()
        if there.is_contiguous():
            there.copy_(sent)
        else:
            there.copy_(torch.empty_like(sent, device=there.device).copy_(sent))


def _is_near(target: torch.Tensor, made: torch.Tensor) -> bool:
    return on_host(target.device) or target.device == made.device


def _in_pieces(
    target: torch.Tensor, made: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape in pieces that are small, or that need nothing beside them."""
    alike = target.dtype == made.dtype and target.is_contiguous() and made.is_contiguous()
    if alike or max(target.nbytes, made.nbytes) <= _PIECE_BYTES:
        yield target, made
        return
    at = next(dim for dim, size in enumerate(made.shape) if size > 1)
    half, size = made.shape[at] // 2, made.shape[at]
    for start, length in ((0, half), (half, size - half)):
        yield from _in_pieces(target.narrow(at, start, length), made.narrow(at, start, length))
