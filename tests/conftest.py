"""Shared by all tests; its presence puts this directory on the import path, for the
helpers.

Every test begins with random numbers of its own, finds NaN in fresh memory, and has to
leave nothing behind: helpers/uninitialised.py, helpers/leftovers.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from multiprocessing.util import Finalize

import numpy as np
import pytest
import torch
from helpers.controller import check_every_event
from helpers.interpreter import patch_language_once_a_launch
from helpers.leftovers import count_page_locks, left_since, standing
from helpers.uninitialised import filled

# Triton decides at its import, and at that of kernels, whether it interprets; without a
# GPU it has to. Here, before a test that takes the setting away can be the first to
# import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError):
        import triton.language  # noqa: F401

        patch_language_once_a_launch()

check_every_event()
_SHARED = tempfile.gettempdir()
# Of this run alone, so that what is left in it was left by this run.
_FOLDER = tempfile.mkdtemp(prefix="quorum-attention-tests-")
# After multiprocessing has removed its own folder, which lies in there.
Finalize(
    None,
    shutil.rmtree,
    args=(_FOLDER,),
    kwargs={"ignore_errors": True},
    exitpriority=-200,
)
tempfile.tempdir = os.environ["TMPDIR"] = _FOLDER
# Where pytest's own folders stay for a look at them, and what torch compiled for the
# next run.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _SHARED)
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{_SHARED}/torchinductor_{os.getuid()}"
)
# It compiles in processes of its own otherwise, as many as there are cores for each
# process of pytest-xdist, which waited for them as it ended.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Tables are as wide as in a pipe, wherever tests run; processes of pytest-xdist have a
# width set.
os.environ.pop("COLUMNS", None)
# No test reads, or writes, the calibration of whoever runs it.
os.environ["QUORUM_ATTENTION_CACHE"] = tempfile.mkdtemp(prefix="calibration-")

_passed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "as_allocated: fresh memory is as the allocator hands it out, not full of NaN",
    )
    config.addinivalue_line("markers", "slow: left out by `make test`")
    config.addinivalue_line(
        "markers", "slow_but_first: all cases but the first are slow"
    )
    count_page_locks()


# Before plugins and -m look at markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the later cases of tests whose first case alone is quick."""
    functions_seen: set[str] = set()
    for item in items:
        if item.get_closest_marker("slow_but_first") is None:
            continue
        function = item.nodeid.partition("[")[0]
        if function in functions_seen:
            item.add_marker("slow")
        functions_seen.add(function)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call):
    report = yield
    if call.when == "call":
        item.stash[_passed] = report.passed
    return report


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick() -> None:
    """What has been imported by now (all of torch's compiler, for some) is not looked
    through every time that a test, or a recovery, collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left(
    request: pytest.FixtureRequest, collections_are_quick: None
) -> Iterator[None]:
    """Memory, page locks, threads, processes, files and settings are as they were
    before.

    Of a test that failed nothing is asked: its traceback holds what it worked with.
    """
    before = standing()
    yield
    if request.node.stash.get(_passed, False):
        left = left_since(before)
        assert not left, f"left behind: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def kernels_are_as_they_were(nothing_is_left: None) -> Iterator[None]:
    """A kernel that a test registers could be "auto"'s choice in another."""
    registry = sys.modules.get("quorum_attention.kernels.registry")
    before = dict(registry._KERNELS) if registry is not None else None
    yield
    registry = sys.modules.get("quorum_attention.kernels.registry")
    if registry is not None and before is not None and before != registry._KERNELS:
        registry._KERNELS.clear()
        registry._KERNELS.update(before)
        registry._n_registrations += 1


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest, nothing_is_left: None) -> None:
    """The same random numbers for a test each time, whatever ran before it.

    QUORUM_ATTENTION_SEED, any word, makes others of them.
    """
    more = os.environ.get("QUORUM_ATTENTION_SEED", "")
    seed = zlib.crc32(f"{request.node.nodeid}{more}".encode())
    print(f"seed {seed} (QUORUM_ATTENTION_SEED={more!r})")
    random.seed(seed)
    np.random.seed(seed)
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # that one would note down for GPUs, with a traceback, what to seed them with
        torch.default_generator.manual_seed(seed)


@pytest.fixture(autouse=True)
def fresh_memory_is_nonsense(
    request: pytest.FixtureRequest, nothing_is_left: None
) -> Iterator[None]:
    """What is read without having been written is NaN, and not by chance 0."""
    if request.node.get_closest_marker("as_allocated"):
        yield
    else:
        with filled():
            yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of very many tiny operators: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
