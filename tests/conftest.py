"""Shared by all tests; its presence puts this directory on the import path, for the helpers."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

# The machine checks itself after every event (execution/control/checks.py).
os.environ["QUORUM_ATTENTION_CHECKED"] = "1"
# No test reads, or writes, the calibration of whoever runs it.
os.environ["QUORUM_ATTENTION_CACHE"] = tempfile.mkdtemp(prefix="quorum-attention-tests-")


@pytest.fixture(autouse=True, scope="module")
def collections_are_quick() -> None:
    """What has been imported by now (all of torch's compiler, for some) is not looked through every
    time that a test, or a recovery, collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of very many tiny operators: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
