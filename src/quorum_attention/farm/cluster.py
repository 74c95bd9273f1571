"""The workers of a Ray cluster: started where it has room, listened to, replaced when they die.

Each is an actor, so that it opens its device once. Ray finds a place for it, also later when
machines come; it restarts nothing by itself, because the coordinator knows what is unfinished.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from quorum_attention.counts import whole_number
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.devices.messages import Compute, Done, End, Failed
from quorum_attention.devices.scheduler import Hand
from quorum_attention.execution.device.lookup import backend_of, on_host
from quorum_attention.farm.crew import Here
from quorum_attention.farm.data import Back, Piece, Source, bytes_of
from quorum_attention.farm.messages import Begin
from quorum_attention.sizes import parse_bytes
from quorum_attention.writing import folder_of_now

# Seconds for which a farm waits for its first worker, and for another when it has lost all.
_PATIENCE = 180.0
_ASK_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
# Rows of a tensor that are one object: a task fetches the rows of its chunks, and little more.
_PIECE_BYTES = 4 << 20
# Workers that end before they are ready, one after the other, until no more are started.
_MOST_FAILURES = 3
# Of a folder for Ray's sockets, whose names must have no more than 107 bytes.
_LONGEST_FOLDER = 20


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of one kind, each with what it gets of its machine.

    Attributes:
        count: how many are wanted; None: as many as the cluster holds.
        num_cpus, num_gpus: of its machine; with (part of) a GPU it computes on that.
        resources: what else its machine must have, in Ray's words.
        budget: device bytes, as in ``quorum_attention.attention``; None: what is free, or its part
            of the GPU.
    """

    count: int | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    resources: dict[str, float] = field(default_factory=dict)
    budget: int | str | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            whole_number(self.count, "count", 1)
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        if not self.num_cpus and not self.num_gpus:
            raise ValueError("num_cpus and num_gpus must not both be 0: a farm could not end")
        if self.budget is not None:
            parse_bytes(self.budget)

    def held(self, resources: dict[str, float]) -> int:
        """How many of them a cluster of these resources holds, at most."""
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return min(int(resources.get(name, 0.0) / n + 1e-6) for name, n in asked.items() if n)


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
    """A crew of Ray actors; see ``Farm``."""

    def __init__(
        self,
        address: str | None,
        workers: int | Sequence[Workers] | None,
        num_cpus: float,
        num_gpus: float | None,
        budget: int | str | None,
    ) -> None:
        if isinstance(workers, int):
            whole_number(workers, "workers", 1)
        Workers(None, num_cpus, num_gpus or 0, {}, budget)
        self._ray = ray_here()
        self._ours = not self._ray.is_initialized()
        self._folders = ExitStack()
        if self._ours:
            self._begin(address)
        self._kinds = self._kinds_of(workers, num_cpus, num_gpus, budget)
        self._hands: list[_Actor] = []
        self._coming: list[_Actor] = []
        self._asked = -_ASK_SECONDS
        self._failures: list[str] = []
        try:
            if not self.recruits(wait=True):
                raise RuntimeError(self._none_came())
        except BaseException:
            self.close()
            raise

    @property
    def hands(self) -> list[Hand]:
        """All workers so far, in the order in which they came."""
        return list(self._hands)

    @property
    def expected(self) -> int:
        """How many are there or on their way."""
        return sum(hand.alive for hand in self._hands) + len(self._coming)

    def recruits(self, wait: bool) -> list[Hand]:
        """Workers that have come since this was asked last."""
        limit = time.monotonic() + (_PATIENCE if wait else 0.0)
        while True:
            self._want(at_once=wait)
            came = self._arrived(0.5 if wait else 0.0)
            if came or not self._coming or time.monotonic() >= limit:
                self._hands += came
                return list(came)

    def listen(
        self, workers: Sequence[Any], seconds: float | None
    ) -> list[tuple[Any, Done | Failed | None]]:
        """What workers say next; None instead of an answer from one that is gone."""
        pending = {worker.pending: worker for worker in workers}
        ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0)
        return [(pending[one], pending[one].answer()) for one in ready]

    def kept(self, tensor: torch.Tensor) -> Source:
        """A tensor in the object store, in pieces."""
        return _InStore.of(self._ray, tensor)

    def forget(self) -> None:
        """The store lets go of objects that nobody refers to."""

    def close(self) -> None:
        """End the workers, and Ray if it was begun here."""
        for actor in (*self._hands, *self._coming):
            actor.kill()
        self._coming.clear()
        if self._ours and self._ray.is_initialized():
            self._ray.shutdown()
        self._folders.close()

    def _begin(self, address: str | None) -> None:
        """Connect to a cluster, or begin one."""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        # A cluster that runs may be another user's, so it is joined only where that is said.
        if address is not None and address != "local":
            _check_there(address)
            self._ray.init(address, **options)
            return
        # Names of sockets are short, and nothing of a farm's own cluster is left behind.
        usual = tempfile.gettempdir()
        where = usual if len(usual) <= _LONGEST_FOLDER else "/tmp"
        folder = self._folders.enter_context(folder_of_now("qa-ray-", where))
        with _silent():
            self._ray.init("local", include_dashboard=False, _temp_dir=str(folder), **options)

    def _kinds_of(
        self,
        workers: int | Sequence[Workers] | None,
        num_cpus: float,
        num_gpus: float | None,
        budget: int | str | None,
    ) -> list[Workers]:
        if workers is not None and not isinstance(workers, int):
            if not workers or not all(isinstance(one, Workers) for one in workers):
                raise TypeError(
                    "workers must be a number or a sequence of Workers, of one at least"
                )
            return list(workers)
        if num_gpus is None:
            num_gpus = 1 if self._ray.cluster_resources().get("GPU", 0) >= 1 else 0
        return [Workers(workers, num_cpus, num_gpus, {}, budget)]

    def _want(self, at_once: bool) -> None:
        """Ask for workers that are wanted and not there; now and then, or at once."""
        now = time.monotonic()
        rested = at_once or now >= self._asked + _ASK_SECONDS
        if not rested or len(self._failures) >= _MOST_FAILURES:
            return
        self._asked = now
        resources = self._ray.cluster_resources()
        for number, kind in enumerate(self._kinds):
            there = sum(one.kind == number and one.alive for one in (*self._hands, *self._coming))
            wanted = kind.held(resources) if kind.count is None else kind.count
            # Without a budget, workers have what is free on their device.
            unequal = len(self._kinds) > 1 or kind.budget is None
            self._coming += [
                _Actor(self._ray, number, kind, unequal) for _ in range(wanted - there)
            ]

    def _arrived(self, seconds: float) -> list[_Actor]:
        """Those of the coming that are ready; others that ended are forgotten."""
        if not self._coming:
            return []
        refs = {actor.pending: actor for actor in self._coming}
        ready, _ = self._ray.wait(list(refs), num_returns=1, timeout=seconds)
        came = []
        for ref in ready:
            actor = refs[ref]
            self._coming.remove(actor)
            try:
                actor.label = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                self._failures.append(str(error))
                actor.kill()
                continue
            self._failures.clear()
            came.append(actor)
        return came

    def _none_came(self) -> str:
        asked = ", ".join(f"{one.num_cpus:g} CPU and {one.num_gpus:g} GPU" for one in self._kinds)
        there = self._ray.cluster_resources()
        has = f"{there.get('CPU', 0):g} CPU and {there.get('GPU', 0):g} GPU"
        said = f"; the last one said: {self._failures[-1]}" if self._failures else ""
        return f"no worker of the farm started: one takes {asked}, the cluster has {has}{said}"


