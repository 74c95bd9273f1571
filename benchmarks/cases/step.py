"""A step of ``examples/train_long.py``: as it comes, with attention recovered, with everything.

On a GPU the model has the published shape of Qwen3-8B, in bf16, and random weights; on a CPU a
small shape runs in a minute. Parts, --only chooses some:

equal: loss and gradients of one text through SDPA, through another of torch's kernels (how far two
right answers are apart), with attention recovered, and with everything that long_context does.

long: steps on a longer text with everything: seconds of the first and the last, device memory, and
what attention alone takes beyond q, k, v, o and their gradients. --layers 2,4 runs so many layers
of the model, with all weights in memory, and says of the whole model what the difference comes to:
extrapolated. --ranks 2 shards the text over two GPUs, each with all weights.

longest: the longest text that fits in --memory, each way: the line through the memory of two
lengths is followed, and the length found is run unless it is more than --most tokens. The remedies
are checkpoints in host memory and a chunked loss around SDPA. (Where checkpoints are in host memory
the device has the same to hold however many --layers run.)

told: the peaks of steps with everything, checkpoints in host memory, beside what ``estimate
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
from measure import ROOT, Watched, on_ranks, timed
from torch.nn.attention import SDPBackend, sdpa_kernel

import quorum_attention as qa
from quorum_attention.integrations.transformers import register, sharded_positions
from quorum_attention.recipes import Training, long_context, read_shape, step_memory
from quorum_attention.recipes.switches import SWITCHES
from quorum_attention.units import format_bytes, parse_bytes, parse_count

sys.path.insert(0, str(ROOT / "examples"))
from train_long import SHAPES, library, new_model

for name, (hidden, wide, layers, heads) in {
    "Qwen3-0.6B": (1024, 3072, 28, 16), "Qwen3-4B": (2560, 9728, 36, 32),
}.items():  # fmt: skip
    SHAPES[name] = SHAPES["Qwen3-8B"] | {
        "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": heads, "tie_word_embeddings": True,
    }  # fmt: skip

# By kind of device: shape, tokens of ``equal`` and ``long``, attention's budget, tokens of a tile
# of an MLP; and of ``longest`` the most tokens that it runs, those it begins with, and how many
# times as many with everything.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"shape": "Qwen3-8B", "equal_at": 32_768, "tokens": 262_144, "budget": "8GiB",
             "tile": 8192, "most": 32_768, "first": 4096, "longer": 32},
    "cpu": {"shape": "small", "equal_at": 512, "tokens": 2048, "budget": "16MiB", "tile": 256,
            "most": 4096, "first": 256, "longer": 8},
}  # fmt: skip
WAYS = {
    "sdpa": "SDPA, as it comes", "attention": "attention recovered",
    "remedies": "SDPA with the usual remedies", "everything": "everything",
}  # fmt: skip
OUT_OF_MEMORY = torch.OutOfMemoryError, qa.BudgetError
ON_HOST = "remedies", "everything"  # their checkpoints, where the longest text is looked for


def prepared(model: Any, way: str, options: argparse.Namespace, place: str = "auto") -> Any:
    """``model`` as it comes, or changed in place, with checkpoints in that place."""
    if way == "attention":
        off = {"mlp_tile": None, "chunked_loss": False, "fused_norms": False, "checkpoints": None}
        long_context(model, budget=options.budget, **off)
    if way == "remedies":
        long_context(model, attention=False, mlp_tile=None, fused_norms=False, checkpoints=place)
    if way == "everything":
        if dist.is_initialized():
            model.set_attn_implementation(register(group=dist.group.WORLD))
            sharded_positions(model)
        done = long_context(model, budget=options.budget, mlp_tile=options.tile, checkpoints=place)
        print(done, flush=True)
    return model


def step(model: Any, ids: torch.Tensor) -> float:
    """Forward and backward; gradients are left in the adapters."""
    model.zero_grad(set_to_none=True)
    if not dist.is_initialized():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.detach())
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    ids, labels = (t.chunk(dist.get_world_size(), 1)[dist.get_rank()] for t in (ids, shifted))
    tokens = ids.shape[1] * dist.get_world_size() - 1
    loss = model(input_ids=ids, labels=ids, shift_labels=labels, num_items_in_batch=tokens).loss
    loss.backward()
    loss = loss.detach()
    for total in (loss, *(p.grad for p in model.parameters() if p.grad is not None)):
        dist.all_reduce(total)
    return float(loss)


def told(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Peaks, measured and estimated."""
    rows: list[dict[str, Any]] = []
    for name in [name for name in SHAPES if (name == "small") == (options.device == "cpu")]:
        model = new_model(name, options.rank, options.device)
        long_context(model, budget=options.budget, mlp_tile=options.tile, checkpoints="host")
        shape, weights = read_shape(model.config.to_dict()), weight_bytes(model)
        for tokens in (options.first << power for power in range(5)):
            ids = library(tokens, options.device)
            with Watched(options.device, weights) as watched:
                step(model, ids)
            training = Training(
                tokens, dtype=model.dtype, optimizer="none", lora=options.rank, on=SWITCHES,
                budget=parse_bytes(options.budget), device=options.device,
            )  # fmt: skip
            said = step_memory(shape, training).peak_bytes
            rows.append({"shape": name, "tokens": tokens, "peak": watched.peak, "told": said})
            print(f"{name}, {tokens:,} tokens: {format_bytes(watched.peak)}, estimate "
                  f"{format_bytes(said)}: {said / watched.peak:.2f}", flush=True)  # fmt: skip
        del model
        emptied(options.device)
    return rows


