"""Any function that returns an output and its log-sum-exp, as an inner kernel.

Results over disjoint sets of keys can be merged if each comes with its lse (paper, section 3). So a
function that returns (out, lse) for a rectangle can be called for one rectangle after another. Its
gradient needs no second function: with the whole row's O and lse, a rectangle has the weight
``w = exp(lse_i - lse)`` in the row, and

    O = sum_i w_i O_i   =>   dL/dO_i = w_i dO,   dL/dlse_i = w_i (dO . (O_i - O)),

which autograd propagates through the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from quorum_attention.counts import shown, switch
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES
from quorum_attention.kernels.protocol import CallShape, Extent, Indices, Saved, TaskTensors, Three
from quorum_attention.kernels.rectangles import CallsKernel, TaskCall
from quorum_attention.kernels.tensors import row_blocks
from quorum_attention.keywords import helps_with_names

LseFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]
BackwardFunction = Callable[..., "Three"]
WorkspaceBound = Callable[[CallShape, Extent], int]

_OPTIONAL = ("query_positions", "key_positions", "head_indices", "batch_indices")


class FunctionKernel(CallsKernel):
    """An inner kernel from a function; pass it as ``kernel=``, or register it.

    Args:
        function: ``function(query, key, value, *, is_causal, scale, ...) -> (out, lse)`` for a
            plain rectangle, or with ``is_causal`` a square whose keys after the query are masked.
            query (b, h, lq, d), key (b, h, lk, d), value (b, h, lk, dv) are strided views. out
            (b, h, lq, dv) is normalised; lse (b, h, lq) is the natural log of the sum of
            exponentials, -inf (with any out) in rows without keys. If it has parameters with these
            names, it also gets ``query_positions`` (lq,), ``key_positions`` (lk,), ``head_indices``
            (h,) of the query heads and ``batch_indices`` (b,): int64, counted in the whole call. It
            must not change while the kernel lives, and runs without autocast.
        name: for messages and reports; default the function's.
        backward: ``backward(grad_out, query, key, value, out, lse, *, is_causal, scale, ...)``
            -> gradients of query, key and value, given the whole row's out and lse (as in
            FlashAttention). Default: autograd through ``function``, whose out and lse must then be
            differentiable.
        grouped: whether the function takes fewer key heads than query heads.
        workspace: ``workspace(call, extent)`` -> upper bound of the bytes that a call allocates.
            Default: four score matrices in fp32, enough for a function that materialises scores.
        positive_scale: True if the function needs a scale above 0, as torch's operator for CPUs
            does in causal calls; calls with other scales are then refused.

    Raises:
        TypeError: not callable, or it lacks ``is_causal`` or ``scale``.

    Examples:
        >>> def mine(query, key, value, *, is_causal, scale):
        ...     scores = scale * (query @ key.mT)
        ...     if is_causal:
        ...         scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        ...     lse = torch.logsumexp(scores, -1)
        ...     return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse
        >>> q = torch.randn(1, 2, 300, 16, requires_grad=True)
        >>> out = qa.attention(q, q, q, kernel=qa.from_lse_function(mine), depth=1)
        >>> out.sum().backward()
    """

    own_attention = True

    @helps_with_names
    def __init__(
        self,
        function: LseFunction,
        *,
        name: str | None = None,
        backward: BackwardFunction | None = None,
        grouped: bool = False,
        workspace: WorkspaceBound | None = None,
        positive_scale: bool = False,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        for what, given in (("backward", backward), ("workspace", workspace)):
            if given is not None and not callable(given):
                raise TypeError(f"{what} must be callable or None, got {shown(given)}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, got {shown(name)}")
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.function, self.explicit_backward, self.workspace = function, backward, workspace
        self.grouped = switch(grouped, "grouped")
        self.positive_scale = switch(positive_scale, "positive_scale")
        self._wants = _parameters(function, "function")
        self._backward_wants = () if backward is None else _parameters(backward, "backward")
        self.position_free = not (self._wants or self._backward_wants)

    def called_back(self) -> tuple[Callable[..., Any], ...]:
        """See ``Kernel``."""
        own = self.explicit_backward
        return (self.function,) if own is None else (self.function, own)

    def results_of_functions(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: Indices
    ) -> Sequence[torch.Tensor]:
        """See ``Kernel``."""
        named = {"is_causal": False, "scale": 1.0, **_named(self._wants, at)}
        found: list[torch.Tensor] = []
        for heads in self._heads(query, key):
            found += self._called(query[:, heads], key, value, **_for_heads(named, heads))
        return found

    def refusal(self, shape: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if shape.bias is not None:
            return "it takes no attention mask: let the function itself apply it, by positions"
        if self.positive_scale and not shape.positive_scale:
            return "its function is for a scale above 0"
        return None

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return (self.workspace or quadratic_workspace)(shape, extent) + MERGE_WORKSPACE_BYTES

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        # What autograd saves in the forward, and as much for the gradients.
        workspace = self.workspace or quadratic_workspace
        return 2 * workspace(shape, extent) + MERGE_WORKSPACE_BYTES

    def task_calls(self, task: TaskTensors, *, backward: bool) -> Iterator[tuple[TaskCall]]:
        """See ``CallsKernel``."""
        own = backward and self.explicit_backward is not None
        wants = self._backward_wants if own else self._wants
        for r in task.rectangles:
            numbers = _named(wants, task.indices(r)) if wants else {}
            named = {"is_causal": r.causal, "scale": task.scale, **numbers}
            columns = itemgetter((slice(None), slice(None), slice(r.key_start, r.key_stop)))
            for heads in self._heads(task.query, task.key):
                rows = itemgetter((slice(None), heads, slice(r.query_start, r.query_stop)))
                inputs = rows(task.query), columns(task.key), columns(task.value)
                mine = _for_heads(named, heads)
                forward = partial(self._forward, *inputs, **mine)
                yield (TaskCall(rows, columns, forward, partial(self._gradients, inputs, mine)),)

    def _forward(self, *inputs: torch.Tensor, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            out, lse = self._called(*inputs, **named)
        return out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse

    def _gradients(self, inputs: Three, named: dict[str, Any], saved: Saved) -> Three:
        if self.explicit_backward is not None:
            return self.explicit_backward(saved.grad_out, *inputs, saved.out, saved.lse, **named)
        plain = {name: recordable(value) for name, value in named.items()}
        return gradients_by_autograd(partial(self._called, **plain), inputs, saved)

    def _called(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.function(query, key, value, **named)
        says = f"kernel {self.name!r} must return"
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"{says} (out, lse), got {type(found)}")
        rows = tuple(query.shape[:3])
        for what, tensor, shape in zip(
            ("out", "lse"), found, ((*rows, value.shape[-1]), rows), strict=True
        ):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{says} a tensor as {what}, got {shown(tensor)}")
            if tensor.shape != shape:
                raise ValueError(f"{says} {what} of shape {shape}, got {tuple(tensor.shape)}")
        return found


from_lse_function = FunctionKernel


def gradients_by_autograd(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    saved: Saved,
) -> Three:
    """Gradients of query, key and value by autograd through another forward of a part.

    Args:
        run: ``run(query, key, value) -> (out, lse)`` of the part.
        inputs: query, key and value of the part.
        saved: of the whole rows.

    Raises:
        TypeError: ``run`` has no gradient.
    """
    # Gradients have to be recorded here, also if the caller has turned that off.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [recordable(t).detach().requires_grad_() for t in inputs]
        own_out, own_lse = run(*leaves)
        if not (own_out.requires_grad and own_lse.requires_grad):
            which = "an lse" if own_out.requires_grad else "an out"
            raise TypeError(
                f"the kernel's function returns {which} without a gradient: both must be "
                "differentiable, or give backward="
            )
        upstream = upstream_of(own_out, own_lse, saved)
        grads = torch.autograd.grad((own_out, own_lse), leaves, upstream, allow_unused=True)
    query, key, value = (
        torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)
    )
    return query, key, value


def recordable(value: Any) -> Any:
    """A copy of a tensor of inference mode, which autograd refuses; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value