@contextmanager
def _silent() -> Iterator[None]:
    """Keep a new cluster from reporting its use over the network, unless that was allowed."""
    name = "RAY_USAGE_STATS_ENABLED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


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


class _Actor:
    """A worker: an actor of Ray."""

    def __init__(self, ray: Any, number: int, kind: Workers, unequal: bool) -> None:
        self._ray, self.kind = ray, number
        made = ray.remote(FarmWorker).options(
            num_cpus=kind.num_cpus, num_gpus=kind.num_gpus, resources=kind.resources,
            max_restarts=0, max_task_retries=0,
        )  # fmt: skip
        self._actor = made.remote(kind, unequal)
        self.alive, self.label = True, ""
        self.pending = self._actor.ready.remote()
        self._back: Any = None

    def send(self, message: object) -> bool:
        """Send a message; that it is gone is known from its answer."""
        if isinstance(message, Compute):
            self._back = message.sums
            self.pending = self._actor.compute.remote(message)
        else:
            self._actor.tell.remote(message)
        return self.alive

    def answer(self) -> Done | Failed | None:
        """Its answer, which is there."""
        try:
            said, pieces = self._ray.get(self.pending)
        except self._ray.exceptions.RayError:
            return None
        if isinstance(self._back, Back):
            self._back.pieces = [
                Piece(one.chunk, tuple(map(_opened, one.tensors))) for one in pieces
            ]
        result: Done | Failed = said
        return result

    def kill(self) -> None:
        """End it at once."""
        self.alive = False
        # Where Ray was ended before, its workers were too, and asking would begin another cluster.
        if self._ray.is_initialized():
            self._ray.kill(self._actor, no_restart=True)


