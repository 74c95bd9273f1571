"""``run``: attention from one safetensors file to another, inside a memory budget.

The input has tensors named query, key and value (or q, k, v), and a mask or attn_mask where there
is one. The output is written beside its place, so the disk must have room for it and for what it
replaces, and takes that place only when it is whole: a refused, failed or stopped call leaves what
was there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass
from typing import Any

import torch

import quorum_attention
from quorum_attention.api import attention_with_lse
from quorum_attention.cli import options as shared
from quorum_attention.cli.help import GLOSSARY
from quorum_attention.cli.output import print_json, say, warn
from quorum_attention.execution.report import Report
from quorum_attention.files import open_tensors, writing_tensors
from quorum_attention.kernels import get_kernel
from quorum_attention.pictures import check_drawable
from quorum_attention.writing import check_target

_NAMES = {
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "mask": ("attn_mask", "mask"),
}


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(
        commands, "run", "compute attention file to file under a budget", __doc__
    )
    parser.add_argument(
        "input", help="safetensors file with query, key, value (or q, k, v), and mask if any"
    )
    parser.add_argument(
        "output", help="safetensors file to write: out, and lse with --lse; another than the input"
    )
    shared.add_causal(parser)
    parser.add_argument(
        "--scale", type=_scale, metavar="X", help="of the scores (default: head_dim ** -0.5)"
    )
    parser.add_argument(
        "--out-dtype", type=shared.dtype_of, metavar="DTYPE", help="(default: the query's)"
    )
    parser.add_argument("--lse", action="store_true", help="write the log-sum-exp as well")
    parser.add_argument("--kernel", default="auto", help="inner kernel")
    parser.add_argument(
        "--depth", type=shared.depth_of, default="auto", help="levels of cutting; 0 is uncut"
    )
    shared.add_budget(parser, "device memory, e.g. 2GiB or 1e9 (default: what is free)")
    shared.add_device(parser)
    shared.add_draw(parser, "the report")
    shared.add_json(parser)
    shared.add_glossary(parser)
    parser.set_defaults(run=_run)


def _scale(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return found


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a file holds for a call, mapped; ``unknown`` names what it holds besides."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    unknown: tuple[str, ...]


def read_inputs(path: str) -> Inputs:
    """The tensors of a call, by name.

    Raises:
        ValueError: one of them is not in the file, or under two names.
    """
    tensors = open_tensors(path)
    found: dict[str, torch.Tensor | None] = {}
    for name, spellings in _NAMES.items():
        there = [spelling for spelling in spellings if spelling in tensors]
        if len(there) > 1:
            raise ValueError(f"{path} has both {' and '.join(there)}: one of them must go")
        if not there and name != "mask":
            raise ValueError(
                f"{path} has no tensor named {' or '.join(spellings)} ({name}); "
                f"it has {', '.join(tensors) or 'none'}"
            )
        found[name] = tensors.pop(there[0]) if there else None
    query, key, value = found["query"], found["key"], found["value"]
    assert query is not None
    assert key is not None
    assert value is not None
    return Inputs(query, key, value, found["mask"], tuple(tensors))


def read_qkv(path: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a file, mapped, for who takes no mask.

    Raises:
        ValueError: one of them is not in it, or a mask is.
    """
    inputs = read_inputs(path)
    if inputs.mask is not None:
        raise ValueError(f"{path} has a mask, which this command does not take")
    return inputs.query, inputs.key, inputs.value


def _run(options: argparse.Namespace) -> int:
    inputs = read_inputs(options.input)
    query, key, value, mask = inputs.query, inputs.key, inputs.value, inputs.mask
    device = shared.default_device(options.device)
    _check(options, inputs)
    if inputs.unknown:
        warn(f"{options.input} also has {', '.join(inputs.unknown)}, which nothing is done with")
    if not options.json:
        say(_headline(inputs, options.causal, device))
    shape = (*query.shape[:-1], value.shape[-1])
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "out": (shape, options.out_dtype or query.dtype)
    }
    if options.lse:
        state = torch.float64 if query.dtype == torch.float64 else torch.float32
        wanted["lse"] = (shape[:-1], state)
    report = Report()
    with writing_tensors(options.output, wanted, _metadata(options)) as results:
        _, lse = attention_with_lse(
            query,
            key,
            value,
            mask,
            is_causal=options.causal,
            scale=options.scale,
            enable_gqa=True,
            budget=options.budget,
            depth=options.depth,
            kernel=options.kernel,
            devices=device,
            out=results["out"],
            progress=True,
            report=report,
        )
        if options.lse:
            results["lse"].copy_(lse)
    if options.json:
        print_json(
            {
                "output": options.output,
                "is_causal": options.causal,
                "mask": None if mask is None else list(mask.shape),
                "unknown": inputs.unknown,
                **report.to_dict(),
            }
        )
    else:
        say(str(report))
        say(GLOSSARY)
        say(f"wrote {options.output}")
    # A call without queries or keys is no pass, and leaves nothing to draw.
    if options.draw and report.forward is not None:
        report.draw(options.draw)
        if not options.json:
            say(f"picture: {options.draw}")
    return 0


def _check(options: argparse.Namespace, inputs: Inputs) -> None:
    """Refuse what can be refused, before anything is written."""
    target = check_target(options.output)
    if _are_same(options.input, target):
        raise ValueError(
            f"output {options.output} is the input {options.input}, which is read until the end: "
            f"it must be another file"
        )
    if options.draw:
        drawn = check_drawable(options.draw)
        for name, other in (("output", target), ("input", options.input)):
            if _are_same(other, drawn):
                raise ValueError(f"--draw must be another file than the {name}, got {options.draw}")
    if options.kernel != "auto":
        get_kernel(options.kernel)
    for name in ("query", "key", "value"):
        shape = tuple(getattr(inputs, name).shape)
        if len(shape) < 2:
            raise ValueError(f"{name} must be (..., heads, tokens, head_dim), got shape {shape}")


def _are_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two names are one file, by whatever links; or would be."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _metadata(options: argparse.Namespace) -> dict[str, str]:
    arguments = {name: value for name, value in vars(options).items() if name != "run"}
    return {
        "format": "pt",
        "quorum_attention": quorum_attention.__version__,
        "arguments": json.dumps(arguments, default=str),
    }


def _headline(inputs: Inputs, is_causal: bool, device: torch.device) -> str:
    def size(tensor: torch.Tensor) -> str:
        return " x ".join(map(str, tensor.shape))

    dtype = str(inputs.query.dtype).removeprefix("torch.")
    mask = "no mask" if inputs.mask is None else f"mask {size(inputs.mask)} of the file"
    return (
        f"queries {size(inputs.query)}, keys {size(inputs.key)}, {dtype}, "
        f"{shared.causality(is_causal)}, {mask}, on {device}"
    )
