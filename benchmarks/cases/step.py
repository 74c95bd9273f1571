"""A step of ``examples/train_long.py``: as it comes, with attention recovered, with
everything.

On a GPU the model has the published shape of Qwen3-8B, in bf16, and random weights; on
a CPU a small shape runs in a minute. Parts, --only chooses some:

equal: loss and gradients of one text through SDPA, through another of torch's kernels
(how far two right answers are apart), with attention recovered, and with everything
that long_context does.

long: steps on a longer text with everything: seconds of the first and the last, device
memory, and what attention alone takes beyond q, k, v, o and their gradients. --layers
2,4 runs so many layers of the model, with all weights in memory, and says of the whole
model what the difference comes to: extrapolated. --ranks 2 shards the text over two
GPUs, each with all weights.

longest: the longest text that fits in --memory, each way: the line through the memory
of two lengths is followed, and the length found is run unless it is more than --most
tokens. The remedies are checkpoints in host memory and a chunked loss around SDPA.
(Where checkpoints are in host memory the device has the same to hold however many
--layers run.)

estimate: the peaks of steps with everything, checkpoints in host memory, beside what
``estimate
--model`` says of them: five lengths, on a GPU of three shapes.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from measure import ROOT, Meter, on_ranks, timed
from torch.nn.attention import SDPBackend, sdpa_kernel

import quorum_attention as qa
from quorum_attention.integrations.transformers import register, sharded_positions
from quorum_attention.recipes import Training, long_context, read_shape, step_memory
from quorum_attention.recipes.step_estimate import StepMemory
from quorum_attention.recipes.switches import SWITCHES, TILES
from quorum_attention.units import format_bytes, parse_bytes, parse_count

sys.path.insert(0, str(ROOT / "examples"))
from train_long import SHAPES, library, new_model

SHAPES["Qwen3-0.6B"] = {
    **SHAPES["Qwen3-8B"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
SHAPES["Qwen3-4B"] = {
    **SHAPES["Qwen3-8B"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
}
# By kind of device: shape, tokens of ``equal`` and ``long``, attention's budget, tokens
# of a tile of an MLP; and of ``longest`` the most tokens that it runs, those it begins
# with, and how many times as many with everything.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "shape": "Qwen3-8B",
        "equal_at": 32_768,
        "tokens": 262_144,
        "budget": "8GiB",
        "tile": 8192,
        "most": 32_768,
        "first": 4096,
        "longer": 32,
    },
    "cpu": {
        "shape": "small",
        "equal_at": 512,
        "tokens": 2048,
        "budget": "16MiB",
        "tile": 256,
        "most": 4096,
        "first": 256,
        "longer": 8,
    },
}
WAYS = {
    "sdpa": "SDPA, as it comes",
    "attention": "attention recovered",
    "remedies": "SDPA with the usual remedies",
    "everything": "everything",
}
OUT_OF_MEMORY = torch.OutOfMemoryError, qa.BudgetError
# Ways whose checkpoints are in host memory where the longest text is looked for.
ON_HOST = "remedies", "everything"
# A first text shorter than this one has to fit.
MIN_TOKENS = 64
# Memory that CUDA itself needs.
CUDA_BYTES = 3 << 30


def prepare(
    model: Any, way: str, options: argparse.Namespace, place: str = "auto"
) -> None:
    """Change ``model`` in place for a way, with checkpoints in that place."""
    if way == "attention":
        long_context(
            model,
            budget=options.budget,
            mlp_tile=None,
            chunked_loss=False,
            fused_norms=False,
            checkpoints=None,
        )
    if way == "remedies":
        long_context(
            model, attention=False, mlp_tile=None, fused_norms=False, checkpoints=place
        )
    if way == "everything":
        if dist.is_initialized():
            model.set_attn_implementation(register(group=dist.group.WORLD))
            sharded_positions(model)
        summary = long_context(
            model, budget=options.budget, mlp_tile=options.tile, checkpoints=place
        )
        print(summary, flush=True)


def step(model: Any, ids: torch.Tensor) -> float:
    """Forward and backward; gradients are left in the adapters."""
    model.zero_grad(set_to_none=True)
    if dist.is_initialized():
        return sharded_step(model, ids)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


def sharded_step(model: Any, ids: torch.Tensor) -> float:
    """A step of a text that is sharded over ranks."""
    n_ranks = dist.get_world_size()
    rank = dist.get_rank()
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    ids = ids.chunk(n_ranks, 1)[rank]
    labels = shifted.chunk(n_ranks, 1)[rank]
    tokens = ids.shape[1] * n_ranks - 1
    loss = model(
        input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=tokens
    ).loss
    loss.backward()
    loss = loss.detach()
    for tensor in (loss, *trained_gradients(model)):
        dist.all_reduce(tensor)
    return float(loss)


def measured_step(model: Any, tokens: int, device: str) -> tuple[Meter, float]:
    """A step on a text of so many tokens: seconds and peak, and the loss."""
    ids = library(tokens, device)
    with Meter(device, weight_bytes(model)) as meter:
        loss = step(model, ids)
    return meter, loss


def trained_gradients(model: Any) -> list[torch.Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def flat_gradients(model: Any) -> torch.Tensor:
    """The gradients of all adapters in one row, float32."""
    return torch.cat([grad.float().flatten() for grad in trained_gradients(model)])


def weight_bytes(model: Any) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """Peaks, measured and estimated."""
    shapes = [name for name in SHAPES if name != "small"]
    if options.device == "cpu":
        shapes = ["small"]
    points: list[dict[str, Any]] = []
    for name in shapes:
        model = new_model(name, options.rank, options.device)
        long_context(
            model, budget=options.budget, mlp_tile=options.tile, checkpoints="host"
        )
        for power in range(5):
            tokens = options.first << power
            meter, _ = measured_step(model, tokens, options.device)
            estimated = estimated_peak(model, tokens, options)
            points.append(
                {
                    "shape": name,
                    "tokens": tokens,
                    "peak": meter.peak,
                    "estimate": estimated,
                }
            )
            print(
                f"{name}, {tokens:,} tokens: {format_bytes(meter.peak)}, estimate "
                f"{format_bytes(estimated)}: {estimated / meter.peak:.2f}",
                flush=True,
            )
        del model
        free_memory(options.device)
    return {"estimate": points}


def estimated_peak(model: Any, tokens: int, options: argparse.Namespace) -> int:
    return estimated_step(model, tokens, SWITCHES, options).peak_bytes


def estimated_step(
    model: Any, tokens: int, switches: tuple[str, ...], options: argparse.Namespace
) -> StepMemory:
    """The memory of a step with all layers, by ``estimate``."""
    training = Training(
        tokens,
        dtype=model.dtype,
        optimizer="none",
        lora=options.rank,
        on=switches,
        budget=parse_bytes(options.budget),
        device=options.device,
    )
    return step_memory(read_shape(model.config.to_dict()), training)


def equal(options: argparse.Namespace) -> dict[str, Any]:
    """Loss and gradients, each way, of one text: distances from SDPA's."""
    model = new_model(options.shape, options.rank, options.device)
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    comparison = Comparison(model, library(options.equal_at, options.device))
    print(
        f"{options.equal_at:,} tokens; SDPA (flash): loss {comparison.loss:.6f}",
        flush=True,
    )
    second = SDPBackend.CUDNN_ATTENTION if options.device == "cuda" else SDPBackend.MATH
    with sdpa_kernel(second):
        comparison.add(f"SDPA ({second.name.lower()})")
    model.set_attn_implementation(register(budget=options.budget))
    comparison.add(WAYS["attention"])
    prepare(model, "everything", options)
    comparison.add(WAYS["everything"])
    # As near as two of torch's kernels are to each other, or a few roundings of a loss
    # summed in another order.
    rounding = 1e-5 if options.device == "cpu" else 1e-2
    tolerance = max(2 * comparison.ways[0]["gradients_off"], rounding)
    agree = all(way["gradients_off"] <= tolerance for way in comparison.ways[1:])
    print("equal" if agree else "NOT EQUAL", flush=True)
    row = {
        "tokens": options.equal_at,
        "layers": len(model.model.layers),
        "loss": comparison.loss,
        "ways": comparison.ways,
        "room": tolerance,
        "equal": agree,
    }
    return {f"{options.shape} equal {options.equal_at}": row}


