"""Checks of a call's arguments, before any work; casts of autocast and broadcasting, as torch's own
function has them.

Every error names the argument, what was given and what is allowed. Only views and, under autocast,
casts are made, by functions that autograd knows: gradients have the inputs' own shapes and dtypes.
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
from quorum_attention.call.options import Arguments
from quorum_attention.call.overlap import Mappings, overlaps_itself
from quorum_attention.execution.device.lookup import BACKENDS, HOST
from quorum_attention.execution.dtypes import DTYPE_NAMES, check_dtype
from quorum_attention.kernels.protocol import DTYPES, CallShape
from quorum_attention.kernels.torch_private import PLAIN, has_tangent
from quorum_attention.mask import Mask
from quorum_attention.planner.plan import Plan
from quorum_attention.units import counted

# The replacement that an error names, by the class of a refused tensor.
_INSTEAD_OF = {
    "DTensor": "give what this rank holds, tensor.to_local(), to quorum_attention.attention, or to "
    "quorum_attention.distributed.attention where tokens are sharded",
    "NestedTensor": "concatenate its texts and give a document id for each token, "
    "Mask(documents=ids), or pad them and give Mask(key_lengths=lengths)",
}


class Tensors(NamedTuple):
    """What a call reads: query (*batch, heads, n_queries, head_dim), key (*batch, kv_heads, n_keys,
    head_dim), value (*batch, kv_heads, n_keys, value_dim); bias broadcasts to (*batch, heads,
    n_queries, n_keys); sinks are (heads,); seed is that of dropout under torch.func, whose entries
    may have their own."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    sinks: torch.Tensor | None = None
    seed: torch.Tensor | None = None


def check_tensors(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> tuple[Tensors, torch.Tensor | None, Mask | None, CallShape, bool, int]:
    """The tensors of a call, checked and broadcast.

    Returns:
        what it reads; the caller's tensor for the result, with a dimension of heads; the mask, if
        it is a ``Mask``; sizes and dtype alone; whether the inputs were (tokens, head_dim); bytes
        of the casts of autocast, on the inputs' device.

    Raises:
        ValueError, TypeError, NotImplementedError: one does not fit, by name.
    """
    query, key, value = as_tensor(query, "query"), as_tensor(key, "key"), as_tensor(value, "value")
    attn_mask: Any = as_mask(arguments.attn_mask, query, key)
    described = attn_mask if isinstance(attn_mask, Mask) else None
    attn_mask = attn_mask if described is None else described.bias
    mask = None if attn_mask is None else as_tensor(attn_mask, "attn_mask")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_kind(tensor, name)
    query, key, value, shared, without_heads, cast_bytes = broadcast_inputs(
        query, key, value, arguments.enable_gqa
    )
    sizes = shape_of_inputs(query, key, value, switch(shared, "enable_gqa"))
    out, out_dtype = arguments.out, arguments.out_dtype
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"out_dtype must be None or one of {DTYPE_NAMES}, got {shown(out_dtype)}")
    if mask is not None:
        _check_mask(mask, query, key)
    sinks = None if described is None else described.sinks
    if sinks is not None:
        check_kind(sinks, "Mask.sinks")
        if sinks.shape != (sizes.heads,):
            each = f"one for each of the {sizes.heads} query heads"
            raise ValueError(f"Mask.sinks must be {each}, got {tuple(sinks.shape)}")
        _check_place(sinks, "Mask.sinks", query.device)
    if out is not None:
        out = as_tensor(out, "out", for_writing=True)
        out = out.unsqueeze(0) if without_heads and out.dim() == 2 else out
        shape = (*query.shape[:-1], value.shape[-1])
        check_tensor(out, shape, "out", query.device, out_dtype, for_writing=True)
        every = {"query": query, "key": key, "value": value, "attn_mask": mask}
        check_no_overlap({"out": out}, every)
    read = Tensors(query, key, value, mask, sinks)
    return read, out, described, sizes, without_heads, cast_bytes