class FarmWorker:
    """What an actor does: computes units on the device that it was given."""

    def __init__(self, kind: Workers, unequal: bool) -> None:
        self._device = torch.device("cuda:0" if kind.num_gpus else "cpu")
        if not kind.num_gpus:
            torch.set_num_threads(max(1, int(kind.num_cpus)))
        torch.empty(1, device=self._device)  # opens the device, which takes a while
        budget = None if kind.budget is None else parse_bytes(kind.budget)
        if budget is None and 0 < kind.num_gpus < 1:
            free = backend_of(self._device).free_bytes(self._device)
            budget = int(free * 0.9 * kind.num_gpus)
        self._here = Here(self._device, budget, unequal)

    def ready(self) -> str:
        """Its machine and device, when it has it."""
        host, place = socket.gethostname(), self._device
        model = "cpu" if on_host(place) else backend_of(place).model(place)
        return f"{host} {model}, process {os.getpid()}"

    def tell(self, message: Begin | End) -> None:
        """A pass begins or ends."""
        self._here.send(message)

    def compute(self, message: Compute) -> tuple[Done | Failed, list[Piece]]:
        """Compute a unit; what is sent back is in NumPy's arrays, which Ray does not copy."""
        self._here.send(message)
        with backend_of(self._device).current(self._device):
            said = self._here.answer()
        pieces = message.sums.pieces if isinstance(message.sums, Back) else []
        return said, [Piece(one.chunk, tuple(map(_closed, one.tensors))) for one in pieces]


def _closed(tensor: torch.Tensor) -> Any:
    """A tensor as bytes, its shape and dtype: NumPy does not know all of torch's dtypes."""
    return bytes_of(tensor).numpy(), tuple(tensor.shape), tensor.dtype


def _opened(closed: Any) -> torch.Tensor:
    """The tensor again; it may be read only, because others may have its memory."""
    raw, shape, dtype = closed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        found: torch.Tensor = torch.from_numpy(raw)
    return found.view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class _InStore:
    """A tensor (batch, heads, rows, ...) in the object store.

    Attributes:
        refs: of its pieces, by batch entry and head.
        step: rows of a piece.
        shape, dtype: of the tensor.
    """

    refs: list[list[list[Any]]]
    step: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, ray: Any, tensor: torch.Tensor) -> _InStore:
        row_bytes = tensor[:1, :1, :1].nbytes
        step = max(1, _PIECE_BYTES // max(1, row_bytes))
        refs = [
            [[ray.put(_closed(rows)) for rows in head.split(step)] for head in entry]
            for entry in tensor
        ]
        return cls(refs, step, tuple(tensor.shape), tensor.dtype)

    def rows(self, entry: int, heads: Interval, rows: Interval) -> torch.Tensor:
        """(1, heads, rows, ...), fetched and put together."""
        if rows.start >= rows.stop:
            return torch.empty(
                (1, heads.length, 0, *self.shape[3:]), dtype=self.dtype, device="cpu"
            )
        first, last = rows.start // self.step, -(-rows.stop // self.step)
        ray = ray_here()
        found = []
        for head in range(*heads):
            pieces = ray.get(self.refs[entry][head][first:last])
            whole = torch.cat([_opened(piece) for piece in pieces])
            at = first * self.step
            found.append(whole[rows.start - at : rows.stop - at])
        return torch.stack(found)[None]


__all__ = ["Cluster", "FarmWorker", "Workers", "ray_here"]
