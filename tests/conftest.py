"""Shared by all tests; its presence puts this directory on the import path, for the helpers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

# No test reads, or writes, the calibration of whoever runs it.
os.environ["QUORUM_ATTENTION_CACHE"] = tempfile.mkdtemp(prefix="quorum-attention-tests-")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of very many tiny operators: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
