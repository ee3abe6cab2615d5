import errno
import itertools
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.common import files

CALLS = ("open", "fsync", "replace", "unlink")


class Killed(BaseException):
    """No handler of errors sees it."""


def fail_from(patch: pytest.MonkeyPatch, number: int, failure: BaseException) -> None:
    """Patch the file system so that every call from this number on fails."""
    count = itertools.count(1)

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            if next(count) >= number:
                raise failure
            return real(*args, **more)

        return call

    for name in CALLS:
        patch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize("failure", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
def test_replace_leaves_old_or_new_content(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "file"
    for number in itertools.count(1):
        path.write_text("old")
        with pytest.MonkeyPatch.context() as patch:
            fail_from(patch, number, failure)
            try:
                files.replace_file(path, "new")
            except (Killed, OSError):
                pass
            else:
                break
        assert path.read_text() == "old"
    assert path.read_text() == "new" and number > 3
    for left in tmp_path.glob(".file*"):
        left.unlink()
    files.replace_file(path, "newer")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_replacing_removes_file_of_failed_block(tmp_path: Path) -> None:
    with pytest.raises(ValueError), files.open_replacement(tmp_path / "file") as file:
        file.write(b"half")
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_replace_sets_mode(tmp_path: Path) -> None:
    files.replace_file(tmp_path / "file", b"\xff", mode=0o600)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_delete_removes_tree_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    inside = tmp_path / "inside"
    (inside / "a/b").mkdir(parents=True)
    (inside / "a/file").write_bytes(b"x" * 10_000)
    (inside / "a/link").symlink_to(outside)
    (inside / "a/b/file").symlink_to(outside / "precious")
    (tmp_path / "link").symlink_to(inside)
    assert files.delete_directory(tmp_path / "link") == [f"{tmp_path}/link: Not a directory"]
    assert (inside / "a/file").exists()
    hidden = tmp_path / files.hidden_name("inside")
    files.hide_directory(inside, hidden)
    freed: list[int] = []
    assert files.delete_directory(hidden, freed.append) == []
    assert sum(freed) > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "outside"]
    assert (outside / "precious").exists()
    # Another process was faster.
    assert files.delete_directory(hidden) == []


def test_delete_reports_undeletable_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone/a/b").mkdir(parents=True)
    for name in ("gone/a/busy", "gone/a/b/file", "gone/file"):
        (tmp_path / name).touch()
    real = os.unlink

    def unlink(name: str, *, dir_fd: int) -> None:
        if name == "busy":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    root = os.open(tmp_path, os.O_RDONLY)
    assert files.delete_directory("gone", dir_fd=root) == ["gone/a/busy: Device or resource busy"]
    os.close(root)
    assert [path.name for path in (tmp_path / "gone").rglob("*")] == ["a", "busy"]


def test_append_lines_writes_whole_lines(tmp_path: Path) -> None:
    """As on a full disk: a limit on the size of files takes a part of what is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    descriptor = files.open_to_append(tmp_path / "lines")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        assert files.append_lines(descriptor, b"one\ntwo\nthree\n") == 8
        assert files.append_lines(descriptor, b"three\n") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(descriptor)
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"
