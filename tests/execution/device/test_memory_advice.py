"""Advice to the system about memory: of whole pages, that hold what they are about."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

import quorum_attention
from quorum_attention.execution.device import memory_advice
from quorum_attention.execution.device.host_memory import PAGE_BYTES

SOURCES = Path(quorum_attention.__file__).parent


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The addresses [start, stop) that the system was asked about."""
    ranges = []

    def record(start: int, n_bytes: int, advice: int) -> None:
        ranges.append((start, start + n_bytes))

    monkeypatch.setattr(memory_advice, "_advise", record)
    return ranges


def test_pages_of_a_view_are_read_ahead(advised: list[tuple[int, int]]) -> None:
    """Keys of one head after the other, of which the first tokens are there: the system
    refuses addresses that are not a page's."""
    memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.float32)
    view = memory[3:].view(-1)[: 4 * 8000].view(4, 1000, 8)[:, :700]
    memory_advice.read_ahead(view)
    ((start, stop),) = advised
    assert start % PAGE_BYTES == 0
    assert view.data_ptr() - PAGE_BYTES < start <= view.data_ptr()
    last = view[-1, -1, -1:]
    assert stop == last.data_ptr() + last.nbytes
    memory_advice.read_ahead(view[:, :0])
    assert len(advised) == 1


def test_the_system_takes_advice_about_mapped_memory(tmp_path: Path) -> None:
    """What the memory holds stays as it was."""
    path = tmp_path / "keys"
    path.write_bytes(bytes(range(256)) * 1024)
    with path.open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    memory_advice.read_ahead(memory)
    memory_advice.ask_for_huge_pages(memory)
    memory_advice.make_pages(memory.data_ptr(), memory.nbytes)
    assert bytes(memory.tolist()) == path.read_bytes()


def test_there_is_one_place_for_advice() -> None:
    """There were three, and one of them asked for the system again."""
    places = [
        path.name for path in SOURCES.rglob("*.py") if "madvise" in path.read_text()
    ]
    assert places == ["memory_advice.py"]
