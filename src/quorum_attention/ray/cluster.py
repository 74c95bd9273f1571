"""A Ray cluster: joining one, or beginning one, and how many workers it holds."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from quorum_attention.extras import install_hint
from quorum_attention.plain_types import Keywords

# Ray reports a cluster's use over the network unless this variable says 0.
_REPORTS = "RAY_USAGE_STATS_ENABLED"
_CONNECT_SECONDS = 10.0


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        ModuleNotFoundError: Ray is not installed; says how to install it.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a farm needs Ray, which is not installed: {install_hint('ray')}"
        ) from error
    return ray


def connect(ray: Any, address: str | None, undo: ExitStack) -> None:
    """Connect to a cluster, or begin one on this machine.

    Args:
        address: as of ``Farm``. A running cluster may be another user's, so it is
            joined only if the address says so.
        undo: what ends the cluster, or leaves it, is put here.

    Raises:
        ConnectionError: there is no cluster at the address.
        ValueError: the address is none.
    """
    options: Keywords = {"log_to_driver": False, "logging_level": "ERROR"}
    if address in (None, "local"):
        address = "local"
        # Names of sockets are short, and nothing of a farm's own cluster is left
        # behind.
        folder = undo.enter_context(TemporaryDirectory(prefix="qa-ray-", dir="/tmp"))
        options |= {"include_dashboard": False, "_temp_dir": folder}
    elif address != "auto":
        _check_listens(str(address))
    with ExitStack() as stack:
        if _REPORTS not in os.environ:
            os.environ[_REPORTS] = "0"
            stack.callback(os.environ.pop, _REPORTS)
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address, **options)
    # Ray replaces the handler of a program, such as that of ``cli/process.py``.
    if callable(handler) and signal.getsignal(signal.SIGTERM) is not handler:
        signal.signal(signal.SIGTERM, handler)
    undo.callback(ray.shutdown)


def _check_listens(address: str) -> None:
    """Refuse an address at which nobody listens: Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address must be auto, local or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"there is no Ray cluster at {address}: {error}"
        ) from error


def count_workers(ray: Any, cpus: float, gpus: float) -> int:
    """Return how many workers of so many CPUs and GPUs the machines of the cluster hold
    now."""
    needed = {name: n for name, n in (("CPU", cpus), ("GPU", gpus)) if n}
    if not needed:
        return 0
    n_workers = 0
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            n_workers += min(
                int(resources.get(name, 0) / n + 1e-6) for name, n in needed.items()
            )
    return n_workers
