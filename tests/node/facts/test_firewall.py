"""Which firewall runs, by the files that each leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.node.facts.firewall import firewall


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({}, ""),
        ({"etc/ufw/ufw.conf": "# /etc/ufw/ufw.conf\nENABLED=yes\nLOGLEVEL=low\n"}, "ufw"),
        ({"etc/ufw/ufw.conf": "ENABLED=no\n# ENABLED=yes\n"}, ""),
        ({"sys/fs/cgroup/system.slice/firewalld.service/cgroup.procs": "1\n"}, "firewalld"),
        ({"run/firewalld.pid": "1"}, "firewalld"),
    ],
)
def test_the_firewall_that_runs(files: dict[str, str], name: str, tmp_path: Path) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert firewall(str(tmp_path)) == name
