"""Options that several commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch

from quorum_attention.cli.help import GLOSSARY, HelpFormatter
from quorum_attention.execution.device.lookup import present
from quorum_attention.execution.workload import ELEMENT_BYTES
from quorum_attention.sizes import parse_bytes, parse_count

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ELEMENT_BYTES}
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


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


def bytes_of(text: str) -> int:
    """``text`` as bytes: a number, 1e9, 512MiB and the like."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count_of(text: str) -> int:
    """``text`` as a positive number; 1_048_576, 1,048,576, 1e6, 128K and 1M are fine."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
    if text in ("", "none"):
        return ()
    return tuple(count_of(part) for part in text.split(","))


def add_command(commands: Any, name: str, summary: str, description: str) -> Any:
    """A parser for a command, which looks as all do."""
    return commands.add_parser(
        name,
        help=summary,
        description=description.replace("``", ""),
        formatter_class=HelpFormatter,
    )


def add_glossary(parser: argparse.ArgumentParser) -> None:
    """What the words mean that plans and reports are written in."""
    parser.epilog = GLOSSARY


def add_causal(parser: argparse.ArgumentParser) -> None:
    """Whether queries see later keys: the same default everywhere, which is torch's."""
    add_flag(parser, "causal", "query i sees keys up to i (default: not causal, as in torch)")


def add_flag(
    parser: argparse.ArgumentParser, name: str, text: str, default: bool | None = False
) -> None:
    """``--name`` and ``--no-name``."""
    parser.add_argument(f"--{name}", dest=name, action="store_true", default=default, help=text)
    parser.add_argument(
        f"--no-{name}",
        dest=name,
        action="store_false",
        default=argparse.SUPPRESS,
        help=f"not {name}",
    )


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


def add_sizes(
    parser: argparse.ArgumentParser,
    *,
    tokens_required: bool,
    usual_tokens: str = "",
    usual_dtype: str = "float16; float32 on a CPU",
    causal: bool = True,
) -> None:
    """The sizes of a call; ``causal``: and whether it is causal."""
    parser.add_argument(
        "--tokens", type=count_of, required=tokens_required, metavar="N",
        help="number of queries and of keys: 100000, 1e6, or 1M, which is 1,048,576"
        + (f" (default: {usual_tokens})" if usual_tokens else ""),
    )  # fmt: skip
    parser.add_argument("--heads", type=count_of, metavar="N", help="query heads (default: 8)")
    parser.add_argument(
        "--kv-heads", type=count_of, metavar="N", help="key/value heads (default: as --heads)"
    )
    parser.add_argument(
        "--head-dim", type=count_of, default=64, metavar="N", help="numbers in a head"
    )
    parser.add_argument(
        "--dtype", type=dtype_of, metavar="DTYPE",
        help=f"one of {', '.join(DTYPES)} (default: {usual_dtype})",
    )  # fmt: skip
    if causal:
        add_causal(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where to compute."""
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")


def add_budget(parser: argparse.ArgumentParser, text: str) -> None:
    """The memory budget."""
    parser.add_argument("--budget", type=bytes_of, metavar="BYTES", help=text)


def add_draw(parser: argparse.ArgumentParser, text: str, default: str | None = None) -> None:
    """Where a picture goes."""
    parser.add_argument(
        "--draw", metavar="FILE", default=default, help=f"write a picture of {text} (.png, .svg)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Output for machines."""
    parser.add_argument("--json", action="store_true", help="print JSON for machines")


def default_device(named: str | None) -> torch.device:
    """The device a command computes on.

    Raises:
        ValueError, NotImplementedError: there is no such device here.
    """
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return present(default if named is None else named, "--device")
