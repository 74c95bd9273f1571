"""``run``: attention, or its gradients, from files to files, inside a memory budget. A
stopped run leaves no incomplete output; --resume continues it. More in docs/files.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import quorum_attention
from quorum_attention.call.options import CallOptions
from quorum_attention.cli import masks
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say, warn
from quorum_attention.devices.report import PoolPass
from quorum_attention.execution.report import Report
from quorum_attention.files import metadata_of
from quorum_attention.files.compute import Compute, FileRun, compute_here
from quorum_attention.files.file_call import FileCall, file_call
from quorum_attention.files.inputs import (
    BACKWARD,
    FORWARD,
    NAMES,
    Inputs,
    read_inputs,
)
from quorum_attention.files.output import output_of
from quorum_attention.files.run import RunResult, fingerprint, run_call
from quorum_attention.files.run_folder import Mode
from quorum_attention.plain_types import JsonObject
from quorum_attention.planner.mask_words import mask_words
from quorum_attention.progress import progress_bar
from quorum_attention.units import counted

_amount = shared.number_of("a number of at least 0", lambda number: 0 <= number < 1e6)
# Options that change no number of the result. They may differ when a call is resumed.
_WITHOUT_EFFECT = (
    "run",
    "parser",
    "command",
    "input",
    "output",
    "json",
    "resume",
    "restart",
    "keep_every",
    "ray",
    "ray_workers",
    "ray_gpus",
    "ray_cpus",
)


def add_to(commands: Any) -> None:
    """Add the command."""
    summary = "compute attention from files to files"
    parser = shared.add_command(commands, "run", summary, __doc__, _run)
    files = "safetensors or .npy files, or folders of .npy files"
    parser.add_argument("input", nargs="+", help=files)
    parser.add_argument(
        "output", help="a safetensors or .npy file, or a folder (NAME/)"
    )
    shared.add(
        parser,
        ("--backward", None, "compute gradients, from grad_out, out and lse too"),
    )
    masks.add_to(parser, files=True)
    shared.add(
        parser,
        (
            "--scale",
            shared.number_of("a finite number"),
            "factor of the scores (default: head_dim ** -0.5)",
        ),
        (
            "--out-dtype",
            shared.dtype_of,
            "dtype of out or of gradients (default: the query's)",
        ),
        ("--lse", None, "write the log-sum-exp as well"),
        shared.KERNEL,
        ("--depth", shared.depth_of, "number of levels of cutting; 0: uncut", "auto"),
        (
            "--budget",
            shared.bytes_of,
            "device memory, e.g. 2GiB or 1e9 (default: what is free)",
        ),
        shared.DEVICE,
        (
            "--keep-every N",
            shared.count_of,
            "save progress every N key/value heads (default: about five seconds' work)",
        ),
        shared.JSON,
    )
    shared.add(
        parser.add_mutually_exclusive_group(),
        ("--resume", None, "continue a stopped run; if there is none, start one"),
        ("--restart", None, "discard a stopped run, and start again"),
    )
    shared.add(
        parser.add_argument_group("on a Ray cluster"),
        (
            "--ray ADDRESS",
            str,
            "local (a new cluster on this machine), HOST:PORT, or auto (one "
            "that already runs here) (default: none)",
        ),
        (
            "--ray-workers",
            shared.count_of,
            "units computed at a time (default: as many as fit)",
        ),
        (
            "--ray-gpus",
            _amount,
            "GPUs for each unit (default: 1 if the cluster has any)",
        ),
        ("--ray-cpus", _amount, "CPUs for each unit", 1.0),
        (
            "--chunks",
            shared.count_of,
            "tasks of a head: 1, 7, 13, 21, ... (default: as many as keep all workers "
            "busy)",
        ),
    )
    parser.epilog = shared.GLOSSARY
    _intermix(parser)


def _intermix(parser: Any) -> None:
    """Let a command's file names stand anywhere between its options.

    argparse reads only the names that stand together, and parses commands by
    ``parse_known_args``.
    """
    parse_known_args = parser.parse_known_args

    def parse_intermixed(*arguments: Any) -> Any:
        # Some versions of argparse call parse_known_args within.
        parser.parse_known_args = parse_known_args
        try:
            return parser.parse_known_intermixed_args(*arguments)
        finally:
            parser.parse_known_args = parse_intermixed

    parser.parse_known_args = parse_intermixed


def _computer(options: argparse.Namespace) -> Compute:
    """The function that computes the parts of the call: here, or on Ray."""
    if options.ray is None:
        return compute_here
    from quorum_attention.ray import Farm

    def compute(run: FileRun, numbers: Sequence[int]) -> Iterator[int]:
        parts = {number: run.parts[number] for number in numbers}
        report = PoolPass()
        farm = Farm(
            options.ray,
            workers=options.ray_workers,
            num_cpus=options.ray_cpus,
            num_gpus=options.ray_gpus,
            budget=options.budget,
        )
        with farm, progress_bar() as bar:
            finished = farm.by_parts(
                run.call, run.results, parts, chunks=options.chunks, report=report
            )
            for n_finished, number in enumerate(finished, 1):
                yield number
                bar(n_finished, len(numbers), "parts on Ray")
        if not options.json:
            say(str(report))

    return compute


def _check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if options.backward:
        shared.refuse(
            options, "is for a forward: a backward reads the log-sum-exp", "lse"
        )
    if options.ray is not None:
        shared.refuse(options, "does not go with --ray", "device")
    else:
        of_ray = ("ray_workers", "ray_gpus", "ray_cpus", "chunks")
        shared.refuse(options, "goes with --ray only", *of_ray)


def _check_output_name(options: argparse.Namespace) -> None:
    """Refuse an existing file of an input's name as the output: the command has no
    output then."""
    path = Path(options.output)
    input_names = [name for role in FORWARD for name in NAMES[role]]
    if path.stem in input_names and path.is_file():
        options.parser.error(
            f"the last name is the output, and {path} is named as an input: give the "
            "output behind it"
        )


def _run(options: argparse.Namespace) -> int:
    _check(options)
    _check_output_name(options)
    inputs = read_inputs(options.input, BACKWARD if options.backward else FORWARD)
    device = shared.default_device(options.device)
    mask, is_causal, files = masks.mask_of(options, inputs.tensors.get("mask"))
    files |= {f"the {role}": file for role, file in inputs.files.items()}
    _check_forward(options, inputs)
    call = file_call(
        CallOptions(
            budget=options.budget,
            depth=options.depth,
            kernel=options.kernel,
            devices=device,
        ),
        {role: tensor for role, tensor in inputs.tensors.items() if role != "mask"},
        mask,
        is_causal,
        options.scale,
        enable_gqa=True,
        out_dtype=options.out_dtype,
    )
    results = call.results(lse=options.lse)
    output = output_of(options.output, results, _metadata(options))
    output.check_apart(file.path for file in files.values())
    _warn_of_unknown(options, inputs)
    if not options.json:
        say(_headline(call, device if options.ray is None else f"Ray ({options.ray})"))
    report = Report()
    arguments = {
        shared.option(name): value for name, value in _arguments(options).items()
    }
    result = run_call(
        call,
        output,
        fingerprint(call, results, arguments, files),
        files.values(),
        report,
        mode=_mode(options),
        heads=options.keep_every,
        compute=_computer(options),
        say=warn,
    )
    if options.json:
        _print_json(options, inputs, call, report, result)
    else:
        _print(options, report, result)
    return 0


def _mode(options: argparse.Namespace) -> Mode:
    if options.resume:
        return "resume"
    return "restart" if options.restart else "new"


def _warn_of_unknown(options: argparse.Namespace, inputs: Inputs) -> None:
    """Name the tensors of the files that the command does not use."""
    if not inputs.unknown:
        return
    files = ", ".join(options.input)
    verb = "has" if len(options.input) == 1 else "have"
    warn(
        f"{files} also {verb} {', '.join(inputs.unknown)}, which this command does not "
        "use"
    )


def _print_json(
    options: argparse.Namespace,
    inputs: Inputs,
    call: FileCall,
    report: Report,
    result: RunResult,
) -> None:
    settings, resumed_parts = result
    mask = call.whole_call.mask
    bias = None if mask is None else mask.bias
    print_json(
        {
            "output": options.output,
            "is_causal": options.causal,
            "mask": None if bias is None else list(bias.shape),
            "keeps": _mask_words(call),
            "unknown": inputs.unknown,
            **report.to_dict(),
            "total": report.total.to_dict(),
            "parts": settings.parts,
            "resumed_parts": resumed_parts,
            "kv_heads_per_part": settings.heads,
            "accumulators_in_file": settings.in_file,
        }
    )


def _print(options: argparse.Namespace, report: Report, result: RunResult) -> None:
    # Ray's report was printed when its parts were done.
    if options.ray is None:
        if report.total.forwards + report.total.backwards > 1:
            parts = counted(result.settings.parts, "part")
            say(f"this run:\n{report.total}\nthe last of {parts}:")
        say(str(report))
    say(f"wrote {options.output}")


def _arguments(options: argparse.Namespace) -> JsonObject:
    """The options that a result depends on, as JSON has them.

    A file may have another name later, so an option that names one is True.
    """
    arguments: JsonObject = {}
    for name, value in vars(options).items():
        if name in _WITHOUT_EFFECT or value is None:
            continue
        if name in masks.FILES:
            arguments[name] = True
        elif isinstance(value, (bool, int, float)):
            arguments[name] = value
        else:
            arguments[name] = str(value)
    return arguments


def _metadata(options: argparse.Namespace) -> dict[str, str]:
    paths = {"input": options.input, "output": options.output}
    return {
        "format": "pt",
        "quorum_attention": quorum_attention.__version__,
        "arguments": json.dumps({**paths, **_arguments(options)}),
    }


def _check_forward(options: argparse.Namespace, inputs: Inputs) -> None:
    """Refuse a backward of another call than the forward that wrote its output."""
    if not options.backward:
        return
    file = inputs.files["out"].path
    try:
        forward = dict(json.loads(metadata_of(file).get("arguments", "{}")))
    except (ValueError, TypeError, RecursionError):  # a .npy file, or another program's
        return
    if "causal" not in forward:
        return
    backward = _arguments(options)
    for name in (*masks.NAMES, "scale"):
        if forward.get(name) != backward.get(name):
            raise ValueError(
                f"{file} was written by a forward with {shared.option(name)} "
                f"{forward.get(name)}, and this is a backward with "
                f"{backward.get(name)}"
            )


def _headline(call: FileCall, place: torch.device | str) -> str:
    query = call.tensors["query"]
    key = call.tensors["key"]
    dtype = str(query.dtype).removeprefix("torch.")
    direction = "backward: " if call.backward else ""
    return (
        f"{direction}queries {_size_words(query)}, keys {_size_words(key)}, {dtype}, "
        f"{_mask_words(call)}, on {place}"
    )


def _size_words(tensor: torch.Tensor) -> str:
    """Return the sizes of (..., heads, tokens, head_dim), such as "1 x 8 heads x 4,096
    tokens x 64". They show an input whose tokens come before its heads."""
    *batch_sizes, heads, tokens, head_dim = tensor.shape
    words = [*map(str, batch_sizes), counted(heads, "head"), counted(tokens, "token")]
    return " x ".join([*words, str(head_dim)])


def _mask_words(call: FileCall) -> str:
    return mask_words(call.whole_call.mask, call.shape.is_causal) or "all pairs"
