"""Checks of a call's tensors and sizes, before any work.

Every error names the argument, what was given and what is allowed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quorum_attention.argument_checks import shown, switch
from quorum_attention.call.broadcast import broadcast_inputs
from quorum_attention.call.options import Arguments
from quorum_attention.call.overlap import Mappings, overlaps_itself
from quorum_attention.execution.device.lookup import BACKENDS, HOST
from quorum_attention.execution.dtypes import DTYPE_NAMES, check_dtype
from quorum_attention.kernels.call_shape import DTYPES, CallShape
from quorum_attention.kernels.torch_private import (
    PLAIN,
    has_tangent,
    unwrap_if_dead,
)
from quorum_attention.mask import Mask
from quorum_attention.planner.plan import Plan
from quorum_attention.units import counted

# The replacement that an error names, by the class of a refused tensor.
_INSTEAD_OF = {
    "DTensor": "give what this rank holds, tensor.to_local(), to "
    "quorum_attention.attention, or to quorum_attention.distributed.attention "
    "where tokens are sharded",
    "NestedTensor": "concatenate its texts and give a document id for each token, "
    "Mask(documents=ids), or pad them and give Mask(key_lengths=lengths)",
}


class Tensors(NamedTuple):
    """The tensors that a call reads.

    Attributes:
        query: (*batch, heads, n_queries, head_dim).
        key: (*batch, kv_heads, n_keys, head_dim).
        value: (*batch, kv_heads, n_keys, value_dim).
        bias: the additive or boolean mask; broadcasts to (*batch, heads, n_queries,
            n_keys).
        sinks: (heads,).
        seed: the seed of dropout under torch.func, whose entries may have their own.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    sinks: torch.Tensor | None = None
    seed: torch.Tensor | None = None


class CheckedTensors(NamedTuple):
    """The tensors of a call, checked and broadcast.

    Attributes:
        tensors: what the call reads.
        out: the caller's tensor for the result, with a dimension of heads.
        mask: the call's ``Mask``, if it has one.
        shape: sizes and dtype alone.
        without_heads: whether the inputs were (tokens, head_dim).
        cast_bytes: bytes of the casts of autocast, on the inputs' device.
    """

    tensors: Tensors
    out: torch.Tensor | None
    mask: Mask | None
    shape: CallShape
    without_heads: bool
    cast_bytes: int


