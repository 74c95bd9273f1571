"""``estimate --model``: what a training step of a model needs, by part."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

import torch

from quorum_attention.cli import masks
from quorum_attention.cli import options as shared
from quorum_attention.cli.host_memory import (
    fits_words,
    host_limit,
    host_words,
    known_fits,
    say_which_machine,
    verdict_words,
)
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.execution.device.lookup import best_device, named_device
from quorum_attention.recipes.left_out import left_out_of_step
from quorum_attention.recipes.model_shape import ModelShape, read_shape
from quorum_attention.recipes.remedies import (
    advice_words,
    longest_that_fits,
    switch_until_it_fits,
)
from quorum_attention.recipes.step_estimate import StepMemory, step_memory, with_budget
from quorum_attention.recipes.switches import SWITCHES
from quorum_attention.recipes.training import OPTIMIZERS, Training
from quorum_attention.units import counted, format_bytes, format_count


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that go with ``--model``."""
    shared.add(
        parser,
        (
            "--model CONFIG.json",
            str,
            "a model's config.json from Hugging Face: estimate a "
            "training step of it (default: one attention call)",
        ),
        (
            "--memory",
            shared.memory_of,
            "with --model: memory of the device; only the switches that "
            "are needed to fit are on (default: all)",
        ),
        (
            "--host-memory",
            shared.memory_of,
            "with --model: memory of the host, of which five sixths may be "
            "page-locked (default: what is free on this machine, whatever --device is)",
        ),
        (
            "--optimizer",
            OPTIMIZERS,
            "with --model: adamw keeps two states in the weights' "
            "dtype; adamw-fp32 two, and the weights, in float32 (default: adamw)",
            "adamw",
        ),
        (
            "--lora RANK",
            shared.count_of,
            "with --model: train adapters of this rank on all linear "
            "layers, the rest frozen (default: all weights)",
        ),
    )


def run(options: argparse.Namespace) -> None:
    """The command, with ``--model``.

    Raises:
        ValueError: sizes of a call were given as well; or the file is no configuration.
    """
    sizes = ("heads", "kv_heads", "head_dim", "causal", "kernel")
    shared.refuse(options, "does not go with --model", *sizes, *masks.WITHOUT_FILES)
    shape = read_shape(options.model)
    training = Training(
        options.tokens,
        options.batch,
        options.dtype or torch.bfloat16,
        options.optimizer,
        options.lora,
        options.budget,
        named_device(options.device or best_device(), "--device").type,
    )
    host = host_limit(options)
    fits = None
    longest = None
    if options.memory is None:
        # A device of any size: all is switched on.
        budgeted = with_budget(shape, training)
        needs = step_memory(shape, replace(budgeted, on=SWITCHES))
    else:
        needs, fits = switch_until_it_fits(shape, training, options.memory)
        if not fits or needs.host_bytes > host:
            longest = longest_that_fits(shape, training, options.memory, host)
    if options.json:
        print_json(
            {
                "model": asdict(shape),
                "memory_bytes": options.memory,
                "fits": known_fits(shape, fits),
                "host_memory_bytes": host,
                "host_suffices": needs.host_bytes <= host,
                "longest_tokens": longest,
                **needs.to_dict(),
                "left_out": left_out_of_step(shape),
            }
        )
        return
    say_which_machine(options, training.device)
    for sentence in left_out_of_step(shape):
        say(sentence)
    _show(options, shape, needs, training.device)
    if fits is None:
        say(verdict_words(shape, _all_on_words(options, needs, host)))
        return
    verdict, *advice = _advice(options, needs, fits, host, longest)
    for sentence in (verdict_words(shape, verdict), *advice):
        say(sentence)


def _all_on_words(options: argparse.Namespace, needs: StepMemory, host: int) -> str:
    """Say how much memory a step takes with everything switched on."""
    words = f"with all of these a step takes {format_bytes(needs.peak_bytes)}"
    if needs.host_bytes:
        words += f"; {host_words(options, needs.host_bytes, host)}"
    return f"{words}. --memory 24GiB says whether it fits there"


def _advice(
    options: argparse.Namespace,
    needs: StepMemory,
    fits: bool,
    host: int,
    longest: int | None,
) -> list[str]:
    """Say whether a step fits, and with what; else the longest one that does."""
    limit = format_bytes(options.memory)
    switched = advice_words(needs)
    lacks_host = needs.host_bytes > host
    if fits and not lacks_host:
        free = options.memory - needs.peak_bytes
        words = fits_words(options, limit, free, needs.host_bytes, host)
        return [words, f"switched on: {switched or 'nothing'}"]
    verdict = f"does not fit in {limit}"
    if fits:
        verdict = f"fits in {limit}, but the host has no room"
    sentences = [f"{verdict}: {_longest_words(longest)}"]
    if lacks_host:
        sentences.append(
            f"{host_words(options, needs.host_bytes, host)}: with less, attention is "
            "computed again, or the step does not fit"
        )
    if not fits:
        part = max(needs.parts, key=lambda part: part.bytes)
        size = format_bytes(part.bytes)
        sentences.append(f"the largest part that is left: {part.name} ({size})")
    return [*sentences, f"switched on: {switched or 'nothing, for nothing helps'}"]


def _longest_words(longest: int | None) -> str:
    if not longest:
        return "no shorter text does"
    return f"longest {format_count(longest)}"


def _show(
    options: argparse.Namespace, shape: ModelShape, needs: StepMemory, device: str
) -> None:
    title = (
        f"{shape.kind}, {shape.parameters / 1e6:,.0f} million parameters: a training "
        f"step of {options.batch} x {counted(options.tokens, 'token')} on {device}"
    )
    rows = [
        [
            part.name,
            format_bytes(part.plain_bytes),
            format_bytes(part.bytes),
            needs.changed_by(part),
        ]
        for part in needs.parts
    ]
    totals = [format_bytes(needs.plain_bytes), format_bytes(needs.peak_bytes)]
    rows.append(["peak of the step", *totals, ""])
    columns = ["part", "as it comes", "changed", "changed by"]
    show_table(columns, rows, title=title, words=("changed by",))
    say(
        "The peak is what is always there plus the larger of two: one layer, or the "
        "loss. CUDA's context and what a trainer keeps come on top. The budget of "
        "attention includes its results. docs/long-context.md explains the changes."
    )
