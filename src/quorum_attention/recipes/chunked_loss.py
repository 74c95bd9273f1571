"""The cross entropy of a decoder, some tokens at a time.

In a call with labels the output layer does not run where the model calls it. Its result is a
``DeferredLogits``, a tensor whose numbers are not computed yet. Transformers' loss of them, scaled
or capped at most, is computed in chunks of tokens, and each chunk is a checkpoint. Whatever else
reads the tensor (an unknown operation in the model, an evaluation) gets all logits.

The output layer is looked up in each call, and its whole call is put off. So resized layers,
adapters and trained tokens compute what they compute elsewhere.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.stateless import _reparametrize_module  # as torch.func.functional_call
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from quorum_attention.errors import BudgetError
from quorum_attention.kernels.torch_private import uncompiled
from quorum_attention.recipes.patching import (
    Change,
    drawn,
    evaluating,
    has_own_forward,
    is_patched,
    patch,
    plain_class,
    swapping,
    unpatch,
)
from quorum_attention.recipes.step import LOSS, loss_tokens
from quorum_attention.units import counted, format_bytes

_TRIAL_TOKENS = 12
# Logits of more bytes are warned of where the loss was to be computed in chunks.
_WARNED_BYTES = 1 << 30
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Deferral(threading.local):  # torch's compiler reads it; a ContextVar would break its graph
    """The state of this thread's innermost call with labels.

    Attributes:
        head: the output layer whose call is put off, or None.
        reason: why that layer ran after all.
        has_chunks: whether a loss was computed in chunks.
    """

    head: torch.nn.Module | None = None
    reason = ""
    has_chunks = False


_state = _Deferral()
_warned: set[str] = set()


def chunk_loss(model: Any) -> Change:
    """Let ``model(..., labels=...)`` compute its loss without all logits at once."""
    reason = _reason_against(model)
    if reason is not None:
        return Change(LOSS, False, reason)
    previous_loss = vars(model).get("_loss_function")
    parameters = list(inspect.signature(plain_class(model).forward).parameters)
    patch(model, "forward", _run_model, parameters.index("labels") - 1)
    model.loss_function = chunked_cross_entropy
    reason = _try_few_tokens(model)
    if reason is not None:
        unpatch(model)
        del model._loss_function
        if previous_loss not in (None, chunked_cross_entropy):
            model.loss_function = previous_loss
        return Change(LOSS, False, reason)
    tokens = loss_tokens(len(model.get_input_embeddings().weight), model.dtype.itemsize)
    return Change(
        LOSS, True, f"{counted(tokens, 'token')} at a time; logits only if somebody reads them"
    )


def _reason_against(model: Any) -> str | None:
    """Why the loss of this model cannot be computed in chunks, as far as its parts say."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    kind = type(model).__name__
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, torch.nn.Module):
        return f"{kind} is not a decoder with one output layer"
    if not has_own_forward(model):
        return f"this {kind} was given another forward"
    if model.loss_function not in (ForCausalLMLoss, chunked_cross_entropy):
        return f"this {kind} has another loss than Transformers' cross entropy"
    if "labels" not in inspect.signature(plain_class(model).forward).parameters:
        return f"{kind} takes no labels"
    if any(weight.is_meta for weight in head.parameters()):
        return "the weights are not loaded yet"
    return None


def _try_few_tokens(model: Any) -> str | None:
    """Why the loss needs all logits, tried on a few tokens; None if it does not."""
    try:
        table = model.get_input_embeddings().weight
        ids = torch.arange(_TRIAL_TOKENS, device=table.device)[None] % len(table)
        with torch.no_grad(), evaluating(model):
            output = model(input_ids=ids, labels=ids)
    except BudgetError:
        raise  # attention's budget is too small for a few tokens, which is no fault of the loss
    except Exception as error:  # whatever it is, the model keeps its own loss
        return f"it failed on a few tokens: {type(error).__name__}: {error}"
    logits = output[1] if isinstance(output, tuple) else output.logits
    is_read = isinstance(logits, DeferredLogits) and logits.is_computed
    if _state.has_chunks and not is_read:
        return None
    if _state.reason:
        return _state.reason
    return f"{type(model).__name__} does more to its logits than take their cross entropy"


