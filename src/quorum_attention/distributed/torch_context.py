"""In place of torch's own context parallel: the same arguments, another attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from quorum_attention.argument_checks import shown
from quorum_attention.call.torch_modules import (
    restore_fast_path,
    switch_fast_path_off,
    watch_weights,
)
from quorum_attention.distributed.attention import attention
from quorum_attention.keywords import check_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Options that ``distributed.attention`` gets in every call of the block.
_OPTIONS = ("budget", "depth", "kernel", "report")


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[torch.Tensor] | None = None,
    **options: Any,
) -> Iterator[None]:
    """As ``torch.distributed.tensor.experimental.context_parallel``, by ``distributed.attention``.

    Within the block each of ``buffers`` has this rank's rows only, in its own memory (other tensors
    that shared its memory stay whole), and ``torch.nn.functional.scaled_dot_product_attention``
    attends to the rows of all ranks. Unlike torch's: shards are contiguous, so results stay in
    order; the length need not divide; heads may be grouped; and dropout, and masks that broadcast
    to the queries and keys of the whole sequence, work. Modules that imported the function by name
    before keep torch's own. Use it from one thread at a time.

    Args:
        mesh: a mesh of one dimension, or a process group.
        buffers: tensors that all ranks hold whole; sharded in place, and restored at the end.
        buffer_seq_dims: the dimension of the tokens of each.
        no_restore_buffers: those buffers that are not restored.
        options: budget, depth, kernel and report of ``distributed.attention``, for every call.

    ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` attend to the rows of all ranks
    too, in evaluation as well; with ``need_weights=True`` the first raises NotImplementedError.

    Raises:
        ValueError: buffers that do not fit each other or their dimensions, one given twice, or one
            that requires a gradient.
        TypeError: ``mesh`` is neither.
    """
    check_names("context_parallel", options, _OPTIONS)
    if not isinstance(mesh, dist.ProcessGroup) and not hasattr(mesh, "get_group"):
        raise TypeError(f"mesh must be a DeviceMesh or a process group, got {shown(mesh)}")
    group = mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group()
    given: list[Any] = list(buffers or ())  # torch's types leave out set_ of a tensor
    dims = list(buffer_seq_dims or ())
    kept = set(no_restore_buffers or ())
    lengths = _lengths(given, dims, group.size())
    if kept - set(given):  # tensors in sets are compared by identity
        raise ValueError("no_restore_buffers must be among buffers")
    whole = [buffer.detach() for buffer in given]
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> torch.Tensor:
        return attention(
            query, key, value, attn_mask, group=group, is_causal=is_causal, dropout_p=dropout_p,
            lengths=lengths or None, **options, **named,
        )  # fmt: skip

    # So that another patch lies below this one: its calls would be of this rank's rows alone.
    scaled_dot_product_attention._quorum_attention_sharded = True  # type: ignore[attr-defined]
    for buffer, dim in zip(given, dims, strict=True):
        mine = buffer.detach().narrow(dim, sum(lengths[: group.rank()]), lengths[group.rank()])
        # Memory of its own: others may be views of this one's, as inputs and labels of one batch.
        buffer.set_(mine.clone(memory_format=torch.contiguous_format))
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    plain_modules = functional.multi_head_attention_forward
    watched: Any = watch_weights(plain_modules, _refuse_weights)
    watched._quorum_attention_sharded = True
    functional.multi_head_attention_forward = watched
    switch_fast_path_off()  # it would attend to this rank's rows alone
    try:
        yield
    finally:
        restore_fast_path()
        functional.multi_head_attention_forward = plain_modules
        functional.scaled_dot_product_attention = original
        for buffer, before in zip(given, whole, strict=True):
            if buffer not in kept:
                buffer.set_(before)


def _refuse_weights(*_: torch.Tensor) -> None:
    """Refuse weights of ``nn.MultiheadAttention``: they would be of this rank's rows alone.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "attention over ranks makes no weights, and nn.MultiheadAttention was called with "
        "need_weights=True, its default: give need_weights=False"
    )


def _lengths(buffers: Sequence[torch.Tensor], dims: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Rows of every rank, as equal as can be; () without buffers."""
    shapes = [tuple(buffer.shape) for buffer in buffers]
    if len(dims) != len(shapes) or any(
        not 0 <= dim < len(shape) for dim, shape in zip(dims, shapes, strict=True)
    ):
        raise ValueError(f"buffer_seq_dims must name a dimension of each of {shapes}, got {dims}")
    if len(set(buffers)) < len(shapes):
        raise ValueError("buffers must not have the same tensor twice")
    if any(buffer.requires_grad for buffer in buffers):
        raise ValueError("buffers must not require a gradient")
    tokens = {shape[dim] for dim, shape in zip(dims, shapes, strict=True)}
    if len(tokens) > 1:
        raise ValueError(f"buffers must have the same number of tokens, got {sorted(tokens)}")
    return tuple(
        n * (rank + 1) // ranks - n * rank // ranks for n in tokens for rank in range(ranks)
    )
