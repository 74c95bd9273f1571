"""The machine of an estimate: this one, or another one that options describe."""

from __future__ import annotations

import argparse

from quorum_attention.cli.output import say
from quorum_attention.execution.device.lookup import GPU
from quorum_attention.recipes.left_out import may_leave_out
from quorum_attention.recipes.model_shape import ModelShape
from quorum_attention.recipes.offload import host_room, page_locked_share
from quorum_attention.units import format_bytes


def host_limit(options: argparse.Namespace) -> int:
    """Return the bytes of host memory that may be page-locked."""
    if options.host_memory is None:
        return host_room()
    return page_locked_share(options.host_memory)


def host_words(options: argparse.Namespace, needed: int, limit: int) -> str:
    """Say how much of the host's memory is needed, and which host that is."""
    words = f"host {format_bytes(needed)} of {format_bytes(limit)}"
    if options.host_memory is None:
        return f"{words} of this machine"
    return words


def fits_words(
    options: argparse.Namespace, device: str, free: int, needed: int, limit: int
) -> str:
    """Say that something fits.

    Args:
        options: of the command.
        device: where it fits, in words.
        free: bytes of the device that are left.
        needed: bytes of the host.
        limit: bytes of the host that may be page-locked.
    """
    words = f"fits in {device}; {format_bytes(free)} free"
    if not needed:
        return words
    return f"{words}; {host_words(options, needed, limit)}"


def verdict_words(shape: ModelShape, verdict: str) -> str:
    """Say a verdict on an estimate, and on what it is if the estimate may leave out
    parts of the model."""
    if may_leave_out(shape):
        return f"without what is not estimated: {verdict}"
    return verdict


def known_fits(shape: ModelShape, fits: bool | None) -> bool | None:
    """Return whether a model fits, or None if that is unknown: its estimate fits, and
    may leave out parts of the model."""
    return None if fits and may_leave_out(shape) else fits


def say_which_machine(options: argparse.Namespace, device: str) -> None:
    """Say how to ask about a GPU, if an estimate is for a CPU that nobody asked for.

    Args:
        options: of the command.
        device: the kind of device that the estimate is for.
    """
    if options.device is None and device != GPU:
        say(
            "This machine has no GPU: the estimate is for its CPU. For a GPU say "
            "--device cuda --memory 24GiB --host-memory 64GiB"
        )
