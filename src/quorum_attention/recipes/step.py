"""What a training step of a model needs, by part, and what to switch on so that it fits.

Sizes are those of tensors that a step of a decoder in PyTorch holds at once, with its layers
recomputed in the backward; the framework's own (CUDA context, fragmentation) come on top. At long
context other things than attention die first: logits, the checkpoints of the layers, the
intermediates of one MLP.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from quorum_attention.argument_checks import one_of, whole_number
from quorum_attention.arithmetic import ceil_div
from quorum_attention.errors import BudgetError
from quorum_attention.execution.device.lookup import GPU
from quorum_attention.keywords import helps_with_fields
from quorum_attention.planner import plan
from quorum_attention.recipes.model_shape import ModelShape

Optimizer = Literal["none", "adamw", "adamw-fp32"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
When = Literal["always", "layer", "attention", "mlp", "norm", "loss"]
# Bytes of an optimizer for each trained parameter: two states in the weights' dtype, or two and a
# copy of the weights in float32.
_FP32_STATES = 12
# Where these are done piece by piece: bytes of logits that are there at once, tokens of an MLP.
LOSS_BYTES, MLP_TILE = 1 << 30, 8192
# Of the bound that a plan keeps to: peaks of calls measured on an H200.
_USED = 0.6
# What is switched on, in the order in which it costs least.
SWITCHES = (
    "quorum attention", "fused norms", "chunked loss", "tiled MLP", "checkpoints in host memory",
)  # fmt: skip
ATTENTION, NORMS, LOSS, MLP, HOST = SWITCHES
# Switched on by the checkpoints themselves, where a layer does not fit otherwise.
TILES = "layers in tiles"
WORKING = 2 << 30  # of attention beyond what it returns, where nothing is said of memory


@dataclass(frozen=True)
class MemoryPart:
    """One part of a step's memory.

    Attributes:
        name: what it is.
        bytes: as it stands with what is switched on.
        when: "always"; in a "layer", all the time or in the backward of its "attention", "mlp" or
            "norm"; in the "loss".
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
    """The parts of a step and what they come to.

    Attributes:
        parts: in the order of a step.
        on: the switches that are on.
        budget: of quorum attention, if it is on.
        host_bytes: what layers keep in host memory: their inputs, and attention's results where
            those are not computed again; less what a device of known memory has room for.
    """

    parts: tuple[MemoryPart, ...]
    on: tuple[str, ...] = ()
    budget: int | None = None
    host_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """What is always there, and the larger of a layer and the loss."""
        return self._peak("bytes")

    @property
    def plain_bytes(self) -> int:
        """The same with nothing switched on."""
        return self._peak("plain_bytes")

    def _peak(self, size: str) -> int:
        sums = dict.fromkeys(get_args(When), 0)
        for part in self.parts:
            sums[part.when] += getattr(part, size)
        layer = sums["layer"] + max(sums[when] for when in ("attention", "mlp", "norm"))
        return sums["always"] + max(layer, sums["loss"])

    def to_dict(self) -> dict[str, Any]:
        """In plain types."""
        return {
            "peak_bytes": self.peak_bytes,
            "plain_bytes": self.plain_bytes,
            "host_bytes": self.host_bytes,
            "switched_on": list(self.on),
            "attention_budget_bytes": self.budget,
            "parts": [asdict(part) for part in self.parts],
        }


