"""``estimate``: whether a call fits; with ``--model``, what a training step needs, by
part; with ``--prompt`` too, what a long prompt takes."""

from __future__ import annotations

import argparse
from typing import Any

from quorum_attention.cli import estimate_prompt, estimate_step
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say
from quorum_attention.cli.plan import add_call, sizes_of, summary
from quorum_attention.planner import estimate
from quorum_attention.units import format_bytes


def add_to(commands: Any) -> None:
    """Add the command."""
    words = "tell whether a call or a training step fits in memory"
    parser = shared.add_command(commands, "estimate", words, __doc__, _run)
    add_call(parser, needs_tokens=False)
    estimate_step.add_options(parser)
    estimate_prompt.add_options(parser)


def _run(options: argparse.Namespace) -> int:
    if options.prompt is not None:
        estimate_prompt.run(options)
        return 0
    shared.refuse(options, "goes with --prompt only", "generate", "weights", "folder")
    # argparse cannot require one option of two.
    if options.tokens is None:
        options.parser.error(
            "give --tokens N for a call or a training step, or --prompt N for a prompt"
        )
    if options.model is not None:
        estimate_step.run(options)
        return 0
    reason = "goes with --model only"
    shared.refuse(options, reason, "memory", "host_memory", "lora", "optimizer")
    _estimate_call(options)
    return 0


def _estimate_call(options: argparse.Namespace) -> None:
    """The command, without ``--model``."""
    call_estimate = estimate(options.tokens, **sizes_of(options))
    if options.json:
        print_json(
            {
                "is_causal": options.causal,
                "budget_bytes": call_estimate.budget_bytes,
                "fits_monolithic": call_estimate.fits_monolithic,
                "monolithic_bytes": call_estimate.monolithic_bytes,
                "forward": summary(call_estimate.forward),
                "backward": summary(call_estimate.backward),
                "alternatives": [summary(plan) for plan in call_estimate.alternatives],
            }
        )
        return
    if call_estimate.budget_bytes is not None:
        say(f"budget: {format_bytes(call_estimate.budget_bytes)}")
    say(call_estimate.describe())
