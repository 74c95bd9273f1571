"""``plan``: how a call would be cut and run. Nothing is computed."""

from __future__ import annotations

import argparse
import re
from typing import Any

from quorum_attention.cli import masks
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say
from quorum_attention.devices.simulation import simulate
from quorum_attention.devices.speeds import SPEEDS
from quorum_attention.execution.device.lookup import best_device, named_device
from quorum_attention.pictures import check_drawable, draw_gantt
from quorum_attention.plain_types import JsonObject, Keywords
from quorum_attention.planner import Plan, plan
from quorum_attention.units import counted, format_seconds

_ENTRY = re.compile(
    r"(?:([1-9]\d{0,3})x)?([A-Za-z][A-Za-z0-9-]*)(?::([0-9]+[.]?[0-9]*))?"
)


def devices_of(text: str) -> list[tuple[str, float]]:
    """Names and speeds from "8xH200,4xA100" or "2xH200,1xMINE:0.5".

    Raises:
        argparse.ArgumentTypeError: the text is no such list.
    """
    devices: list[tuple[str, float]] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise argparse.ArgumentTypeError(
                f"{entry!r} is no entry such as 8xH200 or 2xNAME:SPEED"
            )
        count, name, speed_text = match.groups()
        speed = float(speed_text or SPEEDS.get(name.upper(), 0.0))
        if not 0 < speed < 1000:
            raise argparse.ArgumentTypeError(
                f"{entry!r} has no speed above 0 (those of {', '.join(SPEEDS)} are "
                f"known): write {name}:SPEED, relative to an H200"
            )
        devices += [(name, speed)] * int(count or 1)
    return devices


def add_to(commands: Any) -> None:
    """Add the command ``plan``."""
    parser = shared.add_command(
        commands, "plan", "show how a call would be run", __doc__, _run
    )
    add_call(parser)
    shared.add(
        parser,
        (
            "--levels",
            shared.levels_of,
            "chunk counts, e.g. 7 or 7,7; none: uncut (default: the planner's choice)",
        ),
        (
            "--layout",
            ("aligned", "balanced"),
            "chunks of whole tiles, or of equal size",
            "aligned",
        ),
        ("--backward", None, "plan the backward (default: the forward)"),
        (
            "--census",
            None,
            "shares of tiles that are left out, computed whole, or in part",
        ),
        (
            "--draw FILE",
            str,
            "write a picture of which task computes which pairs (.png, .svg)",
        ),
        (
            "--devices LIST",
            devices_of,
            "simulate several devices, e.g. 8xH200,4xA100 or 2xNAME:SPEED (default: "
            "one device)",
        ),
    )


def add_call(parser: argparse.ArgumentParser, *, needs_tokens: bool = True) -> None:
    """Add the options that say what a call is."""
    parser.add_argument(
        "--tokens",
        type=shared.count_of,
        required=needs_tokens,
        metavar="N",
        help=shared.TOKENS,
    )
    shared.add(parser, shared.HEADS, shared.KV_HEADS, shared.HEAD_DIM, shared.DTYPE)
    masks.add_to(parser, files=False)
    shared.add(
        parser,
        ("--batch", shared.count_of, "sequences in the batch", 1),
        (
            "--budget",
            shared.bytes_of,
            "device memory, e.g. 2GiB (default: what is free)",
        ),
        (
            "--device",
            str,
            "cuda or cpu; need not be present (default: a GPU if there is one)",
        ),
        shared.KERNEL,
        shared.JSON,
    )
    parser.epilog = shared.GLOSSARY


def sizes_of(options: argparse.Namespace) -> Keywords:
    """Arguments of ``plan`` and ``estimate``."""
    mask, is_causal, _ = masks.mask_of(options)
    device = named_device(options.device or best_device(), "device").type
    return {
        "heads": options.heads or 8,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "batch": options.batch,
        "dtype": options.dtype or shared.default_dtype(device),
        "is_causal": is_causal,
        "attn_mask": mask,
        "budget": options.budget,
        "device": options.device,
        "kernel": options.kernel,
    }


