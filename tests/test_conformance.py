"""One call by every way of computing it: one device, several, Ray (in this process), files;
ranks are in tests/distributed.

More cases: ``python tests/test_conformance.py WAY FIRST COUNT`` (WAY may be "3 ranks").
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from helpers_conformance import Case, Found, by_farm, by_files, on_devices
from helpers_ranks import count_wrong, spawn
from helpers_ray import FakeRay, fake_farm
from helpers_workers import quick_workers

from quorum_attention.devices import Pool

Run = Callable[[Case, Path], Found]


@contextmanager
def one_device() -> Iterator[Run]:
    yield lambda case, folder: on_devices(case, None)


@contextmanager
def two_devices() -> Iterator[Run]:
    with quick_workers(), Pool(["cpu", "cpu"], threads=1) as pool:
        yield lambda case, folder: on_devices(case, pool)


@contextmanager
def ray() -> Iterator[Run]:
    def run(case: Case, folder: Path) -> Found:
        return by_farm(case, fake_farm(FakeRay(random.Random(str(case)))), folder)

    yield run


@contextmanager
def files() -> Iterator[Run]:
    yield by_files


WAYS = {"one device": one_device, "two devices": two_devices, "ray": ray, "files": files}


@pytest.fixture(scope="module")
def ways() -> Iterator[dict[str, Run]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(way()) for name, way in WAYS.items()}


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("way", WAYS)
def test_a_call_gives_the_textbooks_results(
    way: str, seed: int, ways: dict[str, Run], tmp_path: Path
) -> None:
    case = Case(seed)
    case.check(ways[way](case, tmp_path))


def main(way: str, first: str, count: str) -> None:
    torch.set_num_threads(1)
    if way.endswith("ranks"):  # "3 ranks"
        with tempfile.TemporaryDirectory() as folder:
            spawn(count_wrong, int(way.split()[0]), Path(folder), first, count)
        return
    wrong = 0
    with WAYS[way]() as run, tempfile.TemporaryDirectory() as folder:
        for seed in range(int(first), int(first) + int(count)):
            case = Case(seed)
            try:
                case.check(run(case, Path(folder)))
            except Exception as error:
                wrong += 1
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
                for path in Path(folder).iterdir():
                    path.unlink()
    print(f"{way}: {count} calls, {wrong} wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