class Comparison:
    """Steps on one text, compared with the first, which is SDPA's.

    Attributes:
        loss: the first step's.
        ways: of each step after it, how far loss and gradients are from the first's.
    """

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self._model = model
        self._ids = ids
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            self.loss = step(model, ids)
        self._gradients = flat_gradients(model)
        self.ways: list[dict[str, Any]] = []

    def add(self, name: str) -> None:
        """Make a step with the model as it is."""
        seconds, loss = timed(lambda: step(self._model, self._ids))
        difference = flat_gradients(self._model) - self._gradients
        distance = (difference.norm() / self._gradients.norm()).item()
        way = {
            "what": name,
            "loss": loss,
            "loss_off": abs(loss - self.loss) / self.loss,
            "gradients_off": distance,
            "seconds": seconds,
        }
        self.ways.append(way)
        print(
            f"{name}: loss {loss:.6f}, gradients {distance:.2e} from SDPA's, "
            f"{seconds:.1f} s",
            flush=True,
        )


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """The model with its first layers alone; the others stay in memory."""
    layers = model.model.layers
    model.model.layers = layers[:count]
    model.config.num_hidden_layers = count
    try:
        yield
    finally:
        model.model.layers = layers
        model.config.num_hidden_layers = len(layers)


def long(options: argparse.Namespace) -> dict[str, Any]:
    """A step of everything on a long text: seconds and memory, of some layers or of
    all."""
    model = new_model(options.shape, options.rank, options.device)
    prepare(model, "everything", options)
    n_layers = len(model.model.layers)
    with first_layers(model, 1):
        # Kernels are compiled; the first step of all layers locks host memory.
        step(model, library(options.tokens, options.device))
    steps = [
        long_steps(model, count, options) for count in options.layers or [n_layers]
    ]
    row = {"tokens": options.tokens, "of_layers": n_layers, "steps": steps}
    row |= whole_model(steps, n_layers)
    del model
    name = f"{options.shape} long {options.tokens}"
    if options.ranks > 1:
        return {f"{name} over {options.ranks}": row}
    row["attention_bytes"] = attention_bytes(options)
    print(
        f"attention takes {format_bytes(row['attention_bytes'])} beyond q, k, v, o and "
        "their gradients",
        flush=True,
    )
    return {name: row}


