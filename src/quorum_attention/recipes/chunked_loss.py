"""The cross entropy of a decoder, some tokens at a time.

In a call with labels the output layer does not run where the model calls it. Its result
is a ``DeferredLogits``, a tensor whose numbers are not computed yet. Transformers' loss
of them, scaled or capped at most, is computed in chunks of tokens, and each chunk is a
checkpoint. Whatever else reads the tensor (an unknown operation in the model, an
evaluation) gets all logits.

The output layer is looked up in each call, and its whole call is put off. So resized
layers, adapters and trained tokens compute what they compute elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from quorum_attention.errors import BudgetError
from quorum_attention.integrations.substitutes import substitutes, substituting
from quorum_attention.kernels.torch_private import (
    restores_modes_and_hooks,
    uncompiled,
)
from quorum_attention.recipes.changes import (
    AttributeRecord,
    LeftOutError,
    ModelPiece,
    warn_of_lost_changes,
)
from quorum_attention.recipes.deferred_logits import (
    DeferredLogits,
    HeadCall,
    warn_of_whole_logits,
)
from quorum_attention.recipes.patching import (
    has_own_forward,
    is_patched,
    patch,
    plain_class,
    runs,
    unpatch_all,
)
from quorum_attention.recipes.step_estimate import loss_tokens
from quorum_attention.recipes.switches import LOSS
from quorum_attention.recipes.trials import (
    differ_by_rounding,
    drawn,
    failure_words,
    has_hooks,
    some_ids,
    trying,
)
from quorum_attention.units import counted

_TRIAL_TOKENS = 12


class ChunkedLoss(ModelPiece):
    """Let ``model(..., labels=...)`` compute its loss without all logits at once."""

    name = LOSS
    checked = "a few tokens' loss was computed so"

    def __init__(self) -> None:
        self._attributes = AttributeRecord()

    def make(self, model: Any) -> str:
        """Change the model's forward and loss, and try them on a few tokens."""
        reason = _reason_against(model)
        if reason is not None:
            raise LeftOutError(reason)
        parameters = list(inspect.signature(plain_class(model).forward).parameters)
        patch(model, "forward", _run_model, parameters.index("labels") - 1)
        with self._attributes.recording(model):
            model.loss_function = chunked_cross_entropy
        reason = _reason_from_trial(model)
        if reason is not None:
            self.undo(model)
            raise LeftOutError(reason)
        tokens = loss_tokens(
            len(model.get_input_embeddings().weight), model.dtype.itemsize
        )
        return (
            f"{counted(tokens, 'token')} at a time; logits only if somebody reads them"
        )

    def why_lost(self, model: Any) -> str | None:
        """Look for another forward. Another loss is warned of when it costs memory."""
        return None if runs(model, _run_model) else "the model got another forward"

    def undo(self, model: Any) -> None:
        """Give the model its forward and its loss back, and output layers their
        call."""
        unpatch_all(model, _run_model)
        unpatch_all(model, _call_head)
        self._attributes.restore(model)


@dataclass
class _LabelledCall:
    """A call of a model with labels.

    Attributes:
        head: the output layer whose call is put off; None: none is.
        reason: why that layer ran after all.
        has_chunks: whether a loss was computed in chunks.
        inner: the last call with labels within this one.
    """

    head: torch.nn.Module | None = None
    reason: str = ""
    has_chunks: bool = False
    inner: _LabelledCall | None = None


