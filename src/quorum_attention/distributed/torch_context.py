"""In place of torch's own context parallel: the same arguments, another attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
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
from quorum_attention.plain_types import Keywords
from quorum_attention.units import check_budget

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
    """Replace ``torch.distributed.tensor.experimental.context_parallel``:
    ``distributed.attention`` computes.

    Within the block each of ``buffers`` has this rank's rows only, in its own memory.
    (Other tensors that shared its memory stay whole.)
    ``torch.nn.functional.scaled_dot_product_attention`` attends to the rows of all
    ranks. Four things differ from torch's: shards are contiguous, so results stay in
    order; the length need not be a multiple of the number of ranks; heads may be
    grouped; and dropout works, as do masks that broadcast to the queries and keys of
    the whole sequence. Modules that imported the function by name before the block keep
    torch's. Use it from one thread at a time.

    Args:
        mesh: a mesh of one dimension, or a process group.
        buffers: tensors that all ranks hold as a whole. They are sharded in place, and
            restored at the end.
        buffer_seq_dims: for each of ``buffers``, the dimension of its tokens.
        no_restore_buffers: those buffers that are not restored.
        options: budget, depth, kernel and report of ``distributed.attention``, for
            every call.

    ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` attend to the rows of
    all ranks too, in evaluation as well; with ``need_weights=True`` the first raises
    NotImplementedError.

    Raises:
        ValueError: buffers do not fit each other or their dimensions; a buffer is given
            twice or requires a gradient; or the budget is wrong.
        TypeError: ``mesh`` is neither a mesh nor a process group.
    """
    check_names("context_parallel", options, _OPTIONS)
    check_budget(options.get("budget"))
    if not isinstance(mesh, dist.ProcessGroup) and not hasattr(mesh, "get_group"):
        raise TypeError(
            f"mesh must be a DeviceMesh or a process group, got {shown(mesh)}"
        )
    group = mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group()
    sharded_buffers = list(buffers or ())
    dims = list(buffer_seq_dims or ())
    unrestored = set(no_restore_buffers or ())
    lengths = _lengths(sharded_buffers, dims, group.size())
    # Tensors in sets are compared by identity.
    if unrestored - set(sharded_buffers):
        raise ValueError("no_restore_buffers must be among buffers")
    rank = group.rank()
    start = sum(lengths[:rank])
    stop = sum(lengths[: rank + 1])
    with (
        _sharded_in_place(
            sharded_buffers,
            dims,
            slice(start, stop),
            unrestored,
        ),
        _sharded_functions(group, lengths or None, options),
    ):
        yield


@contextmanager
def _sharded_in_place(
    buffers: Sequence[Any],
    dims: Sequence[int],
    rows: slice,
    unrestored: set[torch.Tensor],
) -> Iterator[None]:
    """Give buffers this rank's rows alone within the block.

    Args:
        buffers: tensors; torch's types leave out their method ``set_``.
        dims: of the tokens of each buffer.
        unrestored: buffers that stay as they are then.
    """
    with ExitStack() as restored:
        for buffer, dim in zip(buffers, dims, strict=True):
            original = buffer.detach()
            shard = original.narrow(
                dim,
                rows.start,
                rows.stop - rows.start,
            )
            # Memory of its own: others may be views of this one's, as inputs and labels
            # of one batch.
            buffer.set_(shard.clone(memory_format=torch.contiguous_format))
            if buffer not in unrestored:
                # At once: a later buffer may refuse to be set.
                restored.callback(buffer.set_, original)
        yield


@contextmanager
def _sharded_functions(
    group: dist.ProcessGroup, lengths: tuple[int, ...] | None, options: Keywords
) -> Iterator[None]:
    """Let torch's attention functions attend to the rows of all ranks within the block.

    Args:
        lengths: rows of every rank, if they are known.
        options: of every call.
    """
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention
    original_modules = functional.multi_head_attention_forward

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **keywords: Any,
    ) -> torch.Tensor:
        return attention(
            query,
            key,
            value,
            attn_mask,
            group=group,
            is_causal=is_causal,
            dropout_p=dropout_p,
            lengths=lengths,
            **options,
            **keywords,
        )

    sharded: Any = scaled_dot_product_attention
    watched: Any = watch_weights(original_modules, _refuse_weights)
    # So that another patch lies below these: its calls would be of this rank's rows
    # alone.
    sharded._quorum_attention_sharded = True
    watched._quorum_attention_sharded = True
    functional.scaled_dot_product_attention = sharded
    functional.multi_head_attention_forward = watched
    switch_fast_path_off()  # it would attend to this rank's rows alone
    try:
        yield
    finally:
        restore_fast_path()
        functional.multi_head_attention_forward = original_modules
        functional.scaled_dot_product_attention = original


def _refuse_weights(*_: torch.Tensor) -> None:
    """Refuse weights of ``nn.MultiheadAttention``: they would be of this rank's rows
    alone.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "attention over ranks makes no weights, and nn.MultiheadAttention was called "
        "with need_weights=True, its default: give need_weights=False"
    )


def _are_dims_of(dims: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Tell whether there is a dimension of each shape."""
    if len(dims) != len(shapes):
        return False
    return all(0 <= dim < len(shape) for dim, shape in zip(dims, shapes, strict=True))


def _lengths(
    buffers: Sequence[torch.Tensor], dims: Sequence[int], ranks: int
) -> tuple[int, ...]:
    """Rows of every rank, as equal as can be; () without buffers."""
    shapes = [tuple(buffer.shape) for buffer in buffers]
    if not _are_dims_of(dims, shapes):
        raise ValueError(
            f"buffer_seq_dims must name a dimension of each of {shapes}, got {dims}"
        )
    if len(set(buffers)) < len(shapes):
        raise ValueError("buffers must not have the same tensor twice")
    if any(buffer.requires_grad for buffer in buffers):
        raise ValueError("buffers must not require a gradient")
    if not shapes:
        return ()
    token_counts = {shape[dim] for dim, shape in zip(dims, shapes, strict=True)}
    if len(token_counts) > 1:
        raise ValueError(
            f"buffers must have the same number of tokens, got {sorted(token_counts)}"
        )
    (n_tokens,) = token_counts
    starts = [n_tokens * rank // ranks for rank in range(ranks + 1)]
    return tuple(stop - start for start, stop in pairwise(starts))
