"""Files arrive whole, or not at all."""

import errno
import os
import resource
from pathlib import Path

import pytest

from orchestrator.common.folder import Folder, PartialFile


def test_put_on_full_disk_fails_and_frees_space(tmp_path: Path) -> None:
    """A limit of a file's size does what the last room of a disk does: a part, and no error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = Folder(tmp_path, private=True)
    part = PartialFile(folder, ["file"], "test")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            part.put(b"x" * 6000)
        size = os.fstat(part.file.fileno()).st_size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    part.close()
    # Other users lose no disk space.
    assert size == 0


def test_folder_uses_its_own_umask(tmp_path: Path) -> None:
    """The process's umask does not count: several threads have folders; the login's umask holds."""
    before = os.umask(0o077)
    try:
        folder = Folder(tmp_path / "a/b", private=False, umask=0o022)
        folder.make()
        with folder.inside(["c", "d"]):
            pass
        assert Folder(tmp_path, private=False).umask == 0o077 == os.umask(0o077)
    finally:
        os.umask(before)
    Folder(tmp_path / "e/f", private=True, umask=0o022).make()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("e", "e/f")] == [0o755, 0o700]
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c", "a/b/c/d")]
    assert modes == [0o755] * 4
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Folder(tmp_path / "file", private=True).make()
