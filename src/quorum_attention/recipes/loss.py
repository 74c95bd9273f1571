"""A loss whose logits are there for some tokens at a time, computed again in the backward.

While a model is given labels, its last layer returns logits that are not computed yet. Where they
go into torch's cross entropy, scaled or capped at most, they are computed some tokens at a time,
each time a checkpoint. Anything else that is done to them computes all of them first, as without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from operator import methodcaller
from threading import local
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.functional import cross_entropy, linear
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from quorum_attention.errors import BudgetError
from quorum_attention.recipes.modules import Change, evaluated, has_own_forward, patch_forward
from quorum_attention.recipes.step import LOSS, loss_tokens

_TRIED = 12  # tokens
_Change = Callable[[torch.Tensor], torch.Tensor]


class _Here(local):  # torch's compiler reads it; of a ContextVar it would leave its graph
    """In this thread, while a model runs that was given labels: its losses that are in chunks."""

    losses: list[torch.Tensor] | None = None


_here = _Here()


def chunk_loss(model: Any) -> Change:
    """Let ``model(..., labels=...)`` compute its loss without all logits at once."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kind = type(model).__name__
    if type(head) is not torch.nn.Linear:
        return Change(LOSS, False, f"{kind} is no decoder with one linear layer to the vocabulary")
    if not has_own_forward(model) or not has_own_forward(head):
        return Change(LOSS, False, f"this {kind} was given another forward")
    if head.weight.device.type == "meta":
        return Change(LOSS, False, "the weights are not there yet")
    patch_forward(head, _head_forward)
    patch_forward(model, _model_forward(model))
    why = _why_not(model)
    if why is not None:
        del model.forward, head.forward
        return Change(LOSS, False, why)
    tokens = loss_tokens(head.weight.shape[0], head.weight.dtype.itemsize)
    return Change(LOSS, True, f"{tokens:,} tokens at a time; a call with labels has no logits")


def _head_forward(self: torch.nn.Linear, states: torch.Tensor) -> Any:
    # A hook may ask whether they are a tensor; or the weights are there within the forward alone.
    hooks = self._forward_hooks or self._backward_hooks or self._backward_pre_hooks
    if _here.losses is None or hooks or _has_any_global_hook():
        return linear(states, self.weight, self.bias)
    product = partial(linear, weight=self.weight, bias=self.bias)
    return _Logits(states, self.weight, (product,), _modes(states))


def _modes(states: torch.Tensor) -> tuple[Any, ...]:
    """What torch's operations here and now depend on: gradients, and autocast's arguments."""
    on = states.device.type
    return torch.is_grad_enabled(), on, torch.get_autocast_dtype(on), torch.is_autocast_enabled(on)


def _model_forward(model: Any) -> Callable[..., Any]:
    plain = type(model).forward
    signature = inspect.signature(plain)

    @wraps(plain)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        labels = signature.bind_partial(self, *args, **named).arguments.get("labels")
        outside = _here.losses
        if labels is None and outside is None:  # else it runs within another model
            return plain(self, *args, **named)
        losses: list[torch.Tensor] | None = None if labels is None else []
        _here.losses = losses
        try:
            found = plain(self, *args, **named)
        finally:
            _here.losses = outside
        without = losses and not isinstance(found, tuple)
        return tree_map_only(_Logits, lambda one: None if without else one.computed(), found)

    return forward


