"""Graphs of a device share memory as long as any of them is there."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from quorum_attention.execution.device.cuda_graphs import CudaGraphs


def test_memory_whose_graphs_are_gone_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch refuses it. When another batch came, no layer could be recorded again."""
    numbers = count()
    captured: list[Any] = []

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            captured.append(pool)

        def capture_end(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    graphs = CudaGraphs(torch.device("cuda", 0))
    pair = [graphs.new(), graphs.new()]
    for graph in pair:
        with graph.recording():
            pass
    del graph, pair[0]
    pair.append(graphs.new())
    with pair[-1].recording():
        pass
    pair.clear()
    graph = graphs.new()
    with graph.recording():
        pass
    assert captured == [0, 0, 0, 1]
