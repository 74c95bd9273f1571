"""A pass on the workers of a pool, and what happens when one is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from quorum_attention.devices.messages import (
    Answer,
    Compute,
    StoredHeads,
    WorkerPass,
)
from quorum_attention.devices.report import PartTiming, PoolPass
from quorum_attention.devices.shared_files import handle_of
from quorum_attention.devices.sums import GradientSums
from quorum_attention.devices.work_queue import BlockQueue
from quorum_attention.devices.worker_process import Worker, end_workers, next_answers
from quorum_attention.errors import OutOfMemoryError
from quorum_attention.execution.report import Report
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.units import counted

_WORKER_ENDED = "its worker has ended"


@dataclass(slots=True)
class Coordinator:
    """Runs one pass; it computes nothing itself.

    A worker that ends or runs out of memory at every depth leaves the pass. Its work
    item goes back, without the heads that the worker has said are stored, and others
    compute it.

    Attributes:
        workers: all workers of the pool.
        worker_pass: the pass.
        queue: the blocks of the pass.
        budgets: bytes that a work item may take on each worker's device; None for what
            is free.
        report: filled with what happened.
        sums: adds up gradients; None in a forward.
        progress: called with the number of blocks that are done, that of all, and the
            pass's name.
    """

    workers: Sequence[Worker]
    worker_pass: WorkerPass
    queue: BlockQueue
    budgets: Sequence[int | None]
    report: PoolPass
    sums: GradientSums | None = None
    progress: Callable[[int, int, str], None] | None = None
    _began: float = field(default_factory=time.perf_counter)
    _sum_buffers: dict[int, NamedTensors] = field(default_factory=dict)
    _error: Exception | None = None
    _out_of_memory: str = ""

    def run(self) -> None:
        """Run all blocks. After an error workers finish the work items that they have.

        Raises:
            OutOfMemoryError: memory ran out on every device.
            RuntimeError: no worker is left; the message says what was done.
            Exception: what a worker raised.
        """
        queue = self.queue
        self.report.devices = [
            f"{worker.device} ({worker.name})" for worker in self.workers
        ]
        self.report.parts = queue.count
        try:
            while queue.running or (self._error is None and not queue.is_finished):
                self._launch()
                self._take_answers()
            if self._error is not None:
                raise self._error
        finally:
            # The error's traceback holds this object: one that held the error in turn
            # would keep the call's memory until Python looks for cycles.
            self._error = None
            self._kill_computing()
            self.report.seconds = time.perf_counter() - self._began

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Keep the first error: it is raised in the end, and no work item is sent after
        it."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def _launch(self) -> None:
        """Send work items to idle devices, where there are some for them."""
        with self._keeping_error():
            if not self.queue.devices:
                raise self._no_device_left()
            for device in sorted(self.queue.devices - self.queue.running.keys()):
                if self._error is None:
                    self._launch_on(device)

    def _launch_on(self, device: int) -> None:
        """Send a device its next work item, if there is one for it.

        Raises:
            Exception: it could not be sent. Nobody waits for an answer to it.
        """
        item = self.queue.take(device, time.perf_counter())
        if item is None:
            return
        try:
            buffers = {} if self.sums is None else self.sums.buffers(item.block)
            handles = {name: handle_of(tensor) for name, tensor in buffers.items()}
            message = Compute(
                self.worker_pass, item.block, self.budgets[device], handles
            )
            is_sent = self.workers[device].send(message)
        except Exception:  # no memory for sums, say
            self.queue.put_back(device)
            raise
        self._sum_buffers[device] = buffers
        if not is_sent:
            self._lose_worker(device, _WORKER_ENDED)

    def _take_answers(self) -> None:
        """Wait for workers that compute, and take their answers."""
        computing = {device: self.workers[device] for device in self.queue.running}
        if not computing:
            return
        for device, answer in next_answers(computing):
            with self._keeping_error():
                self._take_answer(device, answer)

    def _take_answer(self, device: int, answer: Answer | StoredHeads | None) -> None:
        """Take the answer of a worker, or its note; None if it has ended."""
        if answer is None:
            self._lose_worker(device, _WORKER_ENDED)
        elif answer.number != self.worker_pass.number:
            pass  # of an earlier pass, of which a second interrupt has left a worker
        elif isinstance(answer, StoredHeads):
            self.queue.note_stored(device, answer.count)
        elif answer.error is None:
            self._finish_item(device, answer.report)
        elif answer.is_broken:
            self._lose_worker(device, f"its device has failed ({answer.error})")
        elif answer.is_out_of_memory:
            # The worker is well: it only has no part in this pass any more.
            self._out_of_memory = f"; {answer.error}"
            self._remove(device, "out of memory at every depth")
        else:
            self.queue.put_back(device)
            where = f"in the worker of {self.report.devices[device]}:\n{answer.trace}"
            # Raised here, it would hold this frame, whose answer holds it.
            answer.error.__cause__ = RuntimeError(where)
            self._error = self._error or answer.error

    def _finish_item(self, device: int, call_report: Report) -> None:
        """Note that a work item is done, and add its gradients."""
        stop = time.perf_counter() - self._began
        item = self.queue.running.pop(device)
        start = item.start - self._began
        timing = PartTiming(device, item.number, start, stop, call_report)
        self.report.ran.append(timing)
        buffers = self._sum_buffers.pop(device)
        if self.sums is not None:
            self.sums.add(item.block, buffers)
        if self.progress is not None:
            pass_name = "backward" if self.worker_pass.backward else "forward"
            self.progress(
                len(self.report.ran),
                self.report.parts,
                pass_name,
            )

    def _lose_worker(self, device: int, why: str) -> None:
        """End a worker, whose device leaves the pool."""
        self.workers[device].kill()
        self._remove(device, why)

    def _remove(self, device: int, why: str) -> None:
        """Let a device leave the pass; what is left of its work item goes back."""
        item = self.queue.running.get(device)
        if item is not None and item.n_stored:
            heads = counted(item.n_stored, "key/value head")
            why += f"; {heads} of part {item.number} had been stored"
        self.queue.remove(device)
        self.report.history.append(f"{self.report.devices[device]}: {why}")

    def _kill_computing(self) -> None:
        """End the workers that still compute: they would write into results of the
        caller."""
        computing = [self.workers[device] for device in self.queue.running]
        for worker in computing:
            # All are killed before an interrupt can come while one is waited for.
            worker.process.kill()
        end_workers(computing)

    def _no_device_left(self) -> Exception:
        """Return the error that says what was done, and why nobody does the rest."""
        n_done = len(self.report.ran)
        parts = counted(self.report.parts, "part")
        reasons = "all had ended before, or were closed"
        if self.report.history:
            reasons = "; ".join(self.report.history)
        message = (
            f"no device is left after {n_done} of {parts}: "
            f"{reasons}{self._out_of_memory}"
        )
        if self._out_of_memory:
            return OutOfMemoryError(message)
        return RuntimeError(message)
