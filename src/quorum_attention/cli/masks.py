"""The commands' options that say which pairs a call keeps."""

from __future__ import annotations

import argparse

import torch

from quorum_attention.cli import options as shared
from quorum_attention.files.inputs import FileStamp, read_one
from quorum_attention.kernels.tensors import NamedTensors
from quorum_attention.mask import Mask
from quorum_attention.plain_types import Keywords

# Options, by what ``argparse`` calls them, that make a mask.
NAMES = (
    "causal",
    "lower_right",
    "offset",
    "window",
    "chunk",
    "softcap",
    "mask",
    "documents",
    "lengths",
    "sinks",
)
# Help of the options that name a file, and the names that the tensor may have in the
# file.
FILES = {
    "mask": (
        "boolean or additive mask; broadcasts (default: none)",
        "attn_mask",
        "mask",
    ),
    "documents": (
        "document ids, (tokens,) or (batch, tokens) (default: none)",
        "documents",
        "document_ids",
        "ids",
    ),
    "lengths": (
        "number of keys of each batch entry, (batch,) (default: all)",
        "key_lengths",
        "lengths",
    ),
    "sinks": ("one logit for each head, (heads,) (default: none)", "sinks"),
}
# Options that describe a mask beyond causality, without a file.
WITHOUT_FILES = ("lower_right", "offset", "window", "chunk", "softcap")
_positive = shared.number_of("a number above 0", lambda number: number > 0)


def add_to(parser: argparse.ArgumentParser, *, files: bool) -> None:
    """Add the options to a command.

    Args:
        files: whether to add the options that name files as well.
    """
    shared.add(
        parser,
        shared.CAUSAL,
        (
            "--lower-right",
            None,
            "causal, aligned so that an entry's last query sees its last key",
        ),
        ("--offset N", int, "position of the first query among the keys (default: 0)"),
        (
            "--window N",
            _window,
            "a query sees keys within N tokens, or within LEFT,RIGHT; -1: no "
            "limit (default: all keys)",
        ),
        (
            "--chunk",
            shared.count_of,
            "a query sees keys in its chunk of N tokens (default: all)",
        ),
        ("--softcap", _positive, "cap scores: X tanh(score / X) (default: no cap)"),
    )
    if files:
        for name, (text, *_) in FILES.items():
            shared.add(parser, (f"--{name} FILE", str, text))


def _window(text: str) -> int | tuple[int, int]:
    try:
        sides = [int(side) for side in text.split(",")]
    except ValueError:
        sides = []
    if not 1 <= len(sides) <= 2 or min(sides) < -1:
        raise argparse.ArgumentTypeError(
            "must be a number of tokens, or LEFT,RIGHT, each from -1 (no limit), got "
            f"{text!r}"
        )
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def mask_of(
    options: argparse.Namespace, input_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor | Mask | None, bool, dict[str, FileStamp]]:
    """The mask that a command's options describe.

    Args:
        input_mask: a mask among the command's inputs.

    Returns:
        The mask, ``is_causal``, and the files that were read, by option.

    Raises:
        OSError, ValueError, TypeError: a file cannot be read, or does not fit.
    """
    tensors, files = _read_tensors(options)
    bias = tensors.pop("mask", None)
    if bias is not None and input_mask is not None:
        raise ValueError(
            "there is a mask among the inputs and another with --mask: one must go"
        )
    if bias is None:
        bias = input_mask
    fields: Keywords = {
        "offset": options.offset,
        "window": options.window,
        "chunk": options.chunk,
        "softcap": options.softcap,
        "documents": tensors.get("documents"),
        "key_lengths": tensors.get("lengths"),
        "sinks": tensors.get("sinks"),
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    is_causal = options.causal
    # ``is_causal`` counts from the first query. Any other alignment is a field of the
    # mask.
    if options.lower_right:
        fields["causal"] = "lower_right"
        is_causal = False
    elif options.causal and options.offset is not None:
        fields["causal"] = True
        is_causal = False
    if not fields:
        return bias, is_causal, files
    return Mask(bias=bias, **fields), is_causal, files


def _read_tensors(
    options: argparse.Namespace,
) -> tuple[NamedTensors, dict[str, FileStamp]]:
    """Read the files that options name: the tensors by name, the files by option."""
    tensors: NamedTensors = {}
    files: dict[str, FileStamp] = {}
    for name, (_, *tensor_names) in FILES.items():
        path = getattr(options, name, None)
        if path is None:
            continue
        tensor, file = read_one(path, tensor_names)
        tensors[name] = tensor
        files[shared.option(name)] = file
    return tensors, files
