"""One call by every way of computing it: one device, several, Ray (in this process),
files; ranks are in tests/distributed.

More cases: ``python tests/test_conformance.py WAY FIRST COUNT`` (WAY may be "3 ranks").
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from helpers.conformance import (
    Case,
    Found,
    by_farm,
    by_files,
    on_devices,
    on_one_device,
    wrong_calls,
)  # fmt: skip
from helpers.processes import quick_workers
from helpers.ranks import count_wrong, spawn
from helpers.ray import FakeRay, fake_farm

from quorum_attention.devices import Pool

Run = Callable[[Case, Path], Found]


@contextmanager
def two_devices() -> Iterator[Run]:
    with quick_workers(), Pool(["cpu", "cpu"], threads=1) as pool:
        yield lambda case, folder: on_devices(case, pool)


def ray(case: Case, folder: Path) -> Found:
    return by_farm(case, fake_farm(FakeRay(random.Random(str(case)))), folder)


# How, and how many calls of each.
WAYS: dict[str, tuple[Callable[[], AbstractContextManager[Run]], int]] = {
    "files": (lambda: nullcontext(by_files), 12), "two devices": (two_devices, 8),
    "one device": (lambda: nullcontext(lambda case, folder: on_one_device(case)), 48),
    "ray": (lambda: nullcontext(ray), 8),
}  # fmt: skip


def wrong(way: str, first: int, count: int) -> int:
    """How many of so many calls are wrong."""
    with WAYS[way][0]() as run:

        def in_a_folder(case: Case) -> Found:
            with tempfile.TemporaryDirectory() as folder:
                return run(case, Path(folder))

        return wrong_calls(in_a_folder, first, count)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", WAYS)
def test_a_call_gives_the_textbooks_results(way: str) -> None:
    assert not wrong(way, 0, WAYS[way][1])


def main(way: str, first: str, count: str) -> None:
    torch.set_num_threads(1)
    if way.endswith("ranks"):  # "3 ranks"
        with tempfile.TemporaryDirectory() as folder:
            spawn(
                count_wrong, int(way.split()[0]), Path(folder), int(first), int(count)
            )
    else:
        print(f"{way}: {count} calls, {wrong(way, int(first), int(count))} wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
