"""Which Triton kernels a call that is cut is going to launch beside its attention kernel."""

from __future__ import annotations

import torch

from quorum_attention.kernels import ahead
from quorum_attention.kernels.merge import triton_available

_begun: set[tuple[object, ...]] = set()


def compile_ahead(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, scaled: bool | None
) -> None:
    """Begin to compile what merges and adds on ``device``, once in a process (ahead.py).

    Args:
        dtype: of the inputs.
        head_dim, value_dim: of query and key, and of value.
        scaled: whether the backward that is to follow is scaled; None: there is none.
    """
    asked = (device, dtype, head_dim, value_dim, scaled)
    here = device.type == "cuda" and torch.cuda.is_available()
    if asked in _begun or not here or not triton_available():
        return
    _begun.add(asked)
    from quorum_attention.kernels import merge_triton, scaling_triton

    ahead.begin("merge", device, lambda: merge_triton.compile_merge(dtype, value_dim))
    if scaled is not None:
        widths = (head_dim, head_dim, value_dim)
        ahead.begin("add", device, lambda: merge_triton.compile_add(dtype, widths, scaled))
    if scaled:
        ahead.begin("norm", device, lambda: scaling_triton.compile_norm(dtype, value_dim))
        ahead.begin("divide", device, lambda: scaling_triton.compile_divide(dtype, value_dim))
