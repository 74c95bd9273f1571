"""``run``: attention from one safetensors file to another, inside a memory budget."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from quorum_attention.api import attention_with_lse
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import console, print_json
from quorum_attention.execution.report import Report
from quorum_attention.files import create_tensors, open_tensors

_NAMES = {"query": ("query", "q"), "key": ("key", "k"), "value": ("value", "v")}


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run", help="compute attention file to file under a budget", description=__doc__
    )
    parser.add_argument("input", help="safetensors file with query, key and value (or q, k, v)")
    parser.add_argument("output", help="safetensors file to write: out, and lse with --lse")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--scale", type=float, help="of the scores (default head_dim ** -0.5)")
    parser.add_argument("--out-dtype", type=shared.dtype_of, help="default: the query's")
    parser.add_argument("--lse", action="store_true", help="write the log-sum-exp as well")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--depth", default="auto", help="levels of decomposition (default auto)")
    shared.add_budget(parser, "device memory, e.g. 2GiB (default: what is free)")
    shared.add_device(parser)
    parser.add_argument("--draw", metavar="FILE", help="write a picture of the report (.png, .svg)")
    shared.add_json(parser)
    parser.set_defaults(run=_run)


def read_qkv(path: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a file, mapped.

    Raises:
        ValueError: one of them is not in it.
    """
    tensors = open_tensors(path)
    found = []
    for name, spellings in _NAMES.items():
        match = next((tensors[s] for s in spellings if s in tensors), None)
        if match is None:
            raise ValueError(
                f"{path} has no tensor named {' or '.join(spellings)} ({name}); "
                f"it has {', '.join(tensors) or 'none'}"
            )
        found.append(match)
    return found[0], found[1], found[2]


def _run(options: argparse.Namespace) -> int:
    query, key, value = read_qkv(options.input)
    dtype = options.out_dtype or query.dtype
    shape = (*query.shape[:-1], value.shape[-1])
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"out": (shape, dtype)}
    state = torch.float64 if query.dtype == torch.float64 else torch.float32
    if options.lse:
        wanted["lse"] = (shape[:-1], state)
    results = create_tensors(options.output, wanted)
    report = Report()
    _, lse = attention_with_lse(
        query,
        key,
        value,
        is_causal=options.causal,
        scale=options.scale,
        enable_gqa=True,
        budget=options.budget,
        depth=options.depth if options.depth == "auto" else int(options.depth),
        kernel=options.kernel,
        devices=shared.default_device(options.device),
        out=results["out"],
        progress=True,
        report=report,
    )
    if options.lse:
        results["lse"].copy_(lse)
    if options.draw:
        report.draw(options.draw)
    if options.json:
        print_json({"output": options.output, **report.to_dict()})
    else:
        out = console()
        out.print(str(report), highlight=False)
        out.print(f"wrote {options.output}", highlight=False)
    return 0
