"""Files arrive whole, or not at all."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from orchestrator.common.folder import Folder, Partial


def test_what_a_full_disk_takes_a_part_of_is_not_whole(tmp_path: Path) -> None:
    """A limit of a file's size does what the last room of a disk does: a part, and no error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = Folder(tmp_path, private=True)
    part = Partial(folder, ["file"], "test")
    part.open()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            part.put(b"x" * 6000)
        size = os.fstat(part.file.fileno()).st_size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    part.close()
    assert size == 0  # nobody else is kept from the disk