@helps_with_fields
@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        tokens, batch: of a step.
        dtype: of weights and activations.
        optimizer: "none", "adamw" (two states in the weights' dtype), "adamw-fp32" (two states and
            the weights in float32).
        lora: rank of low-rank adapters of all linear layers, the rest frozen; None trains all.
        budget: of one call of quorum attention, including its output or its gradients, as for
            ``register``; None: no limit.
        device: the kind of device that attention is planned for.
    """

    tokens: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    optimizer: Optimizer = "adamw"
    lora: int | None = None
    budget: int | None = None
    device: str = GPU
    on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole_number(self.tokens, "tokens", 1)
        whole_number(self.batch, "batch", 1)
        one_of(self.optimizer, "optimizer", OPTIMIZERS)
        if self.lora is not None:
            whole_number(self.lora, "lora", 1)
        for name in self.on:
            one_of(name, "on", (*SWITCHES, TILES))


def step_memory(shape: ModelShape, training: Training) -> StepMemory:
    """The memory of a training step, by part, with what ``training.on`` switches on.

    Raises:
        BudgetError: attention cannot work in the budget; names the smallest that would do.
    """
    both = zip(_parts(shape, training), _parts(shape, replace(training, on=())), strict=True)
    parts = tuple(replace(now, plain_bytes=plain.bytes) for now, plain in both)
    held = shape.layers * sum(kept_bytes(shape, training)) if HOST in training.on else 0
    held += sum(tiled_bytes(shape, training)) if TILES in training.on else 0
    budget = training.budget if ATTENTION in training.on else None
    return StepMemory(parts, training.on, budget, held)


@lru_cache(maxsize=64)
def transient_bytes(shape: ModelShape, training: Training) -> int:
    """What a step holds beside weights, gradients, optimizer and what its layers keep."""
    parts = tuple([part for part in _parts(shape, training) if part.when != "always"])
    return StepMemory(parts).peak_bytes


def layer_fits(shape: ModelShape, training: Training, free: int) -> bool:
    """Whether a layer does in so many bytes, as a whole."""
    budget = training.budget or WORKING + returned_bytes(shape, training, backward=True)
    try:
        return transient_bytes(shape, replace(training, budget=budget)) <= free
    except BudgetError:
        return False


def tiled_bytes(shape: ModelShape, training: Training) -> tuple[int, int]:
    """In host memory: q, k, v, o of a layer in tiles, and their gradients: page-locked, of which
    torch gives powers of two; and not."""
    heads = 2 * (shape.heads + shape.kv_heads)
    rows = training.tokens * training.batch
    half = rows * heads * shape.head_dim * training.dtype.itemsize
    return 2 * half, half


def kept_bytes(shape: ModelShape, training: Training) -> tuple[int, int]:
    """Bytes that a checkpoint keeps of one layer: its input; attention's output and lse."""
    rows, size = training.tokens * training.batch, training.dtype.itemsize
    return rows * shape.hidden * size, rows * shape.heads * (shape.head_dim * size + 4)


def shares(layers: int, checkpoint: int, result: int, device: int, host: int) -> tuple[int, int]:
    """Where ``layers`` that keep so many bytes each keep them, in the free bytes of both: bytes of
    the first ones in host memory, and for how many of them attention is computed again."""
    every = layers * (checkpoint + result)
    over = max(0, every - device - host)
    recomputed = min(layers, ceil_div(over, result)) if over and result else 0
    return min(host, max(0, every - recomputed * result - device)), recomputed


def adapters(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters of ``rank`` on every linear layer of every decoder layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + q) + 2 * (shape.hidden + kv)
    mlp = 3 * (shape.hidden + shape.intermediate) * max(shape.experts, 1)
    return shape.layers * rank * (attention + mlp)


def _parts(shape: ModelShape, training: Training) -> list[MemoryPart]:
    """A step's, in its order, with what is switched on."""
    size, rows = training.dtype.itemsize, training.tokens * training.batch
    trained = shape.parameters if training.lora is None else adapters(shape, training.lora)
    weights = shape.parameters + (0 if training.lora is None else trained)
    state = {"none": 0, "adamw": 2 * size, "adamw-fp32": _FP32_STATES}[training.optimizer]
    # Torch has a kernel for norms on GPUs.
    fused = NORMS in training.on and training.device == GPU and shape.torch_norms
    # The logits and their gradient in the model's dtype; in float32, the loss's own and theirs.
    at_once = min(rows, loss_tokens(shape.vocabulary, size)) if LOSS in training.on else rows
    logits = at_once * shape.vocabulary
    # The output, in float32 for its norm; its gradient in chunks and put together.
    last = rows * shape.hidden * (3 * size + (0 if fused else 4))
    return [
        MemoryPart("weights", weights * size),
        MemoryPart("weight gradients", trained * size),
        MemoryPart("optimizer", trained * state),
        *_layers(shape, training, rows, fused),
        MemoryPart("attention workspace", _attention(shape, training), "attention", ATTENTION),
        # In float32 the gradient is the loss's own.
        MemoryPart("logits and gradient", logits * (2 * size if size < 4 else size), "loss", LOSS),
        MemoryPart("loss in float32", logits * 8, "loss", LOSS),
        MemoryPart("last hidden state and gradient", last, "loss", NORMS),
    ]


