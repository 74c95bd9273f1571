"""Calls whose tensors are in files, and their parts: blocks that need nothing of each
other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quorum_attention.call.backward_inputs import BackwardInputs, check_backward_inputs
from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.call.options import Arguments, CallOptions
from quorum_attention.call.request import Request, request_of
from quorum_attention.call.validation import Tensors, as_mask
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.files.formats import TensorSpecs
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.mask import Mask
from quorum_attention.partition import split_at_multiples

INPUTS = ("query", "key", "value")
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class FileCall:
    """A forward, or a backward from files; made by ``file_call``.

    Attributes:
        tensors: the tensors that it reads, by role: (*batch, heads, n, d), lse (*batch,
            heads, n_queries).
        whole_call: the call that parts are blocks of.
        out_dtype: the dtype of all results but the lse.
        backward: whether it gives gradients.
        options: its options.
        without_heads: inputs were (tokens, head_dim), and so are results.
    """

    tensors: NamedTensors
    whole_call: WholeCall
    out_dtype: torch.dtype
    backward: bool
    options: CallOptions
    without_heads: bool

    @property
    def shape(self) -> CallShape:
        """Its sizes."""
        return self.whole_call.shape

    @property
    def device(self) -> torch.device:
        """The device that computes it."""
        device = self.options.devices
        assert isinstance(device, torch.device)
        return device

    @property
    def is_empty(self) -> bool:
        """Whether nothing has to be computed for its results."""
        shape = self.shape
        return 0 in (
            shape.batch,
            shape.heads,
            shape.n_queries,
            shape.n_keys,
            shape.value_dim,
        )

    def results(self, *, lse: bool = False) -> TensorSpecs:
        """Return shapes and dtypes of the results, by name.

        Args:
            lse: whether the log-sum-exp of a forward is wanted.
        """
        shape = self.shape
        rows = (*shape.batch_shape, shape.heads, shape.n_queries)
        keys = (*shape.batch_shape, shape.kv_heads, shape.n_keys)
        if self.without_heads:
            rows = rows[1:]
            keys = keys[1:]
        if self.backward:
            return {
                "dq": ((*rows, shape.head_dim), self.out_dtype),
                "dk": ((*keys, shape.head_dim), self.out_dtype),
                "dv": ((*keys, shape.value_dim), self.out_dtype),
            }
        specs: TensorSpecs = {"out": ((*rows, shape.value_dim), self.out_dtype)}
        if lse:
            specs["lse"] = (rows, shape.state_dtype)
        return specs

    def with_heads(self, results: NamedTensors) -> NamedTensors:
        """Return results with a dimension of heads, views."""
        if not self.without_heads:
            return dict(results)
        return {name: result.unsqueeze(0) for name, result in results.items()}

    def parts(self, heads: int) -> list[CallBlock]:
        """Return its parts: all rows and keys of some heads of one batch entry, or of
        some entries.

        Args:
            heads: key/value heads of each part, from ``heads_of_part``.
        """
        shape = self.shape
        all_rows = Interval(0, shape.n_queries)
        all_keys = Interval(0, shape.n_keys)
        n_entries = max(1, heads // max(1, shape.kv_heads))
        return [
            CallBlock(
                entries, self.whole_call.query_heads(kv_heads), all_rows, all_keys
            )
            for entries in split_at_multiples(Interval(0, shape.batch), n_entries)
            for kv_heads in split_at_multiples(Interval(0, shape.kv_heads), heads)
        ]

    def heads_of_part(self, n_heads: int) -> int:
        """Return how many key/value heads a part has that should have about
        ``n_heads``.

        A part has some heads of one batch entry, or all heads of some entries.
        """
        shape = self.shape
        heads_per_entry = max(1, shape.kv_heads)
        has_one_batch_dim = len(shape.batch_shape) == 1
        if n_heads >= heads_per_entry and has_one_batch_dim:
            n_entries = min(n_heads // heads_per_entry, max(1, shape.batch))
            return n_entries * heads_per_entry
        return max(1, min(n_heads, heads_per_entry))


def file_call(
    options: CallOptions,
    tensors: NamedTensors,
    attn_mask: torch.Tensor | Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> FileCall:
    """Check a call on ``tensors`` as a call of ``attention`` is checked.

    Args:
        options: its options.
        tensors: query, key and value; with grad_out, out and lse it is a backward.
        attn_mask: as there, and so are the other arguments.

    Raises:
        ValueError, TypeError, NotImplementedError: what does not fit, by name.
    """
    backward = "grad_out" in tensors
    query, key, value = (tensors[name] for name in INPUTS)
    mask = as_mask(attn_mask, query, key)
    arguments = Arguments(
        mask,
        dropout_p,
        dropout_seed,
        is_causal,
        scale,
        enable_gqa,
        None,
        out_dtype,
        options,
    )
    function = "attention_backward" if backward else "attention"
    checked_tensors, request = request_of(function, query, key, value, arguments)
    if request.records:
        raise NotImplementedError(
            "query, key, value and attn_mask must require no gradient: gradients of "
            "files are computed by a backward of its own"
        )
    # Views with all dimensions; a bias is broadcast by ``WholeCall.cut_bias``.
    inputs = dict(zip(INPUTS, checked_tensors[:3], strict=True))
    if backward:
        inputs |= _upstream(tensors, checked_tensors, request)
    if mask is not None and not isinstance(mask, Mask):
        mask = Mask(bias=checked_tensors.bias)
    # A mask may have made the call causal: the rest of the mask is cut as it was given.
    shape = replace(request.shape, is_causal=is_causal)
    whole_call = WholeCall(shape, mask, scale, request.dropout)
    return FileCall(
        inputs,
        whole_call,
        out_dtype or query.dtype,
        backward,
        options,
        request.without_heads,
    )


def _upstream(
    named_tensors: NamedTensors, tensors: Tensors, request: Request
) -> NamedTensors:
    """Return what a backward reads beside the inputs, checked, views with all
    dimensions.

    Raises:
        ValueError, TypeError, NotImplementedError: what does not fit, by name.
    """
    first_dim = 1 if request.without_heads else 0
    inputs = tuple(named_tensors[name] for name in INPUTS)
    for tensor, checked_tensor in zip(inputs, tensors[:3], strict=True):
        if checked_tensor.shape[first_dim:] != tensor.shape:
            raise NotImplementedError(
                "a backward from files takes no inputs that are broadcast"
            )
    backward_inputs = BackwardInputs(
        named_tensors["grad_out"], named_tensors["out"], named_tensors["lse"]
    )
    backward_inputs = check_backward_inputs(tensors, request, backward_inputs, inputs)
    return {
        "grad_out": backward_inputs.grad_out,
        "out": backward_inputs.out,
        "lse": backward_inputs.lse,
    }
