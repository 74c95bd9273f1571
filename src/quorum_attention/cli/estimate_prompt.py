"""``estimate --model --prompt``: what a long prompt takes, by place, and how long it
takes."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from quorum_attention.cli import masks
from quorum_attention.cli import options as shared
from quorum_attention.cli.host_memory import (
    fits_words,
    host_limit,
    known_fits,
    say_which_machine,
    verdict_words,
)
from quorum_attention.cli.output import print_json, say, show_table
from quorum_attention.execution.device.lookup import (
    GPU,
    backend_of,
    best_device,
    named_device,
)
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.recipes.left_out import left_out_of_prompt
from quorum_attention.recipes.model_shape import ModelShape, read_shape
from quorum_attention.recipes.prompt_estimate import (
    PromptEstimate,
    PromptRequest,
    estimate_prompt,
    longest_prompt,
    weights_fit,
)
from quorum_attention.units import counted, format_bytes, format_count, format_seconds

_GENERATED = 500


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that go with ``--prompt``."""
    shared.add(
        parser,
        (
            "--prompt N",
            shared.count_of,
            "with --model: estimate a prompt of so many tokens "
            "through long_prompt, instead of a training step",
        ),
        (
            "--generate",
            shared.count_of,
            "with --prompt: tokens after it (default: 500)",
        ),
        (
            "--weights",
            ("device", "host"),
            "with --prompt: where weights of layers lie (default: device)",
            "device",
        ),
        ("--folder", None, "with --prompt: files take what memory has no room for"),
    )


def run(options: argparse.Namespace) -> None:
    """The command, with ``--prompt``.

    Raises:
        ValueError: sizes of a call or of a training step were given as well; there is
            no ``--model``, or it is no configuration.
    """
    sizes = (
        "tokens",
        "heads",
        "kv_heads",
        "head_dim",
        "causal",
        "kernel",
        "batch",
        "budget",
    )
    training = ("lora", "optimizer")
    reason = "does not go with --prompt"
    shared.refuse(options, reason, *sizes, *training, *masks.WITHOUT_FILES)
    if options.model is None:
        raise ValueError("--prompt goes with --model only")
    shape = read_shape(options.model, with_caches=True)
    device = named_device(options.device or best_device(), "--device")
    memory = options.memory
    if memory is None:
        memory = backend_of(device).free_bytes(shared.default_device(options.device))
    request = PromptRequest(
        options.prompt,
        _GENERATED if options.generate is None else options.generate,
        memory,
        host_limit(options),
        options.folder,
        options.weights,
        options.dtype or torch.bfloat16,
        device.type,
    )
    if options.json:
        estimate = estimate_prompt(shape, request)
        print_json(
            {
                **estimate.to_dict(),
                "fits": known_fits(shape, estimate.fits),
                "left_out": left_out_of_prompt(shape),
            }
        )
        return
    say_which_machine(options, request.device)
    for sentence in left_out_of_prompt(shape):
        say(sentence)
    if not weights_fit(shape, request):
        say(verdict_words(shape, _longest_words(options, shape, request)))
        return
    estimate = estimate_prompt(shape, request)
    _show(shape, request, estimate)
    device_bytes = format_bytes(request.device_memory)
    if estimate.fits:
        verdict = fits_words(
            options,
            f"{device_bytes} of the device",
            max(0, request.device_memory - estimate.total("device")),
            estimate.total("host"),
            request.host_memory or 0,
        )
    else:
        verdict = _longest_words(options, shape, request)
    say(verdict_words(shape, verdict))
    say(estimate.advice)


def _show(shape: ModelShape, request: PromptRequest, estimate: PromptEstimate) -> None:
    """Print the parts of an estimate, and its seconds if all have a place."""
    rows = [
        [
            part.name,
            *(format_bytes(size) for size in (part.device, part.host, part.file)),
        ]
        for part in estimate.parts
    ]
    totals = [
        format_bytes(estimate.total(place)) for place in ("device", "host", "file")
    ]
    rows.append(["all", *totals])
    title = (
        f"{shape.kind}, {shape.parameters / 1e6:,.0f} million parameters: a prompt of "
        f"{counted(estimate.tokens, 'token')}, {counted(estimate.generate, 'token')} "
        f"after it, on {request.device}"
    )
    show_table(["part", "device", "host memory", "files"], rows, title=title)
    if not estimate.fits:
        return
    machine = " (on an H200)" if request.device == GPU else " (on this machine's CPU)"
    seconds = {
        "prefill": estimate.prefill_seconds,
        "each further token": estimate.token_seconds,
    }
    for name, time in seconds.items():
        words = f"{name}: {format_seconds(time)}{machine}"
        say(verdict_words(shape, words))
    if request.device != GPU and not _is_calibrated(shape, request):
        say(
            "attention's part of the prefill has the rates of a server's CPU: "
            "quorum-attention calibrate measures this one's"
        )


def _is_calibrated(shape: ModelShape, request: PromptRequest) -> bool:
    device = torch.device(request.device)
    return hardware_of(device, request.dtype, shape.head_dim).measured


def _longest_words(
    options: argparse.Namespace, shape: ModelShape, request: PromptRequest
) -> str:
    """Say how long a prompt may be, and with weights in host memory if that helps."""
    memory = f"{format_bytes(request.device_memory)} of the device"
    if request.device == GPU:
        memory += f" and {format_bytes(request.host_memory or 0)} of host memory"
        if options.host_memory is None:
            memory += " (of this machine; --host-memory says another's)"
    longest = longest_prompt(shape, request)
    words = "no prompt fits"
    if longest:
        words = f"longest {format_count(longest)}"
    words = f"does not fit in {memory}: {words}"
    if request.weights == "host" or request.device != GPU:
        return words
    longer = longest_prompt(shape, replace(request, weights="host"))
    if longer <= longest:
        return words
    length = format_count(longer)
    return f"{words}; with weights in host memory (--weights host): longest {length}"
