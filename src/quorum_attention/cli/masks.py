"""Options of commands that say which pairs a call keeps."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from quorum_attention.cli import options as shared
from quorum_attention.files.inputs import FileStamp, read_one
from quorum_attention.mask import Mask

# Options, by what ``argparse`` calls them, that make a mask.
NAMES = (
    "causal", "lower_right", "offset", "window", "chunk", "softcap", "mask", "documents", "lengths",
    "sinks",
)  # fmt: skip
# Those that name a file: what they are, and what the tensor may be called there.
FILES = {
    "mask": ("boolean or additive mask; broadcasts (default: none)", "attn_mask", "mask"),
    "documents": ("document ids, (tokens,) or (batch, tokens) (default: none)",
                  "documents", "document_ids", "ids"),
    "lengths": ("number of keys of each batch entry, (batch,) (default: all)",
                "key_lengths", "lengths"),
    "sinks": ("one logit for each head, (heads,) (default: none)", "sinks"),
}  # fmt: skip
# What the others are where they are not given.
NOT_GIVEN = {"lower_right": False} | dict.fromkeys(("offset", "window", "chunk", "softcap"))
_positive = shared.number_of("a number above 0", lambda number: number > 0)


def add_to(parser: argparse.ArgumentParser, *, files: bool) -> None:
    """Add the options to a command.

    Args:
        files: whether also those that name a file.
    """
    shared.add(
        parser,
        shared.CAUSAL,
        ("--lower-right", None, "causal, aligned so that an entry's last query sees its last key"),
        ("--offset N", int, "position of the first query among the keys (default: 0)"),
        ("--window N", _window, "a query sees keys within N tokens, or within LEFT,RIGHT; -1: no "
         "limit (default: all keys)"),
        ("--chunk", shared.count_of, "a query sees keys in its chunk of N tokens (default: all)"),
        ("--softcap", _positive, "cap scores: X tanh(score / X) (default: no cap)"),
    )  # fmt: skip
    for name, (text, *_) in FILES.items() if files else ():
        shared.add(parser, (f"--{name} FILE", str, text))


def _window(text: str) -> int | tuple[int, int]:
    try:
        sides = [int(side) for side in text.split(",")]
    except ValueError:
        sides = []
    if not 1 <= len(sides) <= 2 or min(sides) < -1:
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens, or LEFT,RIGHT, each from -1 (no limit), got {text!r}"
        )
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def mask_of(
    options: argparse.Namespace, given: torch.Tensor | None = None
) -> tuple[torch.Tensor | Mask | None, bool, dict[str, FileStamp]]:
    """(mask, is_causal, the files that were read by their options) as options say.

    Args:
        given: a mask among the command's inputs.

    Raises:
        OSError, ValueError, TypeError: a file cannot be read, or does not fit.
    """
    tensors: dict[str, torch.Tensor] = {}
    files: dict[str, FileStamp] = {}
    for name, (_, *names) in FILES.items():
        if getattr(options, name, None) is not None:
            tensors[name], files[shared.option(name)] = read_one(getattr(options, name), names)
    bias = tensors.pop("mask", None)
    if bias is not None and given is not None:
        raise ValueError("there is a mask among the inputs and another with --mask: one must go")
    bias = given if bias is None else bias
    fields: dict[str, Any] = {
        "offset": options.offset, "window": options.window, "chunk": options.chunk,
        "softcap": options.softcap, "documents": tensors.get("documents"),
        "key_lengths": tensors.get("lengths"), "sinks": tensors.get("sinks"),
    }  # fmt: skip
    fields = {name: value for name, value in fields.items() if value is not None}
    if options.lower_right:
        fields["causal"] = "lower_right"
    is_causal = options.causal and not options.lower_right
    if options.offset is not None and is_causal:
        # is_causal counts from the first query, whatever the offset.
        fields["causal"], is_causal = True, False
    return (Mask(bias=bias, **fields) if fields else bias), is_causal, files