def upstream_of(
    own_out: torch.Tensor,
    own_lse: torch.Tensor,
    saved: Saved,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with respect to a part's own out and lse (see above), in their dtypes.

    Args:
        own_out, own_lse: (b, h, rows, dv) and (b, h, rows) of the part.
        saved: of the whole row, the same shapes.
    """
    grad_out, out, lse = saved.grad_out, saved.out, saved.lse
    with torch.no_grad():
        by_out, by_lse = torch.empty_like(own_out), torch.empty_like(own_lse)
        batch, heads, rows, width = own_out.shape
        # In blocks, because everything is converted to the dtype of lse.
        for block in row_blocks(batch, heads, rows, max(1, width) * lse.element_size()):
            # A row without keys in this part has no share; -inf - -inf would make it NaN.
            none = own_lse[block] == -torch.inf
            share = torch.exp(own_lse[block].to(lse.dtype) - lse[block]).masked_fill_(none, 0.0)
            upstream = grad_out[block].to(lse.dtype) * share.unsqueeze(-1)
            apart = own_out[block].to(lse.dtype) - out[block].to(lse.dtype)
            # Where a part is the whole row and its output, rounded, is the row's, the rounding is
            # all that they are apart; it would be a gradient of scores that have none.
            same = own_out[block].to(out.dtype) == out[block]
            same &= (own_lse[block].to(lse.dtype) == lse[block]).unsqueeze(-1)
            apart.masked_fill_(same.logical_or_(none.unsqueeze(-1)), 0.0)
            by_out[block] = upstream.to(own_out.dtype)
            by_lse[block] = (upstream * apart).sum(dim=-1).to(own_lse.dtype)
    return by_out, by_lse


def quadratic_workspace(shape: CallShape, extent: Extent) -> int:
    """Bytes of four score matrices in fp32 (fp64 for fp64 inputs), and of copies of the rows."""
    item = max(4, shape.dtype.itemsize)
    lanes = extent.batch * extent.query_heads
    pairs = lanes * extent.max_queries * extent.max_keys
    rows = lanes * (extent.max_queries + extent.max_keys)
    return 4 * pairs * item + 2 * rows * (shape.head_dim + shape.value_dim + 2) * item


def _parameters(function: Callable[..., Any], what: str) -> tuple[str, ...]:
    """Which of the optional parameters a function has."""
    signature = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()):
        return _OPTIONAL
    for wanted in ("is_causal", "scale"):
        if wanted not in signature:
            raise TypeError(
                f"{what} {shown(function)} must have a parameter {wanted!r}: it is called as "
                f"f(query, key, value, *, is_causal, scale), and has {list(signature)}"
            )
    return tuple(name for name in _OPTIONAL if name in signature)


def _named(wants: tuple[str, ...], at: Indices) -> dict[str, torch.Tensor]:
    """The optional arguments that a function wants, for some pairs."""
    every = dict(zip(_OPTIONAL, (at.queries, at.keys, at.heads, at.entries), strict=True))
    return {name: every[name] for name in wants}


def _for_heads(named: dict[str, Any], chosen: slice) -> dict[str, Any]:
    """The arguments of a call of some heads."""
    return {n: value[chosen] if n == "head_indices" else value for n, value in named.items()}
