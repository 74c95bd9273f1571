"""A loss whose logits are there for some tokens at a time, computed again in the backward.

While a model is given labels, its last layer returns logits that are not computed yet. Where they
go into torch's cross entropy, scaled or capped at most, they are computed some tokens at a time,
each time a checkpoint. Anything else that is done to them computes all of them first, as without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from quorum_attention.errors import BudgetError
from quorum_attention.recipes.changes import (
    Change,
    eval_mode,
    has_own_forward,
    is_transformed,
    patch_forward,
)
from quorum_attention.recipes.step import loss_tokens

NAME = "chunked loss"
_TRIED = 12  # tokens
_Change = Callable[[torch.Tensor], torch.Tensor]
# While a model runs that was given labels: its losses that were computed in chunks.
_losses: ContextVar[list[torch.Tensor] | None] = ContextVar("losses", default=None)


def chunk_loss(model: Any) -> Change:
    """Let ``model(..., labels=...)`` compute its loss without all logits at once."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kind = type(model).__name__
    if type(head) is not torch.nn.Linear:
        return Change(NAME, False, f"{kind} is no decoder with one linear layer to the vocabulary")
    if not has_own_forward(model) or not has_own_forward(head):
        return Change(NAME, False, f"this {kind} was given another forward")
    if head.weight.device.type == "meta":
        return Change(NAME, False, "the weights are not there yet")
    patch_forward(head, _head_forward)
    patch_forward(model, _model_forward(model))
    why = _why_not(model)
    if why is not None:
        del model.forward, head.forward
        return Change(NAME, False, why)
    tokens = loss_tokens(head.weight.shape[0], head.weight.dtype.itemsize)
    return Change(NAME, True, f"{tokens:,} tokens at a time; a call with labels has no logits")


def _head_forward(self: torch.nn.Linear, states: torch.Tensor) -> Any:
    if _losses.get() is None:
        return linear(states, self.weight, self.bias)
    return _Logits(states, self.weight, self.bias)


def _model_forward(model: Any) -> Callable[..., Any]:
    plain = type(model).forward
    signature = inspect.signature(plain)

    @wraps(plain)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        given = signature.bind_partial(self, *args, **named).arguments
        if given.get("labels") is None or is_transformed():
            return plain(self, *args, **named)
        losses: list[torch.Tensor] = []
        token = _losses.set(losses)
        try:
            found = plain(self, *args, **named)
        finally:
            _losses.reset(token)
        if isinstance(found, tuple):
            return tree_map_only(_Logits, _Logits.computed, found)
        if isinstance(getattr(found, "logits", None), _Logits):
            logits = None if losses else found.logits.computed()
            found = type(found)(**{**found, "logits": logits})
        return found

    return forward


@dataclass(eq=False)
class _Logits:
    """In place of a tensor: (..., vocabulary) logits that are not computed yet.

    Attributes:
        states: (..., width), whose product with the weights they are.
        weight, bias: of the last layer.
        changes: of each number by itself: a scale, a soft cap, another dtype.
        root: those that these are of another shape, or changed.
        tensor: they, once something has asked for them, and may have changed them.
    """

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    changes: tuple[_Change, ...] = ()
    root: _Logits | None = None
    tensor: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """As of a tensor."""
        return self.states.device

    def view(self, *sizes: Any) -> Any:
        """As of a tensor."""
        if self.tensor is not None or sizes != (-1, len(self.weight)):
            return self.computed().view(*sizes)
        states = self.states.reshape(-1, self.states.shape[-1])
        return replace(self, states=states, root=self if self.root is None else self.root)

    reshape = view

    def computed(self) -> torch.Tensor:
        """The tensor."""
        if self.tensor is None:
            if self.root is None:
                whole = linear(self.states, self.weight, self.bias)
            else:
                whole = self.root.computed().view(*self.states.shape[:-1], len(self.weight))
            for change in self.changes:
                whole = change(whole)
            self.tensor = whole
        return self.tensor

    def changed(self, change: _Change) -> Any:
        """Each number by itself."""
        if self.tensor is not None:
            return change(self.tensor)
        root = self if self.root is None else self.root
        return replace(self, changes=(*self.changes, change), root=root)

    def contiguous(self) -> _Logits:
        """As of a tensor."""
        return self

    def __truediv__(self, other: Any) -> Any:
        number = isinstance(other, (int, float))
        return self.changed(lambda t: t / other) if number else self.computed() / other

    def __mul__(self, other: Any) -> Any:
        number = isinstance(other, (int, float))
        return self.changed(lambda t: t * other) if number else self.computed() * other

    def cross_entropy(
        self, target: torch.Tensor, weight: Any = None, *, ignore_index: int = -100,
        reduction: str = "mean", label_smoothing: float = 0.0, **others: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """Some tokens at a time; None: it is one that all logits are needed for."""
        plain = weight is None and not label_smoothing and reduction in ("mean", "sum")
        fresh = self.tensor is None and (self.root is None or self.root.tensor is None)
        if not (
            fresh and plain and self.states.dim() == 2 and target.shape == self.states.shape[:1]
        ):
            return None

        def of_some(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            logits = replace(self, states=states, root=None).computed()
            return cross_entropy(logits, wanted, ignore_index=ignore_index, reduction="sum")

        tokens = loss_tokens(len(self.weight), self.weight.dtype.itemsize)
        pairs = zip(self.states.split(tokens), target.split(tokens), strict=True)
        again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        total = torch.stack([checkpoint(of_some, *pair, **again) for pair in pairs]).sum()
        return total if reduction == "sum" else total / (target != ignore_index).sum()

    def float(self) -> Any:
        """As of a tensor."""
        return self.changed(torch.Tensor.float)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        if function is cross_entropy and isinstance(args[0], _Logits):
            loss, losses = args[0].cross_entropy(*args[1:], **(named or {})), _losses.get()
            if loss is not None and losses is not None:
                losses.append(loss)
                return loss
        if function is torch.tanh and len(args) == 1 and not named:
            return args[0].changed(function)
        args, named = tree_map_only(_Logits, _Logits.computed, (args, named or {}))
        return function(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.computed(), name)


def _as_of_tensor(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.computed(), name)(*others)


for _name in ("add", "radd", "sub", "rsub", "rmul", "pow", "neg", "getitem",
              "setitem", "len", "iter", "lt", "le", "gt", "ge"):  # fmt: skip
    setattr(_Logits, f"__{_name}__", _as_of_tensor(f"__{_name}__"))


@torch.no_grad()
def _why_not(model: Any) -> str | None:
    """Why the loss needs all logits, if it does: tried on a few tokens."""
    try:
        device = model.get_input_embeddings().weight.device
        ids = torch.arange(_TRIED, device=device)[None] % len(model.get_output_embeddings().weight)
        with eval_mode(model):
            found = model(input_ids=ids, labels=ids)
    except BudgetError:
        raise  # attention's budget is too small for a few tokens: no fault of the loss
    except Exception as error:  # whatever it is, the model keeps its own loss
        return f"it failed on a few tokens: {type(error).__name__}: {error}"
    if getattr(found, "logits", None) is not None:
        return f"{type(model).__name__} does more to its logits than take their cross entropy"
    return None


__all__ = ["NAME", "chunk_loss"]
