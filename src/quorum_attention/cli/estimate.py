"""``estimate``: whether a call fits; with ``--model``, what a training step needs, by part."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

import torch

from quorum_attention.cli import masks
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.cli.plan import add_call, sizes_of, summary
from quorum_attention.execution.device.lookup import best_device
from quorum_attention.planner import estimate
from quorum_attention.recipes import step
from quorum_attention.recipes.step import ModelShape, read_shape
from quorum_attention.sizes import format_bytes


def add_to(commands: Any) -> None:
    """Add the command."""
    words = "tell whether a call or a training step fits in memory"
    parser = shared.add_command(commands, "estimate", words, __doc__, _run)
    add_call(parser)
    shared.add(
        parser,
        ("--model CONFIG.json", str, "a model's config.json from Hugging Face: estimate a "
         "training step of it (default: one attention call)"),
        ("--memory", shared.bytes_of, "with --model: memory of the device; only the switches that "
         "are needed to fit are on (default: all)"),
        ("--optimizer", step.OPTIMIZERS, "with --model: adamw keeps two states in the weights' "
         "dtype; adamw-fp32 two, and the weights, in float32 (default: adamw)", "adamw"),
        ("--lora RANK", shared.count_of, "with --model: train adapters of this rank on all linear "
         "layers, the rest frozen (default: all weights)"),
    )  # fmt: skip


def _run(options: argparse.Namespace) -> int:
    if options.model is not None:
        return _of_model(options)
    shared.refuse(options, "goes with --model only", memory=None, lora=None, optimizer="adamw")
    found = estimate(options.tokens, **sizes_of(options))
    if options.json:
        of_all = ("budget_bytes", "fits_monolithic", "monolithic_bytes")
        print_json({
            "is_causal": options.causal, **{name: getattr(found, name) for name in of_all},
            "forward": summary(found.forward), "backward": summary(found.backward),
            "alternatives": [summary(other) for other in found.alternatives],
        })  # fmt: skip
        return 0
    if found.budget_bytes is not None:
        say(f"budget: {format_bytes(found.budget_bytes)}")
    say(found.describe())
    return 0


def _of_model(options: argparse.Namespace) -> int:
    """The command, with ``--model``.

    Raises:
        ValueError: sizes of a call were given as well; or the file is no configuration.
    """
    shared.refuse(options, "does not go with --model", heads=None, kv_heads=None, head_dim=64,
                  kernel="auto", **masks.NOT_GIVEN)  # fmt: skip
    shape = read_shape(options.model)
    training = step.Training(
        options.tokens, options.batch, options.dtype or torch.bfloat16, options.optimizer,
        options.lora, options.budget, options.device or best_device().type,
    )  # fmt: skip
    if options.memory is None:
        if options.budget is None:
            budget = step.WORKING + step.returned_bytes(shape, training, backward=True)
            training = replace(training, budget=budget)
        found = step.step_memory(shape, replace(training, on=step.SWITCHES))
        fits: bool | None = None
    else:
        found, fits = step.switch_until_it_fits(shape, training, options.memory)
    if options.json:
        asked = {"model": asdict(shape), "memory_bytes": options.memory, "fits": fits}
        print_json({**asked, **found.to_dict()})
        return 0
    _show(options, shape, found)
    if fits is not None:
        say(step.advice(found, fits, options.memory))
    return 0


def _show(options: argparse.Namespace, shape: ModelShape, found: step.StepMemory) -> None:
    title = (
        f"{shape.kind}, {shape.parameters / 1e6:,.0f} million parameters: a training step of "
        f"{options.batch} x {options.tokens:,} tokens"
    )
    switched = "all on" if options.memory is None else "these on"
    rows = [
        [p.name, format_bytes(p.plain_bytes), format_bytes(p.bytes),
         p.switch if p.switch in found.on else ""]
        for p in found.parts
    ]  # fmt: skip
    totals = [format_bytes(found.plain_bytes), format_bytes(found.peak_bytes)]
    rows.append(["peak of the step", *totals, ""])
    columns = ["part", "as it comes", switched, "switched on"]
    show_table(columns, rows, title=title, left=("switched on",))
    if found.host_bytes:
        say(f"in host memory: {format_bytes(found.host_bytes)}")
    say(
        "The peak is what is always there plus the larger of one layer and the loss. CUDA's "
        "context and what a trainer keeps come on top. The budget of attention includes its "
        "results. docs/long-context.md explains the switches."
    )
