"""A loss whose logits are there for some tokens at a time, computed again in the backward.

The model's forward, given labels, then returns no logits. It is tried on a few tokens first: a
model that does more to its logits than to multiply (a soft cap, a scale), or whose loss is another
one, keeps its own. So does a call that asks for anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

from quorum_attention.errors import BudgetError
from quorum_attention.recipes.changes import Change, eval_mode, has_own_forward, patch_forward
from quorum_attention.recipes.step import loss_tokens

NAME = "chunked loss"
_IGNORED = -100
_TRIED = 12  # tokens
# A soft cap leaves small logits as they are, and those of a fresh model are small: it is tried with
# large ones, too.
_LARGE = 100.0


def chunk_loss(model: Any) -> Change:
    """Let ``model(..., labels=...)`` compute its loss without all logits at once."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    base = getattr(model, "base_model", model)
    kind = type(model).__name__
    if type(head) is not torch.nn.Linear or decoder is None or model in (decoder, base):
        return Change(NAME, False, f"{kind} is no decoder with one linear layer to the vocabulary")
    if not has_own_forward(model):
        return Change(NAME, False, f"this {kind} was given another forward")
    if head.weight.device.type == "meta":
        return Change(NAME, False, "the weights are not there yet")
    patch_forward(model, _forward(model))
    why = _differs(model)
    if why is not None:
        del model.forward
        return Change(NAME, False, why)
    tokens = loss_tokens(head.weight.shape[0], head.weight.dtype.itemsize)
    return Change(NAME, True, f"{tokens:,} tokens at a time; a call with labels has no logits")


def _summed(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """The sum of the losses of (tokens, width) hidden states."""

    def of_some(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = linear(states, weight, bias).float()
        return cross_entropy(logits, wanted, ignore_index=_IGNORED, reduction="sum")

    tokens = loss_tokens(weight.shape[0], weight.dtype.itemsize)
    pairs = zip(hidden.split(tokens), labels.split(tokens), strict=True)
    again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.stack([checkpoint(of_some, *pair, **again) for pair in pairs]).sum()


def _forward(model: Any) -> Callable[..., Any]:
    """A model's forward with another way from hidden states to loss.

    Hidden states are those of ``base_model``, which also takes in images where a model reads some;
    the decoder within it would pass over what it does not know.
    """
    plain = type(model).forward
    signature = inspect.signature(plain)
    own_loss = getattr(model, "loss_function", None)
    taken = set(inspect.signature(type(model.base_model).forward).parameters)
    # What the model's own forward reads, and does not hand on by name: only it knows what for.
    kept = set(signature.parameters) - taken - {"self", "labels", "logits_to_keep", "kwargs"}

    @wraps(plain)
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        given = dict(signature.bind_partial(self, *args, **named).arguments)
        given.pop("self", None)
        given.update(given.pop("kwargs", {}))
        labels = given.pop("labels", None)
        if (
            labels is None
            or any(given.get(name) is not None for name in kept)
            or getattr(self, "loss_function", None) is not own_loss
            or _asks_for_more(self, given)
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return plain(self, *args, **named)
        head = self.get_output_embeddings()
        from transformers.modeling_outputs import CausalLMOutputWithPast

        for name in ("logits_to_keep", "shift_labels", "ignore_index"):
            given.pop(name, None)
        items = given.pop("num_items_in_batch", None)
        if "labels" in taken:
            given["labels"] = labels
        found = self.base_model(**given)
        hidden = found.last_hidden_state.to(head.weight.device)
        target = pad(labels, (0, 1), value=_IGNORED)[..., 1:].reshape(-1).to(hidden.device)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if len(hidden) != len(target):  # the rest would be left out
            raise ValueError(
                f"labels must be as many as there are tokens, {len(hidden)}, got {len(target)}"
            )
        loss = _summed(hidden, head.weight, head.bias, target)
        count = (target != _IGNORED).sum() if items is None else items
        return CausalLMOutputWithPast(
            loss=loss / count,
            past_key_values=getattr(found, "past_key_values", None),
            hidden_states=getattr(found, "hidden_states", None),
            attentions=getattr(found, "attentions", None),
        )

    return forward


def _asks_for_more(model: Any, given: dict[str, Any]) -> bool:
    """Whether a call wants what only the model's own gives; or adapters or hooks came after."""
    router = given.get("output_router_logits") or any(
        getattr(one, "output_router_logits", False)
        for one in (model.config, model.config.get_text_config())
    )
    in_words = given.get("return_dict", getattr(model.config, "return_dict", True))
    other_loss = any(given.get(name) is not None for name in ("shift_labels", "ignore_index"))
    last = given.get("logits_to_keep")
    some = isinstance(last, torch.Tensor) or bool(last)  # labels are of these tokens then
    head = model.get_output_embeddings()
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks,
             head._backward_pre_hooks)  # fmt: skip
    plain_head = type(head) is torch.nn.Linear and has_own_forward(head) and not any(hooks)
    return bool(router or other_loss or some or in_words is False or not plain_head)


@torch.no_grad()
def _differs(model: Any) -> str | None:
    """Why the new loss is not the model's own, if it is not: of a few tokens."""
    head = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(head.shape[0], (2, _TRIED), generator=generator, device="cpu")
    # Transformers' own is in float32, of models in float64 too.
    room = 20 * max(torch.finfo(head.dtype).eps, torch.finfo(torch.float32).eps)
    try:
        ids = ids.to(model.get_input_embeddings().weight.device)
        labels = ids.clone()
        labels[0, :3] = _IGNORED
        asked: dict[str, Any] = {"input_ids": ids, "labels": labels}
        if "use_cache" in inspect.signature(type(model.base_model).forward).parameters:
            asked["use_cache"] = False  # otherwise the model's own forward may have to see it
        with eval_mode(model):
            own = type(model).forward(model, **asked)
            factor = max(1.0, _LARGE / max(float(own.logits.abs().max()), 1e-30))
            for scale, more in ((1.0, {}), (factor, {}), (1.0, _as_in_training(model, ids))):
                asked.update(more)
                with model.get_decoder().register_forward_hook(partial(_scale, scale)):
                    found = model(**asked)
                    if found.logits is not None:
                        return "a plain call is one that only this model's own can take"
                    ours = found.loss.double()
                    true = type(model).forward(model, **asked).loss.double()
                if not bool((ours - true).abs() <= room * true.abs()):
                    numbers = f"{ours.item():.6g} for {true.item():.6g}"
                    return f"it is not this model's own: {numbers} on a few tokens"
    except BudgetError:
        raise  # attention's budget is too small for a few tokens: no fault of the loss
    except Exception as error:  # whatever it is, the model keeps its own loss
        return f"it failed on a few tokens: {type(error).__name__}: {error}"
    return None


def _as_in_training(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """What else a call with labels is given: some models leave out of their loss what is masked,
    and some take a mean whatever number of tokens the whole batch has."""
    taken = inspect.signature(type(model).forward).parameters
    more: dict[str, Any] = {}
    if "attention_mask" in taken:
        more["attention_mask"] = torch.ones_like(ids)
        more["attention_mask"][1, -3:] = 0
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        more["num_items_in_batch"] = 2 * _TRIED + 1
    return more


def _scale(factor: float, decoder: torch.nn.Module, inputs: Any, found: Any) -> Any:
    found.last_hidden_state = found.last_hidden_state * factor
    return found


__all__ = ["NAME", "chunk_loss"]
