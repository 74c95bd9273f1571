"""Options of the commands: how they are added, read and explained, the same way
everywhere."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quorum_attention.execution.device.lookup import available_device, best_device
from quorum_attention.kernels import call_shape
from quorum_attention.plain_types import Keywords
from quorum_attention.units import parse_bytes, parse_count, parse_memory

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in call_shape.DTYPES}
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
GLOSSARY = (
    "levels: the number of chunks at each level of cutting (none: uncut). A unit is "
    "one task of one head group: what is loaded, computed and stored at once."
)


def name_of(text: str) -> str:
    """``text`` as the name of a file or folder.

    An unset variable of a script gives an empty text, which must not count as "no
    option".
    """
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


def _as_option_type(parse: Callable[[str], int]) -> Callable[[str], int]:
    """``parse`` as a type of options: argparse prints the text of its ValueError."""

    def parse_option(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_option


bytes_of = _as_option_type(parse_bytes)  # a number, 1e9, 512MiB and the like


# The same, of a device or a host.
memory_of = _as_option_type(partial(parse_memory, name="memory"))
count_of = _as_option_type(
    parse_count
)  # a positive number: 1_048_576, 1,048,576, 1e6, 128K, 1M


def number_of(
    requirement: str, fits: Callable[[float], bool] = lambda number: True
) -> Any:
    """A type of options: finite numbers that fit.

    Args:
        requirement: text for errors, such as "a number above 0".
    """

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and fits(number)):
            raise argparse.ArgumentTypeError(f"must be {requirement}, got {text!r}")
        return number

    return parse


def depth_of(text: str) -> int | str:
    """``text`` as a number of levels, or "auto"."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"must be auto, 0 (uncut), 1, 2, ..., got {text!r}"
        )
    return text if text == "auto" else int(text)


def levels_of(text: str) -> tuple[int, ...]:
    """``7,7`` as (7, 7); an empty text, or ``none``, as the monolithic ()."""
    return (
        ()
        if text in ("", "none")
        else tuple(count_of(part) for part in text.split(","))
    )


_METAVARS: dict[Any, str] = {
    name_of: "FILE",
    dtype_of: "DTYPE",
    bytes_of: "BYTES",
    memory_of: "BYTES",
    count_of: "N",
    str: "NAME",
}
Option = tuple[str, Any, str] | tuple[str, Any, str, Any]


def add_command(
    commands: Any, name: str, summary: str, description: str, run: Callable[..., int]
) -> Any:
    """Add the parser of a command. ``run`` runs the command."""
    usage = {"run": "INPUT [INPUT ...] OUTPUT ", "check": "KERNEL "}.get(name, "")
    parser = commands.add_parser(
        name,
        help=summary,
        description=description.replace("``", ""),
        usage=f"quorum-attention {name} {usage}[options]",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=28),
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def add(parser: Any, *options: Option) -> None:
    """Add options: name, kind, help and default.

    A kind is a function that reads the text; or a tuple of choices; or None for a
    switch; or bool for a switch that has a ``--no-`` form as well. A name may be
    followed by a blank and by the word that stands for the value in help.
    """
    for name, kind, text, *default in options:
        name, _, metavar = name.partition(" ")
        settings: Keywords = {"help": text}
        if kind is None:
            settings["action"] = "store_true"
        elif kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif isinstance(kind, tuple):
            settings["choices"] = kind
        else:
            settings["type"] = kind
            settings["metavar"] = metavar or _METAVARS.get(kind, "X")
        if default:
            settings["default"] = default[0]
            if default[0] is not False and "default" not in text:
                settings["help"] += " (default: %(default)s)"
        parser.add_argument(name, **settings)


def option(name: str) -> str:
    """An option as users write it."""
    return f"--{name.replace('_', '-')}"


def refuse(options: argparse.Namespace, reason: str, *names: str) -> None:
    """Refuse options that have another value than their default.

    Args:
        reason: the rest of the sentence, such as "does not go with --model".
        names: the options, as attributes of ``options``.

    Raises:
        ValueError: names the first.
    """
    for name in names:
        if getattr(options, name) != options.parser.get_default(name):
            raise ValueError(f"{option(name)} {reason}")


# Options of several commands.
CAUSAL: Option = (
    "--causal",
    bool,
    "a query sees no later keys (default: not causal)",
    False,
)
HEADS: Option = ("--heads", count_of, "query heads (default: 8)")
KV_HEADS: Option = ("--kv-heads", count_of, "key/value heads (default: as --heads)")
HEAD_DIM: Option = ("--head-dim", count_of, "dimension of a head", 64)
DTYPE: Option = (
    "--dtype",
    dtype_of,
    f"one of {', '.join(DTYPES)} (default: float16; float32 on a CPU)",
)
DEVICE: Option = (
    "--device",
    str,
    "cuda, cuda:1 or cpu (default: a GPU if there is one)",
)
JSON: Option = ("--json", None, "print JSON")
KERNEL: Option = ("--kernel", str, "inner kernel; `doctor` lists them", "auto")
TOKENS = "number of queries and of keys: 100000, 1e6, or 1M (1,048,576)"


def default_dtype(device: str) -> torch.dtype:
    """The dtype of commands on a device: float16, or float32 on a CPU."""
    return torch.float32 if device == "cpu" else torch.float16


def kv_heads(heads: int, named: int | None) -> int:
    """The number of key/value heads.

    Raises:
        ValueError: the heads do not divide into them.
    """
    if named is not None and heads % named:
        raise ValueError(
            f"--heads must be a multiple of --kv-heads, got {heads} and {named}"
        )
    return named or heads


def default_device(named: str | None) -> torch.device:
    """The device a command computes on.

    Raises:
        ValueError, NotImplementedError: there is no such device here.
    """
    return best_device() if named is None else available_device(named, "--device")
