"""The memory of a training step, by part.

Sizes are those of tensors that a step of a decoder in PyTorch holds at once, with its
layers recomputed in the backward; the framework's own (CUDA context, fragmentation)
come on top. At long context other things than attention die first: logits, the
checkpoints of the layers, the intermediates of one MLP.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import GPU
from quorum_attention.plain_types import JsonObject
from quorum_attention.planner import plan
from quorum_attention.recipes.layer_bytes import kept_bytes, returned_bytes, tiled_bytes
from quorum_attention.recipes.model_shape import ModelShape
from quorum_attention.recipes.switches import ATTENTION, HOST, LOSS, MLP, NORMS, TILES
from quorum_attention.recipes.training import Training

When = Literal["always", "layer", "attention", "mlp", "norm", "loss"]
# Bytes of an optimizer for each trained parameter: two states, and a copy of the
# weights, in float32.
_FP32_STATES = 12
# A chunk of the loss has this many bytes of logits, a tile of an MLP this many tokens.
LOSS_BYTES = 1 << 30
MLP_TILE = 8192
# The share of a plan's bound that calls take at their peak, measured on an H200.
_PEAK_OVER_PLAN = 0.6
# Attention takes this much beyond what it returns where nothing is said of memory.
_DEFAULT_WORKSPACE = 2 << 30
# A budget for a device with room for anything.
_UNLIMITED = 1 << 50


@dataclass(frozen=True)
class MemoryPart:
    """One part of a step's memory.

    Attributes:
        name: what it is.
        bytes: as it stands with what is switched on.
        when: "always"; in a "layer", all the time or in the backward of its
            "attention", "mlp" or "norm"; in the "loss".
        switch: what makes it smaller, if anything.
        plain_bytes: with nothing switched on.
    """

    name: str
    bytes: int
    when: When = "always"
    switch: str | None = None
    plain_bytes: int = 0


@dataclass(frozen=True)
class StepMemory:
    """The parts of a training step, and their memory.

    Attributes:
        parts: the parts, in the order of a step.
        on: the changes that are switched on.
        budget: the budget of quorum attention, if it is switched on.
        host_bytes: what layers keep in host memory: their inputs, and attention's
            results unless they are computed again. If the device's memory is known,
            what fits there is not counted.
    """

    parts: tuple[MemoryPart, ...]
    on: tuple[str, ...] = ()
    budget: int | None = None
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The peak: the parts that are always there, plus a layer or the loss,
        whichever takes more."""
        return self._peak("bytes")

    @property
    def plain_bytes(self) -> int:
        """The peak with nothing switched on."""
        return self._peak("plain_bytes")

    def changed_by(self, part: MemoryPart) -> str:
        """Return the change that makes a part smaller in this step; "" for none.

        Layers in tiles also make parts smaller that have another change.
        """
        if part.switch in self.on:
            return part.switch or ""
        is_smaller = part.bytes < part.plain_bytes
        return TILES if is_smaller and TILES in self.on else ""

    def _peak(self, size: str) -> int:
        sums = dict.fromkeys(get_args(When), 0)
        for part in self.parts:
            sums[part.when] += getattr(part, size)
        in_layer = max(sums["attention"], sums["mlp"], sums["norm"])
        layer = sums["layer"] + in_layer
        return sums["always"] + max(layer, sums["loss"])

    def to_dict(self) -> JsonObject:
        """Return the step in plain types, for JSON."""
        return {
            "peak_bytes": self.peak_bytes,
            "plain_bytes": self.plain_bytes,
            "host_bytes": self.host_bytes,
            "switched_on": list(self.on),
            "attention_budget_bytes": self.budget,
            "parts": [asdict(part) for part in self.parts],
        }


def step_memory(shape: ModelShape, training: Training) -> StepMemory:
    """Return the memory of each part of a training step, with the changes that
    ``training.on`` names.

    Raises:
        BudgetError: the budget is too small for attention; names the smallest that
            works.
    """
    return with_plain_bytes(shape, training, switched_step(shape, training))


def with_plain_bytes(
    shape: ModelShape, training: Training, step: StepMemory
) -> StepMemory:
    """Return a step whose parts say what they take with nothing switched on."""
    plain_step = switched_step(shape, replace(training, on=()))
    parts = tuple(
        replace(part, plain_bytes=plain.bytes)
        for part, plain in zip(step.parts, plain_step.parts, strict=True)
    )
    return replace(step, parts=parts)


def switched_step(shape: ModelShape, training: Training) -> StepMemory:
    """Return the same as ``step_memory``, but not what parts take with nothing switched
    on: attention of all tokens need not be planned for that.

    Raises:
        BudgetError: as ``step_memory`` does.
    """
    return _step_with(shape, training, _workspace(shape, training))


def step_beside_attention(shape: ModelShape, training: Training) -> StepMemory:
    """Return the same without attention's workspace, so that nothing is planned: a step
    takes at least this."""
    return _step_with(shape, training, 0)


