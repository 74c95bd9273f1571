"""Any function that returns an output and its log-sum-exp, as an inner kernel.

Softmax attention over a set of keys is determined by (out, lse), so a function that returns both
for a rectangle can be merged with itself over other keys (paper, section 3). Its gradient needs no
second function: with the whole row's O and lse, a rectangle's share of the row is
``w = exp(lse_i - lse)``, and

    O = sum_i w_i O_i   =>   dL/dO_i = w_i dO,   dL/dlse_i = w_i (dO . (O_i - O)),

which autograd carries back through the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quorum_attention.counts import shown, switch
from quorum_attention.decomposition import Rectangle
from quorum_attention.kernels.blocks import row_blocks
from quorum_attention.kernels.kit.positions import positions
from quorum_attention.kernels.kit.reads import tensors
from quorum_attention.kernels.merge import MERGE_WORKSPACE_BYTES, add_, merge_
from quorum_attention.kernels.protocol import (
    CallShape,
    Extent,
    Gradients,
    Statistics,
    TaskTensors,
)
from quorum_attention.kernels.traits import Traits
from quorum_attention.kernels.views import Pick, jth_of_group

LseFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]
BackwardFunction = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
WorkspaceBound = Callable[[CallShape, Extent], int]

_OPTIONAL = ("query_positions", "key_positions", "head_indices", "batch_indices")


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangle of a task as a function gets it.

    Attributes:
        rectangle: local positions.
        query, key, value: (b, h, lq, d), (b, hk, lk, d), (b, hk, lk, dv), views.
        pick: which query heads these are, of a tensor with all of them.
        named: the keyword arguments, ``is_causal`` and ``scale`` among them.
    """

    rectangle: Rectangle
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pick: Pick
    named: dict[str, Any]

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece's query rows of (b, hq, nq, ...), a view."""
        r = self.rectangle
        return self.pick(tensor)[:, :, r.query_start : r.query_stop]

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece's key rows of (b, hk, nk, ...), a view."""
        return tensor[:, :, self.rectangle.key_start : self.rectangle.key_stop]


