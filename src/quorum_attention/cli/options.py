"""Options of the commands: how they are added, read and explained, the same way everywhere."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quorum_attention.execution.device.lookup import available_device, best_device
from quorum_attention.kernels import call_shape
from quorum_attention.units import parse_bytes, parse_count

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in call_shape.DTYPES}
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
GLOSSARY = (
    "levels: the number of chunks at each level of cutting (none: uncut). A unit is one task of "
    "one head group: what is loaded, computed and stored at once."
)


def name_of(text: str) -> str:
    """``text`` as the name of a file or folder. An empty one is what a script's unset variable
    gives: it must not be taken for an option that is not there."""
    if not text:
        raise argparse.ArgumentTypeError("must be a name, got ''")
    return text


def dtype_of(text: str) -> torch.dtype:
    """``text`` as a dtype: float16 or fp16, and so on."""
    name = _SHORT.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join([*DTYPES, *_SHORT])}, got {text!r}"
        )
    return DTYPES[name]


def _read_by(parse: Callable[[str], int]) -> Callable[[str], int]:
    """``parse`` as a kind of option, whose own words a refusal has."""

    def read(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


bytes_of = _read_by(parse_bytes)  # a number, 1e9, 512MiB and the like
count_of = _read_by(parse_count)  # a positive number: 1_048_576, 1,048,576, 1e6, 128K, 1M


def number_of(said: str, fits: Callable[[float], bool] = lambda number: True) -> Any:
    """A type of options: finite numbers that fit.

    Args:
        said: what an option must be, for people: "a number above 0".
    """

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and fits(found)):
            raise argparse.ArgumentTypeError(f"must be {said}, got {text!r}")
        return found

    return parse


def depth_of(text: str) -> int | str:
    """``text`` as a number of levels, or "auto"."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be auto, 0 (uncut), 1, 2, ..., got {text!r}")
    return text if text == "auto" else int(text)


def levels_of(text: str) -> tuple[int, ...]:
    """``7,7`` as (7, 7); an empty text, or ``none``, as the monolithic ()."""
    return () if text in ("", "none") else tuple(count_of(part) for part in text.split(","))


_METAVARS: dict[Any, str] = {
    name_of: "FILE", dtype_of: "DTYPE", bytes_of: "BYTES", count_of: "N", str: "NAME"
}  # fmt: skip
Option = tuple[str, Any, str] | tuple[str, Any, str, Any]


def add_command(
    commands: Any, name: str, summary: str, description: str, run: Callable[..., int]
) -> Any:
    """A parser for a command that ``run`` runs; it looks as all do."""
    usage = {"run": "INPUT [INPUT ...] OUTPUT ", "check": "KERNEL "}.get(name, "")
    parser = commands.add_parser(
        name, help=summary, description=description.replace("``", ""),
        usage=f"quorum-attention {name} {usage}[options]",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=28),
    )  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def add(parser: Any, *options: Option) -> None:
    """Add options: name, kind, help and default.

    A kind is what reads the text; a tuple, of which one is chosen; None: the option is a switch; or
    bool: one that has a --no- beside it.
    A name may have what stands for the value in help after a blank.
    """
    for name, kind, text, *default in options:
        name, _, metavar = name.partition(" ")
        more: dict[str, Any] = {"help": text}
        if kind is None or kind is bool:
            more["action"] = argparse.BooleanOptionalAction if kind else "store_true"
        elif isinstance(kind, tuple):
            more["choices"] = kind
        else:
            more |= {"type": kind, "metavar": metavar or _METAVARS.get(kind, "X")}
        if default:
            more["default"] = default[0]
            if default[0] is not False and "default" not in text:
                more["help"] += " (default: %(default)s)"
        parser.add_argument(name, **more)


def option(name: str) -> str:
    """An option as users write it."""
    return f"--{name.replace('_', '-')}"


def refuse(options: argparse.Namespace, why: str, **usual: Any) -> None:
    """Refuse options that have another value than the usual one.

    Args:
        why: what follows the option's name: "does not go with --model".

    Raises:
        ValueError: names the first.
    """
    for name, value in usual.items():
        if getattr(options, name) != value:
            raise ValueError(f"{option(name)} {why}")


# Options of several commands.
CAUSAL: Option = ("--causal", bool, "a query sees no later keys (default: not causal)", False)
HEADS: Option = ("--heads", count_of, "query heads (default: 8)")
KV_HEADS: Option = ("--kv-heads", count_of, "key/value heads (default: as --heads)")
HEAD_DIM: Option = ("--head-dim", count_of, "dimension of a head", 64)
DTYPE: Option = (
    "--dtype", dtype_of, f"one of {', '.join(DTYPES)} (default: float16; float32 on a CPU)"
)  # fmt: skip
DEVICE: Option = ("--device", str, "cuda, cuda:1 or cpu (default: a GPU if there is one)")
JSON: Option = ("--json", None, "print JSON")
KERNEL: Option = ("--kernel", str, "inner kernel; `doctor` lists them", "auto")
TOKENS = "number of queries and of keys: 100000, 1e6, or 1M (1,048,576)"


def default_dtype(device: str) -> torch.dtype:
    """What commands compute in on a device: float16; float32 on a CPU."""
    return torch.float32 if device == "cpu" else torch.float16


def kv_heads(heads: int, named: int | None) -> int:
    """How many key/value heads there are.

    Raises:
        ValueError: the heads do not divide into them.
    """
    if named is not None and heads % named:
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {heads} and {named}")
    return named or heads


def default_device(named: str | None) -> torch.device:
    """The device a command computes on.

    Raises:
        ValueError, NotImplementedError: there is no such device here.
    """
    return best_device() if named is None else available_device(named, "--device")