def weight_bytes(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters())


def gradients(model: Any) -> torch.Tensor:
    """Of all adapters, in one row, float32."""
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def equal(options: argparse.Namespace) -> dict[str, Any]:
    """Loss and gradients, each way, of one text: distances from SDPA's."""
    model = new_model(options.shape, options.rank, options.device)
    ids = library(options.equal_at, options.device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    other = SDPBackend.CUDNN_ATTENTION if options.device == "cuda" else SDPBackend.MATH
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = step(model, ids)
    wanted = gradients(model)
    size = wanted.norm()
    rows: list[dict[str, Any]] = []

    def held_against(name: str) -> None:
        took, found = timed(lambda: step(model, ids))
        far = ((gradients(model) - wanted).norm() / size).item()
        off = abs(found - loss) / loss
        rows.append({"what": name, "loss": found, "loss_off": off, "gradients_off": far,
                     "seconds": took})  # fmt: skip
        said = f"loss {found:.6f}, gradients {far:.2e} from SDPA's, {took:.1f} s"
        print(f"{name}: {said}", flush=True)

    print(f"{options.equal_at:,} tokens; SDPA (flash): loss {loss:.6f}", flush=True)
    with sdpa_kernel(other):
        held_against(f"SDPA ({other.name.lower()})")
    model.set_attn_implementation(register(budget=options.budget))
    held_against(WAYS["attention"])
    prepared(model, "everything", options)
    held_against(WAYS["everything"])
    # As near as two of torch's kernels are to each other, or a few roundings of a loss summed in
    # another order.
    room = max(2 * rows[0]["gradients_off"], 1e-5 if options.device == "cpu" else 1e-2)
    agree = all(row["gradients_off"] <= room for row in rows[1:])
    print("equal" if agree else "NOT EQUAL", flush=True)
    return {"tokens": options.equal_at, "layers": len(model.model.layers), "loss": loss,
            "ways": rows, "room": room, "equal": agree}  # fmt: skip


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """The model with its first layers alone; the others stay in memory."""
    every = model.model.layers
    model.model.layers = every[:count]
    model.config.num_hidden_layers = count
    try:
        yield
    finally:
        model.model.layers = every
        model.config.num_hidden_layers = len(every)


def long(options: argparse.Namespace) -> dict[str, Any]:
    """A step of everything on a long text: seconds and memory, of some layers or of all."""
    model = new_model(options.shape, options.rank, options.device)
    prepared(model, "everything", options)
    ids, every = library(options.tokens, options.device), len(model.model.layers)
    rows: list[dict[str, Any]] = []
    counts, weights = options.layers or [every], weight_bytes(model)
    with first_layers(model, 1):
        step(model, ids)  # kernels are compiled; the first step of all layers locks host memory
    for count in counts:
        seconds = []
        with first_layers(model, count):
            for _ in range(options.steps):
                with Watched(options.device, weights) as watched:
                    loss = step(model, ids)
                seconds.append(watched.seconds)
        rows.append({"layers": count, "first_seconds": seconds[0], "seconds": seconds[-1],
                     "peak": watched.peak, "loss": loss})  # fmt: skip
        print(f"{options.tokens:,} tokens, {count} of {every} layers: {seconds[-1]:.1f} s (the "
              f"first {seconds[0]:.1f}), {format_bytes(watched.peak)}", flush=True)  # fmt: skip
    found: dict[str, Any] = {"tokens": options.tokens, "of_layers": every, "steps": rows}
    last = rows[-1]
    if last["layers"] == every:
        found |= {"seconds": last["seconds"], "extrapolated": False}
    elif len(rows) > 1:
        a_layer = (last["seconds"] - rows[0]["seconds"]) / (last["layers"] - rows[0]["layers"])
        whole = last["seconds"] + (every - last["layers"]) * a_layer
        found |= {"seconds": whole, "seconds_a_layer": a_layer, "extrapolated": True}
        print(f"{every} layers: {whole:.0f} s (extrapolated, {a_layer:.2f} s a layer)", flush=True)
    del model
    if dist.is_initialized():
        return found
    found["attention_bytes"] = attention_alone(options)
    print(f"attention takes {format_bytes(found['attention_bytes'])} beyond q, k, v, o and their "
          "gradients", flush=True)  # fmt: skip
    return found


def attention_alone(options: argparse.Namespace) -> int:
    """Bytes of one attention, forward and backward, beyond its inputs, output and gradients."""
    shape = SHAPES[options.shape]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    q, k, v, grad = (
        torch.randn(1, h, options.tokens, shape["head_dim"], device=options.device, dtype=dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    inputs = sum(t.nbytes for t in (q, k, v, grad))
    with Watched(options.device, inputs) as watched:
        out = qa.attention(q, k, v, is_causal=True, enable_gqa=True, budget=options.budget)
        out.backward(grad)
    # The output, and the gradients of q, k and v.
    return watched.peak - inputs - q.nbytes - sum(t.nbytes for t in (q, k, v))


def longest(options: argparse.Namespace) -> dict[str, Any]:
    """The longest text of each way, by a line through what two lengths take."""
    found = {}
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1, options.memory / total))
    for way in options.ways.split(","):
        model = new_model(options.shape, options.rank, options.device)
        prepared(model, way, options, "host")
        weights, count = weight_bytes(model), len(model.model.layers)
        if way in ON_HOST and options.layers:
            count = max(options.layers)
        with first_layers(model, count):
            found[way] = {"layers": count, **followed(model, way, weights, options)}
        del model
        emptied(options.device)
    return {"memory": options.memory, "ways": found}


def reach(points: list[dict[str, Any]], memory: int, grain: int) -> int:
    """Tokens at which the line through the last two points reaches ``memory``."""
    a, b = points[-2:]
    slope = (b["peak"] - a["peak"]) / (b["tokens"] - a["tokens"])
    return int(b["tokens"] + (memory - b["peak"]) / slope) // grain * grain


def followed(model: Any, way: str, weights: int, options: argparse.Namespace) -> dict[str, Any]:
    """The memory of two lengths, and what the line through them comes to."""

    def point(tokens: int) -> dict[str, Any]:
        ids = library(tokens, options.device)
        with Watched(options.device, weights) as watched:
            step(model, ids)
        print(f"{WAYS[way]}: {tokens:,} tokens, {format_bytes(watched.peak)}", flush=True)
        return {"tokens": tokens, "peak": watched.peak, "seconds": watched.seconds}

    first = options.first * (options.longer if way in ON_HOST else 1)
    points: list[dict[str, Any]] = []
    while not points:
        try:
            points = [point(first), point(2 * first)]
        except OUT_OF_MEMORY:
            first //= 2
            if first < 64:
                raise
    grain = max(8, min(first, options.first) // 8)
    best, ran = reach(points, options.memory, grain), False
    while not ran and 2 * first < best <= options.most:
        try:
            points.append(point(best))
        except OUT_OF_MEMORY:
            print(f"{WAYS[way]}: {best:,} tokens did not fit", flush=True)
            best = best * 19 // 20 // grain * grain
            continue
        ran = points[-1]["peak"] <= options.memory
        if not ran:
            best = min(reach(points, options.memory, grain), best - grain)
    print(f"{WAYS[way]}: {best:,} tokens in {format_bytes(options.memory)}"
          f"{'' if ran else ' by the line: not run'}", flush=True)  # fmt: skip
    return {"points": points, "tokens": best, "ran": ran}


def plot(found: dict[str, Any], path: str) -> None:
    """Length against memory, for the three ways."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    (axes, clock), memory = figure.subplots(1, 2), found["longest"]["memory"] / 2**30
    for way, one in found["longest"]["ways"].items():
        points = sorted((point["tokens"], point["peak"] / 2**30) for point in one["points"])
        timed = sorted((p["tokens"], p["seconds"] / one["layers"]) for p in one["points"]
                       if "seconds" in p)  # fmt: skip
        # The first two lie on each other: one is broad.
        broad = {"linewidth": 6, "alpha": 0.4} if way == "sdpa" else {"linewidth": 1.5}
        drawn = axes.plot(*zip(*points, strict=True), "o-", label=WAYS[way], **broad)
        clock.plot(*zip(*timed, strict=True), "o-", **broad)
        if one["tokens"] > points[-1][0]:
            ends = zip(points[-1], (one["tokens"], memory), strict=True)
            axes.plot(*ends, ":", color=drawn[0].get_color())
        if way != "attention":
            side = "right" if way == "remedies" else "center"
            axes.annotate(f"{one['tokens']:,}", (one["tokens"], memory * 1.05), ha=side)
    axes.axhline(memory, color="black", linewidth=0.8)
    for part in (axes, clock):
        part.set_xscale("log", base=2)
        part.set_yscale("log", base=2)
        part.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
        part.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
    clock.set(xlabel="tokens of one text", ylabel="seconds of a step, by layer")
    title = f"{found['shape']}'s shape, random weights (dotted: by the line, not run)"
    axes.set(ylim=(None, memory * 1.5), xlabel="tokens of one text",
             ylabel="memory of a step, GiB", title=title)  # fmt: skip
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=150)


def emptied(device: str) -> None:
    """Let go of what nobody holds: a model that was changed in place refers to itself."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def add_options(parser: argparse.ArgumentParser) -> None:
    default = "equal,long,longest"
    parser.add_argument("--only", default=default, help="parts; none draws what --json has")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--equal-at", type=parse_count, help="tokens of the comparison")
    parser.add_argument("--tokens", type=parse_count, help="tokens of the long step")
    parser.add_argument("--steps", type=int, default=2, help="of long; the last is counted")
    parser.add_argument("--layers", type=lambda s: [int(n) for n in s.split(",")])
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of long")
    parser.add_argument("--budget", help="of an attention call, with what it returns")
    parser.add_argument("--tile", type=parse_count, help="tokens of an MLP at a time")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--memory", type=parse_bytes, help="that the longest text may take")
    parser.add_argument("--first", type=parse_count, help="shortest text of longest")
    parser.add_argument("--longer", type=int, help="times that, with everything")
    parser.add_argument("--ways", default=",".join(WAYS), help="of longest")
    parser.add_argument("--most", type=parse_count, help="longest text that longest runs")
    parser.add_argument("--plot", metavar="FILE", help="a picture, .png or .svg")


def complete(options: argparse.Namespace) -> None:
    """Defaults for the device."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.memory and options.device == "cuda":
        # All but what CUDA itself needs.
        options.memory = torch.cuda.get_device_properties(0).total_memory - (3 << 30)
    options.memory = options.memory or 256 << 20


def run(options: argparse.Namespace, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts that are asked for; ``found`` has what earlier ones found."""
    complete(options)
    print(f"{options.shape}'s shape, random weights, adapters of rank {options.rank}", flush=True)
    if options.ranks > 1:
        yield found | {"shape": options.shape, f"long_{options.ranks}": on_ranks(long, options)}
        return
    for part in (equal, long, longest, told):
        if part.__name__ in options.only.split(","):
            found |= {"shape": options.shape, part.__name__: part(options)}
            yield found
            emptied(options.device)
    if options.plot and "longest" in found:
        plot(found, options.plot)
