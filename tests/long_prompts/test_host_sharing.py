"""The threads of the cores that attend over keys in host memory."""

import threading

import pytest
import torch

from quorum_attention.long_prompts import host_sharing


def test_fewer_threads_for_the_cores_are_no_fewer_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_sharing, "HostReader", lambda memory: None)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        sharing = host_sharing.HostSharing(torch.empty(0, dtype=torch.uint8))
        on_cores = sharing._executors[0].submit(torch.get_num_threads).result()
        counts: list[int] = []
        later = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert (torch.get_num_threads(), counts) == (8, [8])
        assert on_cores == 8 - host_sharing._BUSY_CORES
    finally:
        torch.set_num_threads(before)
