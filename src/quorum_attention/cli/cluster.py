"""``plan --devices``: what devices would do together, also ones that are not here."""

from __future__ import annotations

import argparse
import re
from typing import Any

from quorum_attention.cli import masks
from quorum_attention.cli.output import print_json, say
from quorum_attention.devices.partition import Sizes
from quorum_attention.devices.report import PoolPass
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
        count, name, speed = match.groups()
        known = SPEEDS.get(name.upper())
        if speed is None and known is None:
            raise argparse.ArgumentTypeError(
                f"the speed of {name!r} is not known ({', '.join(SPEEDS)} are): write "
                f"{name}:SPEED, relative to an H200"
            )
        try:
            factor = float(speed) if speed is not None else float(known or 0.0)
        except ValueError:
            factor = 0.0
        if not 0 < factor < 1000:
            raise argparse.ArgumentTypeError(f"{entry!r} has no speed above 0")
        if not 1 <= int(count or 1) <= 4096:
            raise argparse.ArgumentTypeError(f"{entry!r} must be 1 to 4096 devices")
        found += [(name, factor)] * int(count or 1)
    return found


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument(
        "--devices", type=devices_of, metavar="LIST",
        help="what several devices would do together, e.g. 8xH200,4xA100 or 2xNAME:SPEED "
        "(default: one device)",
    )  # fmt: skip


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
    kv_heads = sizes["kv_heads"] or sizes["heads"]
    of = Sizes(
        sizes["batch"], sizes["heads"], kv_heads, options.tokens, options.tokens, sizes["is_causal"]
    )
    ran = {
        "forward": _simulated(of, devices, options, sizes, backward=False),
        "backward": _simulated(of, devices, options, sizes, backward=True),
    }
    if options.draw is not None:
        from quorum_attention.pictures.gantt import draw_gantt

        draw_gantt(
            options.draw,
            {
                name: (found.devices, [(r.device, r.index, r.start, r.stop) for r in found.ran])
                for name, found in ran.items()
            },
        )
    total = sum(speed for _, speed in devices)
    shares = {
        name: sum(r.stop - r.start for r in found.ran) / len(devices) / found.seconds
        for name, found in ran.items()
    }
    if options.json:
        print_json(
            {
                "devices": [{"name": name, "speed": speed} for name, speed in devices],
                "of_one_h200": total,
                "passes": {
                    name: {"seconds": found.seconds, "parts": found.parts, "busy": shares[name]}
                    for name, found in ran.items()
                },
            }
        )
        return 0
    for name, found in ran.items():
        say(
            f"{name}: {format_seconds(found.seconds)}, {found.parts} parts, devices busy "
            f"{shares[name]:.1%} of the time"
        )
    say(
        f"Predicted, not measured: {len(devices)} devices with the speed of {total:g} H200s, whose "
        "assumed rates were measured; other speeds are published ones or yours. Each device has "
        "the budget for itself, and all of them reach inputs and results at full speed."
    )
    if options.draw is not None:
        say(f"picture: {options.draw}")
    return 0


def _simulated(
    of: Sizes,
    devices: list[tuple[str, float]],
    options: argparse.Namespace,
    sizes: dict[str, Any],
    backward: bool,
) -> PoolPass:
    own = {"heads", "kv_heads", "batch", "is_causal", "n_keys"}
    call = {name: value for name, value in sizes.items() if name not in own} | {"device": "cuda"}
    return simulate(of, devices, predicted(of, backward=backward, **call))


__all__ = ["SPEEDS", "add_to", "devices_of", "run"]
