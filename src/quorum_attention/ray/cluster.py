"""A Ray cluster that computes units: each is an idempotent task, begun again if its worker dies."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from quorum_attention.devices.report import PoolPass, Ran
from quorum_attention.ray.compute import Job, compute
from quorum_attention.ray.units import Head, Schedule, Unit

# Times that a unit is begun again because its worker or its machine was lost.
_RETRIES = 3
_CONNECT_SECONDS, _CANCEL_SECONDS = 10.0, 30.0
_REPORTS = "RAY_USAGE_STATS_ENABLED"
_SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def ray_here() -> Any:
    """Ray.

    Raises:
        ModuleNotFoundError: it is not installed; says how to.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a farm needs Ray, which is not installed: pip install 'quorum-attention[ray]'"
        ) from error
    return ray


class Cluster:
    """A cluster, joined or begun; see ``Farm``.

    Attributes:
        cpus, gpus: of each task.
    """

    def __init__(
        self, address: str | None, workers: int | None, cpus: float, gpus: float | None
    ) -> None:
        self._ray, self._most, self.cpus = ray_here(), workers, cpus
        with ExitStack() as begun:
            if not self._ray.is_initialized():
                self._begin(address, begun)
            there = self._ray.cluster_resources()
            self.gpus = float(there.get("GPU", 0) >= 1) if gpus is None else gpus
            if not self._held():
                raise RuntimeError(
                    f"no machine of the cluster holds a worker: one takes {cpus:g} CPU and "
                    f"{self.gpus:g} GPU, the cluster has {there.get('CPU', 0):g} CPU and "
                    f"{there.get('GPU', 0):g} GPU"
                )
            self._begun = begun.pop_all()

    @property
    def workers(self) -> int:
        """How many units are computed at once."""
        return self._most or max(1, self._held())

    def run(self, job: Job, heads: Collection[Head], report: PoolPass) -> Iterator[Head]:
        """Compute a pass.

        Yields:
            each head whose results are complete.

        Raises:
            RuntimeError: a unit was begun too often.
            Exception: what a unit raised.
        """
        schedule, begun, ray = Schedule(job.cut, heads), time.perf_counter(), self._ray
        report.parts = schedule.count
        sent, running = ray.put(job), dict[Any, Unit]()
        merge, other = self._remote(max(1, self.cpus), 0), self._remote(self.cpus, self.gpus)
        try:
            while schedule.waiting or running:
                # Twice as many as are computed at once: none of them waits for this process.
                while schedule.waiting and len(running) < (self._most or 2 * self.workers):
                    unit = schedule.waiting.popleft()
                    remote = merge if unit.kind == "merge" else other
                    running[remote.remote(sent, unit, schedule.states(unit))] = unit
                for ref in ray.wait(list(running))[0]:
                    done = self._answer(ref, running[ref], report)
                    unit, now = running.pop(ref), time.perf_counter() - begun
                    if done.where not in report.devices:
                        report.devices.append(done.where)
                    device, spent = report.devices.index(done.where), done.seconds
                    index = len(report.ran)
                    report.ran.append(Ran(device, index, now - spent, now, done.report, spent))
                    head = schedule.done(unit, done.chunks)
                    if unit.kind == "merge":
                        job.remove_states(unit)
                    if head is not None:
                        yield head
        finally:
            report.seconds = time.perf_counter() - begun
            if running and ray.is_initialized():
                # They write to files that their caller may use otherwise now.
                for ref in running:
                    ray.cancel(ref, force=True)
                ray.wait(list(running), num_returns=len(running), timeout=_CANCEL_SECONDS)

    def close(self) -> None:
        """End Ray if it was begun here."""
        self._begun.close()

    def _held(self) -> int:
        """How many workers the machines hold now."""
        asked = {"CPU": self.cpus, "GPU": self.gpus}
        return sum(
            min(int(node["Resources"].get(name, 0) / n + 1e-6) for name, n in asked.items() if n)
            for node in self._ray.nodes()
            if node["Alive"]
        )

    def _remote(self, cpus: float, gpus: float) -> Any:
        # Workers stay for more tasks, so each opens its device once.
        options: dict[str, Any] = {"max_calls": 0, "max_retries": _RETRIES}
        if gpus:
            options["runtime_env"] = {"env_vars": _SEE_ALL_GPUS}
        return self._ray.remote(num_cpus=cpus, num_gpus=gpus, **options)(compute)

    def _answer(self, ref: Any, unit: Unit, report: PoolPass) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, Exception) else error from error
        except errors.RayError as error:
            raise RuntimeError(
                f"{unit} was begun {_RETRIES + 1} times and its worker was lost each time, after "
                f"{len(report.ran)} of {report.parts} units: {error}"
            ) from error

    def _begin(self, address: str | None, begun: ExitStack) -> None:
        """Connect to a cluster, or begin one."""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        # A cluster that runs may be another user's, so it is joined only where that is said.
        if address is not None and address != "local":
            _check_there(address)
        else:
            address = "local"
            # Names of sockets are short, and nothing of a farm's own cluster is left behind.
            folder = begun.enter_context(TemporaryDirectory(prefix="qa-ray-", dir="/tmp"))
            options |= {"include_dashboard": False, "_temp_dir": folder}
        # A cluster reports its use over the network only if that was allowed.
        unset = _REPORTS not in os.environ
        os.environ.setdefault(_REPORTS, "0")
        try:
            self._ray.init(address, **options)
        finally:
            if unset:
                del os.environ[_REPORTS]
        begun.callback(self._ray.shutdown)


def _check_there(address: str) -> None:
    """Refuse an address at which nobody listens: Ray would try for minutes."""
    if address == "auto":
        return
    host, _, port = str(address).removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address must be auto, local or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"there is no Ray cluster at {address}: {error}") from error


__all__ = ["Cluster", "ray_here"]
