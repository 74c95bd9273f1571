"""Options that several commands share."""

from __future__ import annotations

import argparse

import torch

from quorum_attention.devices import present
from quorum_attention.execution.workload import ELEMENT_BYTES
from quorum_attention.sizes import parse_bytes

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ELEMENT_BYTES}
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def dtype_of(text: str) -> torch.dtype:
    """``text`` as a dtype: float16 or fp16, and so on."""
    name = _SHORT.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join([*DTYPES, *_SHORT])}, got {text!r}"
        )
    return DTYPES[name]


def bytes_of(text: str) -> int:
    """``text`` as bytes: a number, or 512MiB and the like."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count_of(text: str) -> int:
    """``text`` as a positive number; 1_048_576 and 1,048,576 are fine."""
    try:
        count = int(text.replace(",", "").replace("_", ""))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from error
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


def levels_of(text: str) -> tuple[int, ...]:
    """``7,7`` as (7, 7); an empty text, or ``none``, as the monolithic ()."""
    if text in ("", "none"):
        return ()
    return tuple(count_of(part) for part in text.split(","))


def add_sizes(parser: argparse.ArgumentParser, *, tokens_required: bool) -> None:
    """The sizes of a call."""
    parser.add_argument(
        "--tokens", type=count_of, required=tokens_required, help="number of queries and of keys"
    )
    parser.add_argument("--heads", type=count_of, help="query heads")
    parser.add_argument("--kv-heads", type=count_of, help="key/value heads (default: as --heads)")
    parser.add_argument("--head-dim", type=count_of, default=64, help="default 64")
    parser.add_argument(
        "--dtype", type=dtype_of, metavar="DTYPE", help=f"one of {', '.join(DTYPES)}"
    )
    parser.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=True, help="default: causal"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where to compute."""
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")


def add_budget(parser: argparse.ArgumentParser, text: str) -> None:
    """The memory budget."""
    parser.add_argument("--budget", type=bytes_of, metavar="BYTES", help=text)


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
