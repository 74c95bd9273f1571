"""Which Triton kernels a call that is cut is going to launch beside its attention kernel."""

from __future__ import annotations

from contextlib import suppress

import torch

from quorum_attention.kernels import ahead
from quorum_attention.kernels.launches import (
    adding,
    compile_for,
    dividing,
    finding_norms,
    merging,
)
from quorum_attention.kernels.merge import triton_available
from quorum_attention.kernels.torch_private import outside


def compile_ahead(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, scaled: bool | None
) -> None:
    """Begin to compile what merges and adds on ``device`` in a thread; asked for once in a process.

    Args:
        dtype: of the inputs.
        head_dim, value_dim: of query and key, and of value.
        scaled: whether the backward that is to follow is scaled; None: there is none.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or not triton_available():
        return
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with outside():
        # In the order in which they are needed.
        kernels = [merging(dtype, value_dim)]
        if scaled is not None:
            kernels.append(adding(dtype, (head_dim, head_dim, value_dim), scaled))
        if scaled:
            kernels += finding_norms(dtype, value_dim), dividing(dtype, value_dim)

    def work() -> None:
        for kernel in kernels:
            compile_for(kernel)

    with suppress(RuntimeError):  # no more threads: launches compile
        ahead.begin("Triton kernels", device, work)