class FunctionKernel:
    """See ``from_lse_function``."""

    traits = Traits(own_attention=True, captures=True)

    def __init__(
        self,
        function: LseFunction,
        *,
        name: str,
        backward: BackwardFunction | None = None,
        grouped: bool = False,
        workspace: WorkspaceBound | None = None,
    ) -> None:
        self.name = name
        self.function = function
        self.explicit_backward = backward
        self.grouped = grouped
        self._workspace = workspace or quadratic_workspace
        self._wants = _parameters(function, "function")
        self._backward_wants = () if backward is None else _parameters(backward, "backward")

    def captured(self) -> list[torch.Tensor]:
        """See ``Captures``: what the functions close over, as far as it is plain to see."""
        return tensors(self.function, self.explicit_backward)

    def refusal(self, call: CallShape) -> str | None:
        """Why this kernel cannot run such a call, in words for the user; None if it can."""
        if call.mask is not None:
            return "it takes no attention mask: let the function itself apply it, by positions"
        return None

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``forward`` allocates at any one time."""
        return self._workspace(call, extent) + MERGE_WORKSPACE_BYTES

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        """Upper bound of the device bytes ``backward`` allocates at any one time."""
        # What autograd keeps of the forward, and the gradients on their way.
        return 2 * self._workspace(call, extent) + MERGE_WORKSPACE_BYTES

    def forward(self, task: TaskTensors, state: Statistics) -> None:
        """Merge the task's kept pairs into ``state``, in place."""
        for piece in self.pieces(task, self._wants):
            with torch.no_grad():
                out, lse = self._run(piece, piece.query, piece.key, piece.value)
            empty = (lse == -torch.inf).unsqueeze(-1)
            with task.timed("merge"):
                merge_(piece.rows(state.out), piece.rows(state.lse), out.masked_fill(empty, 0.0),
                       lse)  # fmt: skip

    def backward(self, task: TaskTensors, grads: Gradients) -> None:
        """Add the task's gradients into ``grads``, in place."""
        wants = self._wants if self.explicit_backward is None else self._backward_wants
        for piece in self.pieces(task, wants):
            grad_out = piece.rows(grads.grad_out)
            out, lse = piece.rows(grads.out), piece.rows(grads.lse)
            if self.explicit_backward is None:
                found = self._by_autograd(piece, grad_out, out, lse)
            else:
                finite = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse)
                found = self.explicit_backward(
                    grad_out, piece.query, piece.key, piece.value, out, finite, **piece.named
                )
            targets = (
                piece.rows(grads.grad_query),
                piece.columns(grads.grad_key),
                piece.columns(grads.grad_value),
            )
            with task.timed("merge"):
                for target, part in zip(targets, found, strict=True):
                    add_(target, part)

    def pieces(self, task: TaskTensors, wants: tuple[str, ...]) -> Iterator[Piece]:
        """The function's calls for a task."""
        if 0 in task.query.shape[:2]:
            return
        device = task.query.device
        shared = task.query.shape[1] // task.key.shape[1]
        picks: list[tuple[Pick, slice]] = [(_whole, slice(None))]
        if shared > 1 and not self.grouped:
            key_heads = task.key.shape[1]
            picks = [
                (partial(jth_of_group, key_heads, j), slice(j, None, shared)) for j in range(shared)
            ]
        heads = torch.arange(task.query.shape[1], device=device) + task.first_head
        for r in self.rectangles(task):
            if r.n_queries == 0 or r.n_keys == 0:
                continue
            named: dict[str, Any] = {"is_causal": r.causal, "scale": task.scale}
            if "query_positions" in wants:
                named["query_positions"] = positions(task.task, r.query_start, r.query_stop, device)
            if "key_positions" in wants:
                named["key_positions"] = positions(task.task, r.key_start, r.key_stop, device)
            if "batch_indices" in wants:
                named["batch_indices"] = torch.tensor(task.entries, device=device)
            for pick, chosen in picks:
                if "head_indices" in wants:
                    named["head_indices"] = heads[chosen]
                yield Piece(
                    r,
                    pick(task.query)[:, :, r.query_start : r.query_stop],
                    task.key[:, :, r.key_start : r.key_stop],
                    task.value[:, :, r.key_start : r.key_stop],
                    pick,
                    named,
                )

    def rectangles(self, task: TaskTensors) -> Iterator[Rectangle]:
        """What the function is called for; all of the task's rectangles."""
        yield from task.rectangles

    def _run(
        self, piece: Piece, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.function(query, key, value, **piece.named)
        wanted = (*query.shape[:3], value.shape[-1])
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"kernel {self.name!r} must return (out, lse), got {type(found)}")
        out, lse = found
        if tuple(out.shape) != wanted or tuple(lse.shape) != wanted[:3]:
            raise ValueError(
                f"kernel {self.name!r} must return out {wanted} and lse {wanted[:3]}, got "
                f"{tuple(out.shape)} and {tuple(lse.shape)}"
            )
        return out, lse

    def _by_autograd(
        self, piece: Piece, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Whatever the caller runs under, this records.
        with torch.inference_mode(False), torch.enable_grad():
            named = {name: _plain(value) for name, value in piece.named.items()}
            three = (_plain(t) for t in (piece.query, piece.key, piece.value))
            inputs = [t.detach().requires_grad_() for t in three]
            own_out, own_lse = self._run(replace(piece, named=named), *inputs)
            if not (own_out.requires_grad and own_lse.requires_grad):
                which = "an lse" if own_out.requires_grad else "an out"
                raise TypeError(
                    f"kernel {self.name!r} returns {which} without a gradient: both must be "
                    "differentiable, or give backward="
                )
            upstream = upstream_of(own_out, own_lse, grad_out, out, lse)
            grads = torch.autograd.grad((own_out, own_lse), inputs, upstream, allow_unused=True)
        query, key, value = (
            torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True)
        )
        return query, key, value