def _run_model(labels_at: int, plain: Any, model: Any, *args: Any, **named: Any) -> Any:
    """Run the model's forward; with labels, its output layer is put off.

    Args:
        labels_at: the place of ``labels`` among positional arguments.
        plain: the forward of the model's class.
        model: the model.
        args, named: arguments of the forward.
    """
    labels = named.get("labels", args[labels_at] if len(args) > labels_at else None)
    if labels is None or model.loss_function is not chunked_cross_entropy:
        output = plain(model, *args, **named)
        if model.training and not torch.compiler.is_compiling():
            _warn_of_returned_logits(output, labels is not None)
        return output
    outside = _state.head  # the model may run within another one
    _state.head = _deferring_head(model)
    try:
        output = plain(model, *args, **named)
    finally:
        _state.head = outside
    return output if _weights_stay(model) else _without_deferred(model, output)


@uncompiled
def _deferring_head(model: Any) -> torch.nn.Module:
    """The model's output layer of now, with a call that can be put off."""
    head: torch.nn.Module = model.get_output_embeddings()
    _state.reason = ""
    _state.has_chunks = False
    if not is_patched(head, _call_head):
        patch(head, "__call__", _call_head)
    return head


def _call_head(plain: Any, head: torch.nn.Module, *args: Any, **named: Any) -> Any:
    """Call an output layer, or put the call off if the model in this thread asked for that."""
    if _state.head is not head:
        return plain(head, *args, **named)
    if named or len(args) != 1 or not isinstance(args[0], torch.Tensor):
        return plain(head, *args, **named)
    return _put_off(plain, head, args[0])


@uncompiled
def _put_off(plain: Any, head: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """The logits of ``states``: deferred ones if they can be computed in chunks.

    Args:
        plain: the call of the output layer's class.
        head: the output layer.
        states: (..., width), its input.
    """
    # A hook sees whole tensors, and may do anything to them.
    hooked = any(getattr(part, hooks) for part in head.modules() for hooks in _HOOKS)
    if hooked or _has_any_global_hook():
        _state.reason = f"the output layer, {type(head).__name__}, has hooks"
        return _run(plain, head, states)
    sample = _sample(plain, head, states)
    if sample is None:
        _state.reason = f"the output layer, {type(head).__name__}, does not take tokens one by one"
        return _run(plain, head, states)
    return DeferredLogits(_HeadCall.record(plain, head, states), sample)


def _run(plain: Any, head: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = plain(head, states)
    return logits


def _sample(plain: Any, head: torch.nn.Module, states: torch.Tensor) -> torch.Tensor | None:
    """Logits of no or few tokens, for their dtype and width; None if tokens depend on each other.

    Layers that are not torch's linear one are tried on two tokens, together and alone.
    """
    if plain_class(head) is torch.nn.Linear and "forward" not in vars(head):
        with torch.no_grad():
            return _run(plain, head, states.flatten(0, -2)[:0])
    tokens = drawn(1, 2, states.shape[-1]).to(states)
    try:
        with torch.no_grad(), evaluating(head):
            together = _run(plain, head, tokens)
            apart = torch.cat([_run(plain, head, token) for token in tokens.split(1, 1)], 1)
    except Exception:  # whatever it is, the layer is to run as a whole
        return None
    if together.shape[:-1] != (1, 2):
        return None
    distance = (together - apart).abs().max()
    rounding = torch.finfo(together.dtype).eps * together.abs().max()
    return together if bool(distance <= 100 * rounding) else None


@dataclass(frozen=True)
class _HeadCall:
    """A call of an output layer that is put off, with what it depends on.

    Attributes:
        plain: the call of the layer's class.
        head: the layer.
        states: (..., width), its input.
        weights: its parameters by name. A backward may come when the layer has others: ranks have
            parts of them there, and ``torch.func.functional_call`` takes its own away.
        versions: of these, which torch counts up when they are written to.
        grad, inference, training: whether gradients are recorded, torch is in inference mode, and
            the layer is in training mode.
        autocast: arguments of ``torch.autocast``.
    """

    plain: Callable[..., torch.Tensor]
    head: torch.nn.Module
    states: torch.Tensor
    weights: dict[str, torch.Tensor]
    versions: dict[str, int]
    grad: bool
    inference: bool
    training: bool
    autocast: tuple[str, torch.dtype, bool]

    @classmethod
    def record(cls, plain: Any, head: torch.nn.Module, states: torch.Tensor) -> _HeadCall:
        """The call as it would be now."""
        weights: dict[str, torch.Tensor] = {}
        versions: dict[str, int] = {}
        for name, weight in head.named_parameters():
            if weight.is_meta:  # offloaded: hooks of the layer fetch its numbers
                continue
            weights[name] = weight
            if not weight.is_inference():
                versions[name] = weight._version
        kind = states.device.type
        return cls(
            plain,
            head,
            states,
            weights,
            versions,
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            training=head.training,
            autocast=(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)),
        )

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of some of the states, in the modes of now."""
        present = dict(self.head.named_parameters())
        swapped = [n for n, weight in self.weights.items() if present.get(n) is not weight]
        if not swapped:
            return self.plain(self.head, states)
        with swapping, _reparametrize_module(self.head, self.weights, tie_weights=True):
            return self.plain(self.head, states)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of the call.

        Raises:
            RuntimeError: the weights have changed since, or are not there any more.
        """
        changed = any(self.weights[n]._version != version for n, version in self.versions.items())
        if changed or any(map(_is_freed, self.weights.values())):
            raise RuntimeError(
                "logits of a call with labels are computed when somebody reads them, and the "
                "weights of the output layer have changed since the call, or are no longer there: "
                "read the logits earlier, or use long_context(chunked_loss=False)"
            )
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            torch.autocast(*self.autocast),
            nullcontext() if self.training else evaluating(self.head),
        ):
            yield


