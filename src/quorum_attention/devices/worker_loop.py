"""What a worker process does, until its pool is closed or gone."""

from __future__ import annotations

import errno
import pickle
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from quorum_attention.call.block import BlockResults, CallBlock, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.devices.head_notes import HeadNotes
from quorum_attention.devices.mask_transport import unpickle_mask
from quorum_attention.devices.messages import (
    GRADIENTS,
    INPUTS,
    RESULTS,
    Answer,
    Compute,
    StoredHeads,
    WorkerPass,
)
from quorum_attention.devices.prefault import prefaulting
from quorum_attention.devices.worker_mappings import WorkerMappings
from quorum_attention.errors import BudgetError, is_out_of_memory
from quorum_attention.execution.device.host_memory import bytes_of_host, is_locked
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import OnStored
from quorum_attention.execution.report import Report
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.mask import Mask
from quorum_attention.passes.block_call import compute_block

# A worker without work looks this often whether the pool's process has freed memory.
_IDLE_SECONDS = 1.0
# After this long without work it gives back what it holds on its device.
_LONG_SECONDS = 10.0
# Workers keep at most this share of the host's memory page-locked, all of them the same
# memory.
_MAX_LOCKED_SHARE = 1 / 8


def run_worker(device_name: str, threads: int | None, pipe: Connection) -> None:
    """Compute what a pool asks for, until the pool is gone.

    Args:
        threads: of a CPU device; None for torch's default.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its workers itself
    if threads is not None:
        torch.set_num_threads(threads)
    device = torch.device(device_name)
    backend = backend_of(device)
    with backend.current(device):
        torch.empty(1, device=device)  # opens the device, which takes a while
        pipe.send(backend.model(device))  # tells the pool that the worker is ready
        with suppress(EOFError, OSError):  # the pool is gone
            _answer_messages(device, pipe)


def _answer_messages(device: torch.device, pipe: Connection) -> None:
    """Answer one message after the other.

    Between messages a worker soon lets go of memory that the pool's process has freed,
    and after a while of memory that it holds on its device.

    Raises:
        EOFError, OSError: the pool is gone.
    """
    backend = backend_of(device)
    locker = None if backend.pinned is None else backend.pinned.locker
    mappings = WorkerMappings(locker, bytes_of_host(_MAX_LOCKED_SHARE))
    worker = BlockWorker(device, mappings, pipe.send)
    idle_seconds = 0.0
    while True:
        if pipe.poll(_IDLE_SECONDS):
            pipe.send(worker.answer(pipe.recv()))
            idle_seconds = 0.0
            continue
        idle_seconds += _IDLE_SECONDS
        worker.end_pass()
        mappings.forget_gone()
        if idle_seconds == _LONG_SECONDS:
            mappings.unlock()
            backend.give_back_cached()


class BlockWorker:
    """Computes the blocks of one pass after the other.

    Args:
        device: where it computes.
        mappings: the memory of the pool's process that this process has mapped.
        send: sends the pool a note.
    """

    def __init__(
        self,
        device: torch.device,
        mappings: WorkerMappings,
        send: Callable[[StoredHeads], None],
    ) -> None:
        self._device = device
        self._send = send
        self._backend = backend_of(device)
        self._mappings = mappings
        self._pass: _OpenPass | None = None

    def end_pass(self) -> None:
        """Let go of the tensors of the last pass."""
        self._pass = None

    def answer(self, message: Compute) -> Answer:
        """Compute a block, and tell how that ended."""
        report = Report(timed=False)
        number = message.worker_pass.number
        try:
            open_pass = self._open_pass(message.worker_pass)
            try:
                open_pass.compute(message, report, self._send)
            finally:  # a failed block too: another worker may compute it next
                self._backend.synchronize(self._device)
        except Exception as error:
            is_memory = _is_out_of_memory(error)
            # After an error of its own a CUDA device takes nothing more from this
            # process.
            is_broken = not is_memory and "CUDA error" in str(error)
            trace = traceback.format_exc()
            return Answer(
                number, report, _picklable(error), trace, is_memory, is_broken
            )
        return Answer(number, report)

    def _open_pass(self, worker_pass: WorkerPass) -> _OpenPass:
        """Return a pass with its tensors, which are opened at its first block."""
        if self._pass is None or self._pass.worker_pass.number != worker_pass.number:
            self.end_pass()
            self._mappings.begin_pass()
            self._pass = _OpenPass(worker_pass, self._device, self._mappings)
        return self._pass


class _OpenPass:
    """A pass with its tensors.

    Args:
        worker_pass: the pass.
        device: where its blocks are computed.
        mappings: opens and locks its tensors.
    """

    def __init__(
        self, worker_pass: WorkerPass, device: torch.device, mappings: WorkerMappings
    ) -> None:
        self.worker_pass = worker_pass
        self._device = device
        handles = worker_pass.tensors
        self._tensors = {
            name: mappings.open(handle) for name, handle in handles.items()
        }
        self._call = self._call_with_mask()
        # Inputs first: not all may fit what may be locked.
        results_last = sorted(self._tensors, key=RESULTS.__contains__)
        for name in results_last:
            mappings.lock(handles[name], is_result=name in RESULTS)

    def _call_with_mask(self) -> WholeCall:
        """Return the call with its mask, whose tensors are taken from the pass's."""
        bias = self._tensors.pop("bias", None)
        sinks = self._tensors.pop("sinks", None)
        mask = Mask()
        if self.worker_pass.mask is not None:
            mask = unpickle_mask(self.worker_pass.mask)
        mask = replace(mask, bias=bias, sinks=sinks)
        if not mask.set_fields():
            return self.worker_pass.call
        return replace(self.worker_pass.call, mask=mask)

    def compute(
        self,
        message: Compute,
        report: Report,
        send: Callable[[StoredHeads], None],
    ) -> None:
        """Compute a block into the results of the pass, and into the sums of the
        message.

        Args:
            send: gets notes of heads whose results are in place.
        """
        options = self.worker_pass.options._replace(
            devices=self._device, budget=message.budget, total=report, report=report
        )
        # Sums have memory of their own.
        tensors = {
            name: tensor
            for name, tensor in self._tensors.items()
            if name not in message.sums
        }
        views = self._call.cut_named(tensors, message.block)
        on_stored = None
        # The pool adds sums up when all of the block's are there.
        if not message.sums:
            n_heads = self._call.key_heads(message.block).length
            notes = HeadNotes(self.worker_pass.number, n_heads, send)
            on_stored = notes.add
        with prefaulting(self._untouched_results(views)):
            if not self.worker_pass.backward:
                self._compute_forward(message.block, views, options, on_stored)
                return
            sums = {name: handle.open() for name, handle in message.sums.items()}
            self._compute_backward(
                message.block,
                views,
                views | sums,
                options,
                on_stored,
            )

    def _untouched_results(self, views: NamedTensors) -> list[torch.Tensor]:
        """Return the results whose pages are made beside the call."""
        if not backend_of(self._device).own_memory:
            return []
        handles = self.worker_pass.tensors
        return [
            view
            for name, view in views.items()
            if name in RESULTS
            and handles[name].is_shared_memory
            and not is_locked(view)
        ]

    def _compute_forward(
        self,
        block: CallBlock,
        views: NamedTensors,
        options: CallOptions,
        on_stored: OnStored | None,
    ) -> None:
        """Compute out and lse into ``views``."""
        inputs = {name: views[name] for name in INPUTS}
        results = BlockResults(views["out"], views["lse"], on_stored=on_stored)
        compute_block(self._call, block, inputs, options, results)

    def _compute_backward(
        self,
        block: CallBlock,
        views: NamedTensors,
        targets: NamedTensors,
        options: CallOptions,
        on_stored: OnStored | None,
    ) -> None:
        """Compute gradients into ``targets``."""
        inputs = {name: view for name, view in views.items() if name not in GRADIENTS}
        grad_query, grad_key, grad_value = (targets[name] for name in GRADIENTS)
        computed = grad_query
        # The gradients of keys have a wider dtype where they are added up with other
        # blocks'.
        if grad_query.dtype != grad_key.dtype:
            computed = torch.empty_like(grad_query, dtype=grad_key.dtype)
        grad_bias = targets.get("grad_bias", False)
        results = BlockResults(
            grads=(computed, grad_key, grad_value),
            grad_mask=grad_bias,
            on_stored=on_stored,
        )
        compute_block(self._call, block, inputs, options, results)
        if computed is not grad_query:
            grad_query.copy_(computed)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, of the device or of the host."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # not mapped
        return True
    return is_out_of_memory(error) and not isinstance(error, BudgetError)


def _picklable(error: Exception) -> Exception:
    """Return an error after a pickle round trip, or a RuntimeError with its text.

    The original's traceback would keep the tensors of the block alive.
    """
    with suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error):
            return copy
    return RuntimeError(f"{type(error).__name__}: {error}")
