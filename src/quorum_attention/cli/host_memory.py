"""The host of an estimate: this machine, or another one that ``--host-memory`` says the
memory of."""

from __future__ import annotations

import argparse

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