def _step_with(shape: ModelShape, training: Training, workspace: int) -> StepMemory:
    """Return the step with these bytes of attention's workspace."""
    parts = (
        *_state_parts(shape, training),
        _checkpoint_part(shape, training),
        *_layer_parts(shape, training),
        MemoryPart("attention workspace", workspace, "attention", ATTENTION),
        *_loss_parts(shape, training),
    )
    host_bytes = 0
    if training.has(HOST):
        layer = kept_bytes(shape, training)
        host_bytes += shape.layers * layer.checkpoint
        host_bytes += shape.attention_layers * layer.result
    if training.has(TILES):
        host_bytes += sum(tiled_bytes(shape, training))
    budget = training.budget if training.has(ATTENTION) else None
    return StepMemory(parts, training.on, budget, host_bytes)


@lru_cache(maxsize=64)
def transient_bytes(shape: ModelShape, training: Training) -> int:
    """Return what a step takes beside weights, gradients, optimizer and what its layers
    keep."""
    step = switched_step(shape, training)
    parts = tuple([part for part in step.parts if part.when != "always"])
    return StepMemory(parts).peak_bytes


def layer_fits(shape: ModelShape, training: Training, free: int) -> bool:
    """Whether a layer that is not computed in tiles takes at most ``free`` bytes."""
    try:
        return transient_bytes(shape, with_budget(shape, training)) <= free
    except BudgetError:
        return False


def with_budget(shape: ModelShape, training: Training) -> Training:
    """Return a training with the budget of attention that is usual where nothing is
    said of memory, unless it has one."""
    if training.budget is not None:
        return training
    returned = returned_bytes(shape, training, backward=True)
    return replace(training, budget=_DEFAULT_WORKSPACE + returned)


