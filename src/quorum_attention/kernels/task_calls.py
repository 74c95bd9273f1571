"""Kernels that compute a task by calls, whose results are merged one after the
other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from quorum_attention.kernels.merge import add_, merge_
from quorum_attention.kernels.operator_call import OutLse, Saved, Three
from quorum_attention.kernels.operator_inputs import shifted_lse
from quorum_attention.kernels.protocol import Kernel
from quorum_attention.kernels.scaling import Scaling
from quorum_attention.kernels.task_tensors import Gradients, Statistics, TaskTensors
from quorum_attention.kernels.tensors import Pick


class TaskCall(NamedTuple):
    """A call of a task.

    Attributes:
        rows: selects its query rows of (b, hq, nq, ...), as a view.
        keys: selects its key rows of (b, hk, nk, ...), as a view.
        forward: returns (out, lse) of these rows and keys.
        backward: returns their gradients, given the results of the whole rows, with lse
            0 in rows without keys.
    """

    rows: Pick
    keys: Pick
    forward: Callable[[], OutLse]
    backward: Callable[[Saved], Three]


class CallsKernel(Kernel):
    """A kernel that computes a task by calls whose results are merged one after the
    other."""

    @abstractmethod
    def task_calls(
        self, task: TaskTensors, *, backward: bool
    ) -> Iterator[Iterable[TaskCall]]:
        """Yield the calls of a task in turns.

        The calls of each turn share a stream, if there are several streams.
        """

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""

        def run_and_merge(call: TaskCall, turn_number: int) -> None:
            out, lse = call.forward()
            with _merging(task, turn_number):
                state_out = call.rows(state.out)
                state_lse = call.rows(state.lse)
                merge_(state_out, state_lse, out, lse)

        self._run(task, run_and_merge, backward=False)

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        scaling = grads.scaling
        lse = shifted_lse(grads.lse, scaling.shift)

        def run_and_add(call: TaskCall, turn_number: int) -> None:
            grad_out = call.rows(grads.grad_out)
            out = call.rows(grads.out)
            saved = Saved(grad_out, out, call.rows(lse))
            grad_query, grad_key, grad_value = call.backward(saved)
            with _merging(task, turn_number):
                _add_runs(call.rows(grads.grad_query), grad_query, scaling)
                _add_runs(call.keys(grads.grad_key), grad_key, scaling)
                _add_runs(call.keys(grads.grad_value), grad_value, scaling)

        self._run(task, run_and_add, backward=True)

    def _heads(self, query: torch.Tensor, key: torch.Tensor) -> list[slice]:
        """Return the query heads of each call: all, or one of every key head."""
        n_calls = 1 if self.grouped else query.shape[1] // key.shape[1]
        return [slice(first, None, n_calls) for first in range(n_calls)]

    def _run(
        self,
        task: TaskTensors,
        run_call: Callable[[TaskCall, int], None],
        *,
        backward: bool,
    ) -> None:
        """Run all calls of a task, each turn on its stream."""
        streams = task.streams
        turns = enumerate(self.task_calls(task, backward=backward))
        if streams is None:
            for number, calls in turns:
                _run_turn(calls, number, run_call)
            return
        with streams.task():
            for number, calls in turns:
                with streams.call(number):
                    _run_turn(calls, number, run_call)


def _add_runs(total: torch.Tensor, part: torch.Tensor, scaling: Scaling) -> None:
    """Add a part to a gradient, and undo its scaling. Runs of rows with the same keys
    return a part for each run, as batch entries."""
    n_runs = part.shape[0] // total.shape[0]
    unshift = 2.0**-scaling.shift
    for run in part.chunk(n_runs):
        add_(
            total,
            run,
            unshift,
            scaling.unscale,
            scaling.overflow,
        )


def _run_turn(
    calls: Iterable[TaskCall], number: int, run_call: Callable[[TaskCall, int], None]
) -> None:
    for call in calls:
        run_call(call, number)
        del call  # its bias is freed before the next one is made


@contextmanager
def _merging(task: TaskTensors, turn_number: int) -> Iterator[None]:
    """Enter the stream, and the clock, for merging the results of a call."""
    stream = nullcontext() if task.streams is None else task.streams.merge(turn_number)
    with stream, task.timed("merge"):
        yield