def _plain(value: Any) -> Any:
    """A tensor of inference mode, which autograd does not take, as a copy; all else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value


def from_lse_function(
    function: LseFunction,
    *,
    name: str | None = None,
    backward: BackwardFunction | None = None,
    grouped: bool = False,
    workspace: WorkspaceBound | None = None,
) -> FunctionKernel:
    """An inner kernel from a function; pass it as ``kernel=``, or register it.

    Args:
        function: ``function(query, key, value, *, is_causal, scale, ...) -> (out, lse)`` for a
            plain rectangle, or with ``is_causal`` a square whose keys after the query are masked.
            query (b, h, lq, d), key (b, h, lk, d), value (b, h, lk, dv), strided views; out
            (b, h, lq, dv), normalised; lse (b, h, lq), natural log of the sum of exponentials,
            -inf (with any out) in rows that have no key. It may name further parameters, and then
            gets them: ``query_positions`` (lq,) and ``key_positions`` (lk,), int64, *global*;
            ``head_indices`` (h,) of the query heads; ``batch_indices`` (b,). Tensors that it closes
            over have to stay as they are until the backward: one that is written to in between is
            an error, as with any saved tensor (one that it finds in a global or an attribute is
            not seen). Kernels run without autocast.
        name: for messages and reports; default the function's.
        backward: ``backward(grad_out, query, key, value, out, lse, *, is_causal, scale, ...)``
            -> gradients of query, key and value, given the whole row's out and lse (as in
            FlashAttention). Default: autograd through ``function``, whose out and lse then have to
            be differentiable.
        grouped: the function takes fewer key heads than query heads as they are.
        workspace: ``workspace(call, extent)``: upper bound of the bytes a call allocates. Default:
            four score matrices in fp32, as a function that holds its scores takes.

    Raises:
        TypeError: not callable, or it lacks ``is_causal`` or ``scale``.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    for what, given in (("backward", backward), ("workspace", workspace)):
        if given is not None and not callable(given):
            raise TypeError(f"{what} must be callable or None, got {shown(given)}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, got {shown(name)}")
    grouped = switch(grouped, "grouped")
    found = name or str(getattr(function, "__name__", type(function).__name__))
    return FunctionKernel(
        function, name=found, backward=backward, grouped=grouped, workspace=workspace
    )


def upstream_of(
    own_out: torch.Tensor,
    own_lse: torch.Tensor,
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a part's own out and lse, given the whole row's (see above); in their dtypes.

    Args:
        own_out, own_lse: (b, h, rows, dv) and (b, h, rows) of the part.
        grad_out, out, lse: of the whole row, the same shapes.
    """
    with torch.no_grad():
        by_out, by_lse = torch.empty_like(own_out), torch.empty_like(own_lse)
        batch, heads, rows, width = own_out.shape
        # In blocks, because everything is widened.
        for block in row_blocks(batch, heads, rows, max(1, width) * lse.element_size()):
            # -inf - -inf is NaN: a row without keys here has no share, whatever it has elsewhere.
            none = own_lse[block] == -torch.inf
            share = torch.exp(own_lse[block].to(lse.dtype) - lse[block]).masked_fill_(none, 0.0)
            upstream = grad_out[block].to(lse.dtype) * share.unsqueeze(-1)
            apart = own_out[block].to(lse.dtype) - out[block].to(lse.dtype)
            apart.masked_fill_(none.unsqueeze(-1), 0.0)
            by_out[block] = upstream.to(own_out.dtype)
            by_lse[block] = (upstream * apart).sum(dim=-1).to(own_lse.dtype)
    return by_out, by_lse


def quadratic_workspace(call: CallShape, extent: Extent) -> int:
    """Bytes of a function that holds four matrices of scores in fp32 (or wider), and its rows."""
    item = max(4, call.dtype.itemsize)
    lanes = extent.batch * extent.query_heads
    pairs = lanes * extent.max_queries * extent.max_keys
    rows = lanes * (extent.max_queries + extent.max_keys)
    return 4 * pairs * item + 2 * rows * (call.head_dim + call.value_dim + 2) * item


def _parameters(function: Callable[..., Any], what: str) -> tuple[str, ...]:
    """Which of the optional parameters a function names."""
    signature = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()):
        return _OPTIONAL
    for wanted in ("is_causal", "scale"):
        if wanted not in signature:
            raise TypeError(f"{what} must have a parameter {wanted!r}, it has {list(signature)}")
    return tuple(name for name in _OPTIONAL if name in signature)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