def _reason_against(model: Any) -> str | None:
    """Return why the loss of this model cannot be computed in chunks, as far as its
    parts say."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    kind = type(model).__name__
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Module):
        return f"{kind} is not a decoder with one output layer"
    if not has_own_forward(model):
        return f"this {kind} was given another forward"
    if model.loss_function is not ForCausalLMLoss:
        return f"this {kind} has another loss than Transformers' cross entropy"
    if "labels" not in inspect.signature(plain_class(model).forward).parameters:
        return f"{kind} takes no labels"
    if any(weight.is_meta for weight in head.parameters()):
        return "the weights are not loaded yet"
    return None


def _reason_from_trial(model: Any) -> str | None:
    """Return why the loss needs all logits, tried on a few tokens; None if it does
    not."""
    trial = _LabelledCall()
    try:
        ids = some_ids(model, _TRIAL_TOKENS)
        with substituting(labelled_call=trial), trying(model):
            output = model(input_ids=ids, labels=ids)
    except BudgetError:
        # Attention's budget is too small for a few tokens: no fault of the loss.
        raise
    except Exception as error:  # whatever it is, the model keeps its own loss
        return failure_words(error)
    logits = output[1] if isinstance(output, tuple) else output.logits
    is_read = isinstance(logits, DeferredLogits) and logits.is_computed
    call = trial.inner or trial
    if call.has_chunks and not is_read:
        return None
    if call.reason:
        return call.reason
    return (
        f"{type(model).__name__} does more to its logits than take their cross entropy"
    )


def _run_model(labels_at: int, plain: Any, model: Any, *args: Any, **named: Any) -> Any:
    """Run the model's forward; with labels, its output layer is put off.

    Args:
        labels_at: the place of ``labels`` among positional arguments.
        plain: the forward of the model's class.
        model: the model.
        args, named: arguments of the forward.
    """
    labels = named.get("labels", args[labels_at] if len(args) > labels_at else None)
    is_step = model.training and not torch.compiler.is_compiling()
    if is_step and torch.is_grad_enabled():
        warn_of_lost_changes(model)
    if labels is None or model.loss_function is not chunked_cross_entropy:
        output = plain(model, *args, **named)
        if is_step:
            _warn_of_returned_logits(output, labels is not None)
        return output
    outside = substitutes.labelled_call  # the model may run within another one
    try:
        substitutes.labelled_call = _begin_call(model)
        output = plain(model, *args, **named)
    finally:
        substitutes.labelled_call = outside
    return output if _weights_stay(model) else _without_deferred(model, output)


@uncompiled
def _begin_call(model: Any) -> _LabelledCall:
    """Return a call that puts off the model's output layer of now."""
    head: torch.nn.Module = model.get_output_embeddings()
    if not is_patched(head, _call_head):
        patch(head, "__call__", _call_head)
    call = _LabelledCall(head)
    if substitutes.labelled_call is not None:
        substitutes.labelled_call.inner = call
    return call


def _call_head(plain: Any, head: torch.nn.Module, *args: Any, **named: Any) -> Any:
    """Call an output layer, or put the call off if the model in this thread asked for
    that."""
    call = substitutes.labelled_call
    if call is None or call.head is not head:
        return plain(head, *args, **named)
    if named or len(args) != 1 or not isinstance(args[0], torch.Tensor):
        return plain(head, *args, **named)
    return _put_off(plain, head, args[0])


@uncompiled
@restores_modes_and_hooks
def _put_off(
    plain: Callable[..., torch.Tensor], head: torch.nn.Module, states: torch.Tensor
) -> torch.Tensor:
    """The logits of ``states``: deferred ones if they can be computed in chunks.

    Args:
        plain: the call of the output layer's class.
        head: the output layer.
        states: (..., width), its input.
    """
    call: _LabelledCall = substitutes.labelled_call
    if has_hooks(head):
        call.reason = f"the output layer, {type(head).__name__}, has hooks"
        return plain(head, states)
    sample = _sample(plain, head, states)
    if sample is None:
        call.reason = (
            f"the output layer, {type(head).__name__}, does not take tokens one by one"
        )
        return plain(head, states)
    return DeferredLogits(HeadCall.record(plain, head, states), sample)


