"""Logits that are not computed yet: the output layer's call is put off until somebody
reads them.

The cross entropy of a decoder takes such logits some tokens at a time. Any other
operation gets all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.kernels.torch_private import (
    restores_modes_and_hooks,
    uncompiled,
)
from quorum_attention.recipes.lent_weights import run_with_weights
from quorum_attention.recipes.trials import evaluating
from quorum_attention.recipes.weight_versions import WeightVersions
from quorum_attention.units import format_bytes

# Logits of more bytes are warned of where the loss was to be computed in chunks.
_WARNED_BYTES = 1 << 30
_warned: set[str] = set()


@dataclass(frozen=True)
class HeadCall:
    """A call of an output layer that is put off, with what it depends on.

    Attributes:
        plain: the call of the layer's class.
        head: the layer.
        states: (..., width), its input.
        weights: its parameters by name. A backward may come when the layer has others:
            ranks have parts of them there, and ``torch.func.functional_call`` takes its
            own away.
        versions: of these weights.
        grad, inference, training: whether gradients are recorded, torch is in inference
            mode, and the layer is in training mode.
        autocast: arguments of ``torch.autocast``.
    """

    plain: Callable[..., torch.Tensor]
    head: torch.nn.Module
    states: torch.Tensor
    weights: NamedTensors
    versions: WeightVersions
    grad: bool
    inference: bool
    training: bool
    autocast: tuple[str, torch.dtype, bool]

    @classmethod
    def record(
        cls, plain: Any, head: torch.nn.Module, states: torch.Tensor
    ) -> HeadCall:
        """The call as it would be now."""
        weights: NamedTensors = {
            name: weight
            for name, weight in head.named_parameters()
            if not weight.is_meta  # offloaded: hooks of the layer fetch its numbers
        }
        kind = states.device.type
        return cls(
            plain,
            head,
            states,
            weights,
            WeightVersions.record(weights),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            training=head.training,
            autocast=(
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
            ),
        )

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of some of the states, in the modes of now.

        Raises:
            RuntimeError: the weights have changed since the call.
        """
        if self.versions.have_changed():
            raise RuntimeError(
                "weights of the output layer have changed between a call with labels "
                "and the backward of its loss, which computes logits again: change "
                "weights after the backward"
            )
        present = dict(self.head.named_parameters())
        swapped = [
            n for n, weight in self.weights.items() if present.get(n) is not weight
        ]
        if not swapped:
            return self.plain(self.head, states)
        logits: torch.Tensor = run_with_weights(
            self.head, self.weights, self.plain, self.head, states
        )
        return logits

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of the call.

        Raises:
            RuntimeError: the weights have changed since, or are not there any more.
        """
        has_lost_weights = any(map(_is_freed, self.weights.values()))
        if has_lost_weights or self.versions.have_changed():
            raise RuntimeError(
                "logits of a call with labels are computed when somebody reads them, "
                "and the weights of the output layer have changed since the call, or "
                "are no longer there: read the logits earlier, or use "
                "long_context(chunked_loss=False)"
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

    Until then the tensor says that it requires no gradient, so that wrappers of models
    (FSDP, DDP) do not read it. What is read has the gradients of all logits.

    Args:
        call: the call of the output layer.
        sample: (..., vocabulary), a tensor with the dtype and the width of the logits.
        steps: what the model does to each logit of the output layer, in order.
        device: of the logits; None is that of the states.
    """

    _call: HeadCall
    _steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    _computed: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        call: HeadCall,
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
    @restores_modes_and_hooks
    def computed(self) -> torch.Tensor:
        """All logits, an ordinary tensor."""
        if self._computed is None:
            reason = "they were read from a call with labels"
            warn_of_whole_logits(self.nbytes, reason)
            with self._call.modes():
                self._computed = self.compute(self.states)
        return self._computed

    def then(self, step: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        """These logits after an operation of each logit by itself; themselves if it is
        none."""
        before = self._without_memory()
        after = step(before)
        if after is before:
            return self
        return DeferredLogits(self._call, after, (*self._steps, step), self.device)

    def moved(self, *targets: torch.dtype | torch.device | str | int) -> DeferredLogits:
        """These logits in another dtype, on another device; themselves if they are
        there."""
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
        sample = self._without_memory()
        move: Any = partial(torch.Tensor.to, device=device)
        return DeferredLogits(self._call, sample, (*self._steps, move), device)

    def _without_memory(self) -> torch.Tensor:
        """The logits of one token, on the device "meta"."""
        return torch.empty((1, self.shape[-1]), dtype=self.dtype, device="meta")

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, function: Any, _: Any, args: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        logits = args[0] if args else None
        if function in _OF_GRADIENTS:
            _warn_of_gradients()
        if isinstance(logits, DeferredLogits) and not logits.is_computed:
            result = logits._without_numbers(function, args[1:], named)
            if result is not NotImplemented:
                return result
        args, named = tree_map_only(
            DeferredLogits, DeferredLogits.computed, (args, named)
        )
        return function(*args, **named)

    def _without_numbers(self, function: Any, operands: Any, named: Any) -> Any:
        """The result of a function of these logits, or NotImplemented if it needs their
        numbers."""
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
        # Reached by calls that do not ask Python first, such as those within an
        # autograd function.
        args, named = tree_map_only(
            DeferredLogits,
            lambda logits: logits.computed().detach(),
            (args, named or {}),
        )
        return function(*args, **named)


# Questions about a tensor that need no numbers.
_PROPERTIES = (
    "device dtype grad_fn is_cpu is_cuda is_leaf is_meta is_mps is_nested "
    "is_quantized is_sparse is_xpu itemsize layout nbytes ndim requires_grad shape"
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
# Functions that need the gradients of a tensor.
_OF_GRADIENTS = {torch.Tensor.register_hook, torch.Tensor.retain_grad}
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
    """Whether arguments of ``Tensor.to`` are a dtype, a device, and whether the host
    waits."""
    kinds = (torch.dtype, torch.device, str, int)
    is_known = set(named) <= {"device", "dtype", "non_blocking"}
    return is_known and all(
        isinstance(value, kinds) for value in (*targets, *named.values())
    )


def _is_by_logit(function: Any, *operands: Any) -> bool:
    """Whether a function of logits and ``operands`` computes each logit by itself."""
    if getattr(function, "__name__", "") not in _BY_LOGIT:
        return False
    return all(isinstance(operand, (int, float)) for operand in operands)


def warn_of_whole_logits(n_bytes: int, reason: str) -> None:
    """Warn once of logits of more than a gibibyte that are there at once, and say
    why."""
    if n_bytes <= _WARNED_BYTES or reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"long_context computes losses in chunks, and yet {format_bytes(n_bytes)} of "
        f"logits are computed at once: {reason}",
        stacklevel=2,
    )


def _warn_of_gradients() -> None:
    """Warn of a hook that does not see the gradients of a loss in chunks."""
    warnings.warn(
        "gradients of these logits do not include those of a loss in chunks, which is "
        "not computed of them: use long_context(chunked_loss=False) to see or change "
        "these gradients",
        stacklevel=4,
    )
