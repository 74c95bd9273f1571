"""The gradient of a mask by one call of a kernel whose operator returns it.

That takes the host less than tiles do (``mask_gradient.py``): many short entries may share a mask.
"""

from __future__ import annotations

import torch

from quorum_attention.execution.job import PassJob
from quorum_attention.execution.kernel_layout import as_kernel_readable
from quorum_attention.execution.routes.whole import without_empty_rows
from quorum_attention.kernels.operator_call import Call, Saved

# Most bytes of the gradient before it is summed.
_MOST_BYTES = 1 << 30


def fill_by_kernel(job: PassJob, saved: Saved, target: torch.Tensor) -> bool:
    """Fill ``target`` with the gradient of the call's mask, if the kernel computes it.

    Args:
        saved: as the caller gave it, of the whole rows.
        target: of the mask's shape.

    Returns:
        Whether the kernel has computed it.
    """
    if job.bias is None or not _is_plain_call(job, saved):
        return False
    shape = job.shape
    bias = job.bias.of_call(shape.bias_dtype, job.device, shape.batch_shape)
    query, key, value = (job.tensors[name] for name in ("query", "key", "value"))
    rows = Saved(
        as_kernel_readable(saved.grad_out, shape.dtype),
        as_kernel_readable(saved.out, shape.dtype),
        without_empty_rows(saved.lse),
    )
    grad = job.kernel.bias_gradient(Call(query, key, value, False, job.scale, bias), rows)
    if grad is None:
        return False
    sizes = (1,) * (grad.dim() - target.dim()) + tuple(target.shape)
    summed = [dim for dim, size in enumerate(sizes) if size == 1 < grad.shape[dim]]
    if summed:
        grad = grad.sum(dim=summed, keepdim=True, dtype=shape.state_dtype)
    target.copy_(grad.reshape(target.shape))
    return True


def _is_plain_call(job: PassJob, saved: Saved) -> bool:
    """Whether one kernel call can take the whole call, and its inputs as they lie."""
    shape = job.shape
    place = job.problem.place
    if len(shape.batch_shape) != 1 or not place.in_place or shape.is_causal:
        return False
    if shape.columns or job.dropout is not None:
        return False
    tensors = (*job.tensors.values(), *(saved.grad_out, saved.out, saved.lse))
    if any(tensor.device != job.device for tensor in tensors):
        return False
    n_pairs = shape.batch * shape.heads * shape.n_queries * shape.n_keys
    if n_pairs * shape.dtype.itemsize > _MOST_BYTES:
        return False
    return job.kernel.takes_whole(job.problem.kernel_shape, shape.n_tokens, all_heads=True)