def _layers(shape: ModelShape, training: Training, rows: int, fused: bool) -> list[MemoryPart]:
    """Checkpoints; and what one layer holds while it is recomputed and gone back through."""
    size, tiled = training.dtype.itemsize, TILES in training.on
    held = shape.layers * rows * shape.hidden * size
    # The one that is used, and the next one on its way, with attention's results.
    taken = kept_bytes(shape, training)[:1] if tiled else kept_bytes(shape, training)
    moved = min(held, 2 * sum(taken)) if HOST in training.on else held
    # Of a layer in tiles the gradients of output and input are whole, all else is of a tile; and
    # the sums of its weights' gradients are in float32, beside those of a tile.
    ends = 2 * rows * shape.hidden * size if tiled else 0
    if tiled and training.lora is None:
        ends += shape.parameters // shape.layers * (4 + size)
    rows = min(rows, MLP_TILE) if tiled else rows
    hidden, wide = rows * shape.hidden * size, rows * shape.hidden * 4
    # Kept for the backward: the projections' inputs, gate, up and their product, of each token's
    # experts; the gradients that flow back replace what has been used.
    mlp = 3 * rows * shape.mlp_width * size
    if MLP in training.on:
        mlp = min(mlp, mlp * MLP_TILE // rows)
        if rows > MLP_TILE and training.lora is None and not shape.experts and size < 4:
            # Its weights and the sums of their gradients in float32, and the weights of one tile.
            mlp += 3 * shape.hidden * shape.intermediate * (4 + 4 + size)
    projected = 2 * rows * (shape.heads + shape.kv_heads) * shape.head_dim * size
    # A norm keeps its input in float32, and its own result where its weight is trained; fused, its
    # input as it is. The first one's input is the checkpoint.
    headed = rows * (shape.heads + shape.kv_heads) * shape.head_dim if shape.head_norms else 0
    kept = headed * 4 + (wide if size < 4 else 0) + 2 * hidden
    kept += 0 if training.lora is not None else hidden + headed * size
    lean = headed * size + 2 * hidden
    return [
        MemoryPart("layer checkpoints", moved, switch=HOST),
        MemoryPart("q, k, v, o", projected, "layer", TILES),
        MemoryPart("norms and residuals", ends + (lean if fused else kept), "layer", NORMS),
        MemoryPart("MLP intermediates", mlp, "mlp", MLP),
        MemoryPart("MLP input and gradient", 2 * hidden + (0 if fused else wide), "mlp", NORMS),
        # Its input, and five terms of its gradient, in float32; fused, its gradient alone.
        MemoryPart("norm backward", 2 * hidden if fused else 6 * wide, "norm", NORMS),
        MemoryPart("gradients of q, k, v, o", projected + hidden, "attention", TILES),
    ]  # fmt: skip


def loss_tokens(vocabulary: int, size: int) -> int:
    """Tokens of a chunk of the loss, of logits of ``size`` bytes, in float32 and their gradient."""
    return max(16, LOSS_BYTES // (vocabulary * (size + 8)) // 16 * 16)


def _attention(shape: ModelShape, training: Training) -> int:
    """What attention works in, beyond q, k, v, o and their gradients: the larger of both passes.
    Of a layer in tiles it has those in host memory."""
    inputs = replace(training, on=(TILES,) if TILES in training.on else (), lora=None)
    # A device with room for anything: the fastest way there is.
    working = _attention_peak(shape, replace(inputs, budget=1 << 50))
    if ATTENTION in training.on and training.budget is not None:
        working = min(working, _attention_peak(shape, inputs))
    return int(working * (_USED if training.device == GPU else 1.0))


@lru_cache(maxsize=256)
def _attention_peak(shape: ModelShape, training: Training) -> int:
    """The larger of both passes' plans in a budget, which covers what a call returns: o, or the
    gradients of q, k and v."""
    tiled = TILES in training.on
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
            inputs="host" if tiled else "device",
            device=training.device,
            budget=training.budget,
            backward=backward,
        )
        returned = 0 if tiled else returned_bytes(shape, training, backward=backward)
        peaks.append(planned.peak_bytes - returned)
    return max(peaks)


def returned_bytes(shape: ModelShape, training: Training, *, backward: bool) -> int:
    """Bytes of the output of an attention call, or of its gradients."""
    heads = shape.heads + (2 * shape.kv_heads if backward else 0)
    tokens = training.tokens * training.batch
    return tokens * heads * shape.head_dim * training.dtype.itemsize
