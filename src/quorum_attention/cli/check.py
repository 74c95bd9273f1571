"""``check``: is a kernel of your own recovered exactly? Exit status 1 if not, 2 if it fails."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import quorum_attention
from quorum_attention.checking import check_kernel
from quorum_attention.cli import options as shared
from quorum_attention.cli.output import print_json, say
from quorum_attention.progress.lines import line


def add_to(commands: Any) -> None:
    """Add the command."""
    parser = shared.add_command(
        commands, "check", "run a kernel against itself, cut and uncut", __doc__
    )
    parser.add_argument(
        "kernel",
        help="a registered kernel's name, or module:name of an inner kernel or of a function that "
        "returns (out, lse)",
    )
    usual = inspect.signature(check_kernel).parameters
    shared.add(
        parser,
        ("--tokens", shared.count_of, "number of queries and of keys", usual["n_tokens"].default),
        ("--heads", shared.count_of, "query heads", usual["heads"].default),
        shared.KV_HEADS,
        ("--head-dim", shared.count_of, "numbers in a head", usual["head_dim"].default),
        ("--dtype", shared.dtype_of, f"one of {', '.join(shared.DTYPES)}", "float32"),
        ("--forward-only", None, "no gradients"),
        shared.DEVICE,
        shared.JSON,
    )
    shared.add_flag(parser, "causal", "only causal calls (default: both kinds)", None)
    parser.set_defaults(run=_run)


def load(name: str) -> Any:
    """The kernel of that name, or what ``module:name`` is, made a kernel if it is a function.

    Raises:
        ValueError: there is no such thing, or importing it would end the program.
        TypeError: it is neither a kernel nor a function.
    """
    if ":" not in name:
        return name
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
    except SystemExit as error:  # its status would be taken for a verdict
        raise ValueError(
            f"{module} ends the program while it is imported: put what it does as a script under "
            f'`if __name__ == "__main__":`'
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {attribute!r}")
        found = getattr(found, part)
    from quorum_attention.kernels import is_kernel
    from quorum_attention.kernels.kit import from_lse_function

    if is_kernel(found):
        return found
    if callable(found):
        return from_lse_function(found)
    raise TypeError(f"{name} is neither an inner kernel nor a function: {type(found).__name__}")


def _run(options: argparse.Namespace) -> int:
    try:
        return _checked(options)
    except Exception as error:
        frames = _users_frames(error) if ":" in options.kernel else []
        if not frames:
            raise
        said = traceback.format_list(frames) + traceback.format_exception_only(error)
        line(f"quorum-attention: {options.kernel} failed:\n{''.join(said).rstrip()}")
        return 2


def _users_frames(error: Exception) -> list[traceback.FrameSummary]:
    """The part of an error's traceback that begins in a user's file, without frames of ours; none
    where it does not reach one."""
    ours, theirs = (str(Path(package.__path__[0])) for package in (quorum_attention, torch))
    frames = traceback.extract_tb(error.__traceback__)
    inner = [number for number, frame in enumerate(frames) if frame.filename.startswith(ours)]
    after = [f for f in frames[min(inner, default=0) :] if not f.filename.startswith(ours)]
    while after and after[0].filename.startswith((theirs, "<frozen", importlib.__path__[0])):
        after.pop(0)
    return after


def _checked(options: argparse.Namespace) -> int:
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
        tried = {None: "causal and not causal", True: "causal", False: "not causal"}
        say(str(result))
        say(f"calls tried: {tried[options.causal]}")
    return 0 if result.exact else 1
