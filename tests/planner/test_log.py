"""One line in the log for each kind of call that is cut."""

from __future__ import annotations

import logging

import pytest
import torch

import quorum_attention as qa
from quorum_attention.planner import log


@pytest.fixture(autouse=True)
def _forget() -> None:
    log._told.clear()


@pytest.mark.usefixtures("one_thread")
def test_once_for_calls_of_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(1, 4, 400, 16, requires_grad=True)
    with caplog.at_level(logging.INFO, "quorum_attention"):
        qa.attention(q, q, q)
        assert not caplog.records, "not cut"
        for _ in range(3):
            qa.attention(q, q, q, depth=1).sum().backward()
        qa.attention(q[:, :, :390], q, q, depth=1)  # a length of the same kind
        lines = [record.getMessage() for record in caplog.records]
        assert [line.split()[0] for line in lines] == ["forward", "backward"]
        for words in ("400 queries x 400 keys", "1 x 4 heads", "budget none", "depth 1",
                      "kernel cpu", "predicted"):  # fmt: skip
            assert words in lines[0]
        qa.attention(q.detach(), q.detach(), q.detach(), budget="64MiB", depth=1)
    assert "budget 64.00 MiB" in caplog.records[2].getMessage()
    assert {record.name for record in caplog.records} == {"quorum_attention"}


@pytest.mark.usefixtures("one_thread")
def test_nothing_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(1, 4, 400, 16)
    with caplog.at_level(logging.WARNING, "quorum_attention"):
        qa.attention(q, q, q, depth=1)
    assert not caplog.records
    assert not log._told


def test_it_forgets_before_it_remembers_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_MOST_KINDS", 1)
    q = torch.randn(1, 4, 400, 16)
    log.LOG.setLevel(logging.INFO)
    try:
        for depth in (1, 2, 1):
            qa.attention(q, q, q, depth=depth)
            assert len(log._told) == 1
    finally:
        log.LOG.setLevel(logging.NOTSET)
