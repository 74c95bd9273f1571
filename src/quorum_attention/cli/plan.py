"""``plan`` and ``estimate``: what a call would do, without doing it."""

from __future__ import annotations

import argparse
from typing import Any

from quorum_attention.cli import masks, model, plan_devices
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
    shared.add(
        parser,
        ("--levels", shared.levels_of, "chunk counts, e.g. 7 or 7,7; none is monolithic (default: "
         "the planner's choice)"),
        ("--layout", ("aligned", "balanced"), "chunks of whole tiles, or as equal as can be",
         "aligned"),
        ("--backward", None, "plan the backward pass"),
        ("--census", None, "count tiles by verdict"),
        ("--draw FILE", str, "write a picture of the coverage (.png, .svg)"),
        ("--devices LIST", plan_devices.devices_of, "what several devices would do together, e.g. "
         "8xH200,4xA100 or 2xNAME:SPEED (default: one device)"),
    )  # fmt: skip
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
    parser.add_argument(
        "--tokens", type=shared.count_of, required=True, metavar="N", help=shared.TOKENS
    )
    shared.add(parser, shared.HEADS, shared.KV_HEADS, shared.HEAD_DIM, shared.DTYPE)
    masks.add_to(parser, files=False)
    shared.add(
        parser,
        ("--batch", shared.count_of, "sequences", 1),
        ("--budget", shared.bytes_of, "device memory, e.g. 2GiB (default: what is free)"),
        ("--device", str, "cuda or cpu, also one that is not here (default: the best that is)"),
        shared.KERNEL,
        shared.JSON,
    )
    parser.epilog = shared.GLOSSARY


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
    own = ["levels", "n_tasks", "n_groups", "kernel", "backward", "peak_bytes", "predicted_seconds"]
    schedule = made.schedule
    return {
        "kept": made.kept or "all pairs",
        "layout": made.decomposition.layout,
        "max_task_tokens": schedule.largest_task,
        "heads_per_group": schedule.group.kv_heads * made.work.queries_per_key_head,
        "n_cap": schedule.n_cap,
        "accumulator": schedule.accumulator,
        **{name: getattr(made, name) for name in own},
    }


def _plan(options: argparse.Namespace) -> int:
    if options.draw is not None:
        check_drawable(options.draw)
    if options.devices is not None:
        return plan_devices.run(options, _sizes(options))
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
        names = ("masked", "clear", "mixed", "tiles")
        result["census"] = {name: getattr(census, name) for name in names}
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
        of_all = ("budget_bytes", "fits_monolithic", "monolithic_bytes")
        print_json(
            {
                "is_causal": options.causal,
                **{name: getattr(found, name) for name in of_all},
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