def as_tensor(value: Any, name: str, *, for_writing: bool = False) -> torch.Tensor:
    """``value`` as a tensor; a NumPy array (np.memmap too) is shared, not copied.

    Args:
        for_writing: whether the call writes to it.

    Raises:
        TypeError: it is neither, or an array of a dtype that torch lacks.
        ValueError: an array that torch cannot share, or a read-only one that is written to.
    """
    if isinstance(value, torch.Tensor):
        # Kernels read memory as it is, and would miss a lazy negation.
        return value if for_writing or not value.is_neg() else value.resolve_neg()
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"{name} must be a torch.Tensor or a numpy.ndarray, got {type(value).__name__}"
        )
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: its mask would be ignored")
    if for_writing and not value.flags.writeable:
        raise ValueError(f"{name} must be writable (it is written to), got a read-only array")
    with warnings.catch_warnings():
        # torch warns of read-only arrays; this one is only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} cannot be shared with torch: {error}") from None


def check_kind(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor without dense memory of its own. Before all other checks: such a tensor may
    not even have sizes.

    Raises:
        NotImplementedError: it is nested, sparse or a wrapper of other tensors.
    """
    if type(tensor) not in PLAIN and _stands_for_others(tensor):
        kind = type(tensor).__name__
        raise NotImplementedError(
            f"{name} must be a plain tensor, got a {kind}, which stands for others: "
            f"{_INSTEAD_OF.get(kind, 'give those')}"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        instead = _INSTEAD_OF["NestedTensor"] if tensor.is_nested else "give tensor.to_dense()"
        raise NotImplementedError(
            f"{name} must be a dense (strided) tensor, got a {kind} one: {instead}"
        )


def _stands_for_others(tensor: torch.Tensor) -> bool:
    """Whether what a tensor of another class says is not in memory of its own."""
    if is_traceable_wrapper_subclass(tensor) or is_causal_bias(tensor):
        return True
    if tensor.layout != torch.strided or tensor.is_nested or tensor.numel() == 0:
        return False
    try:
        return tensor.data_ptr() == 0 and not tensor.is_meta
    except RuntimeError:
        return True


def is_causal_bias(attn_mask: Any) -> bool:
    """Whether a mask is one of torch's ``causal_upper_left`` and ``causal_lower_right``."""
    # Its module loads torch's compiler; where nobody has imported it, nobody has one.
    home = sys.modules.get("torch.nn.attention.bias")
    return home is not None and isinstance(attn_mask, home.CausalBias)


def as_mask(attn_mask: Any, query: Any = None, key: Any = None) -> Any:
    """``attn_mask``; a ``Mask`` that says the same if it is torch's ``CausalBias``.

    Args:
        query, key: the call's, (..., tokens, head_dim); None: it is not looked at how long they
            are.

    Raises:
        ValueError: it was made for other lengths.
        TypeError: it is a ``BlockMask`` of FlexAttention.
    """
    if type(attn_mask).__name__ == "BlockMask":
        raise TypeError(
            "attn_mask must be a tensor or a quorum_attention.Mask, got a BlockMask: give "
            "Mask(keeps=block_mask.mask_mod)"
        )
    if not is_causal_bias(attn_mask):
        return attn_mask
    made = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if query is not None and min(len(query.shape), len(key.shape)) >= 2:
        lengths = (query.shape[-2], key.shape[-2])
        if made != lengths:
            raise ValueError(f"attn_mask must be of {lengths} tokens, got a CausalBias of {made}")
    return Mask(causal="lower_right" if attn_mask.variant.name == "LOWER_RIGHT" else "upper_left")


def _check_device(tensor: torch.Tensor, name: str) -> None:
    if tensor.device.type not in BACKENDS:
        raise NotImplementedError(f"{name} must be on a CPU or CUDA device, got '{tensor.device}'")


def _check_place(tensor: torch.Tensor, name: str, home: torch.device) -> None:
    """Tensors beside the inputs are on the inputs' device ``home`` or in host memory."""
    if tensor.device not in (HOST, home):
        allowed = f"in host memory or on the query's device {home}"
        raise ValueError(f"{name} must be {allowed}, got {tensor.device}")


def shape_of_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> CallShape:
    """The sizes of a call, from tensors that have passed ``check_kind``.

    Raises:
        ValueError, TypeError: the inputs do not fit each other.
        NotImplementedError: the inputs are on neither a CPU nor a CUDA device.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 3:
            least = "at least 2 dimensions (..., heads, tokens, head_dim)"
            raise ValueError(f"{name} must have {least}, got shape {tuple(tensor.shape)}")
        check_dtype(tensor.dtype, name)
    _check_device(query, "query")
    dtype, home = query.dtype, query.device
    *batch, heads, n_queries, head_dim = query.shape
    *_, kv_heads, n_keys, key_dim = key.shape
    *_, value_heads, n_values, value_dim = value.shape
    for name, other in (("key", key), ("value", value)):
        if other.dtype != dtype:
            raise TypeError(f"{name} must have the query's dtype {dtype}, got {other.dtype}")
        if other.device != home:
            raise ValueError(f"{name} must be on the query's device {home}, got {other.device}")
    if key_dim != head_dim:
        raise ValueError(f"key must have the query's head_dim {head_dim}, got {key_dim}")
    of_key, of_value = (kv_heads, n_keys), (value_heads, n_values)
    if of_value != of_key:
        raise ValueError(f"value must have the key's heads and tokens {of_key}, got {of_value}")
    for name, what, width in (("query", "head_dim", head_dim), ("value", "value_dim", value_dim)):
        if width == 0:
            raise ValueError(f"{name} must have a {what} of at least 1, got 0")
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"key has {counted(kv_heads, 'head')} and query {heads}: give enable_gqa=True"
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"query must have a multiple of the key's {kv_heads} heads, got {heads}")
    return CallShape(
        home.type, dtype, heads, kv_heads, head_dim, value_dim,
        batch_shape=tuple(batch), n_queries=n_queries, n_keys=n_keys,
    )  # fmt: skip


def _check_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    """Check that a mask broadcasts to (*batch, heads, n_queries, n_keys).

    Raises:
        ValueError, TypeError, NotImplementedError: it does not fit.
    """
    check_kind(mask, "attn_mask")
    _check_device(mask, "attn_mask")
    if mask.dtype != torch.bool and mask.dtype not in DTYPES:
        raise TypeError(f"attn_mask must be bool or one of {DTYPE_NAMES}, got {mask.dtype}")
    whole = (*query.shape[:-1], key.shape[-2])
    sizes = zip(reversed(mask.shape), reversed(whole), strict=False)
    if mask.dim() > len(whole) or not all(n in (1, m) for n, m in sizes):
        wanted = f"(..., heads, queries, keys) = {whole}"
        raise ValueError(f"attn_mask must broadcast to {wanted}, got {tuple(mask.shape)}")


def check_tensor(
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    name: str,
    home: torch.device,
    dtype: torch.dtype | None = None,
    *,
    for_writing: bool = False,
) -> None:
    """Check a tensor beside the inputs, which are on ``home``: shape, dtype (None: any floating
    one) and place; of one that is written to, that it can be.

    Beside inputs in host memory, what a backward reads may be on any device: the forward may have
    computed there.
    """
    check_kind(tensor, name)
    if for_writing or home.type != "cpu" or tensor.device.type not in BACKENDS:
        _check_place(tensor, name, home)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    check_dtype(tensor.dtype, name)
    if for_writing and tensor.requires_grad:
        raise ValueError(f"{name} must not require a gradient")
    if for_writing and has_tangent(tensor):
        raise ValueError(f"{name} must not have a forward-mode tangent")
    if for_writing and tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name} must not be a tensor of inference mode outside of it")
    if for_writing and tensor.is_neg():
        raise ValueError(f"{name} must not be a view with a sign of its own (it is written to)")


def check_no_overlap(
    results: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor | None]
) -> None:
    """Check that results share no memory with what is read, with each other or with themselves.

    (Inputs are read again after a part of the results has been written.) Interleaved views of one
    packed tensor share none. Two maps of one file do, and a result in a read-only map cannot be
    written; both are known on Linux (``call/overlap.py``). A tensor over an object that must not
    change, such as ``torch.frombuffer`` of bytes, is not recognised.

    Raises:
        ValueError: they share memory, or one cannot be written; by name.
    """
    # Only memory that torch did not allocate itself can be read-only or a file's.
    foreign = any(not t.untyped_storage().resizable() for t in results.values())
    known = Mappings.now() if foreign else Mappings(())
    before: dict[str, torch.Tensor] = {n: t for n, t in read.items() if t is not None}
    for name, result in results.items():
        if known.is_read_only(result):
            raise ValueError(f"{name} must be writable (it is written to), got a read-only map")
        if overlaps_itself(result):
            raise ValueError(
                f"{name} must not overlap itself (it is written to), got shape "
                f"{tuple(result.shape)} with strides {result.stride()}"
            )
    for name, result in results.items():
        for other, tensor in before.items():
            if known.share(result, tensor):
                raise ValueError(f"{name} must not share memory with {other}")
        before[name] = result


def check_plan(plan: Plan, shape: CallShape) -> None:
    """Check that a plan was made for a call of these sizes.

    Raises:
        ValueError: names what differs.
    """
    for name in (
        "n_queries", "n_keys", "heads", "kv_heads", "head_dim", "value_dim", "batch", "dtype",
        "is_causal",
    ):  # fmt: skip
        planned, came = getattr(plan.shape, name), getattr(shape, name)
        if planned != came:
            raise ValueError(f"plan was made for {name} = {planned}, the call has {came}")


# --- Broadcasting ---------------------------------------------------------------------------------


def broadcast_inputs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool, bool, int]:
    """The inputs cast by autocast and broadcast, for ``shape_of_inputs``.

    Returns:
        query, key and value of at least three dimensions and the same batch dimensions;
        ``enable_gqa``, or True where all query heads share one key/value head; whether the inputs
        were (tokens, head_dim); bytes of the casts, on the inputs' device.

    Raises:
        ValueError: batch dimensions that do not broadcast.
    """
    cast_bytes = 0
    dtype = _autocast_dtype(query.device.type)
    if dtype is not None:
        given = (query, key, value)
        query, key, value = (cast_by_autocast(tensor, dtype) for tensor in given)
        made = zip((query, key, value), given, strict=True)
        # Not ``nbytes``, which torch's compiler cannot read of lengths that may vary.
        cast_bytes = sum(n.numel() * n.element_size() for n, old in made if n is not old)
    dims = (query.dim(), key.dim(), value.dim())
    if min(dims) < 2:
        return query, key, value, enable_gqa, False, cast_bytes
    rank = max(3, *dims)
    query, key, value = (
        t if t.dim() == rank else t[(None,) * (rank - t.dim())] for t in (query, key, value)
    )
    heads, shared, grouped = _heads(query.shape[-3], key.shape[-3], value.shape[-3], enable_gqa)
    try:
        batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
    except RuntimeError:
        found = [tuple(t.shape[:-3]) for t in (query, key, value)]
        raise ValueError(
            f"query, key and value must have batch dimensions that broadcast, got {found}"
        ) from None
    query = _expanded(query, (*batch, heads))
    key, value = (
        _expanded(t, (*batch, shared if t.shape[-3] == 1 else t.shape[-3])) for t in (key, value)
    )
    return query, key, value, grouped, max(dims) == 2, cast_bytes


def _expanded(tensor: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
    return tensor if tensor.shape[:-2] == leading else tensor.expand(*leading, *tensor.shape[-2:])


def _heads(query: int, key: int, value: int, enable_gqa: bool) -> tuple[int, int, bool]:
    """(query heads, key/value heads, enable_gqa) after broadcasting.

    As torch broadcasts, except that a single key/value head is shared instead of expanded.
    """
    shared = value if key == 1 else key
    if enable_gqa or query == shared:
        return query, shared, enable_gqa
    if query == 1:
        return shared, shared, False
    return query, shared, shared == 1


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast casts to on such a device; None where it is off."""
    if device_type not in BACKENDS or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_by_autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` as autocast casts it: only floating dtypes, and not float64."""
    spared = not tensor.is_floating_point() or tensor.dtype == torch.float64
    return tensor if spared else tensor.to(dtype)