def check_tensors(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> CheckedTensors:
    """Check the tensors of a call, and broadcast them.

    Raises:
        ValueError, TypeError, NotImplementedError: one does not fit, by name.
    """
    query = as_tensor(query, "query")
    key = as_tensor(key, "key")
    value = as_tensor(value, "value")
    attn_mask: Any = as_mask(arguments.attn_mask, query, key)
    mask = attn_mask if isinstance(attn_mask, Mask) else None
    bias = attn_mask if mask is None else mask.bias
    if bias is not None:
        bias = as_tensor(bias, "attn_mask")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_kind(tensor, name)
    query, key, value, enable_gqa, without_heads, cast_bytes = broadcast_inputs(
        query, key, value, arguments.enable_gqa
    )
    shape = shape_of_inputs(query, key, value, switch(enable_gqa, "enable_gqa"))
    out_dtype = arguments.out_dtype
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(
            f"out_dtype must be None or one of {DTYPE_NAMES}, got {shown(out_dtype)}"
        )
    if bias is not None:
        _check_bias(bias, query, key)
    sinks = None if mask is None else mask.sinks
    if sinks is not None:
        _check_sinks(sinks, shape.heads, query.device)
    tensors = Tensors(query, key, value, bias, sinks)
    out = arguments.out
    if out is not None:
        out = _checked_out(out, tensors, out_dtype, without_heads=without_heads)
    return CheckedTensors(tensors, out, mask, shape, without_heads, cast_bytes)


def _check_sinks(sinks: torch.Tensor, heads: int, home: torch.device) -> None:
    """Check that sinks are one for each query head, on the inputs' device or in host
    memory."""
    check_kind(sinks, "Mask.sinks")
    if sinks.shape != (heads,):
        raise ValueError(
            f"Mask.sinks must be one for each of the {heads} query heads, got "
            f"{tuple(sinks.shape)}"
        )
    _check_place(sinks, "Mask.sinks", home)


def _checked_out(
    out: Any, tensors: Tensors, out_dtype: torch.dtype | None, *, without_heads: bool
) -> torch.Tensor:
    """Return the caller's tensor for the result, checked, with a dimension of heads."""
    result = as_tensor(out, "out", for_writing=True)
    if without_heads and result.dim() == 2:
        result = result.unsqueeze(0)
    shape = (*tensors.query.shape[:-1], tensors.value.shape[-1])
    check_tensor(
        result,
        shape,
        "out",
        tensors.query.device,
        out_dtype,
        for_writing=True,
    )
    return result


def as_tensor(value: Any, name: str, *, for_writing: bool = False) -> torch.Tensor:
    """Return ``value`` as a tensor; a NumPy array (np.memmap too) is shared, not
    copied.

    Args:
        for_writing: whether the call writes to it.

    Raises:
        TypeError: it is neither, or an array of a dtype that torch lacks.
        ValueError: an array that torch cannot share, or a read-only one that is written
            to.
    """
    if isinstance(value, torch.Tensor):
        # The wrapper of a transformation that is over is replaced by its tensor.
        tensor: torch.Tensor = unwrap_if_dead(value)
        # Kernels read memory as it is, and would miss a lazy negation.
        return tensor if for_writing or not tensor.is_neg() else tensor.resolve_neg()
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"{name} must be a torch.Tensor or a numpy.ndarray, got "
            f"{type(value).__name__}"
        )
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: its mask would be ignored")
    if for_writing and not value.flags.writeable:
        raise ValueError(
            f"{name} must be writable (it is written to), got a read-only array"
        )
    with warnings.catch_warnings():
        # torch warns of read-only arrays; this one is only read.
        warnings.filterwarnings(
            "ignore", message="The given NumPy array is not writable"
        )
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} cannot be shared with torch: {error}") from None


