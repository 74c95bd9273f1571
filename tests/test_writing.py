"""Files are whole or not there: tensors, pictures, reports, calibrations; whoever is
stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quorum_attention.writing import atomic_write, check_target, write_text

EARLIER = b"what was there"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_whatever_goes_wrong_the_earlier_file_stays(
    tmp_path: Path,
    step: str,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*arguments: object) -> None:
        raise error

    path = tmp_path / "x"
    path.write_bytes(EARLIER)

    if step != "write":
        monkeypatch.setattr(os, step, failing)
    with pytest.raises(error), atomic_write(path) as file:  # noqa: PT012
        file.write(b"half of")
        file.flush()
        if step == "write":
            raise error
    assert names(tmp_path) == ["x"]
    assert path.read_bytes() == EARLIER


def test_permissions_are_the_usual_ones_or_those_of_the_old_file(
    tmp_path: Path,
) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "x", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    (tmp_path / "x").chmod(0o604)
    write_text(tmp_path / "x", "newer")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o604


def test_links_lead_where_they_led(tmp_path: Path) -> None:
    """Also names as long as there may be."""
    (tmp_path / "far").mkdir()
    there, long = tmp_path / "far" / "x", tmp_path / ("x" * 255)
    long.symlink_to(there)
    write_text(long, "new")
    (tmp_path / "hard").hardlink_to(there)
    write_text(long, "newer")
    assert there.read_text() == "newer"
    assert long.is_symlink()
    assert (tmp_path / "hard").read_text() == "new"
    assert len(names(tmp_path)) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_another_users_file_gives_no_permissions_to_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(EARLIER)
    path.chmod(0o666)
    os.chown(path, 12345, 12345)
    write_text(path, "new")
    assert (path.stat().st_uid, path.stat().st_mode & 0o022) == (os.geteuid(), 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give links away")
def test_another_users_link_in_a_folder_of_all_is_not_followed(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "x"
    mine.write_bytes(EARLIER)
    link.symlink_to(mine)
    os.lchown(link, 12345, 12345)
    write_text(link, "new")  # nobody else may put one there
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="link of user 12345"):
        write_text(link, "newer")
    assert mine.read_text() == "new"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_another_users_file_in_a_sticky_folder_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of hours ended with "Operation not permitted" when its results were
    renamed."""
    path = tmp_path / "x"
    path.write_bytes(EARLIER)
    os.chown(path, 12345, 12345)
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "access", lambda *arguments: True)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        check_target(path)
    tmp_path.chmod(0o777)
    assert check_target(path) == path
    tmp_path.chmod(0o1777)
    for user in (0, 12345):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert check_target(path) == path


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("y")
    (tmp_path / "y").symlink_to("x")
    with pytest.raises(OSError, match="symbolic links"):
        check_target(tmp_path / "x")