def loss_tokens(vocabulary: int, size: int) -> int:
    """Return the tokens of a chunk of the loss, whose logits of ``size`` bytes are
    there once more in float32, with their gradient."""
    return max(16, LOSS_BYTES // (vocabulary * (size + 8)) // 16 * 16)


def _state_parts(shape: ModelShape, training: Training) -> list[MemoryPart]:
    """Return weights, their gradients and the optimizer's states."""
    size = training.number_bytes
    weights = shape.parameters
    trained = shape.parameters
    if training.lora is not None:
        trained = _adapter_parameters(shape, training.lora)
        weights += trained
    state_bytes = {"none": 0, "adamw": 2 * size, "adamw-fp32": _FP32_STATES}
    return [
        MemoryPart("weights", weights * size),
        MemoryPart("weight gradients", trained * size),
        MemoryPart("optimizer", trained * state_bytes[training.optimizer]),
    ]


def _adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Return the parameters of adapters of ``rank`` on every linear layer of every
    decoder layer."""
    query_width = shape.heads * shape.head_dim
    key_width = shape.kv_heads * shape.head_dim
    # An adapter has rank times the widths of its layer's input and output.
    query_and_output = 2 * (shape.hidden + query_width)
    key_and_value = 2 * (shape.hidden + key_width)
    mlp = 3 * (shape.hidden + shape.intermediate)
    n_mlps = max(shape.experts, 1)
    widths = query_and_output + key_and_value + n_mlps * mlp
    return shape.layers * rank * widths


def _loss_parts(shape: ModelShape, training: Training) -> list[MemoryPart]:
    """Return what the loss takes."""
    size = training.number_bytes
    rows = training.rows
    if training.has(LOSS):
        rows = min(rows, loss_tokens(shape.vocabulary, size))
    n_logits = rows * shape.vocabulary
    # The logits and their gradient in the model's dtype; in float32 that gradient is
    # the loss's.
    logits_bytes = 2 * size if size < 4 else size
    # The output and its gradient, which is there in chunks and put together; in float32
    # the output once more for its norm.
    norm_bytes = 0 if _has_fused_norms(shape, training) else 4
    last_bytes = 3 * size + norm_bytes
    return [
        MemoryPart("logits and gradient", n_logits * logits_bytes, "loss", LOSS),
        MemoryPart("loss in float32", n_logits * 8, "loss", LOSS),
        MemoryPart(
            "last hidden state and gradient",
            training.rows * shape.hidden * last_bytes,
            "loss",
            NORMS,
        ),
    ]


def _has_fused_norms(shape: ModelShape, training: Training) -> bool:
    """Whether norms run as torch's kernel, which is there on GPUs."""
    return training.has(NORMS) and training.device == GPU and shape.torch_norms


def _checkpoint_part(shape: ModelShape, training: Training) -> MemoryPart:
    """Return what the checkpoints of all layers take of the device."""
    layer = kept_bytes(shape, training)
    on_device = shape.layers * layer.checkpoint
    if training.has(HOST):
        # One layer is used and the next one is on its way, with attention's results,
        # which tiles have in host memory.
        moved = layer.checkpoint if training.has(TILES) else layer.total
        on_device = min(on_device, 2 * moved)
    return MemoryPart("layer checkpoints", on_device, switch=HOST)


def _layer_parts(shape: ModelShape, training: Training) -> list[MemoryPart]:
    """Return what one layer takes while it is recomputed and gone back through.

    In tiles the gradients of output and input are those of all tokens, and all else is
    of a tile.
    """
    rows = min(training.rows, MLP_TILE) if training.has(TILES) else training.rows
    fused = _has_fused_norms(shape, training)
    hidden = rows * shape.hidden * training.number_bytes
    wide = rows * shape.hidden * 4
    projected = (
        2
        * rows
        * (shape.heads + shape.kv_heads)
        * shape.head_dim
        * training.number_bytes
    )
    norm_bytes = _kept_by_norms(shape, training, rows)
    norm_bytes += _ends_of_tiled_layer(shape, training)
    # A norm's input, and five terms of its gradient, in float32; fused, its gradient
    # alone.
    norm_backward = 2 * hidden if fused else 6 * wide
    mlp_input = 2 * hidden + (0 if fused else wide)
    return [
        MemoryPart("q, k, v, o", projected, "layer", TILES),
        MemoryPart("norms and residuals", norm_bytes, "layer", NORMS),
        MemoryPart("MLP intermediates", _mlp_bytes(shape, training, rows), "mlp", MLP),
        MemoryPart("MLP input and gradient", mlp_input, "mlp", NORMS),
        MemoryPart("norm backward", norm_backward, "norm", NORMS),
        MemoryPart("gradients of q, k, v, o", projected + hidden, "attention", TILES),
    ]


def _ends_of_tiled_layer(shape: ModelShape, training: Training) -> int:
    """Return the bytes of a layer in tiles that do not depend on the tile: the
    gradients of output and input; and sums of weights' gradients in float32, beside
    those of a tile."""
    if not training.has(TILES):
        return 0
    size = training.number_bytes
    ends = 2 * training.rows * shape.hidden * size
    if training.has_frozen_weights:
        return ends
    return ends + shape.parameters // shape.layers * (4 + size)


def _kept_by_norms(shape: ModelShape, training: Training, rows: int) -> int:
    """Return what norms and residuals keep of some rows.

    A norm keeps its input in float32, and its own result where its weight is trained;
    fused, its input as it is. The first one's input is the checkpoint.
    """
    size = training.number_bytes
    hidden = rows * shape.hidden * size
    n_in_heads = 0
    if shape.head_norms:
        n_in_heads = rows * (shape.heads + shape.kv_heads) * shape.head_dim
    if _has_fused_norms(shape, training):
        return n_in_heads * size + 2 * hidden
    n_bytes = n_in_heads * 4 + 2 * hidden
    if size < 4:
        n_bytes += rows * shape.hidden * 4
    if not training.has_frozen_weights:
        n_bytes += hidden + n_in_heads * size
    return n_bytes


def _mlp_bytes(shape: ModelShape, training: Training, rows: int) -> int:
    """Return what an MLP keeps for the backward: the projections' inputs, gate, up and
    their product, of each token's experts. Gradients that flow back replace what has
    been used."""
    size = training.number_bytes
    n_bytes = 3 * rows * shape.mlp_width * size
    if not training.has(MLP):
        return n_bytes
    n_bytes = min(n_bytes, n_bytes * MLP_TILE // rows)
    has_tiles = rows > MLP_TILE
    if has_tiles and not training.has_frozen_weights and not shape.experts and size < 4:
        # Its weights and the sums of their gradients in float32, and the weights of one
        # tile.
        n_bytes += 3 * shape.hidden * shape.intermediate * (4 + 4 + size)
    return n_bytes


def _workspace(shape: ModelShape, training: Training) -> int:
    """Return what attention works in, beyond q, k, v, o and their gradients: the larger
    of both passes. A layer in tiles has those in host memory."""
    on = (TILES,) if training.has(TILES) else ()
    budgeted = replace(training, on=on, lora=None)
    unlimited = replace(budgeted, budget=_UNLIMITED)
    n_bytes = _attention_peak(shape, unlimited)
    if training.has(ATTENTION) and training.budget is not None:
        n_bytes = min(n_bytes, _attention_peak(shape, budgeted))
    if training.device == GPU:
        return int(n_bytes * _PEAK_OVER_PLAN)
    return n_bytes


@lru_cache(maxsize=256)
def _attention_peak(shape: ModelShape, training: Training) -> int:
    """Return the larger of both passes' plans in a budget, which covers what a call
    returns: o, or the gradients of q, k and v."""
    is_on_host = training.has(TILES)
    peaks = []
    for backward in (False, True):
        planned = plan(
            training.tokens,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            batch=training.batch,
            head_dim=shape.head_dim,
            dtype=training.dtype,
            is_causal=True,
            inputs="host" if is_on_host else "device",
            device=training.device,
            budget=training.budget,
            backward=backward,
        )
        returned = (
            0 if is_on_host else returned_bytes(shape, training, backward=backward)
        )
        peaks.append(planned.peak_bytes - returned)
    return max(peaks)
