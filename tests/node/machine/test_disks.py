from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.node.machine import disks, probe

MOUNTINFO = r"""22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 22 0:35 / /home rw,relatime shared:20 - nfs4 fs01:/export/home rw,vers=4.2
41 40 0:36 / /home/bob rw shared:21 - lustre 10.0.0.9@tcp:/scratch rw
42 22 0:37 / /mnt/my\040disk rw - fuse.sshfs alice@host:/x rw
43 22 0:38 / /data rw - tmpfs tmpfs rw
44 43 0:39 / /data rw - xfs /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/usr/lib", ("/", "ext4", "/dev/nvme0n1p2")),
        ("/home", ("/home", "nfs4", "fs01:/export/home")),
        ("/home/bobby/x", ("/home", "nfs4", "fs01:/export/home")),
        ("/home/bob/x", ("/home/bob", "lustre", "10.0.0.9@tcp:/scratch")),
        ("/mnt/my disk/x", ("/mnt/my disk", "fuse.sshfs", "alice@host:/x")),
        ("/data/x", ("/data", "xfs", "/dev/sdb1")),  # the later mount hides the earlier
    ],
)
def test_which_file_system_holds_a_path(path: str, found: tuple[str, str, str]) -> None:
    assert disks.mount(MOUNTINFO, path) == found


def test_a_directory_here(tmp_path: Path) -> None:
    found = disks.disk(str(tmp_path))
    space = os.statvfs(tmp_path)
    assert found.total == space.f_blocks * space.f_frsize
    assert 0 <= found.free <= found.total
    assert found.writable and found.filesystem and found.mounted
    gone = disks.disk(str(tmp_path / "not/yet"))
    assert (gone.path, gone.total) == (str(tmp_path / "not/yet"), found.total)


def test_what_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks.os, "access", lambda *_: False)  # root may write everything
    assert disks.disk(str(tmp_path)).writable is False


def test_limits_of_this_login() -> None:
    found = probe.limits()
    soft, hard = found.nofile
    assert soft > 0 and (hard >= soft or hard == -1)


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    """It is not taken for the disk that it would be on."""
    assert disks.shared_memory(str(tmp_path / "shm")) is None
    found = disks.shared_memory(str(tmp_path))
    assert found is not None
    assert found.writable