def _is_freed(weight: torch.Tensor) -> bool:
    """Whether ranks have taken a weight's memory away."""
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
    return plain and weight.numel() > 0 and weight.untyped_storage().size() == 0


class DeferredLogits(torch.Tensor):
    """Logits that are computed when somebody reads them: all at once, and once.

    Until then the tensor says that it requires no gradient, so that wrappers of models (FSDP, DDP)
    do not read it. What is read has the gradients of all logits.

    Args:
        call: the call of the output layer.
        sample: (..., vocabulary), a tensor with the dtype and the width of the logits.
        steps: what the model does to each logit of the output layer, in order.
        device: of the logits; None is that of the states.
    """

    _call: _HeadCall
    _steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    _computed: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        call: _HeadCall,
        sample: torch.Tensor,
        steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
        device: torch.device | None = None,
    ) -> DeferredLogits:
        """A tensor without numbers."""
        make: Any = torch.Tensor._make_wrapper_subclass
        states = call.states
        shape = (*states.shape[:-1], sample.shape[-1])
        device = states.device if device is None else device
        tensor: DeferredLogits = make(cls, shape, dtype=sample.dtype, device=device)
        tensor._call, tensor._steps, tensor._computed = call, steps, None
        return tensor

    @property
    def states(self) -> torch.Tensor:
        """(..., width), the input of the output layer."""
        return self._call.states

    @property
    def is_computed(self) -> bool:
        """Whether somebody has read the logits."""
        return self._computed is not None

    def compute(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of some of the states, computed in the modes of now."""
        logits = self._call.logits_of(states)
        for step in self._steps:
            logits = step(logits)
        return logits

    @uncompiled
    def computed(self) -> torch.Tensor:
        """All logits, an ordinary tensor."""
        if self._computed is None:
            reason = "they were read from a call with labels"
            _warn_of_whole_logits(self.nbytes, reason)
            with self._call.modes():
                self._computed = self.compute(self.states)
        return self._computed

    def then(self, step: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        """These logits after an operation of each logit by itself; themselves if it is none."""
        before = torch.empty((1, self.shape[-1]), dtype=self.dtype, device="meta")
        after = step(before)
        if after is before:
            return self
        return DeferredLogits(self._call, after, (*self._steps, step), self.device)

    def moved(self, *targets: torch.dtype | torch.device | str | int) -> DeferredLogits:
        """These logits in another dtype, on another device; themselves if they are there."""
        logits = self
        for target in targets:
            if isinstance(target, bool):  # whether the host waits
                continue
            if isinstance(target, torch.dtype):
                logits = logits.then(partial(torch.Tensor.to, dtype=target))
            elif torch.device(target) != logits.device:
                logits = logits._on(torch.device(target))
        return logits

    def _on(self, device: torch.device) -> DeferredLogits:
        sample = torch.empty((1, self.shape[-1]), dtype=self.dtype, device="meta")
        move: Any = partial(torch.Tensor.to, device=device)
        return DeferredLogits(self._call, sample, (*self._steps, move), device)

    @classmethod
    @uncompiled
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        logits = args[0] if args else None
        if isinstance(logits, DeferredLogits) and not logits.is_computed:
            result = logits._without_numbers(function, args[1:], named)
            if result is not NotImplemented:
                return result
        args, named = tree_map_only(DeferredLogits, DeferredLogits.computed, (args, named))
        return function(*args, **named)

    def _without_numbers(self, function: Any, operands: Any, named: Any) -> Any:
        """The result of a function of these logits, or NotImplemented if it needs their numbers."""
        if function in _DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(self, *operands, **named)
        if function is torch.Tensor.to and _is_plain_move(*operands, **named):
            # Accelerate moves what a model returns to the device of its input.
            return self.moved(*operands, *named.values())
        if _is_by_logit(function, *operands, *named.values()):
            return self.then(lambda logits: function(logits, *operands, **named))
        return NotImplemented

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _: Any, args: Any = (), named: Any = None
    ) -> Any:
        # Reached by calls that do not ask Python first, such as those within an autograd function.
        args, named = tree_map_only(
            DeferredLogits, lambda logits: logits.computed().detach(), (args, named or {})
        )
        return function(*args, **named)


# Questions about a tensor that need no numbers.
_PROPERTIES = (
    "device dtype grad_fn is_cpu is_cuda is_leaf is_meta is_mps is_nested is_quantized is_sparse "
    "is_xpu itemsize layout nbytes ndim requires_grad shape"
)
_DESCRIPTIONS = {
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.Tensor.stride,
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
}
_BY_LOGIT = {
    "__mul__",
    "__rmul__",
    "__truediv__",
    "bfloat16",
    "contiguous",
    "div",
    "double",
    "float",
    "half",
    "mul",
    "tanh",
    "true_divide",
}


def _is_plain_move(*targets: Any, **named: Any) -> bool:
    """Whether arguments of ``Tensor.to`` are a dtype, a device, and whether the host waits."""
    kinds = (torch.dtype, torch.device, str, int)
    is_known = set(named) <= {"device", "dtype", "non_blocking"}
    return is_known and all(isinstance(value, kinds) for value in (*targets, *named.values()))


def _is_by_logit(function: Any, *operands: Any) -> bool:
    """Whether a function of logits and ``operands`` computes each logit by itself."""
    if getattr(function, "__name__", "") not in _BY_LOGIT:
        return False
    return all(isinstance(operand, (int, float)) for operand in operands)


@uncompiled
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

    named = {"labels": labels, "vocab_size": vocab_size, "ignore_index": ignore_index, **extra}
    if not isinstance(logits, DeferredLogits) or logits.is_computed:
        reason = _state.reason or "the model computes with its logits before their loss"
        _warn_of_whole_logits(logits.nbytes, reason)
        named |= {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
        loss: torch.Tensor = ForCausalLMLoss(logits, **named)
        return loss
    if shift_labels is None:
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    states = logits.states.flatten(0, -2)
    targets = shift_labels.flatten()
    if len(states) != len(targets):
        raise ValueError(f"labels must be as many as there are tokens, {len(states)}")
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum()
    named["num_items_in_batch"] = num_items_in_batch
    tokens = loss_tokens(vocab_size, states.dtype.itemsize)
    _state.has_chunks = True

    def chunk_loss(states: torch.Tensor, targets: torch.Tensor) -> Any:
        return ForCausalLMLoss(logits.compute(states[None]), shift_labels=targets, **named)

    losses = [
        checkpoint(chunk_loss, *chunk, use_reentrant=False)
        for chunk in zip(states.split(tokens), targets.split(tokens), strict=True)
    ]
    return torch.stack(losses).sum()


def _weights_stay(model: Any) -> bool:
    """Whether the output layer has its weights after the forward too. Ranks of FSDP and replicas of
    ``DataParallel`` have them in the forward alone."""
    if any(parent.__name__ == "FSDPModule" for parent in type(model).__mro__):
        return False
    weights = list(model.get_output_embeddings().parameters())
    if not weights:
        return False
    return all(isinstance(weight, torch.nn.Parameter) for weight in weights)


def _without_deferred(model: Any, output: Any) -> Any:
    """The output with logits in place of deferred ones, or without logits in training."""
    compute = isinstance(output, tuple) or not model.training
    return tree_map_only(
        DeferredLogits, lambda logits: logits.computed() if compute else None, output
    )


def _warn_of_returned_logits(output: Any, has_labels: bool) -> None:
    """Warn if a call in training returns many logits, of which a loss will be computed."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or not logits.requires_grad:
        return
    reason = "the model was given another loss"
    if not has_labels:
        reason = (
            "the model is called without labels, so its caller computes a loss of all logits, "
            "as label smoothing does"
        )
    _warn_of_whole_logits(logits.nbytes, reason)


def _warn_of_whole_logits(n_bytes: int, reason: str) -> None:
    """Warn once of logits of more than a gibibyte that are there at once, and say why."""
    if n_bytes <= _WARNED_BYTES or reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"long_context computes losses in chunks, and yet {format_bytes(n_bytes)} of logits are "
        f"computed at once: {reason}",
        stacklevel=2,
    )