def check_kind(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor without dense memory of its own.

    This check comes before all others: such a tensor may not even have sizes.

    Raises:
        NotImplementedError: it is nested, sparse or a wrapper of other tensors.
    """
    if type(tensor) not in PLAIN and _stands_for_others(tensor):
        kind = type(tensor).__name__
        raise NotImplementedError(
            f"{name} must be a plain tensor, got a {kind}, which stands for others: "
            f"{_INSTEAD_OF.get(kind, 'give those')}"
        )
    if tensor.is_nested:
        raise NotImplementedError(
            f"{name} must be a dense (strided) tensor, got a nested one: "
            f"{_INSTEAD_OF['NestedTensor']}"
        )
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise NotImplementedError(
            f"{name} must be a dense (strided) tensor, got a {kind} one: give "
            "tensor.to_dense()"
        )


def _stands_for_others(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor of another class has its numbers outside of memory of its
    own."""
    if is_traceable_wrapper_subclass(tensor) or is_causal_bias(tensor):
        return True
    if tensor.layout != torch.strided or tensor.is_nested or tensor.numel() == 0:
        return False
    try:
        return tensor.data_ptr() == 0 and not tensor.is_meta
    except RuntimeError:
        return True


def has_dense_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor of any kind is dense and has memory of its own."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return not _stands_for_others(tensor)


def is_causal_bias(attn_mask: Any) -> bool:
    """Tell whether a mask is one of torch's ``causal_upper_left`` and
    ``causal_lower_right``."""
    # Its module loads torch's compiler; where nobody has imported it, nobody has one.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(attn_mask, module.CausalBias)


def as_mask(attn_mask: Any, query: Any = None, key: Any = None) -> Any:
    """Return ``attn_mask``, or the equivalent ``Mask`` if it is torch's ``CausalBias``.

    Args:
        query, key: the call's, (..., tokens, head_dim); None: their lengths are not
            checked.

    Raises:
        ValueError: it was made for other lengths.
        TypeError: it is a ``BlockMask`` of FlexAttention.
    """
    if type(attn_mask).__name__ == "BlockMask":
        raise TypeError(
            "attn_mask must be a tensor or a quorum_attention.Mask, got a BlockMask: "
            "give Mask(keeps=block_mask.mask_mod)"
        )
    if not is_causal_bias(attn_mask):
        return attn_mask
    mask_lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if query is not None and min(len(query.shape), len(key.shape)) >= 2:
        lengths = (query.shape[-2], key.shape[-2])
        if mask_lengths != lengths:
            raise ValueError(
                f"attn_mask must be of {lengths} tokens, got a CausalBias of "
                f"{mask_lengths}"
            )
    is_lower_right = attn_mask.variant.name == "LOWER_RIGHT"
    return Mask(causal="lower_right" if is_lower_right else "upper_left")


def _check_device(tensor: torch.Tensor, name: str) -> None:
    """Check that a tensor is in host memory or on a CUDA device."""
    if tensor.device.type not in BACKENDS:
        raise NotImplementedError(
            f"{name} must be on a CPU or CUDA device, got '{tensor.device}'"
        )


def _check_place(tensor: torch.Tensor, name: str, home: torch.device) -> None:
    """Check that a tensor is on the inputs' device ``home`` or in host memory."""
    if tensor.device not in (HOST, home):
        allowed = f"in host memory or on the query's device {home}"
        raise ValueError(f"{name} must be {allowed}, got {tensor.device}")


def shape_of_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> CallShape:
    """Return the sizes of a call, from tensors that have passed ``check_kind``.

    Raises:
        ValueError, TypeError: the inputs do not fit each other.
        NotImplementedError: the inputs are on neither a CPU nor a CUDA device.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 3:
            raise ValueError(
                f"{name} must have at least 2 dimensions (..., heads, tokens, "
                f"head_dim), got shape {tuple(tensor.shape)}"
            )
        check_dtype(tensor.dtype, name)
    _check_device(query, "query")
    for name, tensor in (("key", key), ("value", value)):
        _check_like_query(tensor, name, query)
    *batch, heads, n_queries, head_dim = query.shape
    *_, kv_heads, n_keys, key_dim = key.shape
    *_, value_heads, n_values, value_dim = value.shape
    if key_dim != head_dim:
        raise ValueError(
            f"key must have the query's head_dim {head_dim}, got {key_dim}"
        )
    if (value_heads, n_values) != (kv_heads, n_keys):
        raise ValueError(
            f"value must have the key's heads and tokens {(kv_heads, n_keys)}, "
            f"got {(value_heads, n_values)}"
        )
    if head_dim == 0:
        raise ValueError("query must have a head_dim of at least 1, got 0")
    if value_dim == 0:
        raise ValueError("value must have a value_dim of at least 1, got 0")
    if heads != kv_heads:
        _check_grouped_heads(heads, kv_heads, enable_gqa)
    return CallShape(
        query.device.type,
        query.dtype,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        batch_shape=tuple(batch),
        n_queries=n_queries,
        n_keys=n_keys,
    )


def _check_like_query(tensor: torch.Tensor, name: str, query: torch.Tensor) -> None:
    """Check that key or value has the query's dtype and device."""
    if tensor.dtype != query.dtype:
        raise TypeError(
            f"{name} must have the query's dtype {query.dtype}, got {tensor.dtype}"
        )
    if tensor.device != query.device:
        raise ValueError(
            f"{name} must be on the query's device {query.device}, got {tensor.device}"
        )


def _check_grouped_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    """Check that several query heads may share a key/value head."""
    if not enable_gqa:
        raise ValueError(
            f"key has {counted(kv_heads, 'head')} and query {heads}: give "
            "enable_gqa=True"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query must have a multiple of the key's {kv_heads} heads, got {heads}"
        )


def _check_bias(bias: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    """Check that a mask broadcasts to (*batch, heads, n_queries, n_keys).

    Raises:
        ValueError, TypeError, NotImplementedError: it does not fit.
    """
    check_kind(bias, "attn_mask")
    _check_device(bias, "attn_mask")
    if bias.dtype != torch.bool and bias.dtype not in DTYPES:
        raise TypeError(
            f"attn_mask must be bool or one of {DTYPE_NAMES}, got {bias.dtype}"
        )
    scores_shape = (*query.shape[:-1], key.shape[-2])
    aligned = zip(reversed(bias.shape), reversed(scores_shape), strict=False)
    broadcasts = all(size in (1, full) for size, full in aligned)
    if bias.dim() > len(scores_shape) or not broadcasts:
        raise ValueError(
            "attn_mask must broadcast to (..., heads, queries, keys) = "
            f"{scores_shape}, got {tuple(bias.shape)}"
        )


def check_tensor(
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    name: str,
    home: torch.device,
    dtype: torch.dtype | None = None,
    *,
    for_writing: bool = False,
) -> None:
    """Check a tensor beside the inputs: its shape, dtype and place.

    Args:
        home: the inputs' device. Beside inputs in host memory, what a backward reads
            may be on any device: the forward may have computed there.
        dtype: None: any floating one.
        for_writing: whether the call writes to the tensor, and it has to allow that.

    Raises:
        ValueError, TypeError, NotImplementedError: it does not fit.
    """
    check_kind(tensor, name)
    if for_writing or home.type != "cpu" or tensor.device.type not in BACKENDS:
        _check_place(tensor, name, home)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    check_dtype(tensor.dtype, name)
    if for_writing:
        _check_writable(tensor, name)


def _check_writable(tensor: torch.Tensor, name: str) -> None:
    """Check that a call may write to a tensor, as far as torch knows."""
    if tensor.requires_grad:
        raise ValueError(f"{name} must not require a gradient")
    if has_tangent(tensor):
        raise ValueError(f"{name} must not have a forward-mode tangent")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name} must not be a tensor of inference mode outside of it")
    if tensor.is_neg():
        raise ValueError(
            f"{name} must not be a view with a sign of its own (it is written to)"
        )


def check_no_overlap(
    results: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor | None]
) -> None:
    """Check that results share no memory with inputs, with each other or with
    themselves.

    (Inputs are read again after a part of the results has been written.) Interleaved
    views of one packed tensor share none. Two maps of one file do, and a result in a
    read-only map cannot be written; both are known on Linux (``call/overlap.py``). A
    tensor over an object that must not change, such as ``torch.frombuffer`` of bytes,
    is not recognised.

    Raises:
        ValueError: they share memory, or one cannot be written; by name.
    """
    # Only memory that torch did not allocate itself can be read-only or a file's.
    may_be_mapped = any(not t.untyped_storage().resizable() for t in results.values())
    mappings = Mappings.now() if may_be_mapped else Mappings(())
    for name, result in results.items():
        if mappings.is_read_only(result):
            raise ValueError(
                f"{name} must be writable (it is written to), got a read-only map"
            )
        if overlaps_itself(result):
            raise ValueError(
                f"{name} must not overlap itself (it is written to), got shape "
                f"{tuple(result.shape)} with strides {result.stride()}"
            )
    earlier = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    for name, result in results.items():
        for earlier_name, tensor in earlier.items():
            if mappings.share_memory(result, tensor):
                raise ValueError(f"{name} must not share memory with {earlier_name}")
        earlier[name] = result


_PLANNED_SIZES = (
    "n_queries",
    "n_keys",
    "heads",
    "kv_heads",
    "head_dim",
    "value_dim",
    "batch",
    "dtype",
    "is_causal",
)


def check_plan(plan: Plan, shape: CallShape) -> None:
    """Check that a plan was made for a call of these sizes.

    Raises:
        ValueError: names what differs.
    """
    for name in _PLANNED_SIZES:
        planned = getattr(plan.shape, name)
        actual = getattr(shape, name)
        if planned != actual:
            raise ValueError(
                f"plan was made for {name} = {planned}, the call has {actual}"
            )
