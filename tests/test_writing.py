"""Files are whole or not there: tensors, pictures, reports, calibrations; whoever is stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quorum_attention.writing import check_target, replacing, write_text

EARLIER = b"what was there"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_whatever_goes_wrong_the_earlier_file_stays(
    tmp_path: Path, step: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> None:
        raise error

    path = tmp_path / "x"
    path.write_bytes(EARLIER)

    if step != "write":
        monkeypatch.setattr(os, step, failing)
    with pytest.raises(error), replacing(path) as file:  # noqa: PT012
        file.write(b"half of")
        file.flush()
        if step == "write":
            raise error
    assert names(tmp_path) == ["x"]
    assert path.read_bytes() == EARLIER


def test_permissions_are_the_usual_ones_or_those_of_the_old_file(tmp_path: Path) -> None:
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


OTHER = 12345
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def everybodys(tmp_path: Path) -> Path:
    """A folder like /tmp, and a file of ours elsewhere."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "x").write_bytes(EARLIER)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    return tmp_path / "tmp"


def link(path: Path, to: Path, owner: int) -> None:
    path.symlink_to(to)
    os.lchown(path, owner, owner)


@ROOT
@pytest.mark.parametrize("mode", [0o1777, 0o777])
@pytest.mark.parametrize("where", ["last", "behind a link", "dangling"])
def test_another_users_link_is_not_followed_where_all_may_write(
    everybodys: Path, where: str, mode: int
) -> None:
    home = everybodys.parent / "home"
    everybodys.chmod(mode)
    path = everybodys / "x"
    link(path, home / ("new" if where == "dangling" else "x"), OTHER)
    if where == "behind a link":
        link(home / "mine", path, os.geteuid())
        path = home / "mine"
    for write in (check_target, lambda path: write_text(path, "new")):
        with pytest.raises(PermissionError, match=f"is a link of user {OTHER}"):
            write(path)
    assert (home / "x").read_bytes() == EARLIER
    assert not (home / "new").exists()


@ROOT
@pytest.mark.parametrize("whose", ["mine", "the folder's owner's", "not in everybody's folder"])
def test_links_that_the_system_follows_are_followed(everybodys: Path, whose: str) -> None:
    home = everybodys.parent / "home"
    owner = os.geteuid() if whose == "mine" else OTHER
    if whose == "the folder's owner's":
        os.chown(everybodys, OTHER, OTHER)
    if whose == "not in everybody's folder":
        everybodys.chmod(0o755)
    link(everybodys / "x", home / "x", owner)
    write_text(everybodys / "x", "new")
    assert (home / "x").read_text() == "new"


@ROOT
def test_another_users_file_is_not_replaced_where_only_its_owner_may(everybodys: Path) -> None:
    """Found out before the work, and not at its end; and the new file is not given to him."""
    (everybodys / "x").write_bytes(EARLIER)
    os.chown(everybodys / "x", OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
        check_target(everybodys / "x")
    everybodys.chmod(0o755)
    write_text(everybodys / "x", "new")
    assert (everybodys / "x").stat().st_uid == OTHER


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("y")
    (tmp_path / "y").symlink_to("x")
    with pytest.raises(OSError, match="symbolic links"):
        check_target(tmp_path / "x")
