"""Schedules that searches have found, remembered on disk for the next process.

A search takes a tenth of a second and more, of which the first call of every process would wait for
two or four. What it finds follows from the call's sizes, the wish, the kernel and the machine's
rates, and from this package's own code: all of that is in an entry's name. An entry is the schedule
and no price: it is priced again, and searched for again where it does not fit. Only schedules
through slots of untrimmed tasks, and on the route ``passing``, are remembered, and only for GPUs.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from quorum_attention.cache_files import load, store
from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.case import Case
from quorum_attention.execution.device.lookup import BACKENDS
from quorum_attention.execution.routes.passing import Passing
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.schedule import Route, Schedule
from quorum_attention.execution.workload import GroupSize
from quorum_attention.kernels.protocol import is_bare
from quorum_attention.planner.machine import Machine

_FILE = "plans.json"
# Most entries of the file: the oldest go first.
_MOST = 400
_PLAIN = (int, float, str, bool, type(None), torch.dtype)


def name_of(case: Case, wish: object, machine: Machine) -> str | None:
    """The name of a search's entry; None where nothing is remembered."""
    kernel, work = case.kernel, case.work
    ours = type(kernel).__module__.startswith(_PACKAGE) and is_bare(kernel)
    backend = BACKENDS[case.place.device_type]
    if not ours or not backend.remembers or not backend.is_here():
        return None
    asked = (work, case.place, wish, machine)
    # The text of anything else might be the same for different things.
    if not all(map(_is_plain, asked)):
        return None
    modes = (torch.__version__, torch.are_deterministic_algorithms_enabled(), case.spec.name)
    text = repr((*asked, type(kernel).__qualname__, modes, _code()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(name: str) -> tuple[Schedule, str] | None:
    """The schedule of that name, and why it was taken; None if there is none."""
    entry = _known().get(name)
    try:
        n_tokens, levels, layout, tile, group, limits, fields, passing, why = entry  # type: ignore[misc]
        shape = Decomposition(n_tokens, tuple(levels), layout, tile)
        route: Route = Slots(*fields)
        if passing is not None:
            side, queries, keys, n_cap = passing
            route = Passing(side, queries, keys, Slots(*fields), n_cap)
        return Schedule(shape, GroupSize(*group), route, *limits), str(why)
    except (TypeError, ValueError):
        return None


def note(name: str, schedule: Schedule, why: str) -> None:
    """Remember ``schedule``, if it is of the kind that is. What cannot be written is not."""
    route, shape = schedule.route, schedule.decomposition
    passing = None
    if isinstance(route, Passing):
        passing = (route.stays, route.queries, route.keys, route.n_cap)
        route = route.instead
    if not isinstance(route, Slots) or route.trimmed is not None or schedule.pinned:
        return
    entry = [
        shape.n_tokens, shape.levels, shape.layout, shape.tile,
        (schedule.group.batch, schedule.group.kv_heads), schedule.limits,
        (route.n_cap, route.accumulator, route.streams), passing, why,
    ]  # fmt: skip
    _known()[name] = entry
    with suppress(OSError):
        # Another process may have added to it.
        store(_FILE, lambda said: dict(list({**_entries(said), **_known()}.items())[-_MOST:]))


@functools.cache
def _known() -> dict[str, Any]:
    return _entries(load(_FILE))


def _entries(said: Any) -> dict[str, Any]:
    return said if isinstance(said, dict) else {}


def _is_plain(value: object) -> bool:
    if is_dataclass(value):
        return all(_is_plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


_PACKAGE = __name__.partition(".")[0] + "."


@functools.cache
def _code() -> str:
    """What tells this package's files from those of another version: names, sizes and times."""
    folder = Path(__file__).parent.parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        status = path.stat()
        found.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns};".encode())
    return found.hexdigest()[:16]
