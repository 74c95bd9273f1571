"""A worker lets go of what it holds when it has had nothing to do for a while."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

import quorum_attention as qa
from quorum_attention.pool import Pool

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="not Linux")


def test_memory_of_a_pass_is_let_go_of() -> None:
    with Pool("cpu", threads=1) as pool:
        maps = Path(f"/proc/{pool.workers[0].process.pid}/maps")

        def mapped() -> int:
            return maps.read_text(encoding="utf-8").count("memfd:quorum-attention")

        q = torch.randn(1, 2, 100, 8)
        qa.attention(q, q, q, devices=pool)
        assert mapped() > 0  # the next pass may read it again
        del q
        gc.collect()
        until = time.monotonic() + 10
        while mapped():
            assert time.monotonic() < until
            time.sleep(0.05)
        q = torch.randn(1, 2, 100, 8)
        assert torch.allclose(qa.attention(q, q, q, devices=pool), qa.attention(q, q, q), atol=1e-5)
