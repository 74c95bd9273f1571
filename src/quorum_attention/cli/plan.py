"""``plan`` and ``estimate``: what a call would do, without doing it."""

from __future__ import annotations

import argparse
from typing import Any

from quorum_attention.cli import cluster, masks, model
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say
from quorum_attention.execution.device.lookup import best_device, named_device
from quorum_attention.pictures import check_drawable
from quorum_attention.planner import Plan, estimate, plan
from quorum_attention.sizes import format_bytes


def add_to(commands: Any) -> None:
    """Add the command ``plan``."""
    parser = shared.add_command(commands, "plan", "describe and draw a plan", __doc__)
    _add_common(parser)
    parser.add_argument(
        "--levels", type=shared.levels_of,
        help="chunk counts, e.g. 7 or 7,7; none is monolithic (default: the planner's choice)",
    )  # fmt: skip
    parser.add_argument(
        "--layout", choices=["aligned", "balanced"], default="aligned",
        help="chunks of whole tiles, or as equal as can be",
    )  # fmt: skip
    parser.add_argument("--backward", action="store_true", help="plan the backward pass")
    parser.add_argument("--census", action="store_true", help="count tiles by verdict")
    shared.add_draw(parser, "the coverage")
    cluster.add_to(parser)
    parser.set_defaults(run=_plan)


class Estimate:
    """The command ``estimate``."""

    @staticmethod
    def add_to(commands: Any) -> None:
        """Add it."""
        parser = shared.add_command(
            commands, "estimate", "does a call fit, which plan would it run, alternatives", __doc__
        )
        _add_common(parser)
        model.add_to(parser)
        parser.set_defaults(run=_estimate)


def _add_common(parser: argparse.ArgumentParser) -> None:
    shared.add_sizes(parser, tokens_required=True, causal=False)
    masks.add_to(parser, files=False)
    parser.add_argument("--batch", type=shared.count_of, default=1, metavar="N", help="sequences")
    shared.add_budget(parser, "device memory, e.g. 2GiB (default: what is free)")
    parser.add_argument(
        "--device", help="cuda or cpu, also one that is not here (default: the best that is)"
    )
    parser.add_argument("--kernel", default="auto", help="inner kernel")
    shared.add_json(parser)
    shared.add_glossary(parser)


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
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


def summary(made: Plan) -> dict[str, Any]:
    """A plan in plain types."""
    schedule = made.schedule
    return {
        "kept": made.kept or "all pairs",
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
    if options.draw is not None:
        check_drawable(options.draw)
    if options.devices is not None:
        return cluster.run(options, _sizes(options))
    made = plan(
        options.tokens,
        levels=options.levels,
        layout=options.layout,
        backward=options.backward,
        **_sizes(options),
    )
    result = {"is_causal": options.causal, **summary(made)}
    if options.census:
        census = made.census()
        result["census"] = {
            "masked": census.masked,
            "clear": census.clear,
            "mixed": census.mixed,
            "tiles": census.tiles,
        }
    if options.draw is not None:
        made.draw(options.draw)
        result["picture"] = options.draw
    if options.json:
        print_json(result)
        return 0
    say(made.describe())
    if options.census:
        found = result["census"]
        shares = " / ".join(f"{100 * found[k]:.2f}" for k in ("masked", "clear", "mixed"))
        say(f"tiles of 128 x 128: {shares} % masked / clear / mixed")
    if options.draw is not None:
        say(f"picture: {options.draw}")
    return 0


def _estimate(options: argparse.Namespace) -> int:
    if options.model is not None:
        return model.run(options)
    if options.memory is not None or options.lora is not None:
        raise ValueError("--memory and --lora are for a model's step: give --model CONFIG.json too")
    found = estimate(options.tokens, **_sizes(options))
    if options.json:
        print_json(
            {
                "is_causal": options.causal,
                "budget_bytes": found.budget_bytes,
                "fits_monolithic": found.fits_monolithic,
                "monolithic_bytes": found.monolithic_bytes,
                "forward": summary(found.forward),
                "backward": summary(found.backward),
                "alternatives": [summary(other) for other in found.alternatives],
            }
        )
        return 0
    if found.budget_bytes is not None:
        say(f"budget: {format_bytes(found.budget_bytes)}")
    say(found.describe())
    return 0
