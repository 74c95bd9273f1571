"""``plan --devices``: what devices would do together, also ones that are not here."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from typing import Any

from quorum_attention.call.block import WholeCall
from quorum_attention.cli import masks
from quorum_attention.cli.output import print_json, say
from quorum_attention.devices.simulate import SPEEDS, predicted, simulate
from quorum_attention.sizes import format_seconds

_ENTRY = re.compile(r"(?:(\d+)x)?([A-Za-z][A-Za-z0-9-]*)(?::([0-9.]+))?")


def devices_of(text: str) -> list[tuple[str, float]]:
    """Names and speeds from "8xH200,4xA100" or "2xH200,1xMINE:0.5".

    Raises:
        argparse.ArgumentTypeError: it is no such list.
    """
    found: list[tuple[str, float]] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise argparse.ArgumentTypeError(
                f"{entry!r} is no entry such as 8xH200 or 2xNAME:SPEED"
            )
        count, name, said = match.groups()
        if said is None and name.upper() not in SPEEDS:
            raise argparse.ArgumentTypeError(
                f"the speed of {name!r} is not known ({', '.join(SPEEDS)} are): write "
                f"{name}:SPEED, relative to an H200"
            )
        speed = SPEEDS[name.upper()] if said is None else 0.0
        with suppress(ValueError):  # of several points
            speed = speed if said is None else float(said)
        if not 0 < speed < 1000:
            raise argparse.ArgumentTypeError(f"{entry!r} has no speed above 0")
        if not 1 <= int(count or 1) <= 4096:
            raise argparse.ArgumentTypeError(f"{entry!r} must be 1 to 4096 devices")
        found += [(name, speed)] * int(count or 1)
    return found


def run(options: argparse.Namespace, sizes: dict[str, Any]) -> int:
    """Say how long each pass would take, and draw it if asked to.

    Raises:
        ValueError: an option of a plan for one device was given as well.
    """
    usual = {"levels": (None,), "layout": ("aligned",), "backward": (False,), "census": (False,)}
    for name, values in {**usual, "device": (None, "cuda")}.items():
        if getattr(options, name) not in values:
            raise ValueError(f"--{name} does not go with --devices")
    masks.refuse(options, "--devices")
    devices: list[tuple[str, float]] = options.devices
    tokens, heads = options.tokens, sizes["heads"]
    batch, kv_heads = (sizes["batch"],), sizes["kv_heads"] or heads
    of = WholeCall(batch, heads, kv_heads, tokens, tokens, is_causal=sizes["is_causal"])
    own = {"heads", "kv_heads", "batch", "is_causal"}
    call = {name: value for name, value in sizes.items() if name not in own} | {"device": "cuda"}
    ran = {
        name: simulate(of, devices, predicted(of, backward=name == "backward", **call))
        for name in ("forward", "backward")
    }
    if options.draw is not None:
        from quorum_attention.pictures import draw_gantt

        draw_gantt(
            options.draw,
            {
                name: (found.devices, [(r.device, r.index, r.start, r.stop) for r in found.ran])
                for name, found in ran.items()
            },
        )
    total = sum(speed for _, speed in devices)
    passes = {}
    for name, found in ran.items():
        busy = sum(r.stop - r.start for r in found.ran) / len(devices) / found.seconds
        passes[name] = {"seconds": found.seconds, "parts": found.parts, "busy": busy}
    if options.json:
        named = [{"name": name, "speed": speed} for name, speed in devices]
        print_json({"devices": named, "of_one_h200": total, "passes": passes})
        return 0
    for name, made in passes.items():
        say(
            f"{name}: {format_seconds(made['seconds'])}, {made['parts']} parts, devices busy "
            f"{made['busy']:.1%} of the time"
        )
    say(
        f"Predicted, not measured: {len(devices)} devices with the speed of {total:g} H200s, whose "
        "assumed rates were measured; other speeds are published ones or yours. Each device has "
        "the budget for itself, and all of them reach inputs and results at full speed."
    )
    if options.draw is not None:
        say(f"picture: {options.draw}")
    return 0


__all__ = ["SPEEDS", "devices_of", "run"]