def _sample(
    plain: Callable[..., torch.Tensor], head: torch.nn.Module, states: torch.Tensor
) -> torch.Tensor | None:
    """Logits of no or few tokens, for their dtype and width; None if tokens depend on
    each other.

    Layers that are not torch's linear one are tried on two tokens, together and alone.
    """
    if plain_class(head) is torch.nn.Linear and "forward" not in vars(head):
        with trying(head):
            return plain(head, states.flatten(0, -2)[:0])
    tokens = drawn(1, 2, states.shape[-1]).to(states)
    try:
        with trying(head):
            together = plain(head, tokens)
            apart = torch.cat([plain(head, token) for token in tokens.split(1, 1)], 1)
    except Exception:  # whatever it is, the layer is to run as a whole
        return None
    if together.shape[:-1] != (1, 2):
        return None
    return together if differ_by_rounding(together, apart) else None


@uncompiled
@restores_modes_and_hooks
def chunked_cross_entropy(
    logits: torch.Tensor,
    labels: Any,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **extra: Any,
) -> torch.Tensor:
    """Transformers' ``ForCausalLMLoss``; of deferred logits, some tokens at a time."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss_of: partial[torch.Tensor] = partial(
        ForCausalLMLoss,
        labels=labels,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        **extra,
    )
    call: _LabelledCall = substitutes.labelled_call or _LabelledCall()
    if not isinstance(logits, DeferredLogits) or logits.is_computed:
        reason = call.reason or "the model computes with its logits before their loss"
        warn_of_whole_logits(logits.nbytes, reason)
        return loss_of(
            logits, num_items_in_batch=num_items_in_batch, shift_labels=shift_labels
        )
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    states = logits.states.flatten(0, -2)
    targets = shift_labels.flatten()
    if len(states) != len(targets):
        raise ValueError(f"labels must be as many as there are tokens, {len(states)}")
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum()
    call.has_chunks = True
    loss_of = partial(loss_of, num_items_in_batch=num_items_in_batch)
    return _sum_of_chunks(logits, states, targets, vocab_size, loss_of)


def _sum_of_chunks(
    logits: DeferredLogits,
    states: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    loss_of: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Add up the losses of chunks of tokens, each of which is a checkpoint.

    Args:
        logits: of all tokens, not computed.
        states: (tokens, width), the inputs of the output layer.
        targets: (tokens,).
        vocab_size: the width of the logits.
        loss_of: called with (1, tokens, vocabulary) logits and ``shift_labels``.
    """
    tokens = loss_tokens(vocab_size, states.dtype.itemsize)

    def loss_of_chunk(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        chunk_logits = logits.compute(states[None])
        return loss_of(chunk_logits, shift_labels=targets)

    losses = []
    chunks = zip(states.split(tokens), targets.split(tokens), strict=True)
    for chunk_states, chunk_targets in chunks:
        loss = checkpoint(
            loss_of_chunk,
            chunk_states,
            chunk_targets,
            use_reentrant=False,
        )
        losses.append(loss)
    return torch.stack(losses).sum()


def _weights_stay(model: Any) -> bool:
    """Whether the output layer has its weights after the forward too. Ranks of FSDP and
    replicas of ``DataParallel`` have them in the forward alone."""
    if any(parent.__name__ == "FSDPModule" for parent in type(model).__mro__):
        return False
    weights = list(model.get_output_embeddings().parameters())
    if not weights:
        return False
    return all(isinstance(weight, torch.nn.Parameter) for weight in weights)


def _without_deferred(model: Any, output: Any) -> Any:
    """The output with logits in place of deferred ones, or without logits in
    training."""
    is_kept = isinstance(output, tuple) or not model.training

    def replace(logits: DeferredLogits) -> torch.Tensor | None:
        return logits.computed() if is_kept else None

    return tree_map_only(DeferredLogits, replace, output)


def _warn_of_returned_logits(output: Any, has_labels: bool) -> None:
    """Warn if a call in training returns many logits, of which a loss will be
    computed."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or not logits.requires_grad:
        return
    reason = "the model was given another loss"
    if not has_labels:
        reason = (
            "the model is called without labels, so its caller computes a loss of all "
            "logits, as label smoothing does"
        )
    warn_of_whole_logits(logits.nbytes, reason)
