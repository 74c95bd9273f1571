"""``plan`` and ``estimate``: what a call would do, without doing it."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import console, print_json
from quorum_attention.planner import Plan, estimate, plan
from quorum_attention.sizes import format_bytes


def add_to(commands: Any) -> None:
    """Add the command ``plan``."""
    parser = commands.add_parser("plan", help="describe and draw a plan", description=__doc__)
    _add_common(parser)
    parser.add_argument(
        "--levels", type=shared.levels_of, help="chunk counts, e.g. 7 or 7,7; none is monolithic"
    )
    parser.add_argument("--layout", choices=["aligned", "balanced"], default="aligned")
    parser.add_argument("--backward", action="store_true", help="plan the backward pass")
    parser.add_argument("--census", action="store_true", help="count tiles by verdict")
    parser.add_argument("--draw", metavar="FILE", help="write a picture of the coverage")
    parser.set_defaults(run=_plan)


class Estimate:
    """The command ``estimate``."""

    @staticmethod
    def add_to(commands: Any) -> None:
        """Add it."""
        parser = commands.add_parser(
            "estimate",
            help="does a call fit, which plan would it run, alternatives",
            description=__doc__,
        )
        _add_common(parser)
        parser.set_defaults(run=_estimate)


def _add_common(parser: argparse.ArgumentParser) -> None:
    shared.add_sizes(parser, tokens_required=True)
    parser.add_argument("--batch", type=shared.count_of, default=1)
    shared.add_budget(parser, "device memory, e.g. 2GiB (default: what is free)")
    parser.add_argument("--device", help="cuda or cpu, also one that is not here")
    parser.add_argument("--kernel", default="auto", help="inner kernel (default: auto)")
    shared.add_json(parser)


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "heads": options.heads or 8,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "batch": options.batch,
        "dtype": options.dtype or torch.float16,
        "is_causal": options.causal,
        "budget": options.budget,
        "device": options.device,
        "kernel": options.kernel,
    }


def summary(made: Plan) -> dict[str, Any]:
    """A plan in plain types."""
    schedule = made.schedule
    return {
        "levels": made.levels,
        "layout": made.decomposition.layout,
        "n_tasks": made.n_tasks,
        "max_task_tokens": made.schedule.largest_task,
        "n_groups": made.n_groups,
        "heads_per_group": schedule.group.kv_heads * made.work.queries_per_key_head,
        "n_cap": schedule.n_cap,
        "accumulator": schedule.accumulator,
        "kernel": made.kernel,
        "peak_bytes": made.peak_bytes,
        "predicted_seconds": made.predicted_seconds,
        "backward": made.backward,
    }


def _plan(options: argparse.Namespace) -> int:
    made = plan(
        options.tokens,
        levels=options.levels,
        layout=options.layout,
        backward=options.backward,
        **_sizes(options),
    )
    result = summary(made)
    if options.census:
        census = made.census()
        result["census"] = {
            "masked": census.masked,
            "clear": census.clear,
            "mixed": census.mixed,
            "tiles": census.tiles,
        }
    if options.draw:
        made.draw(options.draw)
        result["picture"] = options.draw
    if options.json:
        print_json(result)
        return 0
    out = console()
    out.print(made.describe(), highlight=False)
    if options.census:
        found = result["census"]
        shares = " / ".join(f"{100 * found[k]:.2f}" for k in ("masked", "clear", "mixed"))
        out.print(f"tiles of 128 x 128: {shares} % masked / clear / mixed", highlight=False)
    if options.draw:
        out.print(f"picture: {options.draw}", highlight=False)
    return 0


def _estimate(options: argparse.Namespace) -> int:
    found = estimate(options.tokens, **_sizes(options))
    if options.json:
        print_json(
            {
                "budget_bytes": found.budget_bytes,
                "fits_monolithic": found.fits_monolithic,
                "monolithic_bytes": found.monolithic_bytes,
                "forward": summary(found.forward),
                "backward": summary(found.backward),
                "alternatives": [summary(other) for other in found.alternatives],
            }
        )
        return 0
    out = console()
    if found.budget_bytes is not None:
        out.print(f"budget: {format_bytes(found.budget_bytes)}", highlight=False)
    out.print(found.describe(), highlight=False)
    return 0
