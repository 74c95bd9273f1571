"""The journal of an unfinished output: it counts up to the first line that is not whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.on_disk import journal as journals
from quorum_attention.on_disk.journal import Header, Journal, read

HEADER = Header({"--scale": 0.5, "shape": [1, 2]}, {"input 1": {"size": 3}}, {"heads": 1}, "today")


def written(path: Path, parts: Sequence[int], *, finished: bool = False) -> Journal:
    path.unlink(missing_ok=True)
    journal = Journal(path, HEADER)
    for part in parts:
        journal.add(part)
    if finished:
        journal.finish()
    return journal


def refused(path: Path, reading: Callable[[Path], Journal | None]) -> Journal | None:
    """What is read, or None where it is refused by name."""
    try:
        return reading(path)
    except ValueError as error:
        if str(path) not in str(error):
            raise
        return None


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    assert read(path) is None
    made = written(path, [3, 0, 7])
    found = read(path)
    assert found is not None
    assert found == made
    assert found.header.differences(HEADER) == []
    assert (found.done, found.complete, found.torn) == ({0, 3, 7}, False, 0)
    found.add(9)
    found.finish()
    again = read(path)
    assert again is not None
    assert (again.done, again.complete) == ({0, 3, 7, 9}, True)


def test_there_is_no_file_before_the_first_part(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", HEADER)
    journal.finish()
    assert not list(tmp_path.iterdir())


def test_any_end_may_be_torn_off(tmp_path: Path) -> None:
    """A kill in the middle of a write: what was whole before it counts, and what comes after."""
    path = tmp_path / "j"
    written(path, [1, 2, 3])
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in range(ends[1], len(whole) + 1):
        path.write_bytes(whole[:size])
        found = read(path)
        assert found is not None
        lines = sum(end <= size for end in ends)
        assert found.done == set(range(1, lines))
        assert found.torn == (size not in ends)
        found.add(5)
        again = read(path)
        assert again is not None
        assert (again.done, again.torn) == ({*range(1, lines), 5}, 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A journal of three parts."""
    path = tmp_path_factory.mktemp("whole") / "j"
    written(path, [1, 2, 3])
    return path.read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_never_makes_a_part_done(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    """Bytes changed, cut out or put in anywhere: parts that were not done are not, and the header
    is what it was, or the journal is refused by name."""
    path = tmp_path_factory.getbasetemp() / "damaged"
    text = bytearray(whole)
    at = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(at, min(len(text), at + 40)))
    text[at:stop] = data.draw(st.binary(max_size=40))
    path.write_bytes(text)
    found = refused(path, read)
    if found is None:
        return
    assert found.done <= {1, 2, 3}
    assert not found.complete
    assert found.header == HEADER


@settings(max_examples=100, deadline=None)
@given(text=st.binary(max_size=300))
def test_any_other_file_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "other"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="its first line cannot be read"):
        read(path)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"journal": 2}, "of format 2"),
        ({"journal": journals.FORMAT, "call": {}, "inputs": []}, "no header"),
    ],
)
def test_other_formats_are_refused_by_name(
    tmp_path: Path, record: dict[str, object], said: str
) -> None:
    (tmp_path / "j").write_bytes(journals._line(record))
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "j")


def test_a_full_disk_leaves_what_was_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = written(tmp_path / "j", [1])
    before = (tmp_path / "j").read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for write in (lambda: journal.add(2), journal.finish):
            with pytest.raises(OSError, match="No space") as raised:
                write()
            assert raised.value.filename == str(tmp_path / "j")
        assert (tmp_path / "j").read_bytes() == before
        with pytest.raises(OSError, match="No space"):
            written(tmp_path / "new", [1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j"]
    assert journal.done == {1}
    journal.add(3)
    found = read(tmp_path / "j")
    assert found is not None
    assert found.done == {1, 3}


def test_differences_are_said_by_name() -> None:
    other = Header(
        {"--scale": 2.0, "shape": [1, 2], "--lse": True},
        {"input 1": {"size": 4, "path": "/x"}, "input 2": {"size": 1}},
        {},
    )
    assert HEADER.differences(other) == [
        "--scale was 0.5 and is 2.0",
        "--lse was not given and is True",
        "input 1 (/x) has changed: its size was 3 and is 4",
        "input 2 was not given and is {'size': 1}",
    ]
