"""Which Triton kernels a call that is cut is going to launch beside its attention kernel."""

from __future__ import annotations

import torch

from quorum_attention.kernels import ahead
from quorum_attention.kernels.launches import Launch, adding, dividing, finding_norms, merging
from quorum_attention.kernels.launching import prepare
from quorum_attention.kernels.merge import triton_available
from quorum_attention.kernels.outside import outside

_begun: set[tuple[object, ...]] = set()


def compile_ahead(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, scaled: bool | None
) -> bool:
    """Begin to load or compile what merges and adds on ``device``, once in a process (ahead.py).
    Whether this is the first time that it was asked for, and was begun.

    Args:
        dtype: of the inputs.
        head_dim, value_dim: of query and key, and of value.
        scaled: whether the backward that is to follow is scaled; None: there is none.
    """
    asked = (device, dtype, head_dim, value_dim, scaled)
    here = device.type == "cuda" and torch.cuda.is_available()
    if asked in _begun or not here or not triton_available():
        return False
    _begun.add(asked)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())

    def begin(what: Launch) -> None:
        def work() -> None:
            if what.kernel != "merge":
                # It is needed first, and threads that compile hold each other up, and the call.
                ahead.wait("merge")
            prepare(what, device)

        ahead.begin(what.kernel, device, work)

    with outside():
        begin(merging(dtype, value_dim))
        if scaled is not None:
            begin(adding(dtype, (head_dim, head_dim, value_dim), scaled))
        if scaled:
            begin(finding_norms(dtype, value_dim))
            begin(dividing(dtype, value_dim))
    return True
