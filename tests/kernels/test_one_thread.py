"""One thread for the operators of one thread of the process; all others keep theirs."""

from __future__ import annotations

import threading

import pytest
import torch

from quorum_attention.kernels.one_thread import one_thread


def in_another_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_only_here_and_only_for_as_long(count: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
            assert in_another_thread() == count
        assert torch.get_num_threads() == in_another_thread() == count
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == in_another_thread() == count
    finally:
        torch.set_num_threads(before)
