"""What a call cannot have while a CUDA graph is captured, because a replay would not do
it again.

A replay launches the same kernels on the same addresses. It does not run the host. So
what the host reads or copies while it prepares a call stays as it was when the graph
was captured, without an error. Such a call is refused by the name of the argument.
"""

from __future__ import annotations

import torch

from quorum_attention.kernels.masked.mask_fields import tensors_of
from quorum_attention.kernels.protocol import InnerKernel
from quorum_attention.kernels.torch_private import capturing
from quorum_attention.mask import Mask

# Kernels of calls in captured graphs, by their ids. Nobody says when a graph is gone.
_KERNELS_OF_GRAPHS: dict[int, InnerKernel] = {}
_AT_REPLAY = "while a CUDA graph is captured: every replay would"


def check_capture(
    device: torch.device,
    query: torch.Tensor,
    bias: torch.Tensor | None,
    mask: Mask | None,
) -> None:
    """Refuse what the host reads or copies, if a CUDA graph is being captured.

    Args:
        device: the device that computes.
        query: (..., heads, n_queries, head_dim); key and value are on the same device.
        bias: the additive or boolean mask of the call, or None.
        mask: the ``Mask`` of the call, or None.

    Raises:
        NotImplementedError: names the argument, and what to give instead.
    """
    if not capturing(device):
        return
    bias_name = "attn_mask" if mask is None else "Mask.bias"
    copied = [("query, key and value", "them", query), (bias_name, "it", bias)]
    if mask is not None:
        copied.append(("Mask.sinks", "them", mask.sinks))
    for name, pronoun, tensor in copied:
        if tensor is not None and tensor.device != device:
            raise NotImplementedError(
                f"{name} cannot be on {tensor.device} {_AT_REPLAY} not copy {pronoun} "
                f"again; move {pronoun} to {device} before the call"
            )
    if mask is None:
        return
    names = sorted({name for name, _ in tensors_of(mask)})
    if names:
        fields = " and ".join(f"Mask.{name}" for name in names)
        raise NotImplementedError(
            f"{fields} cannot be given {_AT_REPLAY} mask by the values of now, because "
            "the host reads them; give the same mask as attn_mask (a tensor on the "
            "device is read at every replay), or make this call outside the graph"
        )


def keep_for_replays(kernel: InnerKernel, device: torch.device) -> None:
    """Keep a kernel for good, if a CUDA graph is being captured: the graph reads the
    tensors that the kernel holds (tables, slopes, a mask's ids) at every replay."""
    if capturing(device):
        _KERNELS_OF_GRAPHS[id(kernel)] = kernel
