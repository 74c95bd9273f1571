"""Bytes that a layer of a step keeps, returns or moves, and where they go."""

from __future__ import annotations

from typing import NamedTuple

from quorum_attention.arithmetic import ceil_div
from quorum_attention.recipes.model_shape import ModelShape
from quorum_attention.recipes.training import Training


class KeptBytes(NamedTuple):
    """Bytes that a checkpoint keeps of one layer.

    Attributes:
        checkpoint: the layer's input.
        result: attention's output and lse; 0: attention is computed again.
    """

    checkpoint: int
    result: int

    @property
    def total(self) -> int:
        """Both."""
        return self.checkpoint + self.result


class HostTileBytes(NamedTuple):
    """Bytes in host memory of a layer in tiles: q, k, v, o and their gradients.

    Attributes:
        locked: page-locked, of which torch gives powers of two.
        pageable: not page-locked.
    """

    locked: int
    pageable: int


class OffloadSplit(NamedTuple):
    """Where the layers of a step keep what they keep.

    Attributes:
        host_bytes: that the first layers keep in host memory.
        n_recomputed: for how many of them attention is computed again.
    """

    host_bytes: int
    n_recomputed: int


def kept_bytes(shape: ModelShape, training: Training) -> KeptBytes:
    """Return what a checkpoint keeps of one layer."""
    size = training.number_bytes
    checkpoint = training.rows * shape.hidden * size
    lse = 4
    result = training.rows * shape.heads * (shape.head_dim * size + lse)
    return KeptBytes(checkpoint, result)


def tiled_bytes(shape: ModelShape, training: Training) -> HostTileBytes:
    """Return what a layer in tiles takes of host memory."""
    heads = 2 * (shape.heads + shape.kv_heads)
    n_bytes = training.rows * heads * shape.head_dim * training.number_bytes
    return HostTileBytes(2 * n_bytes, n_bytes)


def returned_bytes(shape: ModelShape, training: Training, *, backward: bool) -> int:
    """Return the bytes of the output of an attention call, or of its gradients."""
    heads = shape.heads + (2 * shape.kv_heads if backward else 0)
    return training.rows * heads * shape.head_dim * training.number_bytes


def split_offload(
    layers: int, layer: KeptBytes, device: int, host: int
) -> OffloadSplit:
    """Choose what goes to host memory, and what is computed again.

    Args:
        layers: how many there are.
        layer: bytes of each.
        device, host: free bytes of both.
    """
    total = layers * layer.total
    missing = max(0, total - device - host)
    n_recomputed = 0
    if missing and layer.result:
        n_recomputed = min(layers, ceil_div(missing, layer.result))
    stored = total - n_recomputed * layer.result
    return OffloadSplit(min(host, max(0, stored - device)), n_recomputed)