def summary(plan: Plan) -> JsonObject:
    """A plan in plain types."""
    schedule = plan.schedule
    return {
        "kept": plan.mask_words or "all pairs",
        "layout": plan.decomposition.layout,
        "max_task_tokens": schedule.largest_task,
        "heads_per_group": schedule.group.kv_heads * plan.shape.queries_per_key_head,
        "n_cap": schedule.route.n_cap,
        "accumulator": schedule.route.accumulator,
        "levels": plan.levels,
        "n_tasks": plan.n_tasks,
        "n_groups": plan.n_groups,
        "kernel": plan.kernel,
        "backward": plan.backward,
        "peak_bytes": plan.peak_bytes,
        "predicted_seconds": plan.predicted_seconds,
    }


def _run(options: argparse.Namespace) -> int:
    if options.draw is not None:
        check_drawable(options.draw)
    plan_call = _plan_one_device if options.devices is None else _simulate_devices
    result, sentences = plan_call(options)
    if options.draw is not None:
        result["picture"] = options.draw
        sentences.append(f"picture: {options.draw}")
    if options.json:
        print_json(result)
    else:
        say("\n".join(sentences))
    return 0


def _plan_one_device(options: argparse.Namespace) -> tuple[JsonObject, list[str]]:
    """The plan for one device, as data and as sentences."""
    call_plan = plan(
        options.tokens,
        levels=options.levels,
        layout=options.layout,
        backward=options.backward,
        **sizes_of(options),
    )
    result = {"is_causal": options.causal, **summary(call_plan)}
    sentences = [call_plan.describe()]
    if options.census:
        census = call_plan.census()
        shares = {"masked": census.masked, "clear": census.clear, "mixed": census.mixed}
        result["census"] = {**shares, "tiles": census.tiles}
        percentages = " / ".join(f"{100 * share:.2f}" for share in shares.values())
        sentences.append(f"tiles of 128 x 128: {percentages} % masked / clear / mixed")
    if options.draw is not None:
        call_plan.draw(options.draw)
    return result, sentences


def _simulate_devices(options: argparse.Namespace) -> tuple[JsonObject, list[str]]:
    """The seconds of each pass on several devices, as data and as sentences.

    Raises:
        ValueError: an option of a plan for one device was given as well.
    """
    sizes = sizes_of(options) | {"device": "cuda"}
    if options.device == "cuda":
        options.device = None
    of_one_device = ("levels", "layout", "backward", "census", "device")
    shared.refuse(
        options, "does not go with --devices", *of_one_device, *masks.WITHOUT_FILES
    )
    devices: list[tuple[str, float]] = options.devices
    passes = {}
    simulations = {}
    sentences = []
    for name in ("forward", "backward"):
        call_plan = plan(options.tokens, backward=name == "backward", **sizes)
        simulation = simulate(call_plan.shape, devices, call_plan.predicted_seconds)
        simulations[name] = simulation
        busy_seconds = sum(part.stop - part.start for part in simulation.ran)
        busy = busy_seconds / len(devices) / simulation.seconds
        passes[name] = {
            "seconds": simulation.seconds,
            "parts": simulation.parts,
            "busy": busy,
        }
        sentences.append(
            f"{name}: {format_seconds(simulation.seconds)}, "
            f"{counted(simulation.parts, 'part')}, devices busy {busy:.1%} of the time"
        )
    if options.draw is not None:
        draw_gantt(options.draw, simulations)
    total_speed = sum(speed for _, speed in devices)
    sentences.append(
        f"Predicted, not measured: {counted(len(devices), 'device')}, together as fast "
        f"as {total_speed:g} H200s. The H200's rates were measured; other speeds are "
        "published ones, or yours. Each device has the whole budget, and reaches "
        "inputs and results at full speed."
    )
    entries = [{"name": name, "speed": speed} for name, speed in devices]
    return {"devices": entries, "of_one_h200": total_speed, "passes": passes}, sentences
