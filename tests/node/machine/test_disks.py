import os
from pathlib import Path

import pytest

from orchestrator.node.machine import disks, probe


def test_disk_describes_directory(tmp_path: Path) -> None:
    found = disks.disk_of(str(tmp_path))
    space = os.statvfs(tmp_path)
    assert found.total == space.f_blocks * space.f_frsize
    assert 0 <= found.free <= found.total
    assert found.writable and os.path.ismount(found.mounted)
    gone = disks.disk_of(str(tmp_path / "not/yet"))
    assert (gone.path, gone.total) == (str(tmp_path / "not/yet"), found.total)


def test_disk_reports_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write everywhere.
    monkeypatch.setattr(disks.os, "access", lambda *_: False)
    assert disks.disk_of(str(tmp_path)).writable is False


def test_limits_of_login_are_read() -> None:
    soft, hard = probe.login_limits().nofile
    assert soft > 0 and (hard >= soft or hard == -1)


def test_shared_memory_is_none_if_not_mounted(tmp_path: Path) -> None:
    assert disks.shared_memory(str(tmp_path / "shm")) is None
    found = disks.shared_memory(str(tmp_path))
    assert found is not None
    assert found.writable
