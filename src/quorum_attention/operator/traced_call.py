"""Makes a call by the operator, where it is traced."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quorum_attention.call.broadcast import broadcast_inputs
from quorum_attention.call.options import Arguments, names_several
from quorum_attention.call.transformations import needs_gradient
from quorum_attention.call.validation import as_mask, shape_of_inputs
from quorum_attention.kernels.operator_call import OutLse
from quorum_attention.kernels.torch_private import (
    has_transforms,
    is_tracing,
    refuse_real_among_fake,
)
from quorum_attention.mask import Mask
from quorum_attention.operator.codec import encode_call
from quorum_attention.operator.register import count_flops


class _EncodedArguments(NamedTuple):
    """Arguments of a call as an operator takes them.

    Attributes:
        parts: the tensors of a ``Mask`` but its bias and its sinks.
        numbers: the whole numbers of options and mask.
    """

    bias: torch.Tensor | None
    sinks: torch.Tensor | None
    options: str
    numbers: list[int]
    parts: list[torch.Tensor]


def as_operator(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> OutLse | None:
    """Return (out, lse) of a call by the operator; None if it cannot make the call.

    Where it cannot, the graph of torch's compiler has to break, and other traces refuse
    the call.

    Raises:
        TypeError, ValueError: query, key and value do not fit each other.
    """
    encoded = _encode_arguments(query, key, value, arguments)
    if encoded is None:
        return None
    seed = None
    if arguments.dropout_p > 0.0:
        seed = _seed_tensor(arguments.dropout_seed)
    query, key, value, enable_gqa, without_heads, _ = broadcast_inputs(
        query, key, value, arguments.enable_gqa
    )
    shape_of_inputs(query, key, value, enable_gqa)
    _check_fakes(query, key, value, encoded)
    recorded = needs_gradient(query, key, value, encoded.bias, encoded.sinks)
    has_learned_bias = encoded.bias is not None and encoded.bias.requires_grad
    result_dtype = arguments.out_dtype or query.dtype
    reads_unrounded = recorded and arguments.options.exact_delta is True
    if reads_unrounded and query.dtype.itemsize == 2:
        # The backward reads this output. The graph rounds what the call returns.
        arguments = arguments._replace(out_dtype=torch.float32)
    out, lse, _ = torch.ops.quorum_attention.attention(
        query,
        key,
        value,
        encoded.bias,
        encoded.sinks,
        seed,
        encoded.parts or None,
        float(arguments.dropout_p),
        arguments.scale,
        arguments.is_causal,
        enable_gqa,
        arguments.out_dtype,
        encoded.options,
        encoded.numbers or None,
        recorded,
        recorded and has_learned_bias,
    )
    out = out.to(result_dtype)
    if without_heads:
        return out.squeeze(0), lse.squeeze(0)
    return out, lse


def _encode_arguments(
    query: Any, key: Any, value: Any, arguments: Arguments
) -> _EncodedArguments | None:
    """Return arguments of a call as an operator takes them; None if it cannot take
    them."""
    attn_mask = as_mask(arguments.attn_mask, query, key)
    # A graph of torch's compiler may drop tangents. Where it breaks, the call refuses
    # them.
    if (
        torch.compiler.is_dynamo_compiling()
        and torch.autograd.forward_ad._current_level >= 0
    ):
        return None
    if arguments.out is not None or names_several(arguments.options.devices):
        return None
    # torch.jit.trace would keep what one call did.
    if has_transforms() or is_tracing():
        return None
    if not _have_operator_types(query, key, value, attn_mask, arguments):
        return None
    mask = attn_mask if isinstance(attn_mask, Mask) else None
    numbers: list[int] = []
    parts: list[torch.Tensor] = []
    try:
        options = encode_call(arguments.options, mask, numbers, parts)
    except NotImplementedError:
        return None
    if mask is None:
        return _EncodedArguments(attn_mask, None, options, numbers, parts)
    return _EncodedArguments(mask.bias, mask.sinks, options, numbers, parts)


def _have_operator_types(
    query: Any, key: Any, value: Any, attn_mask: Any, arguments: Arguments
) -> bool:
    """Tell whether arguments have the types that an operator takes."""
    scale = 0.0 if arguments.scale is None else arguments.scale
    types_of_values = (
        ((query, key, value), torch.Tensor),
        ((attn_mask,), (torch.Tensor, Mask, type(None))),
        ((arguments.is_causal, arguments.enable_gqa), bool),
        ((arguments.dropout_p, scale), (int, float)),
    )
    return all(
        isinstance(v, types) for values, types in types_of_values for v in values
    )


def _seed_tensor(seed: int | None) -> torch.Tensor:
    """Return the seed of dropout as a tensor, drawn if there is none.

    An operator of its own draws it, so that whoever recomputes a graph takes care of it
    as of any other random numbers. The backward gets the same tensor.
    """
    if seed is None:
        return torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")
    return torch.full((), seed, dtype=torch.int64, device="cpu")


def _check_fakes(query: Any, key: Any, value: Any, encoded: _EncodedArguments) -> None:
    """Refuse real tensors among fake ones, and meta tensors beside others."""
    bias, sinks, _, _, parts = encoded
    for tensor in (bias, sinks, *parts):
        # torch would call the fake kernel, and take its results for real.
        if tensor is not None and tensor.is_meta and not query.is_meta:
            raise ValueError(
                f"attn_mask must be in host memory or on {query.device}, got meta"
            )
    if torch.compiler.is_dynamo_compiling():
        return
    names = ["query", "key", "value", "attn_mask", "Mask.sinks"]
    names += ["a tensor of the Mask (documents, key_padding, ...)"] * len(parts)
    refuse_real_among_fake(names, [query, key, value, bias, sinks, *parts])
    count_flops()  # also in inference mode, which goes around derivatives
