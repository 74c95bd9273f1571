"""``check``: is a kernel of your own recovered exactly? Exit status 1 if not."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from quorum_attention.cli import options as shared
from quorum_attention.cli.output import console, print_json


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "check", help="run a kernel against itself, cut and uncut", description=__doc__
    )
    parser.add_argument(
        "kernel",
        help="a registered kernel's name, or module:name of an inner kernel or of a function that "
        "returns (out, lse)",
    )
    parser.add_argument("--tokens", type=shared.count_of, default=331)
    parser.add_argument("--heads", type=shared.count_of, default=4)
    parser.add_argument("--kv-heads", type=shared.count_of, help="default: as --heads")
    parser.add_argument("--head-dim", type=shared.count_of, default=16)
    parser.add_argument("--dtype", type=shared.dtype_of, default=torch.float32)
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: both")
    parser.add_argument("--forward-only", action="store_true")
    shared.add_device(parser)
    shared.add_json(parser)
    parser.set_defaults(run=_run)


def load(name: str) -> Any:
    """The kernel of that name, or what ``module:name`` is, made a kernel if it is a function.

    Raises:
        ValueError: there is no such thing.
        TypeError: it is neither a kernel nor a function.
    """
    if ":" not in name:
        return name
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {attribute!r}")
        found = getattr(found, part)
    from quorum_attention.kernels import InnerKernel
    from quorum_attention.kernels.kit import from_lse_function

    if isinstance(found, InnerKernel):
        return found
    if callable(found):
        return from_lse_function(found)
    raise TypeError(f"{name} is neither an inner kernel nor a function: {type(found).__name__}")


def _run(options: argparse.Namespace) -> int:
    from quorum_attention.checking import check_kernel

    result = check_kernel(
        load(options.kernel),
        n_tokens=options.tokens,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
        is_causal=options.causal,
        backward=not options.forward_only,
        device=shared.default_device(options.device),
    )
    if options.json:
        print_json(result.to_dict())
    else:
        console().print(str(result), highlight=False, markup=False)
    return 0 if result.exact else 1