@dataclass(eq=False)
class _Logits:
    """In place of a tensor: (..., vocabulary) logits that are not computed yet.

    Once one is computed, so are all that were made of the same: it may be changed in place.

    Attributes:
        states: (..., width) of the last layer's input.
        weight: of the last layer.
        changes: what makes logits of states: the last layer, then a scale, a soft cap, another
            dtype: of each number by itself.
        modes: in which they are computed.
        base: of which the last change makes these; None: of the states.
        family: all that are made of the same product.
        tensor: they, once something has asked for one of them.
    """

    states: torch.Tensor
    weight: torch.Tensor
    changes: tuple[_Change, ...]
    modes: tuple[Any, ...]
    base: _Logits | None = None
    family: WeakSet[_Logits] = field(default_factory=WeakSet)
    tensor: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.family.add(self)

    @property
    def open(self) -> bool:
        """Whether nothing has asked for them yet, and what is done now is done in their modes."""
        return self.tensor is None and _modes(self.states) == self.modes

    def view(self, *sizes: Any) -> Any:
        """As of a tensor."""
        if sizes != (-1, len(self.weight)):
            return self.computed().view(*sizes)
        states = self.states.reshape(-1, self.states.shape[-1])
        return self.changed(lambda logits: logits.view(*sizes), states)

    reshape = view

    def computed(self) -> torch.Tensor:
        """The tensor."""
        if self.tensor is None:
            with torch.set_grad_enabled(self.modes[0]), torch.autocast(*self.modes[1:]):
                for one in sorted(self.family, key=lambda one: len(one.changes)):
                    given = one.states if one.base is None else one.base.computed()
                    one.tensor = one.changes[-1](given)
        assert self.tensor is not None
        return self.tensor

    def changed(self, change: _Change, states: torch.Tensor | None = None) -> Any:
        """Each number by itself; or seen in another shape, that of ``states``."""
        if not self.open:
            return change(self.computed())
        states = self.states if states is None else states
        return replace(self, states=states, changes=(*self.changes, change), base=self)

    def cross_entropy(
        self, target: torch.Tensor, weight: Any = None, *, ignore_index: int = -100,
        reduction: str = "mean", label_smoothing: float = 0.0, **old: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """Some tokens at a time; None: it is one that all logits are needed for."""
        of_tokens = self.states.dim() == 2 and target.shape == self.states.shape[:1]
        plain = weight is None and not label_smoothing and reduction in ("mean", "sum")
        if not (self.open and of_tokens and plain and set(old.values()) <= {None}):
            return None
        changes = self.changes

        def of_some(some: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            for change in changes:
                some = change(some)
            return cross_entropy(some, wanted, ignore_index=ignore_index, reduction="sum")

        tokens = loss_tokens(len(self.weight), self.weight.dtype.itemsize)
        pairs = zip(self.states.split(tokens), target.split(tokens), strict=True)
        again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        total = torch.stack([checkpoint(of_some, *pair, **again) for pair in pairs]).sum()
        return total if reduction == "sum" else total / (target != ignore_index).sum()

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        if function is cross_entropy and isinstance(args[0], _Logits):
            loss, losses = args[0].cross_entropy(*args[1:], **(named or {})), _here.losses
            if loss is not None and losses is not None:
                losses.append(loss)
                return loss
        if function is torch.tanh and len(args) == 1 and not named:
            return args[0].tanh()
        args, named = tree_map_only(_Logits, _Logits.computed, (args, named or {}))
        return function(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.states if name == "device" else self.computed(), name)


_CHANGES = ("__mul__", "__rmul__", "__truediv__", "contiguous", "float", "tanh")
_OTHERS = ("add", "radd", "iadd", "sub", "rsub", "isub", "imul", "rtruediv", "itruediv", "mod",
           "floordiv", "matmul", "pow", "ipow", "neg", "abs", "getitem", "setitem", "len", "iter",
           "eq", "ne", "lt", "le", "gt", "ge")  # fmt: skip


def _as_of_tensor(name: str) -> Callable[..., Any]:
    def method(self: _Logits, *others: Any) -> Any:
        by_number = name in _CHANGES and all(isinstance(one, (int, float)) for one in others)
        call = methodcaller(name, *others)
        return self.changed(call) if by_number else call(self.computed())

    return method


for _name in (*_CHANGES, *(f"__{name}__" for name in _OTHERS)):
    setattr(_Logits, _name, _as_of_tensor(_name))


def _why_not(model: Any) -> str | None:
    """Why the loss needs all logits, if it does: tried on a few tokens."""
    try:
        words = model.get_input_embeddings().weight
        ids = torch.arange(_TRIED, device=words.device)[None] % len(words)
        found = evaluated(model, input_ids=ids, labels=ids)
    except BudgetError:
        raise  # attention's budget is too small for a few tokens: no fault of the loss
    except Exception as error:  # whatever it is, the model keeps its own loss
        return f"it failed on a few tokens: {type(error).__name__}: {error}"
    if getattr(found, "logits", None) is not None:
        return f"{type(model).__name__} does more to its logits than take their cross entropy"
    return None


__all__ = ["chunk_loss"]