def long_steps(
    model: Any, n_layers: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Steps of the first layers."""
    seconds = []
    with first_layers(model, n_layers):
        for _ in range(options.steps):
            meter, loss = measured_step(model, options.tokens, options.device)
            seconds.append(meter.seconds)
    print(
        f"{options.tokens:,} tokens, {n_layers} of {len(model.model.layers)} layers: "
        f"{seconds[-1]:.1f} s (the first {seconds[0]:.1f}), {format_bytes(meter.peak)}",
        flush=True,
    )
    return {
        "layers": n_layers,
        "first_seconds": seconds[0],
        "seconds": seconds[-1],
        "peak": meter.peak,
        "host_peak": meter.host_peak,
        "loss": loss,
    }


def whole_model(steps: list[dict[str, Any]], n_layers: int) -> dict[str, Any]:
    """Seconds of all layers: those of a step of all, or what two steps of some come
    to."""
    first = steps[0]
    last = steps[-1]
    if last["layers"] == n_layers:
        return {"seconds": last["seconds"], "extrapolated": False}
    if len(steps) == 1:
        return {}
    layer = (last["seconds"] - first["seconds"]) / (last["layers"] - first["layers"])
    seconds = last["seconds"] + (n_layers - last["layers"]) * layer
    print(
        f"{n_layers} layers: {seconds:.0f} s (extrapolated, {layer:.2f} s a layer)",
        flush=True,
    )
    return {"seconds": seconds, "seconds_a_layer": layer, "extrapolated": True}


def attention_bytes(options: argparse.Namespace) -> int:
    """Bytes of one attention, forward and backward, beyond its inputs, output and
    gradients."""
    shape = SHAPES[options.shape]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32

    def draw(heads: int) -> torch.Tensor:
        size = (1, heads, options.tokens, shape["head_dim"])
        return torch.randn(size, device=options.device, dtype=dtype)

    query = draw(shape["num_attention_heads"]).requires_grad_()
    key = draw(shape["num_key_value_heads"]).requires_grad_()
    value = draw(shape["num_key_value_heads"]).requires_grad_()
    grad_out = draw(shape["num_attention_heads"])
    input_bytes = query.nbytes + key.nbytes + value.nbytes
    out_bytes = grad_out.nbytes
    with Meter(options.device, input_bytes + out_bytes) as meter:
        out = qa.attention(
            query, key, value, is_causal=True, enable_gqa=True, budget=options.budget
        )
        out.backward(grad_out)
    # Inputs and their gradients, the output and its gradient.
    return meter.peak - 2 * input_bytes - 2 * out_bytes


def longest(options: argparse.Namespace) -> dict[str, Any]:
    """The longest text of each way, by a line through what two lengths take."""
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1, options.memory / total))
    rows = {}
    for way in options.ways.split(","):
        model = new_model(options.shape, options.rank, options.device)
        prepare(model, way, options, "host")
        n_layers = len(model.model.layers)
        count = n_layers
        if way in ON_HOST and options.layers:
            count = max(options.layers)
        with first_layers(model, count):
            reached = LongestText(model, way, options).find()
        row = f"{options.shape} {way} in {options.memory}"
        rows[row] = {"layers": count, "of_layers": n_layers, **reached}
        # Layers in tiles are a matter of GPUs.
        if way == "everything" and options.device == "cuda":
            in_tiles = (*SWITCHES, TILES)
            step_bytes = estimated_step(model, reached["tokens"], in_tiles, options)
            rows[row]["host_by_estimate"] = step_bytes.host_bytes
        del model
        free_memory(options.device)
    return rows


class LongestText:
    """Looks for the longest text that fits, one way.

    Attributes:
        points: tokens, peak and seconds of the steps that ran.
    """

    def __init__(self, model: Any, way: str, options: argparse.Namespace) -> None:
        self._model = model
        self._way = way
        self._options = options
        self._first = options.first * (options.longer if way in ON_HOST else 1)
        self.points: list[dict[str, Any]] = []

    def find(self) -> dict[str, Any]:
        """Follow the line through two lengths, and run the length that it comes to."""
        memory = self._options.memory
        self._measure_two_lengths()
        grain = max(8, min(self._first, self._options.first) // 8)
        tokens = self._reach(grain)
        fits = False
        while not fits and 2 * self._first < tokens <= self._options.most:
            try:
                self._measure(tokens)
            except OUT_OF_MEMORY:
                print(f"{WAYS[self._way]}: {tokens:,} tokens did not fit", flush=True)
                tokens = tokens * 19 // 20 // grain * grain
                continue
            fits = self.points[-1]["peak"] <= memory
            if not fits:
                tokens = min(self._reach(grain), tokens - grain)
        note = "" if fits else " by the line: not run"
        print(
            f"{WAYS[self._way]}: {tokens:,} tokens in {format_bytes(memory)}{note}",
            flush=True,
        )
        return {"points": self.points, "tokens": tokens, "ran": fits}

    def _measure_two_lengths(self) -> None:
        """Measure a length and its double, shorter ones where these do not fit."""
        while True:
            try:
                self._measure(self._first)
                self._measure(2 * self._first)
                return
            except OUT_OF_MEMORY:
                self.points.clear()
                self._first //= 2
                if self._first < MIN_TOKENS:
                    raise

    def _measure(self, tokens: int) -> None:
        # Here, not where an error is caught: a caught error still holds the step's
        # tensors, and blocks that stay cached would be in the next step's way.
        free_memory(self._options.device)
        meter, _ = measured_step(self._model, tokens, self._options.device)
        print(
            f"{WAYS[self._way]}: {tokens:,} tokens, {format_bytes(meter.peak)}",
            flush=True,
        )
        point = {
            "tokens": tokens,
            "peak": meter.peak,
            "host_peak": meter.host_peak,
            "seconds": meter.seconds,
        }
        self.points.append(point)

    def _reach(self, grain: int) -> int:
        """Tokens at which the line through the last two points reaches the memory."""
        before, last = self.points[-2:]
        more_bytes = last["peak"] - before["peak"]
        more_tokens = last["tokens"] - before["tokens"]
        bytes_left = self._options.memory - last["peak"]
        tokens_left = bytes_left / more_bytes * more_tokens
        tokens = int(last["tokens"] + tokens_left)
        return tokens // grain * grain


def free_memory(device: str) -> None:
    """Free what nothing refers to but itself, as a model that was changed in place."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def add_options(parser: argparse.ArgumentParser) -> None:
    default = "equal,long,longest"
    parser.add_argument("--only", default=default, help="parts")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--equal-at", type=parse_count, help="tokens of the comparison")
    parser.add_argument("--tokens", type=parse_count, help="tokens of the long step")
    parser.add_argument(
        "--steps", type=int, default=2, help="of long; the last is counted"
    )
    parser.add_argument("--layers", type=lambda s: [int(n) for n in s.split(",")])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of long")
    parser.add_argument("--budget", help="of an attention call, with what it returns")
    parser.add_argument("--tile", type=parse_count, help="tokens of an MLP at a time")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument(
        "--memory", type=parse_bytes, help="that the longest text may take"
    )
    parser.add_argument("--first", type=parse_count, help="shortest text of longest")
    parser.add_argument("--longer", type=int, help="times that, with everything")
    parser.add_argument("--ways", default=",".join(WAYS), help="of longest")
    parser.add_argument(
        "--most", type=parse_count, help="longest text that longest runs"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="a picture of longest, .png or .svg"
    )


def complete(options: argparse.Namespace) -> None:
    """Fill in the defaults for the device."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.memory and options.device == "cuda":
        options.memory = torch.cuda.get_device_properties(0).total_memory - CUDA_BYTES
    options.memory = options.memory or 256 << 20


PARTS = {"equal": equal, "long": long, "longest": longest, "estimate": estimate}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the parts that are asked for."""
    complete(options)
    print(
        f"{options.shape}'s shape, random weights, adapters of rank {options.rank}",
        flush=True,
    )
    if options.ranks > 1:
        yield on_ranks(long, options)
        return
    for name in options.only.split(","):
        rows = PARTS[name](options)
        yield rows
        free_memory(options.device)
        if name == "longest" and options.plot:
            from cases.step_picture import draw

            draw(rows, options)
