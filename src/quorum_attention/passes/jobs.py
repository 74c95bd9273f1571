"""The job of a pass, made of a request and its tensors, and the context in which it is
computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.errors import our_out_of_memory
from quorum_attention.execution.bias import BiasView
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.problem import Problem
from quorum_attention.execution.upstream import rescale_upstream
from quorum_attention.kernels.torch_private import no_grad_no_autocast

_INPUTS = ("query", "key", "value")


def job_of(
    tensors: Tensors,
    request: Request,
    problem: Problem,
    results: Mapping[str, torch.Tensor] | None = None,
    backward_inputs: BackwardInputs | None = None,
) -> PassJob:
    """Return the job of a pass.

    Args:
        results: the preallocated results, by the names of their states.
        backward_inputs: what a backward reads beside the inputs; None for a forward.
    """
    device = request.options.device
    shape = request.shape
    inputs = [t.detach() if t.requires_grad else t for t in tensors[:3]]
    bias = None
    if tensors.bias is not None:
        bias = BiasView(tensors.bias, len(shape.batch_shape))
    sinks = None
    if tensors.sinks is not None:
        sinks = tensors.sinks.detach().to(device, shape.state_dtype)
    job = PassJob(
        problem,
        dict(zip(_INPUTS, inputs, strict=True)),
        request.scale,
        device,
        bias,
        sinks,
        request.dropout,
        dict(results or {}),
    )
    if len(job.results) == len(problem.spec.states):
        # Other results come to their place after the pass.
        job.on_stored = request.on_stored
    if backward_inputs is not None:
        upstream, job.divisor = rescale_upstream(
            backward_inputs.grad_out, problem, device
        )
        job.tensors.update(
            out=backward_inputs.out, grad_out=upstream, lse=backward_inputs.lse
        )
    return job


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Make ``device`` current, without gradients and autocast, and with our error out
    of memory."""
    with backend_of(device).current(device), no_grad_no_autocast(), our_out_of_memory():
        yield


def detach_view(result: torch.Tensor) -> torch.Tensor:
    """Return a result that autograd does not know as a view.

    A caller may not write in place to a view that was made without gradients.
    """
    return result.data if result._is_view() else result
