"""A loss whose logits are there for some tokens at a time, computed again in the backward.

In a call with labels the last layer returns logits that are not computed yet. Transformers' loss of
them, scaled or capped at most, is computed some tokens at a time, each time a checkpoint. A model
that does anything else to its logits is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from threading import local
from typing import Any

import torch
from torch.nn.functional import linear, pad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from quorum_attention.errors import BudgetError
from quorum_attention.recipes.modules import Change, evaluated, has_own_forward, patch_forward
from quorum_attention.recipes.step import LOSS, loss_tokens

_TRIED = 12  # tokens


class _Here(local):  # torch's compiler reads it; of a ContextVar it would leave its graph
    """Whether a model whose loss is in chunks runs in this thread, with labels."""

    chunks = False


_here = _Here()


def chunk_loss(model: Any) -> Change:
    """Let ``model(..., labels=...)`` compute its loss without all logits at once."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kind = type(model).__name__
    if type(head) is not torch.nn.Linear:
        return Change(LOSS, False, f"{kind} is no decoder with one linear layer to the vocabulary")
    if not has_own_forward(model) or not has_own_forward(head):
        return Change(LOSS, False, f"this {kind} was given another forward")
    if model.loss_function not in (ForCausalLMLoss, _chunked):
        return Change(LOSS, False, f"this {kind} has another loss than Transformers' cross entropy")
    if head.weight.device.type == "meta":
        return Change(LOSS, False, "the weights are not there yet")
    patch_forward(head, _head_forward)
    patch_forward(model, _model_forward(model))
    model.loss_function = _chunked
    why = _why_not(model)
    if why is not None:
        del model.forward, head.forward, model._loss_function
        return Change(LOSS, False, why)
    tokens = loss_tokens(head.weight.shape[0], head.weight.dtype.itemsize)
    return Change(LOSS, True, f"{tokens:,} tokens at a time; a call with labels has no logits")


def _head_forward(self: torch.nn.Linear, states: torch.Tensor) -> Any:
    product = partial(linear, weight=self.weight, bias=self.bias)
    # A hook may ask whether they are a tensor; or the weights are there within the forward alone.
    hooks = self._forward_hooks or self._backward_hooks or self._backward_pre_hooks
    if not _here.chunks or hooks or _has_any_global_hook():
        return product(states)
    return _Logits(states, product)


def _model_forward(model: Any) -> Callable[..., Any]:
    plain = type(model).forward
    signature = inspect.signature(plain)

    @wraps(plain)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        labels = signature.bind_partial(self, *args, **named).arguments.get("labels")
        outside = _here.chunks  # it may run within another model
        _here.chunks = labels is not None and self.loss_function is _chunked
        try:
            found = plain(self, *args, **named)
        finally:
            _here.chunks = outside
        if isinstance(found, tuple):  # by position: they have to be there
            return tree_map_only(_Logits, lambda one: one.of(one.states), found)
        return tree_map_only(_Logits, lambda one: None, found)

    return forward


class _Logits:
    """In place of a tensor: logits that are not computed yet.

    Attributes:
        states: (..., width), the last layer's input.
        of: makes logits of some of them: each number by itself but for the last layer.
    """

    def __init__(self, states: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.states, self.of = states, of

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        if function is not torch.tanh:
            raise TypeError(f"torch's {function.__name__} of logits in a loss by chunks")
        return args[0].tanh()


def _as_of_tensor(name: str) -> Callable[..., _Logits]:
    def method(self: _Logits, *numbers: float) -> _Logits:
        if not all(isinstance(number, (int, float)) for number in numbers):
            raise TypeError(f"logits in a loss by chunks: {name} of a tensor")
        return _Logits(self.states, lambda some: getattr(self.of(some), name)(*numbers))

    return method


for _name in ("__mul__", "__rmul__", "__truediv__", "float", "tanh"):
    setattr(_Logits, _name, _as_of_tensor(_name))


def _chunked(
    logits: torch.Tensor | _Logits, labels: Any, vocab_size: int, num_items_in_batch: Any = None,
    ignore_index: int = -100, shift_labels: torch.Tensor | None = None, **others: Any,
) -> torch.Tensor:  # fmt: skip
    """Transformers' ``ForCausalLMLoss``; of logits that are not there, some tokens at a time."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    def loss(some: Any, wanted: Any) -> torch.Tensor:
        if isinstance(logits, _Logits):
            some = logits.of(some)
        found: torch.Tensor = ForCausalLMLoss(
            some, labels, vocab_size, num_items_in_batch, ignore_index, wanted, **others
        )
        return found

    if not isinstance(logits, _Logits):
        return loss(logits, shift_labels)
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    states, wanted = logits.states.flatten(0, -2), shift_labels.flatten()
    if len(states) != len(wanted):
        raise ValueError(f"labels must be as many as there are tokens, {len(states)}")
    if num_items_in_batch is None:
        num_items_in_batch = (wanted != ignore_index).sum()
    tokens = loss_tokens(vocab_size, states.dtype.itemsize)
    pairs = zip(states.split(tokens), wanted.split(tokens), strict=True)
    again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.stack([checkpoint(loss, *pair, **again) for pair in pairs]).sum()


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
