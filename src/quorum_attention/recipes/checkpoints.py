"""Checkpoints of a model's layers that keep attention's results, so it is computed once
a step.

torch's checkpoints keep a layer's input and compute the layer again in the backward.
Here they also keep the output and the lse of attention, and its second run returns
those. What is kept stays on the device while there is room beside the step's own peak;
the first layers' goes to page-locked host memory, copied beside the computation. What
fits nowhere is computed again. How much goes where is decided here; tensor by tensor it
is done in ``kept_layer.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from quorum_attention.arithmetic import round_up
from quorum_attention.autograd import result_hook
from quorum_attention.execution.device.lookup import backend_of, is_known
from quorum_attention.integrations.transformers_private import (
    PrivateNameError,
    layer_checkpoint,
    replace_checkpoint_setter,
    set_checkpoints_as_before,
    set_layer_checkpoint,
)
from quorum_attention.kernels.torch_private import restores_modes_and_hooks
from quorum_attention.plain_types import Keywords
from quorum_attention.recipes import layer_bytes, step_estimate
from quorum_attention.recipes.changes import (
    AttributeRecord,
    LeftOutError,
    ModelPiece,
    warn_of_lost_changes,
)
from quorum_attention.recipes.kept_layer import ForwardStep, KeptLayer
from quorum_attention.recipes.layer_bytes import KeptBytes
from quorum_attention.recipes.lent_weights import with_lent_weights
from quorum_attention.recipes.model_shape import ModelShape, shape_of_model
from quorum_attention.recipes.offload import host_room
from quorum_attention.recipes.switches import ATTENTION, CHECKPOINTS
from quorum_attention.recipes.tile_storage import SideStream
from quorum_attention.recipes.tiled_layer import TiledLayer, checkpointed_module
from quorum_attention.recipes.tiled_layer_trial import reason_to_run_whole
from quorum_attention.recipes.training import Training
from quorum_attention.units import counted

# Where layers keep what they keep, in words.
PLACES = {
    "auto": "on the device while there is room, then in host memory",
    "host": "in host memory",
    "device": "on the device",
}
_UNLIMITED = 1 << 62
# The share of free memory that is left alone.
_MARGIN = 0.06


@dataclass(frozen=True)
class _FreeBytes:
    """Free bytes for what layers keep.

    Attributes:
        device, host: in both places.
        tile: tokens of a tile of a layer; 0: layers are not computed in tiles.
    """

    device: int
    host: int
    tile: int = 0


class LayerCheckpoints(ModelPiece):
    """Keep each layer's input and attention's results alone.

    Transformers calls it as ``(number, layer, *inputs)`` in place of torch's
    ``checkpoint``.

    Args:
        place: "auto", "device" or "host".
        training: of which ``tokens`` and ``batch`` are those of each step.
    """

    name = CHECKPOINTS
    checked = "each layer calls them"

    def __init__(self, place: str, training: Training) -> None:
        self._place = place
        self._training = training
        self._attributes = AttributeRecord()
        self._model: Any = None
        self._shape: ModelShape | None = None
        self._has_layers = False
        # The last step of each device. Layers of a model may lie on several, and
        # replicas of it (``DataParallel``) run at the same time.
        self._steps: dict[torch.device, ForwardStep] = {}
        # A layer's results, as measured, over what ``kept_bytes`` says.
        self._result_ratio = 1.0
        # Bytes of host memory that tiles of earlier steps page-locked.
        self._locked_bytes = 0
        self._warned: set[str] = set()

    def make(self, model: Any) -> str:
        """Switch the model's checkpoints on, these where its layers take them.

        They stay where others switch checkpoints on (again), as trainers do.
        """
        if not model.supports_gradient_checkpointing:
            raise LeftOutError(f"{type(model).__name__} does not support them")
        self._model = model
        # Without a shape everything goes to host memory.
        self._shape = shape_of_model(model)
        try:
            with self._attributes.recording(model):
                replace_checkpoint_setter(model, self._set)
                _switch_on(model)
        except PrivateNameError as error:
            self.undo(model)
            raise LeftOutError(str(error)) from None
        self._has_layers = bool(_checkpointed_layers(model))
        if not self._has_layers:
            self.checked = ""
            return "Transformers' own, on the device"
        how = f"torch's, with attention's results, {PLACES[self._place]}"
        if not model.training:
            how += (
                "; this model is in eval mode, in which nothing is kept: that is "
                "right for generating; to train it, call model.train()"
            )
        return how

    def _set(self, *args: Any, **named: Any) -> None:
        """Switch checkpoints on or off, in place of the model's method that
        Transformers calls."""
        set_checkpoints_as_before(self._model, *args, **named)
        for number, layer in enumerate(_checkpointed_layers(self._model)):
            set_layer_checkpoint(layer, partial(self, number))

    def why_lost(self, model: Any) -> str | None:
        """Look for layers with other checkpoints, and for a model without any."""
        if not self._has_layers:
            return None
        layers = _checkpointed_layers(model)
        if not layers:
            return "they were switched off"
        n_foreign = 0
        for layer in layers:
            if not self._computes(layer):
                n_foreign += 1
        if not n_foreign:
            return None
        return f"other checkpoints run in {counted(n_foreign, 'layer')}"

    def _computes(self, layer: torch.nn.Module) -> bool:
        return getattr(layer_checkpoint(layer), "func", None) is self

    def undo(self, model: Any) -> None:
        """Give all modules the checkpoints that they had before."""
        model.disable_input_require_grads()
        self._attributes.restore(model)
        self._steps.clear()

    def __call__(self, number: int, layer: Callable[..., Any], *inputs: Any) -> Any:
        """Return what ``layer`` returns of its inputs."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return checkpoint(layer, *inputs, use_reentrant=False)
        return self._run_keeping(number, layer, *inputs)

    @restores_modes_and_hooks
    def _run_keeping(self, number: int, layer: Callable[..., Any], *inputs: Any) -> Any:
        """Compute a layer, and keep its input and attention's results."""
        hidden = inputs[0]
        step = self._step_of(number, hidden)
        step.number = number
        kept_layer = KeptLayer(step)
        tiled = self._tiled_layer(layer, inputs, step.tile)
        if tiled is not None:
            layer = tiled
            inputs = (hidden,)
        else:
            layer = with_lent_weights(checkpointed_module(layer), layer)
        run = partial(_run_with_results, kept_layer, layer)
        with saved_tensors_hooks(kept_layer.keep, kept_layer.unpack):
            output = checkpoint(run, *inputs, use_reentrant=False)
        kept_layer.finish_copies()
        step.previous = ref(kept_layer)
        if 0 < step.result_bytes < kept_layer.result_bytes:
            self._plan_again(step, kept_layer, hidden)
        return output

    def __getstate__(self) -> Keywords:
        return {**vars(self), "_steps": {}}

    def _step_of(self, number: int, hidden: torch.Tensor) -> ForwardStep:
        """Return the step that a layer belongs to: a new one if layers begin anew."""
        step = self._steps.get(hidden.device)
        if step is None or number <= step.number:
            warn_of_lost_changes(self._model)
            step = self._begin_step(hidden)
            self._steps[hidden.device] = step
        return step

    def _tiled_layer(self, layer: Any, inputs: Any, tile: int) -> TiledLayer | None:
        """Return the layer in tiles, or None if it is not to be computed so."""
        if not tile:
            return None
        tiled = TiledLayer.of_checkpoint(layer, inputs, tile)
        reason = reason_to_run_whole(tiled, inputs[0])
        if reason is None:
            return tiled
        text = f"{type(tiled.module).__name__} runs whole: {reason}"
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=3)
        return None

    def _plan_again(
        self, step: ForwardStep, kept_layer: KeptLayer, hidden: torch.Tensor
    ) -> None:
        """Plan the rest of a step by what its layer took: ranks have results in
        float32, and rows that several blocks have."""
        self._result_ratio *= kept_layer.result_bytes / step.result_bytes
        planned = self._begin_step(hidden)
        step.offload_bytes = planned.offload_bytes
        step.n_recomputed = planned.n_recomputed
        step.result_bytes = planned.result_bytes

    def _begin_step(self, hidden: torch.Tensor) -> ForwardStep:
        """Plan a step whose first layer has this input."""
        device = hidden.device
        is_offloading = device.type == "cuda" and self._place != "device"
        host = host_room() if is_offloading else 0
        training = self._training_of(hidden)
        if training is None:
            bytes_kept = KeptBytes(hidden.nbytes, 0)
            free = _FreeBytes(0 if host else _UNLIMITED, host)
        else:
            bytes_kept = self._kept_bytes(training, hidden)
            free = self._free_bytes(training, bytes_kept, device, host)
        device_bytes = free.device
        # Layers come back from host memory, one used and one on its way, when those on
        # the device are done with: in their room.
        if free.host and (self._place == "host" or device_bytes < 2 * bytes_kept.total):
            device_bytes = 0
        n_layers = len(_checkpointed_layers(self._model))
        split = layer_bytes.split_offload(n_layers, bytes_kept, device_bytes, free.host)
        return ForwardStep(
            split.host_bytes,
            split.n_recomputed,
            bytes_kept.result,
            device,
            free.tile,
            SideStream(device) if free.host else None,
        )

    def _training_of(self, hidden: torch.Tensor) -> Training | None:
        """Return how the model is trained in a step; None if sizes of model or device
        are not known."""
        if self._shape is None or not is_known(hidden.device):
            return None
        tokens, width = hidden.shape[-2:]
        grain = 1 << max(0, tokens.bit_length() - 4)  # few lengths to be planned for
        return replace(
            self._training,
            batch=hidden.numel() // (tokens * width),
            tokens=round_up(tokens, grain),
            dtype=hidden.dtype,
        )

    def _kept_bytes(self, training: Training, hidden: torch.Tensor) -> KeptBytes:
        """Return what a layer keeps. Another attention than ours keeps no results."""
        assert self._shape is not None
        if not training.has(ATTENTION):
            return KeptBytes(hidden.nbytes, 0)
        bytes_kept = layer_bytes.kept_bytes(self._shape, training)
        result = ceil(bytes_kept.result * self._result_ratio)
        return bytes_kept._replace(result=result)

    def _free_bytes(
        self,
        training: Training,
        bytes_kept: KeptBytes,
        device: torch.device,
        host: int,
    ) -> _FreeBytes:
        """Return the free bytes for what layers keep, beside the step's own peak."""
        assert self._shape is not None
        free = int(backend_of(device).free_bytes(device) * (1 - _MARGIN))
        free -= self._later_gradient_bytes()
        needs_tiles = host and bytes_kept.result
        if needs_tiles and not step_estimate.layer_fits(
            self._shape, training, free - 2 * bytes_kept.total
        ):
            return self._free_beside_tiles(training, host)
        transient = step_estimate.transient_bytes(self._shape, training)
        return _FreeBytes(max(0, free - transient), host)

    def _free_beside_tiles(self, training: Training, host: int) -> _FreeBytes:
        """Return the free bytes beside a layer in tiles, which leaves none on the
        device."""
        assert self._shape is not None
        taken = layer_bytes.tiled_bytes(self._shape, training)
        newly_locked = max(0, taken.locked - self._locked_bytes)
        self._locked_bytes = max(taken.locked, self._locked_bytes)
        tile = max(1, step_estimate.MLP_TILE // training.batch)
        return _FreeBytes(0, max(0, host - taken.pageable - newly_locked), tile)

    def _later_gradient_bytes(self) -> int:
        """Return the bytes of weights' gradients that are not there yet."""
        weights = self._model.parameters()
        return sum(w.nbytes for w in weights if w.requires_grad and w.grad is None)


@restores_modes_and_hooks
def _run_with_results(
    kept_layer: KeptLayer, layer: Callable[..., Any], *inputs: Any
) -> Any:
    """Compute a layer whose attention asks ``kept_layer`` for its results: once in the
    forward and again in the backward."""
    outside = result_hook.get()
    try:
        # In here, because an interrupt may come as soon as it is set.
        result_hook.set(kept_layer.results)
        return layer(*inputs)
    finally:
        result_hook.set(outside)


def _switch_on(model: Any) -> None:
    """Switch the model's checkpoints on by its public method, which has another name in
    later versions of Transformers.

    The method also lets embeddings require gradients, by a hook that cannot be pickled.
    Reentrant checkpoints alone need that.
    """
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.disable_input_require_grads()


def _checkpointed_layers(model: Any) -> list[Any]:
    """Return the layers of a model's decoder whose checkpoints are switched on."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        module
        for module in model.get_decoder().modules()
        if isinstance(module, GradientCheckpointingLayer)
        and module.gradient_checkpointing
    ]
